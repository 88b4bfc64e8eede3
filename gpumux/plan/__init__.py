"""Planning before asking for GPUs: burst-parallel plans (DeepPool, section 4) and the advice of "Distributed training
guidelines". Needs no daemon and no device.

Start with `query.py` (the problem), then `plan.py` (a plan and its times) and `optimal.py` (the search);
docs/planning.md explains it. `cli` imports it; it may import `device` (roofline), `simulate` (pictures) and
`program`."""
