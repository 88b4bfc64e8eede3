"""Deciding how to train before asking for GPUs: burst-parallel plans (DeepPool, section 4) and the advice of
"Distributed training guidelines". Needs no daemon and no device; docs/planning.md explains it."""
