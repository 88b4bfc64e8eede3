"""How near a job's results are to those of the plain run, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumux.client.microbatch.split import TOLERANCE
from gpumux.client.state import StateTable

TF32_TOLERANCE = (
    5e-3  # of float32: two algorithms for one convolution that keep ten bits of each factor differ by so much
)
BIT_EQUAL, EQUIVALENT = "bit-equal", "equivalent"


def exactness(table: StateTable, microbatches: Mapping[str, int], compiled: bool = False) -> dict[str, Any]:
    """For Job.stats(): `exactness`, and where results are not bit-equal `because`, a sentence for each reason, and
    `tolerance`, how far a step's results may be from the reference run's of the same state, relative to the largest element
    of the tensor, by the type they are in.
    `microbatches`: by function, into how many parts its batch is cut; `compiled`: whether one is."""
    because: list[str] = []
    more: dict[str, Any] = {}
    if table.runs_on == "cuda":
        because.append(
            "the step was traced on the CPU, as torch would run it on a GPU, and is carried out on the daemon's GPU, with "
            "optimizers and the numbers that change from step to step in forms of their own"
        )
    elif table.gpu:
        because.append(f"the local model lies on {table.home}, and the daemon computes on the {table.runs_on}")
    counts = {name: count for name, count in microbatches.items() if count > 1}
    if counts:
        because.append("batches are run in parts")
        more = {"microbatches": counts}
    if compiled:
        because.append(
            "the daemon compiles the step, which fuses operators: results are bit-equal to those of any other compiled run of "
            "it with the same torch build on the same kind of machine"
        )
    if not because:
        return {"exactness": BIT_EQUAL}
    tolerance = {**TOLERANCE, "float32": TF32_TOLERANCE} if table.tf32 else dict(TOLERANCE)
    return {"exactness": EQUIVALENT, "because": because, "tolerance": tolerance, **more}
