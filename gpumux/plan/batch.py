"""Mini-batch size and convolution algorithms ("Distributed training guidelines", section 3.1.3): for each mini-batch an integer
program (equation 6) chooses every layer's algorithm within the memory that is left, and the mini-batch with the least time
a sample is suggested. scipy is an extra (`pip install scipy`), imported when a program is solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.plan.cnn import ALGORITHMS, Cnn


@dataclass(frozen=True)
class Option:
    """One algorithm for one layer: T(k, l) in seconds, M(k, l) in bytes."""

    algorithm: str
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Choice:
    """A mini-batch and each layer's algorithm. `seconds`: of all convolutions; `workspace`: bytes of them all, of `bound`
    that there are."""

    batch: int
    algorithms: Mapping[str, str]
    seconds: float
    workspace: float
    bound: float

    @property
    def seconds_a_sample(self) -> float:
        return self.seconds / self.batch


def choose(layers: Mapping[str, Sequence[Option]], bound: float) -> dict[str, Option] | None:
    """Equation 6: each layer's algorithm such that all together take least time within `bound` bytes; None where not even
    the smallest fit. Raises ConfigError where scipy is missing."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ConfigError("integer programs need scipy", "pip install scipy") from None
    pairs = [(name, option) for name, options in layers.items() for option in options]
    if bound < 0 or not pairs:
        return None if bound < 0 else {}
    scale = max(option.seconds for _, option in pairs) or 1.0
    space = max((option.nbytes for _, option in pairs), default=0.0) or 1.0
    one = np.array([[float(name == each) for each, _ in pairs] for name in layers])
    used = np.array([[option.nbytes / space for _, option in pairs]])
    found = milp(
        np.array([option.seconds / scale for _, option in pairs]),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(used, ub=bound / space)],
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if found.status == 2:  # infeasible
        return None
    if found.x is None:
        raise ConfigError(f"HiGHS gave up: {found.message}", "try fewer mini-batches")
    return {name: option for (name, option), x in zip(pairs, found.x, strict=True) if x > 0.5}


def options(cnn: Cnn, batch: int, spec: GpuSpec, algorithms: Sequence[str] = ALGORITHMS) -> dict[str, list[Option]]:
    """Every layer's algorithms with modelled times."""
    return {
        layer.name: [
            Option(name, layer.seconds(name, batch, spec), layer.workspace(name, batch))
            for name in algorithms
            if layer.can(name)
        ]
        for layer in cnn.convolutions
    }


def suggest(
    cnn: Cnn, batches: Sequence[int], memory: float, spec: GpuSpec, algorithms: Sequence[str] = ALGORITHMS
) -> list[Choice]:
    """The best choice for each of `batches` that fits into `memory` bytes, the suggested one first. Raises ConfigError where
    none fits."""
    found = []
    for batch in batches:
        if batch < 1:
            raise ConfigError(f"a mini-batch of {batch}", "give 1 or more")
        bound = cnn.bound(batch, memory)
        chosen = choose(options(cnn, batch, spec, algorithms), bound)
        if chosen is not None:
            seconds = sum(option.seconds for option in chosen.values())
            workspace = sum(option.nbytes for option in chosen.values())
            found.append(
                Choice(batch, {name: option.algorithm for name, option in chosen.items()}, seconds, workspace, bound)
            )
    if not found:
        least = min(batches, default=1)
        raise ConfigError(
            f"no mini-batch of {', '.join(map(str, batches))} fits into {_bytes(memory)}",
            f"{least} samples take {_bytes(memory - cnn.bound(least, memory))} before any convolution's workspace: "
            "try fewer, or a GPU with more memory",
        )
    return sorted(found, key=lambda choice: choice.seconds_a_sample)


def _bytes(nbytes: float) -> str:
    """As --memory takes it."""
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if nbytes >= s), (1.0, "B"))
    return f"{nbytes / scale:.3g} {unit}"
