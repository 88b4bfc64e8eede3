"""The simulated GPU's rules once more, without any aggregation: every block is an object, every instant at which
one ends is an event, and rates are worked out anew at each. Slow, and as plain as the rules themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, inf

from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.gpu import Finished
from gpumux.device.sim.spec import GpuSpec

SAME = 1e-9


@dataclass(frozen=True)
class Asked:
    """A launch that the host gets at `at`."""

    at: float
    launch: int
    job: str
    priority: int
    kernels: tuple[Kernel, ...]
    share: float = 1.0


@dataclass
class Block:
    kernel: Running
    sm: int
    left_s: float
    rate: float = 1.0


@dataclass
class Running:
    job: str
    priority: int
    order: int
    kernel: Kernel
    sms: int
    pending: int
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Call:
    """One call of the host: a graph or a single kernel."""

    asked: Asked
    kernels: tuple[Kernel, ...]
    cost: float
    last: bool
    arrived: float = inf
    placed: bool = False  # all blocks of its last kernel are
    begun: bool = False


@dataclass
class Sample:
    """The state between two events."""

    start: float
    end: float
    free: list[Fraction]  # of each multiprocessor
    bandwidth: float  # bytes a second moved
    resident: dict[str, int]
    pending: dict[str, int]


class Reference:
    def __init__(self, spec: GpuSpec, graphs: bool = True, priorities: bool = True) -> None:
        self.spec, self.graphs, self.priorities = spec, graphs, priorities
        self.now = 0.0
        self.samples: list[Sample] = []
        self.done: list[Finished] = []
        self.begun: dict[int, float] = {}
        self.host: list[Call] = []
        self.host_done = inf
        self.queue: list[Call] = []
        self.streams: dict[str, list[Call]] = {}
        self.channel_of: dict[str, int] = {}
        self.channels: list[list[Call]] = [[] for _ in range(spec.channels)]
        shared = spec.launch_queue == "shared"
        self.depth = spec.stream_depth if shared else spec.queue_length
        self.length = spec.queue_length if shared else 1
        self.ready: dict[str, tuple[float, int]] = {}  # job -> when its kernel number ... may start
        self.running: list[Running] = []
        self.order = 0
        self.sm_seconds: dict[str, float] = {}
        self.busy_s = 0.0

    def run(self, asked: Sequence[Asked]) -> list[Finished]:
        todo = sorted(asked, key=lambda a: (a.at, a.launch))
        while True:
            nexts = [todo[0].at if todo else inf, self.host_done if len(self.queue) < self.length else inf]
            nexts += [at for at, _ in self.ready.values()]
            nexts += [self.now + b.left_s / b.rate for r in self.running for b in r.blocks]
            at = min(nexts)
            if at == inf:
                return sorted(self.done, key=lambda d: d.ended)
            self.pass_to(max(at, self.now))
            self.end_blocks()
            self.move()
            while todo and todo[0].at <= self.now + SAME / 10:
                self.ask(todo.pop(0))
            self.move()
            self.begin()
            self.dispatch()
            self.leave_channels()
            self.set_rates()

    # ---- time

    def pass_to(self, at: float) -> None:
        passed = at - self.now
        if passed > 0:
            moved = sum(
                b.rate * r.kernel.nbytes / r.kernel.blocks / r.kernel.block_s for r in self.running for b in r.blocks
            )
            resident = {r.job: len(r.blocks) for r in self.running}
            pending = {r.job: r.pending for r in self.running}
            free = [self.free(sm) for sm in range(self.spec.sms)]
            self.samples.append(Sample(self.now, at, free, moved, resident, pending))
            self.busy_s += passed * any(r.blocks for r in self.running)
        for r in self.running:
            used = passed * len(r.blocks) / r.kernel.per_sm
            self.sm_seconds[r.job] = self.sm_seconds.get(r.job, 0.0) + used
            for block in r.blocks:
                block.left_s -= passed * block.rate
        self.now = at

    def free(self, sm: int) -> Fraction:
        held = (Fraction(1, r.kernel.per_sm) for r in self.running for b in r.blocks if b.sm == sm)
        return 1 - sum(held, Fraction(0))

    def end_blocks(self) -> None:
        for r in list(self.running):
            r.blocks = [block for block in r.blocks if block.left_s > SAME]
            if not r.blocks and not r.pending:
                self.running.remove(r)
                self.kernel_over(r.job)

    def kernel_over(self, job: str) -> None:
        call = self.streams[job][0]
        number = self.begun.pop(-1 - call.asked.launch)
        if number + 1 < len(call.kernels):
            self.ready[job] = (self.now + self.spec.node_gap_s, int(number) + 1)
            return
        self.streams[job].pop(0)
        call.placed = True
        if call.last:
            self.done.append(Finished(call.asked.launch, self.begun[call.asked.launch], self.now))
        self.leave_channels()

    def leave_channels(self) -> None:
        """Take what is placed off the channels, and begin what is then at their heads and whose stream is free."""
        for r in self.running:
            call = self.streams[r.job][0]
            if not r.pending and self.begun[-1 - call.asked.launch] == len(call.kernels) - 1:
                call.placed = True
        for channel in self.channels:
            while channel and channel[0].placed:
                channel.pop(0)
            if channel and channel[0] is self.streams[channel[0].asked.job][0] and not channel[0].begun:
                channel[0].begun = True
                start = max(self.now, channel[0].arrived)
                self.begun.setdefault(channel[0].asked.launch, start)
                self.ready[channel[0].asked.job] = (start + self.spec.launch_gap_s, 0)

    # ---- the way to the device

    def ask(self, asked: Asked) -> None:
        spec = self.spec
        if self.graphs:
            calls = [Call(asked, asked.kernels, spec.graph_s + len(asked.kernels) * spec.graph_node_s, True)]
        else:
            calls = [Call(asked, (k,), spec.call_s, n == len(asked.kernels) - 1) for n, k in enumerate(asked.kernels)]
        for call in calls:
            if not self.host:
                self.host_done = self.now + call.cost
            self.host.append(call)

    def move(self) -> None:
        while True:
            while self.queue and len(self.streams.get(self.queue[0].asked.job, [])) < self.depth:
                call = self.queue.pop(0)
                self.streams.setdefault(call.asked.job, []).append(call)
                channel = self.channel_of.setdefault(call.asked.job, len(self.channel_of) % self.spec.channels)
                self.channels[channel].append(call)
                self.leave_channels()
            if not self.host or self.host_done > self.now or len(self.queue) >= self.length:
                return
            call = self.host.pop(0)
            call.arrived = max(self.now, self.host_done + self.spec.transmit_s)
            self.queue.append(call)
            self.host_done = self.now + self.host[0].cost if self.host else inf

    # ---- blocks

    def begin(self) -> None:
        for job, (at, number) in sorted(self.ready.items()):
            if at <= self.now + SAME:
                del self.ready[job]
                call = self.streams[job][0]
                self.begun[-1 - call.asked.launch] = number
                self.order += 1
                kernel, sms = call.kernels[number], self.spec.share_sms(call.asked.share)
                priority = call.asked.priority if self.priorities else 0
                self.running.append(Running(job, priority, self.order, kernel, sms, kernel.blocks))

    def dispatch(self) -> None:
        for r in sorted(self.running, key=lambda r: (-r.priority, r.order)):
            one = Fraction(1, r.kernel.per_sm)
            while r.pending:
                takes = {sm: self.free(sm) // one for sm in range(self.spec.sms - r.sms, self.spec.sms)}
                sm = max(takes, key=lambda sm: (takes[sm], -sm))
                if not takes[sm]:
                    return  # what is behind a kernel that waits for room waits too
                r.pending -= 1
                r.blocks.append(Block(r, sm, r.kernel.block_s))

    def set_rates(self) -> None:
        """Rates with f found by bisection, unlike in the engine."""
        spec = self.spec
        jobs = [r for r in self.running if r.blocks]
        missed = sum(r.kernel.cached for r in jobs) > spec.l2_bytes
        memory = [k.nbytes + (k.cached if missed else 0) for k in (r.kernel for r in jobs)]
        l2 = [0 if missed or not k.cached else k.nbytes + k.cached for k in (r.kernel for r in jobs)]
        by_memory, by_l2 = self.speeds(jobs, memory, spec.bandwidth), self.speeds(jobs, l2, spec.l2_bandwidth)
        for r, one, other in zip(jobs, by_memory, by_l2, strict=True):
            limits = [x for x in (one, other) if x is not None] or [1.0]
            beside = r.kernel.sensitivity if len(jobs) > 1 else 1.0
            crowd = [self.crowded(block.sm) for block in r.blocks]
            for block in r.blocks:
                block.rate = min(limits) / beside * sum(crowd) / len(crowd)

    def speeds(self, jobs: list[Running], nbytes: list[int], bandwidth: float) -> list[float | None]:
        """The speed of each kernel's blocks as far as this memory limits it; None: it does not use it."""
        p = self.spec.saturation
        demands = [moved / r.kernel.blocks / r.kernel.block_s for moved, r in zip(nbytes, jobs, strict=True)]
        parts = [min(1.0, self.widest(r.kernel) * d / bandwidth) for d, r in zip(demands, jobs, strict=True)]

        def gain(x: float) -> float:
            return (1 - (1 - x) ** p) / x if x > 1e-6 else p

        def rates(f: float) -> list[float]:
            return [1 / ((1 - m) + m * gain(m) / f) for m in parts]

        def moved(f: float) -> float:
            return sum(x * len(r.blocks) * d for x, r, d in zip(rates(f), jobs, demands, strict=True))

        asked = sum(len(r.blocks) * d for r, d in zip(jobs, demands, strict=True)) / bandwidth
        if asked < 1:
            f = gain(asked)
        else:
            low, f = 0.0, 1.0
            if moved(1.0) > bandwidth:
                for _ in range(80):
                    middle = (low + f) / 2
                    low, f = (middle, f) if moved(middle) <= bandwidth else (low, middle)
        return [x if d else None for x, d in zip(rates(f), demands, strict=True)]

    def crowded(self, sm: int) -> float:
        """The speed of blocks on this multiprocessor, by the issue slots that all of them need."""
        needed = sum(
            r.kernel.issue / min(r.kernel.per_sm, ceil(r.kernel.blocks / self.spec.sms))
            for r in self.running
            for block in r.blocks
            if block.sm == sm
        )
        return 1 / max(1.0, needed)

    def demand(self, kernel: Kernel) -> float:
        return kernel.nbytes / kernel.blocks / kernel.block_s

    def widest(self, kernel: Kernel) -> int:
        return min(kernel.blocks, kernel.per_sm * self.spec.sms)
