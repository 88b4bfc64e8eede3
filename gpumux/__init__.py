"""gpumux: one daemon owns one GPU and lets many PyTorch jobs share it."""

__version__ = "0.1.0"
