"""Checks of the arguments of submit(), made before anything else happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from gpumux.burst.norms import BatchNorm
from gpumux.burst.placement import (
    MOST_RANKS,
    RankPlacement,
    data_parallel,
    folded,
    planned,
    planned_on_fewer,
)
from gpumux.capture.generator import ClientGenerator, client_generator
from gpumux.capture.state import StateTable, whole_optimizer
from gpumux.client.session import Session
from gpumux.errors import ConfigError
from gpumux.program.saved_plan import SavedPlan, load
from gpumux.types import MAX_JOB_NAME, WEIGHTS, JobSpec, Priority
from gpumux.wire.codec import MAX_INT
from gpumux.wire.endpoint import default_endpoint


class SubmitOptions(TypedDict, total=False):
    """The optional arguments of submit(), for those that pass them on: a dictionary of them, and **options."""

    priority: Literal["high", "low"]
    name: str | None
    endpoint: str | None
    weight: float
    max_slowdown: float
    memory_limit: int | None
    max_inflight: int
    seed: int | None
    max_variants: int | None
    microbatches: int
    compile: bool
    rng: Literal["client", "own"] | None
    resume: str | None
    replay_bytes: int
    reconnect_s: float
    plan: str | Path | SavedPlan | RankPlacement | None
    endpoints: Sequence[str] | None
    devices: int | None
    peers_timeout_s: float
    batch_norm: BatchNorm
    waves: int
    memory: Literal["own", "shared"]
    fusible: bool
    cluster: str | None
    gpus: int | None
    min_gpus: int
    urgency: int


def job_spec(
    step: Any, priority: Any, name: Any, weight: Any, max_slowdown: Any, memory_limit: Any, max_inflight: Any,
    seed: Any, memory: Any = "own", fusible: Any = False,
) -> JobSpec:  # fmt: skip
    """The JobSpec of these arguments of submit(). Raises ConfigError, naming the argument and its valid values."""
    if not callable(step):
        raise ConfigError(f"step is a {type(step).__name__}", "pass the function that runs one training step")
    if priority not in ("high", "low"):
        raise ConfigError(f"priority is {priority!r}", 'use "high" or "low"')
    level = Priority.HIGH if priority == "high" else Priority.LOW
    least, most = WEIGHTS
    share = number("weight", weight, lambda w: least <= w <= most, f"use a number from {least:g} to {most:g}")
    slowdown = number(
        "max_slowdown", max_slowdown, lambda s: 1.0 <= s <= 100, "use 1.0 to 100: 1.10 allows 10 % longer steps"
    )
    if memory_limit is not None:
        memory_limit = whole("memory_limit", memory_limit, 1, MAX_INT, "give bytes above 0, or None for no limit")
    if memory not in ("own", "shared"):
        raise ConfigError(f"memory is {memory!r:.60}", 'use "own" or "shared"')
    if memory == "shared" and level is Priority.HIGH:
        raise ConfigError(
            'memory="shared" is for low jobs: they wait for each other', 'leave out memory=, or submit it with "low"'
        )
    if not isinstance(fusible, bool):
        raise ConfigError(f"fusible is {fusible!r:.60}", "use True or False")
    if fusible and (level is Priority.HIGH or memory == "shared"):
        other = 'priority="high"' if level is Priority.HIGH else 'memory="shared"'
        raise ConfigError(f"fusible=True does not go together with {other}", "leave out one of them")
    inflight = whole("max_inflight", max_inflight, 1, 64, "use 1 to 64; 2 keeps the device busy")
    if seed is None:
        seed = torch.initial_seed()
    seed = whole("seed", seed, 0, 2**64 - 1, "use a whole number from 0 to 2**64 - 1")
    arena = os.getuid() if memory == "shared" else None
    return JobSpec(
        _label(step, name), level, share, slowdown, memory_limit, inflight, seed, arena=arena, fusible=fusible
    )


def _label(step: Callable[..., Any], name: Any) -> str:
    if name is None:
        return str(getattr(step, "__name__", "job"))[:MAX_JOB_NAME]
    if not isinstance(name, str) or len(name) > MAX_JOB_NAME or not name.isprintable():
        raise ConfigError(f"name is {name!r:.60}", f"use a string of at most {MAX_JOB_NAME} printable characters")
    return str(name)


def check_compile(value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"compile is {value!r:.60}", "use True or False")


def whole(what: str, value: Any, low: int, high: int, remedy: str) -> int:
    """`value` as an int. Raises ConfigError unless it is a whole number (numpy's too) from `low` to `high`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise ConfigError(f"{what} is {value!r:.60}", remedy)
    return int(value)


def number(what: str, value: Any, fits: Callable[[float], bool], remedy: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(float(value)):
        raise ConfigError(f"{what} is {value!r:.60}", remedy)
    return float(value)


def several(value: Any, kind: type[Any], what: str) -> list[Any]:
    """None, one `kind`, or a list or tuple of them, as a list: of optimizers that wrap others, those inside. Raises
    ConfigError for other items."""
    items = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            raise ConfigError(f"{what}= holds a {type(item).__name__}", f"pass a {kind.__name__} or a sequence of them")
    return [whole_optimizer(item) if isinstance(item, torch.optim.Optimizer) else item for item in items]


def with_inner(optimizers: list[Any]) -> list[Any]:
    """These optimizers, and after them those that they hold and step themselves (SAM's base_optimizer), which have
    state of their own."""
    found = list(optimizers)
    for outer in found:  # grows
        for inner in vars(outer).values():
            if isinstance(inner, torch.optim.Optimizer) and all(inner.state is not one.state for one in found):
                found.append(inner)
    return found


def check_rng(rng: Any, seed: Any) -> None:
    """Raises ConfigError unless submit() takes this `rng` together with this `seed`."""
    if rng not in (None, "client", "own"):
        raise ConfigError(f"rng is {rng!r:.60}", 'use "client" or "own"')
    if rng == "client" and seed is not None:
        raise ConfigError(
            "seed= is for a generator of the job's own, and rng=\"client\" draws from torch's default one",
            'call torch.manual_seed(...) yourself, or say rng="own"',
        )


def generator_of(
    rng: str | None, seed: Any, spec: JobSpec, session: Session, table: StateTable
) -> ClientGenerator | None:
    """The generator of this process that a job's steps draw from; None: they draw from one in the daemon. Raises
    ConfigError if `rng` asks for the client's and the model or the daemon is not on the CPU."""
    on_the_cpu = session.welcome.device["kind"] == "cpu" and not table.gpu
    if rng == "client" and not on_the_cpu:
        where = (
            f"the model lies on {table.home}"
            if table.gpu
            else f"the daemon's device is {session.welcome.device['kind']}"
        )
        raise ConfigError(f'rng="client" needs model and daemon on the CPU, and {where}', 'drop rng=, or use rng="own"')
    if on_the_cpu and rng != "own" and seed is None:
        return client_generator
    # Steps that bring their generator can run as one with others'.
    return ClientGenerator(torch.Generator().manual_seed(spec.seed)) if on_the_cpu and spec.fusible else None


# ---- Jobs on several daemons.


def daemons_of(endpoint: str | None, endpoints: Any, devices: Any) -> list[str]:
    """The endpoints of a job on several daemons; none for a job on one. Raises ConfigError."""
    if endpoints is None and devices is None:
        return []
    if (endpoint is not None) + (endpoints is not None) + (devices is not None) > 1:
        raise ConfigError("endpoint=, endpoints= and devices= all say where the job runs", "give one of them")
    if devices is not None:
        return [default_endpoint(gpu) for gpu in range(whole("devices", devices, 1, MOST_RANKS, "use 1 or more"))]
    if isinstance(endpoints, str) or not all(isinstance(one, str) for one in endpoints) or not endpoints:
        raise ConfigError(f"endpoints is {endpoints!r:.60}", "give the endpoints of the daemons as a list of strings")
    found = list(endpoints)
    if len(set(found)) < len(found) or len(found) > MOST_RANKS:
        raise ConfigError(
            f"endpoints names {len(found)} daemons, {len(set(found))} different ones",
            f"name each daemon once, {MOST_RANKS} at most",
        )
    return found


def placement_of(plan: Any, daemons: Sequence[str]) -> RankPlacement | None:
    """Which layers run on which of these daemons; None for a job on one. Raises ConfigError."""
    if not daemons:
        if plan is not None:
            raise ConfigError("plan= is given, and one daemon", "give the plan's daemons: endpoints=[...] or devices=N")
        return None
    placement = planned_ranks(plan)
    if placement is None:
        return data_parallel(len(daemons))
    if placement.ranks != len(daemons):
        raise ConfigError(
            f"the plan is for {placement.ranks} devices, and {len(daemons)} are given", "give as many daemons"
        )
    return placement


def read_plan(plan: Any) -> Any:
    """What plan= of submit() names: a file's plan, or what was given. Raises ConfigError for a file that can't be
    read."""
    return load(Path(plan)) if isinstance(plan, (str, Path)) else plan


def planned_ranks(plan: Any) -> RankPlacement | None:
    """The layers of a plan on their ranks; None if there is none. Raises ConfigError."""
    if plan is None:
        return None
    if isinstance(plan, SavedPlan):
        plan = planned(plan)
    if not isinstance(plan, RankPlacement):
        raise ConfigError(
            f"plan is a {type(plan).__name__}",
            "give a file that `gpumux plan burst --save` wrote, or a gpumux.burst.placement.RankPlacement",
        )
    return plan


def in_cluster(gpus: Any, plan: Any, endpoint: Any, endpoints: Any, devices: Any) -> RankPlacement:
    """The ranks of a job of a cluster. Raises ConfigError for arguments that don't go together."""
    given = {"endpoint": endpoint, "endpoints": endpoints, "devices": devices}
    wrong = next((name for name, value in given.items() if value is not None), None)
    if wrong is not None:
        raise ConfigError(
            f"cluster= and {wrong}= both say where the job runs", f"drop {wrong}=, or cluster=; gpus= is how many"
        )
    placement = planned_ranks(plan)
    if gpus is None:
        return data_parallel(1) if placement is None else placement
    count = whole("gpus", gpus, 1, MOST_RANKS, f"use 1 to {MOST_RANKS}")
    if placement is not None and placement.ranks != count:
        raise ConfigError(f"the plan is for {placement.ranks} devices, and gpus={count}", "drop gpus=")
    return data_parallel(count) if placement is None else placement


def fewer_ranks(placement: RankPlacement, plan: Any, min_gpus: Any) -> dict[int, RankPlacement]:
    """The placements on fewer devices, from `min_gpus` on, by their number: the plan's own, if it has some. Raises
    ConfigError."""
    most = placement.ranks
    least = whole("min_gpus", min_gpus, 1, most, f"use 1 to {most}, the devices that the job asks for")
    found = {ranks: folded(placement, ranks) for ranks in range(1, most)}
    if isinstance(plan, SavedPlan) and plan.fewer:
        found = {1: folded(placement, 1), **planned_on_fewer(plan)}
    return {ranks: one for ranks, one in found.items() if least <= ranks < most}


def refuse_with_ranks(**given: bool) -> None:
    """Raises ConfigError for an argument of submit() that jobs on several daemons do not take."""
    found = next((name for name, is_given in given.items() if is_given), None)
    if found is not None:
        raise ConfigError(f"{found}= is given, and several daemons", f"drop {found}=, or submit to one daemon")


def refuse_without_cluster(**given: bool) -> None:
    """Raises ConfigError for an argument of submit() that only jobs of a cluster take."""
    found = next((name for name, is_given in given.items() if is_given), None)
    if found is not None:
        raise ConfigError(f"{found}= is given, and no cluster=", f'drop {found}=, or say cluster="auto"')


def refuse_with_waves(**given: bool) -> None:
    """Raises ConfigError for an argument that two waves do not take. given: by name, whether it was given."""
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(f"waves=2 does not go together with {wrong[0]}", f"leave out {wrong[0]}, or waves")


def check_waves(waves: int) -> None:
    """Raises ConfigError for another number than 1 or 2."""
    if waves not in (1, 2) or isinstance(waves, bool):
        raise ConfigError(f"waves={waves!r}", "use 1, or 2 for two waves (docs/waves.md)")
