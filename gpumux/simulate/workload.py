"""The shipped profiles, computed from layer shapes by a roofline over tiles. Nothing in them was measured.

`python -m gpumux.simulate.workload` writes them anew. A matrix product (a convolution is one, implicitly) is covered
with tiles, a block each; blocks of a wave run at the rate of their multiprocessor, so a small batch that fills
part of a wave costs as much as a full one: that is why strong scaling wastes a GPU. Everything else is
bound by memory. Constants are an A100's, with their source beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path

from gpumux.device.sim.cost import FLOOR_S, Kernel, checked, kernels_of, product, stream
from gpumux.device.sim.device import Pieces, cut_kernels
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.errors import ConfigError
from gpumux.program.profile import OpProfile, Shapes, StepProfile, load, save
from gpumux.scheduler.admission import refuse_spec
from gpumux.scheduler.config import SchedulerConfig
from gpumux.types import JobSpec, Priority
from gpumux.wording import nearest

FLOPS = {4: A100.flops["tf32"], 2: A100.flops["float16"]}  # by bytes of an item
FLOAT = 4  # bytes of a float32
AMP = 2  # bytes of an item under mixed precision: products and activations in float16, parameters in float32
ALLREDUCE_BUS = 200e9  # bytes/s over NVLink among 8 A100; guess after public NCCL test results
ALLREDUCE_LATENCY_S = 25e-6  # guess
ALLREDUCE_BLOCKS = 24  # channels; guess
ALLREDUCE_SENSITIVITY = 2.2  # DeepPool, section 5: NCCL's all-reduce "more than doubles" beside another job
BUCKET_BYTES = 25 << 20  # torch DistributedDataParallel's default bucket

VGG16 = ((3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56), (256, 256, 56), (256, 256, 56),
         (256, 512, 28), (512, 512, 28), (512, 512, 28), (512, 512, 14), (512, 512, 14), (512, 512, 14))  # fmt: skip
DENSE = ((25088, 4096), (4096, 4096), (4096, 1000))


@dataclass
class Tape:
    """Collects a step's operators in captured order; `item` bytes an activation's element."""

    item: int = FLOAT
    ops: list[OpProfile] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)  # bytes not yet sent, in the order backward makes them
    parameters: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self,
        target: str,
        shapes: Shapes,
        seconds: float,
        nbytes: int,
        blocks: int,
        per_sm: int,
        sensitivity: float = 1.0,
    ) -> None:
        seconds = float(f"{max(FLOOR_S, seconds):.6g}")
        self.ops.append(OpProfile(target, shapes, seconds, nbytes, blocks, per_sm, sensitivity, "model"))

    def product(self, target: str, shapes: Shapes, m: int, n: int, k: int) -> None:
        """[m, k] x [k, n], with the fastest tile."""
        nbytes = self.item * (m * k + k * n + m * n)
        seconds, blocks, per_sm = product(m, n, k, nbytes, FLOPS[self.item], A100)
        self.add(target, shapes, seconds, nbytes, blocks, per_sm)

    def stream(self, target: str, shapes: Shapes, elements: int, passes: float, item: int = 0) -> None:
        """Elementwise over `elements` of `item` bytes, read or written `passes` times."""
        nbytes = int((item or self.item) * elements * passes)
        seconds, blocks, per_sm = stream(elements, nbytes, A100)
        self.add(target, shapes, seconds, nbytes, blocks, per_sm)

    def all_reduce(self, nbytes: int, gpus: int) -> None:
        seconds = ALLREDUCE_LATENCY_S + 2 * (gpus - 1) / gpus * nbytes / ALLREDUCE_BUS
        shape = (nbytes // FLOAT,)
        self.add("nccl.all_reduce", (shape, shape), seconds, 3 * nbytes, ALLREDUCE_BLOCKS, 1, ALLREDUCE_SENSITIVITY)

    def synchronise(self, gpus: int) -> None:
        """All-reduce the gradients made so far in buckets, once a bucket is full."""
        while gpus > 1 and sum(self.gradients) >= BUCKET_BYTES:
            self._bucket(gpus)

    def parameter(self, shape: tuple[int, ...]) -> None:
        """Use a parameter: under mixed precision it is cast first."""
        self.parameters.append(shape)
        if self.item != FLOAT:
            self.stream("aten._to_copy.default", (shape, shape), prod(shape), 1.5, FLOAT)

    def gradient(self, shape: tuple[int, ...]) -> None:
        """Make a parameter's gradient: under mixed precision it is cast back."""
        self.gradients.append(FLOAT * prod(shape))
        if self.item != FLOAT:
            self.stream("aten._to_copy.default", (shape, shape), prod(shape), 1.5, FLOAT)

    def flush(self, gpus: int) -> None:
        """All-reduce the remaining gradients."""
        self.synchronise(gpus)
        if gpus > 1 and self.gradients:
            self._bucket(gpus)
        self.gradients = []

    def optimize_each(self) -> None:
        """SGD with momentum and weight decay, one parameter at a time, then zeroing of gradients, as in libtorch."""
        for shape in self.parameters:
            for target, passes in (("add_.Tensor", 3), ("mul_.Tensor", 2), ("add_.Tensor", 3), ("add_.Tensor", 3)):
                self.stream(f"aten.{target}", (shape, shape), prod(shape), passes, FLOAT)
            self.stream("aten.zero_.default", (shape,), prod(shape), 1, FLOAT)

    def optimize_together(self) -> None:
        """SGD with momentum over all parameters as three multi-tensor operators: torch's default."""
        count = sum(map(prod, self.parameters))
        for target, passes in (("mul_.Scalar", 2), ("add_.List", 3), ("add_.List", 3)):
            nbytes = FLOAT * count * passes
            seconds, blocks, per_sm = stream(count, nbytes, A100, foreach=True)
            self.add(f"aten._foreach_{target}", ((count,),), seconds, nbytes, blocks, per_sm)

    def _bucket(self, gpus: int) -> None:
        nbytes, rest = sum(self.gradients), 0
        if nbytes > BUCKET_BYTES:
            nbytes, rest = BUCKET_BYTES, nbytes - BUCKET_BYTES
        self.gradients = [rest] if rest else []
        self.all_reduce(nbytes, gpus)


@dataclass(frozen=True)
class ConvLayer:
    """A convolution that keeps its image's size (`stride` 1), then a rectifier."""

    cin: int
    cout: int
    side: int
    kernel: int = 3

    def shapes(self, batch: int) -> Shapes:
        image, weight = (batch, self.cin, self.side, self.side), (self.cout, self.cin, self.kernel, self.kernel)
        return (image, weight, (batch, self.cout, self.side, self.side))

    def forward(self, tape: Tape, batch: int) -> None:
        shapes, pixels = self.shapes(batch), batch * self.side**2
        tape.parameter(shapes[1])
        tape.parameter((self.cout,))
        tape.product("aten.convolution.default", shapes, pixels, self.cout, self.cin * self.kernel**2)
        tape.stream("aten.relu.default", (shapes[2], shapes[2]), pixels * self.cout, 2)

    def backward(self, tape: Tape, batch: int, *, first: bool = False) -> None:
        """The gradients of the weight, and of the image unless it is the batch itself."""
        shapes, pixels, taps = self.shapes(batch), batch * self.side**2, self.kernel**2
        tape.stream("aten.threshold_backward.default", (shapes[2],) * 3, pixels * self.cout, 3)
        backward = (shapes[2], shapes[0], shapes[1])
        if not first:
            tape.product("aten.convolution_backward.input", (*backward, shapes[0]), pixels, self.cin, self.cout * taps)
        tape.product("aten.convolution_backward.weight", (*backward, shapes[1]), self.cout, self.cin * taps, pixels)
        tape.gradient(shapes[1])
        tape.stream("aten.convolution_backward.bias", (shapes[2], (self.cout,)), pixels * self.cout, 1)
        tape.gradient((self.cout,))


def dense_forward(tape: Tape, batch: int, wide: int, out: int) -> None:
    tape.parameter((wide, out))
    tape.parameter((out,))
    tape.product("aten.addmm.default", ((out,), (batch, wide), (wide, out), (batch, out)), batch, out, wide)


def dense_backward(tape: Tape, batch: int, wide: int, out: int) -> None:
    tape.product("aten.mm.default", ((batch, out), (out, wide), (batch, wide)), batch, wide, out)
    tape.product("aten.mm.default", ((out, batch), (batch, wide), (out, wide)), out, wide, batch)
    tape.gradient((wide, out))
    tape.stream("aten.sum.dim_IntList", ((batch, out), (out,)), batch * out, 1)
    tape.gradient((out,))


def vgg16(batch: int, gpus: int = 1) -> StepProfile:
    """One training step of VGG-16 on 224 x 224 images, `batch` of them on this GPU, one of `gpus`."""
    tape = Tape(AMP)
    _convs_forward(tape, batch)
    for wide, out in DENSE:
        dense_forward(tape, batch, wide, out)
        tape.stream("aten.relu.default", ((batch, out), (batch, out)), batch * out, 2)
    for wide, out in reversed(DENSE):
        tape.stream("aten.threshold_backward.default", ((batch, out),) * 3, batch * out, 3)
        dense_backward(tape, batch, wide, out)
        tape.synchronise(gpus)
    _convs_backward(tape, batch, gpus)
    tape.flush(gpus)
    tape.optimize_each()
    where = f", one of {gpus} data-parallel GPUs with an all-reduce for each 25 MiB of gradients" if gpus > 1 else ""
    return _profile(f"vgg16-b{batch}{'-ddp' if gpus > 1 else ''}", batch, tape, f"VGG-16, mixed precision{where}")


def vgg16_burst(batch: int, gpus: int) -> StepProfile:
    """The same under DeepPool's burst-parallel plan, on a GPU without part in the dense layers. Those run on one GPU
    for all, so their gradients need no all-reduce, and the other GPUs wait. Backward comes first here and the next
    forward last, so that the wait (`dense_seconds`) is between two steps."""
    tape, first = Tape(AMP), Tape(AMP)
    _convs_forward(first, batch)
    _convs_backward(tape, batch, gpus)
    tape.flush(gpus)
    tape.parameters = first.parameters
    tape.optimize_each()
    tape.ops += first.ops
    wait = f"then a wait of {dense_seconds(batch * gpus) * 1e3:.2f} ms for the dense layers, which one GPU runs for all"
    note = f"VGG-16's convolutions, mixed precision, one of {gpus} burst-parallel GPUs: backward, forward, {wait}"
    return _profile(f"vgg16-b{batch}-burst", batch, tape, note)


def dense_seconds(batch: int) -> float:
    """Seconds of VGG-16's dense layers, forward and backward, on one GPU."""
    tape = Tape(AMP)
    for wide, out in DENSE:
        dense_forward(tape, batch, wide, out)
    for wide, out in reversed(DENSE):
        dense_backward(tape, batch, wide, out)
    return sum(op.seconds for op in tape.ops)


def _last_of_side(index: int) -> bool:
    return index + 1 == len(VGG16) or VGG16[index + 1][2] < VGG16[index][2]


def _convs_forward(tape: Tape, batch: int) -> None:
    for index, layer in enumerate(VGG16):
        conv = ConvLayer(*layer)
        conv.forward(tape, batch)
        if _last_of_side(index):
            _pool(tape, batch, conv, "aten.max_pool2d_with_indices.default")


def _convs_backward(tape: Tape, batch: int, gpus: int) -> None:
    for index, layer in reversed(list(enumerate(VGG16))):
        conv = ConvLayer(*layer)
        if _last_of_side(index):
            _pool(tape, batch, conv, "aten.max_pool2d_with_indices_backward.default")
        conv.backward(tape, batch, first=index == 0)
        tape.synchronise(gpus)


def _pool(tape: Tape, batch: int, conv: ConvLayer, target: str) -> None:
    half = conv.side // 2
    image, pooled = (batch, conv.cout, conv.side, conv.side), (batch, conv.cout, half, half)
    tape.stream(target, (image, pooled), batch * conv.cout * conv.side**2, 1)


def small_kernels(batch: int) -> StepProfile:
    """A convolutional net of many narrow branches, after Inception-v3: kernels of a few microseconds."""
    tape = Tape()
    convs = [
        ConvLayer(cin, cout, side, kernel)
        for side, channels, modules in ((35, 256, 3), (17, 768, 5), (8, 1280, 2))
        for _ in range(modules)
        for cin, cout, kernel in ((channels, 64, 1), (channels, 48, 1), (48, 64, 3), (channels, 96, 1), (96, 96, 3))
    ]
    for conv in convs:
        conv.forward(tape, batch)
    for index, conv in reversed(list(enumerate(convs))):
        conv.backward(tape, batch, first=index == 0)
    tape.optimize_together()
    return _profile(f"small-kernels-b{batch}", batch, tape, "a net of narrow branches after Inception-v3")


def transformer(batch: int, layers: int = 4, width: int = 512, length: int = 128) -> StepProfile:
    """One training step of an encoder: `layers` of attention (written out) and a feed-forward of four widths."""
    tape, tokens, heads = Tape(), batch * length, width // 64
    weights = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    scores = (batch * heads, length, length)
    for _ in range(layers):
        for wide, out in weights:
            dense_forward(tape, tokens, wide, out)
        _attention(tape, scores, "aten._softmax.default", 2)
        for _ in range(2):
            tape.stream("aten.native_layer_norm.default", ((tokens, width), (tokens, width)), tokens * width, 2)
        tape.stream("aten.gelu.default", ((tokens, 4 * width),) * 2, tokens * 4 * width, 2)
    for _ in range(layers):
        tape.stream("aten.gelu_backward.default", ((tokens, 4 * width),) * 3, tokens * 4 * width, 3)
        for wide, out in reversed(weights):
            dense_backward(tape, tokens, wide, out)
        _attention(tape, scores, "aten._softmax_backward_data.default", 3)
        for _ in range(2):
            tape.stream("aten.native_layer_norm_backward.default", ((tokens, width),) * 3, tokens * width, 3)
    tape.optimize_together()
    note = f"an encoder of {layers} layers, {width} wide, sequences of {length}"
    return _profile(f"transformer-b{batch}", batch, tape, note)


def _attention(tape: Tape, scores: tuple[int, int, int], target: str, passes: int) -> None:
    """Two batched products of 64 wide heads, folded into rows, and the softmax."""
    many, length, _ = scores
    for _ in range(2):
        tape.product("aten.bmm.default", ((many, length, 64), (many, 64, length), scores), many * length, length, 64)
    tape.stream(target, (scores, scores), many * length * length, passes)


def _profile(name: str, batch: int, tape: Tape, note: str) -> StepProfile:
    made_by = "Modelled from layer shapes by gpumux.simulate.workload; nothing here was measured."
    return StepProfile(name, "a100", tuple(tape.ops), batch=batch, note=f"{note}. {made_by}")


def shipped() -> Sequence[StepProfile]:
    """Every profile that comes with gpumux."""
    return (
        vgg16_burst(4, 8),
        vgg16(4, gpus=8),
        vgg16(4),
        vgg16(16),
        small_kernels(4),
        small_kernels(16),
        transformer(2),
        transformer(16),
    )


def main(argv: Sequence[str]) -> int:
    """Write the profiles to a directory, by default the one they are shipped in."""
    directory = Path(argv[0]) if argv else Path(__file__).parent / "profiles"
    for profile in shipped():
        save(profile, directory / f"{profile.name}.json")
    return 0


# ---- The work of a simulated job: one step's kernels, how they are cut, and when its client submits steps.


MAX_AWAY_S = 60.0  # virtual seconds between steps or before the first: simulating one takes a few real seconds
MAX_RATE = 1e5  # steps a second: each is an event, whether it can be answered or not


@dataclass(frozen=True)
class Workload:
    """One job. Its client keeps up to `max_inflight` steps submitted and pauses `think_s` after each answer
    (then a step is submitted only after the pause), or submits at random moments, `rate` a second on average.
    target_s: piece length aimed at, None for the priority's own, inf for whole steps.
    Raises ConfigError for invalid values."""

    name: str
    priority: Priority
    kernels: tuple[Kernel, ...]
    think_s: float = 0.0
    rate: float | None = None
    weight: float = 1.0
    max_slowdown: float = 1.10
    max_inflight: int = 2
    starts_at: float = 0.0
    target_s: float | None = None

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ConfigError(f"job {self.name!r} has no kernels", "give it at least one")
        for kernel in self.kernels:
            checked(kernel)
        if not (0.0 <= self.think_s <= MAX_AWAY_S and 0.0 <= self.starts_at <= MAX_AWAY_S):
            raise ConfigError(
                f"job {self.name!r} thinks for {self.think_s:g} s from {self.starts_at:g} s on",
                f"give 0 to {MAX_AWAY_S:g} s: others are simulated for as long as it is away",
            )
        if self.rate is not None and not 1.0 / MAX_AWAY_S <= self.rate <= MAX_RATE:
            raise ConfigError(
                f"job {self.name!r} submits {self.rate:g} steps a second",
                f"give {1.0 / MAX_AWAY_S:.3g} to {MAX_RATE:g}, or no rate for a job that always has steps submitted",
            )
        if self.rate is not None and self.think_s:
            raise ConfigError(f"job {self.name!r} has both a rate and a pause", "give one of them")
        if self.target_s is not None and not self.target_s > 0:
            raise ConfigError(f"job {self.name!r} is cut to {self.target_s} s", "give more than 0, or inf")
        if fault := refuse_spec(self.job_spec, SchedulerConfig()):
            raise ConfigError(f"job {self.name!r}: {fault.message}", fault.remedy)

    @property
    def job_spec(self) -> JobSpec:
        """The job spec that the daemon gets."""
        return JobSpec(self.name, self.priority, self.weight, self.max_slowdown, None, self.max_inflight)

    @cached_property
    def content_hash(self) -> str:
        """A hash that is equal for equal steps."""
        return blake2b(repr(self.kernels).encode(), digest_size=16).hexdigest()


def cut_workload(workload: Workload, spec: GpuSpec) -> Pieces:
    """The workload's pieces on a GPU, by the time that each kernel takes there alone."""
    return cut_kernels(workload.kernels, spec, workload.priority, workload.target_s)


def from_profile(
    profile: StepProfile, spec: GpuSpec, priority: Priority, *, name: str | None = None, **rest: float | int | None
) -> Workload:
    """A job that runs the profiled step. `rest` are Workload's other fields."""
    return Workload(name or profile.name, priority, kernels_of(profile.ops, spec), **rest)  # type: ignore[arg-type]


# ---- Profiles by name: those that come with gpumux, and users' files.


def directory() -> Path:
    """The directory of the shipped profiles."""
    return Path(__file__).parent / "profiles"


def names() -> Sequence[str]:
    """Names of the shipped profiles, in order."""
    return sorted(path.stem for path in directory().glob("*.json"))


def find(name: str) -> StepProfile:
    """The shipped profile called `name`, or the file of that path. Raises ConfigError if it is neither."""
    if name in names():
        return load(directory() / f"{name}.json")
    path = Path(name)
    if not path.exists():
        near, shipped = nearest(name, names()), ", ".join(names())
        raise ConfigError(
            f"{name!r} is neither a file nor a shipped profile",
            (f"did you mean {near}? " if near else "")
            + f"record one with `gpumux jobs profile`, or choose one of {shipped}",
        )
    return load(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
