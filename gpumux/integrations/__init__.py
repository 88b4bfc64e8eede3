"""gpumux for those whose training loop belongs to a framework (docs/integrations.md). Each module imports its
framework; this one none.

huggingface   on_gpumux(trainer): a Hugging Face Trainer whose steps run in a daemon
lightning     GpumuxStrategy: a Lightning strategy that does the same
"""
