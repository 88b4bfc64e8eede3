"""The user's verb: hand a training step to the daemon."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumux.client.job import Job
from gpumux.client.microbatch.split import check_microbatches
from gpumux.client.session import Session
from gpumux.client.stale import refuse_stale
from gpumux.client.state import StateTable
from gpumux.errors import ConfigError, SimulatedDeviceWarning
from gpumux.model import JobSpec, Priority
from gpumux.wire import messages as m


def submit(
    step: Callable[..., Any], *, example: Any, model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Any = None, priority: str = "low", name: str | None = None, endpoint: str | None = None,
    weight: float = 1.0, max_slowdown: float = 1.10, memory_limit: int | None = None, max_inflight: int = 2,
    seed: int | None = None, max_variants: int = 4, microbatches: int = 1,
) -> Job:  # fmt: skip
    """Capture `step` on the `example` batch, open a job at the daemon and put its state there.

    step: the loop body, called as `step(*example)`. It may use any tensor of `model` and `optimizer`,
        by whatever reference; other tensors must be arguments. It returns any pytree of tensors.
    example: the arguments as a tuple (or a dict of named ones, or one tensor), with real shapes.
    model, optimizer: one or a sequence. No optimizer: an inference job.
    priority: "high" keeps its speed as if alone, "low" uses what is left.
    endpoint: which daemon; default GPUMUX_ENDPOINT, else the one of GPU 0 on this machine.
    weight: share among jobs of one priority. max_slowdown: promise for a high job (>= 1.0).
    memory_limit: bytes this job may hold on the device. max_inflight: unanswered steps at most.
    seed: of the job's own random generator; default torch.initial_seed(), what torch.manual_seed set.
    max_variants: combinations of batch shapes and Python flags captured per function.
    microbatches: run a step's batch as so many accumulated parts, for shorter pieces and less memory;
        must divide the batch size. Equivalent, no longer bit-equal; the step must be one whose loss averages or
        adds up over independent samples (NotSplittable says why it isn't). Dropout draws other masks.

    Raises CaptureError (and its kin, naming the line or tensor), ConfigError for a bad argument,
    AdmissionRefused, DaemonGone. Nothing local is changed by a failed submit.
    """
    models = _several(model, torch.nn.Module, "model")
    if any(isinstance(m, torch.jit.ScriptModule) for m in models):
        raise ConfigError(
            "model= is a TorchScript module, whose Python can't be captured", "submit the module it was made from"
        )
    optimizers = _several(optimizer, torch.optim.Optimizer, "optimizer")
    spec = _spec(step, priority, name, weight, max_slowdown, memory_limit, max_inflight, seed)
    if max_variants < 1:
        raise ConfigError(f"max_variants is {max_variants}", "use 1 or more")
    check_microbatches(microbatches)
    session = Session.connect(endpoint)
    job_id = uuid.uuid4().hex
    job: Job | None = None
    try:
        table = StateTable(models, optimizers, _tensors_on(session))
        refuse_stale(table)
        session.call(
            m.OpenJob(
                0, job_id, spec.name, int(spec.priority), spec.weight, spec.max_slowdown, spec.memory_limit,
                spec.max_inflight, spec.seed,
            )
        )  # fmt: skip
        job = Job(session, job_id, spec, table, max_variants)
        job._capture(step, example, 4, microbatches)
    except BaseException:
        if job is not None:
            job.close(drain=False)
        session.close()
        raise
    return job


def _tensors_on(session: Session) -> str:
    """The device type a job's tensors must be on. Warns of a daemon that computes nothing."""
    device = session.welcome.device
    if device["kind"] != "sim":
        return str(device["kind"])
    warnings.warn(
        f"the daemon only SIMULATES its device ({device['name']}): steps take time, every result is "
        "zero and nothing is trained. For real results submit to a daemon on a real device (gpumux serve --device cpu)",
        SimulatedDeviceWarning,
        stacklevel=3,
    )
    return "cpu"  # where steps for it are traced


def _several(given: Any, kind: type[Any], what: str) -> list[Any]:
    items = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise ConfigError(f"{what}= holds a {type(item).__name__}", f"pass a {kind.__name__} or a sequence of them")
    return items


def _spec(
    step: Any, priority: str, name: str | None, weight: float, max_slowdown: float, memory_limit: int | None,
    max_inflight: int, seed: int | None,
) -> JobSpec:  # fmt: skip
    if not callable(step):
        raise ConfigError(f"step is a {type(step).__name__}", "pass the function that runs one training step")
    if priority not in ("high", "low"):
        raise ConfigError(f"priority is {priority!r}", 'use "high" or "low"')
    if not weight > 0 or weight > 1e6:
        raise ConfigError(f"weight is {weight}", "use a number above 0, at most 1e6")
    if not 1.0 <= max_slowdown <= 100:
        raise ConfigError(f"max_slowdown is {max_slowdown}", "use 1.0 or more: 1.10 allows 10 % longer steps")
    if memory_limit is not None and memory_limit <= 0:
        raise ConfigError(f"memory_limit is {memory_limit}", "give bytes above 0, or None for no limit")
    if not 1 <= max_inflight <= 64:
        raise ConfigError(f"max_inflight is {max_inflight}", "use 1 to 64; 2 keeps the device busy")
    if seed is None:
        seed = torch.initial_seed()
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed is {seed}", "use an integer from 0 to 2**64 - 1")
    level = Priority.HIGH if priority == "high" else Priority.LOW
    label = name if name is not None else getattr(step, "__name__", "job")
    return JobSpec(label, level, float(weight), float(max_slowdown), memory_limit, max_inflight, seed)
