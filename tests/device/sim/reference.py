"""The simulated GPU's rules once more, without any aggregation: every block is an object, every instant at which
one ends is an event, and rates are worked out anew at each. Slow, and as plain as the rules themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

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


@dataclass
class Sample:
    """The state between two events."""

    start: float
    end: float
    room: Fraction  # multiprocessors free
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
        self.ready: dict[str, tuple[float, int]] = {}  # job -> when its kernel number ... may start
        self.running: list[Running] = []
        self.order = 0
        self.sm_seconds: dict[str, float] = {}
        self.busy_s = 0.0

    def run(self, asked: Sequence[Asked]) -> list[Finished]:
        todo = sorted(asked, key=lambda a: (a.at, a.launch))
        while True:
            nexts = [todo[0].at if todo else inf, self.host_done if len(self.queue) < self.spec.queue_length else inf]
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
            self.samples.append(Sample(self.now, at, self.free(), moved, resident, pending))
            self.busy_s += passed * any(r.blocks for r in self.running)
        for r in self.running:
            used = passed * len(r.blocks) / r.kernel.per_sm
            self.sm_seconds[r.job] = self.sm_seconds.get(r.job, 0.0) + used
            for block in r.blocks:
                block.left_s -= passed * block.rate
        self.now = at

    def free(self) -> Fraction:
        return self.spec.sms - sum((Fraction(len(r.blocks), r.kernel.per_sm) for r in self.running), Fraction(0))

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
        if call.last:
            self.done.append(Finished(call.asked.launch, self.begun[call.asked.launch], self.now))
        if self.streams[job]:
            self.begin_call(job)

    def begin_call(self, job: str) -> None:
        call = self.streams[job][0]
        start = max(self.now, call.arrived)
        self.begun.setdefault(call.asked.launch, start)
        self.ready[job] = (start + self.spec.launch_gap_s, 0)

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
            while self.queue and len(self.streams.get(self.queue[0].asked.job, [])) < self.spec.stream_depth:
                call = self.queue.pop(0)
                stream = self.streams.setdefault(call.asked.job, [])
                stream.append(call)
                if len(stream) == 1:
                    self.begin_call(call.asked.job)
            if not self.host or self.host_done > self.now or len(self.queue) >= self.spec.queue_length:
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
            while r.pending and self.free() >= one and self.share_free(r) >= one:
                r.pending -= 1
                r.blocks.append(Block(r, r.kernel.block_s))

    def share_free(self, r: Running) -> Fraction:
        if r.sms == self.spec.sms:
            return Fraction(self.spec.sms)
        held = (Fraction(len(o.blocks), o.kernel.per_sm) for o in self.running if o.sms <= r.sms)
        return r.sms - sum(held, Fraction(0))

    def set_rates(self) -> None:
        """Rates with the bandwidth part found by bisection, unlike in the engine."""
        spec = self.spec
        jobs = [r for r in self.running if r.blocks]
        factors = [r.kernel.sensitivity if len(jobs) > 1 else 1.0 for r in jobs]

        def rates(f: float) -> list[float]:
            bounds = [min(1.0, self.widest(r.kernel) * self.demand(r.kernel) / spec.bandwidth) for r in jobs]
            return [1 / s / ((1 - m) + m / f) for s, m in zip(factors, bounds, strict=True)]

        def moved(f: float) -> float:
            return sum(x * len(r.blocks) * self.demand(r.kernel) for x, r in zip(rates(f), jobs, strict=True))

        low, high = 0.0, 1.0
        if moved(1.0) > spec.bandwidth:
            for _ in range(80):
                middle = (low + high) / 2
                low, high = (middle, high) if moved(middle) <= spec.bandwidth else (low, middle)
            high = low
        for rate, r in zip(rates(high), jobs, strict=True):
            for block in r.blocks:
                block.rate = rate

    def demand(self, kernel: Kernel) -> float:
        return kernel.nbytes / kernel.blocks / kernel.block_s

    def widest(self, kernel: Kernel) -> int:
        return min(kernel.blocks, kernel.per_sm * self.spec.sms)
