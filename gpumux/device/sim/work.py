"""A launch made ready: each kernel's figures on one GPU, and when each starts and ends when nothing disturbs it."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from gpumux.device.sim.kernel import MAX_PER_SM, Kernel, checked, solo_seconds, wave
from gpumux.device.sim.spec import GpuSpec

EPS = 1e-9  # seconds; what is nearer than this happens at the same time
# Blocks that start within this part of their block time become one cohort, which ends at their mean time. Without
# it the blocks of two jobs that share the device spread out until each ends by itself: 5 times the events, and
# times that differ by less than 1 %.
GRAIN = 0.1
SM_UNITS = lcm(*range(1, MAX_PER_SM + 1))  # one multiprocessor: any block takes a whole number of them


class Shape:
    """One kernel on one GPU, under one share of it."""

    __slots__ = ("at_once", "beside", "block_bytes", "block_s", "blocks", "bound", "demand", "grain_s", "name", "nbytes",
                 "size", "solo_s", "wave_s")  # fmt: skip

    def __init__(self, kernel: Kernel, spec: GpuSpec, share: float) -> None:
        checked(kernel)
        self.name = kernel.name
        self.blocks = kernel.blocks
        self.block_s = kernel.block_s
        self.nbytes = kernel.nbytes
        self.beside = 1.0 / kernel.sensitivity  # how fast it runs beside another job
        self.grain_s = max(EPS, GRAIN * kernel.block_s)
        self.size = SM_UNITS // kernel.per_sm  # units a resident block takes
        self.block_bytes = kernel.nbytes / kernel.blocks
        self.demand = self.block_bytes / kernel.block_s  # bytes a second of one block at full speed
        widest, _ = wave(kernel, spec)
        self.bound = min(1.0, widest * self.demand / spec.bandwidth)  # see bandwidth.py
        self.at_once, self.wave_s = wave(kernel, spec, share)  # blocks of a full wave alone, and its seconds
        self.solo_s = solo_seconds(kernel, spec, share)


class Work:
    """The kernels of one launch, in order, and their timeline alone on the device: kernel i is ready
    `starts[i]` seconds after the launch's start and ends at `ends[i]`; `busy[i]`, `area[i]` (unit-seconds)
    and `moved[i]` (bytes) are sums over the kernels before i."""

    __slots__ = ("area", "busy", "cap", "count", "ends", "moved", "shapes", "starts")

    def __init__(self, shapes: Sequence[Shape], cap: int, launch_gap_s: float, node_gap_s: float) -> None:
        self.shapes = tuple(shapes)
        self.cap = cap  # units it may take at once
        self.count = len(self.shapes)
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.busy, self.area, self.moved = [0.0], [0.0], [0]
        at, gap = 0.0, launch_gap_s
        for shape in self.shapes:
            at += gap
            self.starts.append(at)
            at += shape.solo_s
            self.ends.append(at)
            self.busy.append(self.busy[-1] + shape.solo_s)
            waves, rest = divmod(shape.blocks, shape.at_once)
            tail = shape.solo_s - waves * shape.wave_s
            held = waves * shape.at_once * shape.wave_s + rest * tail
            self.area.append(self.area[-1] + held * shape.size)
            self.moved.append(self.moved[-1] + shape.nbytes)
            gap = node_gap_s


class Workshop:
    """Makes Works, each once."""

    MOST = 20_000  # kept at once; a stray caller that makes new kernels for every launch must not fill memory

    def __init__(self, spec: GpuSpec) -> None:
        self._spec = spec
        self._full = spec.sms * SM_UNITS
        self._shapes: dict[tuple[Kernel, float], Shape] = {}
        self._works: dict[tuple[int, float], tuple[Sequence[Kernel], Work]] = {}

    def work(self, kernels: Sequence[Kernel], share: float) -> Work:
        """The Work of these kernels. The same tuple again is found by its identity."""
        key = (id(kernels), share)
        found = self._works.get(key)
        if found is not None and found[0] is kernels:
            return found[1]
        work = self._make(kernels, share)
        if type(kernels) is tuple:  # it can't change, and keeping it keeps its identity taken
            if len(self._works) >= self.MOST:
                self._works.clear()
            self._works[key] = (kernels, work)
        return work

    def single_calls(self, kernels: Sequence[Kernel], share: float) -> list[Work]:
        """One Work a kernel: what launching them one by one hands over."""
        return [self.work(_alone(kernel), share) for kernel in kernels]

    def _make(self, kernels: Sequence[Kernel], share: float) -> Work:
        cap = self._spec.share_sms(share) * SM_UNITS
        return Work(
            [self._shape(kernel, share) for kernel in kernels], cap, self._spec.launch_gap_s, self._spec.node_gap_s
        )

    def _shape(self, kernel: Kernel, share: float) -> Shape:
        key = (kernel, share)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= self.MOST:
                self._shapes.clear()
            shape = self._shapes[key] = Shape(kernel, self._spec, share)
        return shape


_singles: dict[Kernel, tuple[Kernel, ...]] = {}


def _alone(kernel: Kernel) -> tuple[Kernel, ...]:
    """(kernel,), the same tuple every time."""
    if len(_singles) >= Workshop.MOST:
        _singles.clear()
    return _singles.setdefault(kernel, (kernel,))
