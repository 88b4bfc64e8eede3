"""What an operator costs on a GPU: by a profile if one has it, else by a roofline over tiles.

A matrix product (a convolution is one, implicitly) is covered with tiles, one block each. The blocks of a wave run at
the rate of their multiprocessor, so a small batch that fills part of a wave costs as much as a full one. Everything
else is bound by memory. Costs from this model are marked as modelled (`OpProfile.source`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, isfinite, prod
from typing import NamedTuple

from gpumux.device.sim.contention import NO_DEMAND, Demand, crowded, demand, granted, speed
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.program.ir import ITEM_BYTES, Op, Program, TensorRef
from gpumux.program.profile import OpProfile, StepProfile, argument_views, op_nbytes, op_shapes, output_views

# ---- A kernel in the simulator: equal blocks, and the memory traffic they share.


MAX_PER_SM = 32  # resident blocks a multiprocessor, compute capability 8.0 and 9.0
MIN_BLOCK_S = 1e-8  # times nearer than a nanosecond are one instant (gpu.EPS)


class Kernel(NamedTuple):
    """One kernel of equal blocks. A block takes `block_s` seconds when the kernel is alone on the device; a
    multiprocessor holds `per_sm` of them at once; all of them together move `nbytes` to and from memory.

    sensitivity: multiplies the block time while another job has blocks on the device.
    issue: the part of a multiprocessor's issue slots that the kernel's blocks there need when it is alone.
    cached: bytes that it reads again from L2, and that have to stay there meanwhile."""

    name: str
    blocks: int
    block_s: float
    per_sm: int
    nbytes: int
    sensitivity: float = 1.0
    issue: float = 0.0
    cached: int = 0


def checked(kernel: Kernel) -> Kernel:
    """Returns `kernel`. Raises ConfigError that names the figure if one is impossible."""
    name, blocks, block_s, per_sm, nbytes, sensitivity, issue, cached = kernel
    for wrong, what in (
        (blocks < 1, f"{blocks} blocks"),
        (not (isfinite(block_s) and block_s >= MIN_BLOCK_S), f"a block of {block_s} s"),
        (not 1 <= per_sm <= MAX_PER_SM, f"{per_sm} blocks a multiprocessor"),
        (nbytes < 0, f"{nbytes} bytes"),
        (not (isfinite(sensitivity) and sensitivity >= 1.0), f"a sensitivity of {sensitivity}"),
        (not 0.0 <= issue <= 1.0, f"a need of {issue} of a multiprocessor's issue slots"),
        (cached < 0, f"{cached} bytes in L2"),
    ):
        if wrong:
            raise ConfigError(
                f"kernel {name!r} has {what}",
                f"a kernel has at least 1 block of at least {MIN_BLOCK_S} s, 1 to {MAX_PER_SM} of them on a "
                "multiprocessor, no negative bytes, a sensitivity of 1 or more and a need from 0 to 1",
            )
    return kernel


def wave(kernel: Kernel, spec: GpuSpec, share: float = 1.0) -> tuple[int, float]:
    """Blocks of a kernel that run at once when it is alone, and the seconds of such a full wave."""
    at_once = min(kernel.blocks, kernel.per_sm * spec.share_sms(share))
    return at_once, wave_seconds(kernel, spec, at_once, share)


def wave_seconds(kernel: Kernel, spec: GpuSpec, blocks: int, share: float = 1.0) -> float:
    """Seconds that `blocks` blocks take when they run at once and alone."""
    memory, l2, _ = demands(kernel, spec)
    fast = [
        speed(one, granted([(blocks, one)], bandwidth, spec.saturation))
        for one, bandwidth in ((memory, spec.bandwidth), (l2, spec.l2_bandwidth))
        if one.rate
    ]
    sms = spec.share_sms(share)
    need = issue_of_block(kernel, spec)
    each, more = divmod(blocks, sms)
    apart = more * (each + 1) * crowded([(need, each + 1)]) + (sms - more) * each * crowded([(need, each)])
    return kernel.block_s / (min(fast, default=1.0) * apart / blocks)


def demands(kernel: Kernel, spec: GpuSpec) -> tuple[Demand, Demand, Demand]:
    """What one block demands of memory, of L2 where its kernel reads anything there again, and of memory when L2 does
    not hold that. A kernel that reads more again than L2 holds always demands the last."""
    widest = min(kernel.blocks, kernel.per_sm * spec.sms)
    block_bytes, again = kernel.nbytes / kernel.blocks, kernel.cached / kernel.blocks
    missed = demand(block_bytes + again, kernel.block_s, widest, spec.bandwidth, spec.saturation)
    if kernel.cached > spec.l2_bytes:
        return missed, NO_DEMAND, missed
    memory = demand(block_bytes, kernel.block_s, widest, spec.bandwidth, spec.saturation)
    l2 = demand(block_bytes + again, kernel.block_s, widest, spec.l2_bandwidth, spec.saturation) if again else NO_DEMAND
    return memory, l2, missed


def issue_of_block(kernel: Kernel, spec: GpuSpec) -> float:
    """The part of a multiprocessor's issue slots that one block needs."""
    return kernel.issue / min(kernel.per_sm, ceil(kernel.blocks / spec.sms))


def solo_seconds(kernel: Kernel, spec: GpuSpec, share: float = 1.0) -> float:
    """Seconds from its first block's start to its last block's end, alone on the device: full waves, then the rest.
    Never under `kernel.nbytes / spec.bandwidth`."""
    at_once, full = wave(kernel, spec, share)
    waves, rest = divmod(kernel.blocks, at_once)
    return waves * full + (wave_seconds(kernel, spec, rest, share) if rest else 0.0)


# ---- The cost model


# Of a matrix product, before and after its tiles: what small ones take beyond them
# (azure-H200-gemm_cublaslt-1024x1024x1024, -1024x2145x1024).
PRODUCT_S = 5e-6
FLOOR_S = 2e-6  # the shortest kernel; guess
# Tile rows, tile columns, blocks an SM holds, rate beside the largest tile. Guesses after common GEMM kernels.
TILES = ((128, 128, 1, 1.0), (128, 64, 2, 0.9), (64, 64, 4, 0.75))
SPLIT_K = 256  # a block of a product with few tiles takes at least this much of the inner dimension; guess
STREAM_ELEMENTS, STREAM_PER_SM = 1024, 8  # an elementwise block: 256 threads, 4 elements each; 2048 threads an SM
FOREACH_ELEMENTS, FOREACH_PER_SM = 65536, 4  # torch's multi-tensor kernels: this many elements, 512 threads a block

NEAR_S = 1e-9  # part of a kernel's time to which its block time is found
# The part of a multiprocessor's issue slots that a kernel's blocks need: matrix products, all others. Guesses, between
# 0.5 and 1, and 0.2 and 0.6: a copy from L2 and float32 products slow each other by 1.38 (interf-ipc), two kernels of
# the same pipe by 2.0 (interf-pipe).
PRODUCT_ISSUE, OTHER_ISSUE = 1.0, 0.38
# For profiles without a kernel's blocks. Guesses: a matrix product covers its output with tiles of 64 x 64, everything
# else works on 1,024 elements a block.
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "matmul", "linear", "attention")
TILE_ELEMENTS, TILE_PER_SM = 4096, 4


class KernelCost(NamedTuple):
    """What a kernel costs alone on the device. `seconds`: without the overhead of a launch."""

    seconds: float
    blocks: int
    per_sm: int


def product(m: int, n: int, k: int, nbytes: int, flops: float, spec: GpuSpec, count: int = 1) -> KernelCost:
    """`count` products [m, k] x [k, n] that together move `nbytes`, at a peak of `flops` a second, with the quickest
    tile."""
    rate = flops * spec.product_efficiency / spec.sms
    found: list[KernelCost] = []
    for rows, columns, per_sm, beside in TILES:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        split = min(max(1, spec.sms * per_sm // tiles), max(1, k // SPLIT_K))
        block_s = per_sm * 2 * rows * columns * (k / split) / (rate * beside)
        found.append(KernelCost(ceil(tiles * split / (spec.sms * per_sm)) * block_s, tiles * split, per_sm))
    seconds, blocks, per_sm = min(found)
    return KernelCost(PRODUCT_S + max(seconds, nbytes / spec.bandwidth), blocks, per_sm)


def stream(elements: int, nbytes: int, spec: GpuSpec, *, foreach: bool = False) -> KernelCost:
    """An elementwise kernel over `elements`. `foreach`: as one of torch's multi-tensor kernels."""
    seconds = nbytes / spec.bandwidth
    per_block, per_sm = (FOREACH_ELEMENTS, FOREACH_PER_SM) if foreach else (STREAM_ELEMENTS, STREAM_PER_SM)
    return KernelCost(max(seconds, FLOOR_S), max(1, ceil(elements / per_block)), per_sm)


# ---- of a Program's operators ----------------------------------------------------------------------


def op_profiles(program: Program, spec: GpuSpec, known: Iterable[StepProfile] = ()) -> list[OpProfile]:
    """The cost of each operator: by the first of `known` that has this operator with these shapes, else modelled."""
    table: dict[tuple[str, tuple[tuple[int, ...], ...]], OpProfile] = {}
    for profile in known:
        for op in profile.ops:
            table.setdefault((op.target, op.shapes), op)
    return [table.get((op.target, op_shapes(program, op))) or modelled(program, op, spec) for op in program.ops]


def modelled(program: Program, op: Op, spec: GpuSpec) -> OpProfile:
    """The cost of an operator by the roofline."""
    shapes, nbytes = op_shapes(program, op), op_nbytes(program, op)
    cost = _product_cost(program, op, nbytes, spec)
    if cost is None:
        foreach = op.target.removeprefix("aten.").startswith(("_foreach", "_fused"))
        sizes = [prod(program.views[view].size) for view in (*argument_views(op), *output_views(op))]
        elements = sum(sizes) if foreach else max(sizes, default=1)
        cost = stream(elements, nbytes, spec, foreach=foreach)
    return OpProfile(op.target, shapes, cost.seconds, nbytes, cost.blocks, cost.per_sm, source="model")


def _product_cost(program: Program, op: Op, nbytes: int, spec: GpuSpec) -> KernelCost | None:
    """The cost of a matrix product; None for other operators and for empty products."""
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
    """(count, m, n, k) of the matrix products that an operator on tensors of these sizes computes; None for others."""
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
        # The gradients of image and weight: each as much work as the forward.
        grad, image, weight = sizes[:3] if len(sizes) > 2 else ((), (), ())
        if len(grad) < 3 or len(weight) < 3:
            return None
        return 1, grad[0] * prod(grad[2:]), weight[0], 2 * prod(weight[1:])
    image, weight = sizes[:2]
    if len(image) < 3 or len(weight) < 3:
        return None
    # The output's size needs stride and padding. The image's size equals it for most convolutions, and exceeds it for
    # others.
    return 1, image[0] * prod(image[2:]), weight[0], prod(weight[1:])


def _peak(program: Program, dtype: str, spec: GpuSpec) -> float:
    """Operations a second at a dtype, with the program's precision of float32 products."""
    if dtype == "float32" and program.numerics.matmul_precision != "highest" and "tf32" in spec.flops:
        return spec.flops["tf32"]
    return spec.flops.get(dtype, spec.flops["float32"] * ITEM_BYTES["float32"] / ITEM_BYTES[dtype])


# ---- kernels of profiled operators -------------------------------------------------------------------


def kernels_of(ops: Sequence[OpProfile], spec: GpuSpec) -> tuple[Kernel, ...]:
    """The operators as kernels that take `op.seconds` alone on `spec`, whatever device those times are of. Blocks that
    were not recorded are guessed from the output's size."""
    made: dict[OpProfile, Kernel] = {}
    for op in ops:
        if op not in made:
            made[op] = kernel_of(op, spec)
    return tuple([made[op] for op in ops])


def kernel_of(op: OpProfile, spec: GpuSpec) -> Kernel:
    """A kernel whose time alone is `op.seconds`, at least the simulator's shortest block. Traffic above what memory can
    move in that time came from L2, if that holds it, and is left out otherwise: modelled traffic may be more than
    there was."""
    guessed_blocks, guessed_per_sm = _guess(op)
    blocks, per_sm = op.blocks or guessed_blocks, op.per_sm or guessed_per_sm
    seconds = max(op.seconds, MIN_BLOCK_S)
    nbytes = min(op.nbytes, int(seconds * spec.bandwidth))
    cached = op.nbytes - nbytes if op.source == "measured" and op.nbytes <= spec.l2_bytes else 0
    cached = min(cached, int(seconds * spec.l2_bandwidth) - nbytes)
    at_once = min(blocks, per_sm * spec.sms)
    blocks = min(blocks, at_once * int(seconds / MIN_BLOCK_S * 0.999 + 1))  # blocks of more waves would be too short
    issue = PRODUCT_ISSUE if _is_product(op) else OTHER_ISSUE
    made = Kernel(op.target.removeprefix("aten."), blocks, MIN_BLOCK_S, per_sm, nbytes, op.sensitivity, issue, cached)
    least = solo_seconds(made, spec)
    if least > seconds:  # a last wave that does not fill the device can't reach all of the bandwidth
        made = made._replace(nbytes=int(nbytes * seconds / least), cached=int(cached * seconds / least))
    return made._replace(block_s=_block_seconds(made, spec, seconds))


def _block_seconds(kernel: Kernel, spec: GpuSpec, seconds: float) -> float:
    """The block time with which the kernel takes `seconds` alone, by bisection: its time never falls as that rises."""
    waves = ceil(kernel.blocks / (min(kernel.blocks, kernel.per_sm * spec.sms)))
    simple = max(seconds / waves, MIN_BLOCK_S)
    least, greatest = MIN_BLOCK_S, max(seconds, MIN_BLOCK_S)
    if abs(solo_seconds(kernel._replace(block_s=simple), spec) - seconds) <= NEAR_S * seconds:
        return simple
    while greatest - least > NEAR_S * greatest:
        middle = (least + greatest) / 2
        if solo_seconds(kernel._replace(block_s=middle), spec) < seconds:
            least = middle
        else:
            greatest = middle
    return greatest


def guesses_blocks(op: OpProfile) -> bool:
    """Whether `kernel_of` has to guess the blocks of this operator."""
    return op.blocks is None or op.per_sm is None


def _is_product(op: OpProfile) -> bool:
    name = op.target.removeprefix("aten.").split(".")[0].strip("_")
    return any(name == product or product in name.split("_") for product in PRODUCTS)


def _guess(op: OpProfile) -> tuple[int, int]:
    """(blocks, blocks a multiprocessor), by the size of the largest tensor it returns or takes."""
    elements = max((prod(shape) for shape in op.shapes), default=1)
    if _is_product(op):
        elements = prod(op.shapes[-1]) if op.shapes else 1
        return max(1, ceil(elements / TILE_ELEMENTS)), TILE_PER_SM
    return max(1, ceil(elements / STREAM_ELEMENTS)), STREAM_PER_SM
