"""What an operator costs on a GPU: from a profile where one knows it, else a roofline over tiles.

A matrix product (a convolution is one, implicitly) is covered with tiles, a block each; blocks of a wave run at the
rate of their multiprocessor, so a small batch that fills part of a wave costs as much as a full one. Everything
else is bound by memory. Whatever is made here is marked as modelled (`OpProfile.source`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import NamedTuple

from gpumux.device.sim.kernel import MIN_BLOCK_S, Kernel
from gpumux.device.sim.spec import GpuSpec
from gpumux.program.ir import ITEM_BYTES, Op, Program, TensorRef
from gpumux.program.profile import OpProfile, StepProfile, argument_views, op_nbytes, op_shapes, output_views

EFFICIENCY = 0.5  # of the peak rate inside a full wave; guess
MEMORY_EFFICIENCY = 0.85  # of the bandwidth, for streaming kernels; guess
FLOOR_S = 2e-6  # the shortest kernel; guess
# Tile rows, tile columns, blocks an SM holds, rate beside the largest tile. Guesses after common GEMM kernels.
TILES = ((128, 128, 1, 1.0), (128, 64, 2, 0.9), (64, 64, 4, 0.75))
SPLIT_K = 256  # a block of a product with few tiles takes at least this much of the inner dimension; guess
STREAM_ELEMENTS, STREAM_PER_SM = 1024, 8  # an elementwise block: 256 threads, 4 elements each; 2048 threads an SM
FOREACH_ELEMENTS, FOREACH_PER_SM = 65536, 4  # torch's multi-tensor kernels: this many elements, 512 threads a block

# Where a profile does not know a kernel's blocks. Guesses: a matrix product covers its output with tiles of
# 64 x 64, everything else works on 1,024 elements a block.
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "matmul", "linear", "attention")
TILE_ELEMENTS, TILE_PER_SM = 4096, 4


class Cost(NamedTuple):
    """Alone on the device. `seconds` has no overhead of a launch in it."""

    seconds: float
    blocks: int
    per_sm: int


def product(m: int, n: int, k: int, nbytes: int, flops: float, spec: GpuSpec, count: int = 1) -> Cost:
    """`count` products [m, k] x [k, n] that together move `nbytes`, at a peak of `flops` a second, with the tile
    that is quickest."""
    rate = flops * EFFICIENCY / spec.sms
    found: list[Cost] = []
    for rows, columns, per_sm, speed in TILES:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        split = min(max(1, spec.sms * per_sm // tiles), max(1, k // SPLIT_K))
        block_s = per_sm * 2 * rows * columns * (k / split) / (rate * speed)
        found.append(Cost(ceil(tiles * split / (spec.sms * per_sm)) * block_s, tiles * split, per_sm))
    seconds, blocks, per_sm = min(found)
    return Cost(max(seconds, nbytes / spec.bandwidth, FLOOR_S), blocks, per_sm)


def stream(elements: int, nbytes: int, spec: GpuSpec, *, foreach: bool = False) -> Cost:
    """Elementwise over `elements`; `foreach`: as torch's multi-tensor kernels do it."""
    seconds = nbytes / (spec.bandwidth * MEMORY_EFFICIENCY)
    per_block, per_sm = (FOREACH_ELEMENTS, FOREACH_PER_SM) if foreach else (STREAM_ELEMENTS, STREAM_PER_SM)
    return Cost(max(seconds, FLOOR_S), max(1, ceil(elements / per_block)), per_sm)


# ---- of a Program's operators ----------------------------------------------------------------------


def op_profiles(program: Program, spec: GpuSpec, known: Iterable[StepProfile] = ()) -> list[OpProfile]:
    """What each operator costs: as the first of `known` says that has this operator with these shapes, else
    modelled."""
    table: dict[tuple[str, tuple[tuple[int, ...], ...]], OpProfile] = {}
    for profile in known:
        for op in profile.ops:
            table.setdefault((op.target, op.shapes), op)
    return [table.get((op.target, op_shapes(program, op))) or modelled(program, op, spec) for op in program.ops]


def modelled(program: Program, op: Op, spec: GpuSpec) -> OpProfile:
    """The operator by the roofline."""
    shapes, nbytes = op_shapes(program, op), op_nbytes(program, op)
    cost = _product_cost(program, op, nbytes, spec)
    if cost is None:
        foreach = op.target.removeprefix("aten.").startswith(("_foreach", "_fused"))
        sizes = [prod(program.views[view].size) for view in (*argument_views(op), *output_views(op))]
        elements = sum(sizes) if foreach else max(sizes, default=1)
        cost = stream(elements, nbytes, spec, foreach=foreach)
    return OpProfile(op.target, shapes, cost.seconds, nbytes, cost.blocks, cost.per_sm, source="model")


def _product_cost(program: Program, op: Op, nbytes: int, spec: GpuSpec) -> Cost | None:
    """None for what is no matrix product, or a degenerate one."""
    given = [program.views[arg.view] for arg in op.args if isinstance(arg, TensorRef)]
    sizes = [view.size for view in given]
    if not sizes or any(0 in size for size in sizes):
        return None
    name = op.target.removeprefix("aten.").split(".")[0].strip("_")
    shape = _product_shape(name, sizes)
    if shape is None:
        return None
    count, m, n, k = shape
    return product(m, n, k, nbytes, _peak(program, given[-1].dtype, spec), spec, count)


def _product_shape(name: str, sizes: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    """(count, m, n, k) of the matrix products that an operator on tensors of these sizes is."""
    if name in ("addmm", "baddbmm", "addbmm"):
        sizes = sizes[1:]
    if name in ("mm", "addmm") and [len(size) for size in sizes[:2]] == [2, 2]:
        (m, k), (_, n) = sizes[:2]
        return 1, m, n, k
    if name in ("bmm", "baddbmm", "addbmm") and [len(size) for size in sizes[:2]] == [3, 3]:
        (count, m, k), (_, _, n) = sizes[:2]
        return count, m, n, k
    if name in ("convolution", "convolution_backward") and len(sizes) > 1:
        return _convolution_shape(name, sizes)
    if "attention" in name and len(sizes) > 2 and all(len(size) == 4 for size in sizes[:3]):
        batch, heads, rows, depth = sizes[0]
        products = 5 if "backward" in name else 2  # of scores, and of values; backward recomputes the scores
        return batch * heads, rows, sizes[1][2], products * depth
    return None


def _convolution_shape(name: str, sizes: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    if name == "convolution_backward":
        # Towards the image and towards the weight: as much work each as forward.
        grad, image, weight = sizes[:3] if len(sizes) > 2 else ((), (), ())
        if len(grad) < 3 or len(weight) < 3:
            return None
        return 1, grad[0] * prod(grad[2:]), weight[0], 2 * prod(weight[1:])
    image, weight = sizes[:2]
    if len(image) < 3 or len(weight) < 3:
        return None
    # Its output's size needs stride and padding; the image's is right for most, and more than it for the others.
    return 1, image[0] * prod(image[2:]), weight[0], prod(weight[1:])


def _peak(program: Program, dtype: str, spec: GpuSpec) -> float:
    """Operations a second at that dtype, with the program's precision of float32 products."""
    if dtype == "float32" and program.numerics.matmul_precision != "highest" and "tf32" in spec.flops:
        return spec.flops["tf32"]
    return spec.flops.get(dtype, spec.flops["float32"] * ITEM_BYTES["float32"] / ITEM_BYTES[dtype])


# ---- kernels of profiled operators -------------------------------------------------------------------


def kernels_of(ops: Sequence[OpProfile], spec: GpuSpec) -> tuple[Kernel, ...]:
    """The operators as kernels that take, alone on `spec`, what they are said to. Times are taken as they are,
    whatever device they are of; blocks nobody recorded are guessed from the output's size."""
    made: dict[OpProfile, Kernel] = {}
    for op in ops:
        if op not in made:
            made[op] = kernel_of(op, spec)
    return tuple([made[op] for op in ops])


def kernel_of(op: OpProfile, spec: GpuSpec) -> Kernel:
    """A kernel whose time alone is `op.seconds`. Traffic the bandwidth could not carry in that time came from
    caches and is left out; no time is below the simulator's shortest block."""
    guessed_blocks, guessed_per_sm = _guess(op)
    blocks, per_sm = op.blocks or guessed_blocks, op.per_sm or guessed_per_sm
    seconds = max(op.seconds, MIN_BLOCK_S)
    nbytes = min(op.nbytes, int(seconds * spec.bandwidth))
    at_once = min(blocks, per_sm * spec.sms)
    blocks = min(blocks, at_once * int(seconds / MIN_BLOCK_S * 0.999 + 1))  # more would be too short to tell apart
    full, rest = divmod(blocks, at_once)
    wave_moved_s = at_once * nbytes / blocks / spec.bandwidth
    block_s = seconds / (full + (rest > 0))
    if block_s < wave_moved_s:  # full waves are bound by memory; what they leave is the last one's
        block_s = max(seconds - full * wave_moved_s, MIN_BLOCK_S) if rest else wave_moved_s
    return Kernel(op.target.removeprefix("aten."), blocks, max(block_s, MIN_BLOCK_S), per_sm, nbytes, op.sensitivity)


def guesses_blocks(op: OpProfile) -> bool:
    """Whether `kernel_of` has to guess how this operator fills a GPU."""
    return op.blocks is None or op.per_sm is None


def _guess(op: OpProfile) -> tuple[int, int]:
    """(blocks, blocks a multiprocessor) after the size of the largest tensor it returns or takes."""
    elements = max((prod(shape) for shape in op.shapes), default=1)
    name = op.target.removeprefix("aten.").split(".")[0].strip("_")
    if any(name == product or product in name.split("_") for product in PRODUCTS):
        elements = prod(op.shapes[-1]) if op.shapes else 1
        return max(1, ceil(elements / TILE_ELEMENTS)), TILE_PER_SM
    return max(1, ceil(elements / STREAM_ELEMENTS)), STREAM_PER_SM
