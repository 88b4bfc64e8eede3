"""Hypothesis strategies for Programs that pass `validate` (not torch's schemas: no torch here)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gpumux.program.ir import (
    ITEM_BYTES,
    Collective,
    Complex,
    Label,
    Numerics,
    Program,
    ProgramBuilder,
    ScalarRef,
    Tag,
    TensorRef,
    Wave,
    spans,
)

DTYPES = st.sampled_from(sorted(ITEM_BYTES))
SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TAGS = st.sampled_from(
    [
        Tag("dtype", "bfloat16"),
        Tag("layout", "strided"),
        Tag("memory_format", "channels_last"),
        Tag("device", ""),
    ]
)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    INT64,
    st.floats(),
    st.text(max_size=20),
    TAGS,
    st.builds(Complex, st.floats(), st.floats()),
)


def args(builder_views: list[int], scalars: int) -> st.SearchStrategy:
    leaf = [PLAIN]
    if builder_views:
        leaf.append(st.sampled_from(builder_views).map(TensorRef))
    if scalars:
        leaf.append(st.integers(0, scalars - 1).map(ScalarRef))
    nested = st.recursive(st.one_of(leaf), lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=6)
    return st.lists(nested.filter(lambda arg: _depth(arg) <= 4), max_size=5)


def _depth(arg: object) -> int:
    return 1 + max(map(_depth, arg), default=0) if isinstance(arg, tuple) else 0


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 12) -> Program:
    rank, ranks = draw(st.sampled_from([(0, 1), (1, 3)]))
    b = ProgramBuilder(
        rank=rank,
        ranks=ranks,
        device=draw(st.sampled_from(["cpu", "cuda"])),
        numerics=Numerics(
            draw(st.sampled_from(["highest", "high", "medium"])),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.sampled_from(["float32", "float64"])),
            draw(st.sampled_from(["tf32", "tf32", "ieee"])),
        ),
    )
    views: list[int] = []
    given_state = b.input("uint8", (16,)).view if draw(st.booleans()) else None
    for _ in range(draw(st.integers(0, 3))):
        views.append(b.input(draw(DTYPES), draw(SIZES)).view)
    for _ in range(draw(st.integers(0, 3))):
        views.append(b.state(draw(DTYPES), draw(SIZES)).view)
    for data in draw(st.lists(st.binary(min_size=1, max_size=9), max_size=3)):
        views.append(b.add_view(b.add_const(data), "uint8", (len(data),)))
    scalars = draw(st.lists(st.sampled_from(["float", "int"]), max_size=3))
    for kind in scalars:
        b.scalar(kind)
    generator = b.state("uint8", (16,)).view
    streams: list[int | None] = []  # by random slot
    for _ in range(draw(st.integers(0, max_ops))):
        given = draw(args(views, len(scalars)))
        random = stream = None
        target = draw(st.sampled_from(["aten.add.Tensor", "aten.cat.default", "aten.bernoulli.p"]))
        if target == "aten.bernoulli.p":
            random = draw(st.integers(0, len(streams)))
            if random == len(streams):
                streams.append(draw(st.sampled_from([None, generator])))
            stream = streams[random]
        kwargs = draw(st.dictionaries(st.sampled_from(["alpha", "dtype", "out_dtype"]), PLAIN, max_size=2))
        outs: list[object] = []
        for _ in range(draw(st.integers(0, 2))):
            size, dtype = draw(SIZES), draw(DTYPES)
            # A birth, sometimes with a second view on the same new storage.
            out = b.add_tensor("temp", dtype, size)
            views.append(out)
            if size and size[0] > 1:
                base = b.view(out)
                views.append(b.add_view(base.storage, dtype, (size[0] - 1, *size[1:]), base.stride, base.stride[0]))
            outs.append(draw(st.sampled_from([out, (out,)])))
        outs += [None] * draw(st.integers(0, 1))
        b.add_op(target, *given, kwargs=kwargs, outs=outs, random=random, stream=stream)  # type: ignore[arg-type]
    if views:
        for view in draw(st.lists(st.sampled_from(views), max_size=3)):
            b.result(view)
    ops = len(b.build().ops)
    if ops > 1 and ranks > 1:
        for sequence, at in enumerate(sorted(draw(st.lists(st.integers(1, ops - 1), max_size=2)))):
            received = b.add_tensor("temp", "float32", draw(SIZES))
            b.collective(Collective(at, "exchange", 2 * sequence, (0, 1), sends=(), receives=((0, received),)))
            scale = draw(st.floats(allow_nan=False, allow_infinity=False))
            b.collective(Collective(at, "all_reduce", 2 * sequence + 1, (1, 2), (received,), scale))
    program = b.build()
    labels = draw(
        st.lists(st.none() | st.builds(Label, st.sampled_from(["", "a", "b.0"]), st.booleans()), max_size=ops)
    )
    layers, found = spans(labels[:ops])
    draws = given_state is None and any(op.random is not None for op in program.ops)
    lanes = st.none() if ops < 2 or draws else st.none() | st.builds(Wave, st.integers(0, 1), st.integers(1, ops - 1))
    return replace(program, layers=layers, spans=found, generator=given_state, wave=draw(lanes))
