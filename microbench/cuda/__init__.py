"""Small experiments on one NVIDIA GPU, one question each (docs/gpu-notes.md has the questions and what follows from the
answers). `python -m microbench.cuda.NAME` runs one; `python -m microbench.gpu_suite --part design --part details` runs
all. smoke.py checks what the device assumes."""

NAMES = (
    "same_address",
    "rebuild",
    "priorities",
    "launch_cost",
    "boundary_gaps",
    "completion",
    "green",
    "capture",
    "piece_delay",
    "depth",
    "copies",
    "idle_contexts",
)
