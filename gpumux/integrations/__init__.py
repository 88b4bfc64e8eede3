"""gpumux for training loops of frameworks (docs/integrations.md). Each module imports its framework; this one imports
none.

huggingface   on_gpumux(trainer): a Hugging Face Trainer whose steps run in a daemon
lightning     GpumuxStrategy: a Lightning strategy that does the same
ray           endpoint(): the daemon of a Ray worker's node
"""
