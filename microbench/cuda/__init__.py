"""Small experiments on one NVIDIA GPU, one question each (docs/gpu-notes.md has the questions and what follows from the
answers). `python -m microbench.cuda.NAME` runs one; `python -m microbench.gpu_suite --part experiments` runs all."""

NAMES = (
    "launch_cost", "boundary_gaps", "priorities", "piece_delay", "depth", "completion", "copies", "idle_contexts", "green",
    "capture", "same_address", "rebuild",
)  # fmt: skip
