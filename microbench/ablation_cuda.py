"""The ablation's rows on a GPU: VGG-16 with 4 images a step as the high job, with 16 as the low one, with 4 as the
smaller.

The high job runs back to back: what DeepPool's job waits for between steps, another GPU's dense layers, is not here. So
the simulator's prediction beside it is of the same two jobs without pauses, from modelled profiles or, where the daemon
could say what it measured of them, from those.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumux.device.sim.spec import preset
from gpumux.program.profile import StepProfile, loads
from gpumux.simulate import workload as shipped
from gpumux.simulate.workload import Workload, from_profile
from gpumux.types import Priority
from microbench import ablation, ways
from microbench.ablation import HIGH_BATCH, LOW_BATCH, ROWS, SMALL_BATCH, Jobs, Row
from microbench.daemon import GPUMUX
from microbench.worker import Worker

HIGH, LOW, SMALL = "vgg16-b4:train", "vgg16-b16:train", "vgg16-b4:train"
SECONDS, SETTLE_S = 4.0, 2.0
PROFILE_S = 60.0
WAYS = (
    (ROWS[2], ways.STREAMS, LOW), (ROWS[3], "gpumux streams", LOW), (ROWS[4], "gpumux paced", LOW),
    (ROWS[5], "gpumux guarded", LOW), (ROWS[6], "gpumux guarded", SMALL),
)  # fmt: skip


def measure(setting: ways.Setting) -> tuple[list[Row], dict[str, str]]:
    """The rows that the setting's device can have, and the profiles the daemon recorded of the jobs, as text by job.
    Raises WorkerFailed, DaemonFailed."""
    alone = {job: ways.solo(setting, job)["high"] for job in {HIGH, LOW, SMALL}}
    rows = []
    if setting.plain == "graph":
        eager = _eager(setting)
        rows.append(Row(ROWS[0], eager["rate"] / alone[HIGH]["rate"], 0.0, images=eager["rate"] / alone[HIGH]["rate"]))
    rows.append(Row(ROWS[1], 1.0, 0.0, images=1.0))
    profiles: dict[str, str] = {}
    for label, way, low in WAYS:
        if ways.unavailable(way, setting.device):
            continue

        def note(endpoint: str, low: str = low) -> None:
            for job, who in ((HIGH, "high"), (low, "low")):
                if job not in profiles and (text := _profile(endpoint, f"{who} {job}")):
                    profiles[job] = text

        found = ways.together(setting, way, HIGH, low, [None, None], note)
        rows.append(row(label, found, alone, LOW_BATCH if low == LOW else SMALL_BATCH))
    return rows, profiles


def row(label: str, found: dict[str, Any], alone: dict[str, Any], batch: int) -> Row:
    """The low job is counted in images over what the large one does alone."""
    solo, large = alone[HIGH], alone[LOW]["rate"] * LOW_BATCH
    high, images = found["high"]["rate"] / solo["rate"], found["low"]["rate"] * batch
    both = high + images / (solo["rate"] * HIGH_BATCH)
    return Row(label, high, images / large, 1 / high, found["high"]["p99_s"] / solo["median_s"], both)


def _eager(setting: ways.Setting) -> Any:
    with Worker([setting.task(HIGH, "eager", "high")]) as worker:
        worker.answer()
        return ways.measured(setting, worker)


def _profile(endpoint: str, name: str) -> str:
    """What the daemon measured of the job's operators, as a profile's text; empty where it can't say."""
    with tempfile.TemporaryDirectory(prefix="gm-") as directory:
        path = Path(directory) / "profile.json"
        command = [*GPUMUX, "jobs", "profile", name, "-o", str(path), "--endpoint", endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROFILE_S)
        return path.read_text() if done.returncode == 0 else ""


def predict(
    gpu_model: str, profiles: dict[str, str], steps: int, warmup: int, max_slowdown: float
) -> tuple[list[Row], str]:
    """The same rows on the simulated device, and from which profiles."""
    spec = preset(gpu_model)
    of: dict[str, StepProfile] = {}
    for job, batch in ((HIGH, HIGH_BATCH), (LOW, LOW_BATCH)):
        of[job] = loads(profiles[job]) if job in profiles else shipped.find(f"vgg16-b{batch}")
    source = "recorded by the daemon" if len(profiles) >= 2 else "modelled"

    def made(name: str, which: str, priority: Priority) -> Workload:
        return from_profile(replace(of[which], name=name), spec, priority, max_slowdown=max_slowdown)

    jobs = Jobs(
        made("high", HIGH, Priority.HIGH), made("low", LOW, Priority.LOW), made("small", SMALL, Priority.LOW),
        (LOW_BATCH, SMALL_BATCH), source,
    )  # fmt: skip
    return ablation.simulated(jobs, spec, steps, warmup), source
