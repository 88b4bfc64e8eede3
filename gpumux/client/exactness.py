"""How near a job's results are to those of the plain run, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpumux.client.microbatch.split import TOLERANCE
from gpumux.client.state import StateTable

BIT_EQUAL, EQUIVALENT = "bit-equal", "equivalent"


def exactness(table: StateTable, microbatches: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """For Job.stats(): `exactness`, and where results are not bit-equal `because`, a sentence for each reason.
    `microbatches`: each function's name and into how many parts its batch is cut."""
    because, more = [], {}
    if table.runs_on == "cuda":
        because.append(
            "the step was traced on the CPU and is carried out on the daemon's GPU, with attention, optimizers and the "
            "numbers that change from step to step in forms of their own"
        )
    elif table.gpu:
        because.append(f"the local model lies on {table.home}, and the daemon computes on the {table.runs_on}")
    counts = {name: count for name, count in microbatches if count > 1}
    if counts:
        because.append("batches are run in parts")
        more = {"tolerance": dict(TOLERANCE), "microbatches": counts}
    if not because:
        return {"exactness": BIT_EQUAL}
    return {"exactness": EQUIVALENT, "because": because, **more}
