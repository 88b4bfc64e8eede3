"""The assumptions of smoke.py about torch on the GPU: captures and replays as the device makes them
(gpumux/device/cuda/compute.py). Torch is imported when the first of them is checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpumux.device.cuda.driver import bindings
from microbench.cuda.smoke_driver import REACHED_S, Card, hold

WAYS = ("products", "flash", "efficient", "cuDNN")  # as torch numbers its ways of attention


def begin(card: Card) -> str:
    """Import torch. Returns why it can't be checked, or nothing."""
    try:
        import torch
    except ImportError as error:
        return f"there is no torch ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU"
    torch.cuda.init()
    torch.cuda.set_device(0)
    card.torch = torch
    return ""


def _on(card: Card, stream: int) -> Any:
    return card.torch.cuda.stream(card.torch.cuda.ExternalStream(stream, device=card.torch.device("cuda", 0)))


def _capture(card: Card, stream: int, pool: Any, body: Callable[[], Any], **options: bool) -> tuple[Any, Any]:
    """A graph, and what `body` returned."""
    torch = card.torch
    graph = torch.cuda.CUDAGraph(**options)
    torch._C._cuda_clearCublasWorkspaces()
    with _on(card, stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            made = body()
        finally:
            graph.capture_end()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, made


def _replay(card: Card, stream: int, *graphs: Any) -> None:
    """Replay graphs one after the other, and wait."""
    with _on(card, stream):
        for graph in graphs:
            graph.replay()
    card.until(lambda: card.gpu.idle(stream))


def _near(card: Card, found: Any, wanted: Any, tolerance: float = 1e-3) -> str:
    """The largest difference of two elements."""
    torch = card.torch
    off = float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-9))
    hold(bool(torch.isfinite(found).all()) and off <= tolerance, f"{off:.1e} off")
    return f"{off:.0e} off"


class _Streams:
    """A stream to capture on, and one to run on."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def __enter__(self) -> tuple[int, int]:
        self._made = self._card.gpu.stream(self._card.least), self._card.gpu.stream(self._card.greatest)
        return self._made

    def __exit__(self, *raised: object) -> None:
        self._card.torch.cuda.synchronize()
        for stream in self._made:
            self._card.gpu.destroy_stream(stream)


def shared_context(card: Card) -> str:
    torch = card.torch
    before = int(card.plain.call("cuCtxGetCurrent"))
    total = float(torch.ones(1000, device="cuda").sum())
    hold(total == 1000, f"1000 ones are {total}")
    hold(int(card.plain.call("cuCtxGetCurrent")) == before, "torch made another context current")
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def external_stream(card: Card) -> str:
    torch = card.torch
    with _Streams(card) as (stream, _):
        with _on(card, stream):
            made = torch.arange(1000.0, device="cuda") + 1
        event = card.gpu.event(timed=False)
        card.gpu.record(event, stream)
        card.until(lambda: card.gpu.reached(event))
        card.gpu.destroy_event(event)
        hold(float(made.sum()) == 500500, "wrong sum")
    return "operators go where they are told"


def captured(card: Card) -> str:
    torch = card.torch
    with _Streams(card) as (low, high):
        x = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        graph, y = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: x * 2 + 1)
        for value in (1.0, 5.0):
            x.fill_(value)
            torch.cuda.synchronize()
            _replay(card, high, graph)
            hold(float(y[0]) == 2 * value + 1, f"{float(y[0])} instead of {2 * value + 1}")
        graph.reset()
    return "captured on a low stream, replayed on a high one"


def uploaded(card: Card) -> str:
    torch = card.torch
    hold(hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"), "torch does not tell the executable graph")
    with _Streams(card) as (low, high):
        x = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        graph, y = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: x + 1)
        card.gpu.upload(int(graph.raw_cuda_graph_exec()), low)
        card.plain.call("cuGraphLaunch", bindings().CUgraphExec(int(graph.raw_cuda_graph_exec())), high)  # past torch
        card.until(lambda: card.gpu.idle(high))
        hold(float(y[0]) == 2, f"{float(y[0])} instead of 2")
        graph.reset()
    return "uploaded, and launched by the driver alone"


def occupied(card: Card) -> str:
    """Operators that Python calls while the GPU is kept busy queue up behind: their times are the GPU's."""
    torch = card.torch
    with _Streams(card) as (stream, _):
        marks = [card.gpu.event(timed=True) for _ in range(22)]
        with _on(card, stream):
            x = torch.ones(1000, device="cuda")
            card.gpu.record(marks[0], stream)
            torch.cuda._sleep(int(5e-3 * 2e9))
            for mark in marks[1:-1]:
                card.gpu.record(mark, stream)
                x.add_(1)
            card.gpu.record(marks[-1], stream)
        ahead = not card.gpu.reached(marks[1])
        card.until(lambda: card.gpu.reached(marks[-1]))
        busy, each = card.gpu.elapsed(marks[0], marks[1]), card.gpu.elapsed(marks[1], marks[-1]) / 20
        for mark in marks:
            card.gpu.destroy_event(mark)
        hold(ahead, "Python did not get ahead of the GPU")
        hold(2e-3 < busy < 20e-3, f"busy for {1e3 * busy:.1f} ms instead of 5")
    return f"busy for {1e3 * busy:.1f} ms of 5, then {1e6 * each:.1f} us an operator with its event"


def shared_pool(card: Card) -> str:
    torch = card.torch
    with _Streams(card) as (low, high):
        x, pool = torch.ones(1 << 20, device="cuda"), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        first, a = _capture(card, low, pool, lambda: x * 2)
        second, b = _capture(card, low, pool, lambda: a + 1)
        third, c = _capture(card, low, pool, lambda: b * b)
        for value in (1.0, 2.0, 3.0):
            x.fill_(value)
            torch.cuda.synchronize()
            _replay(card, high, first, second, third)
            wanted = (2 * value + 1) ** 2
            hold(float(c[0]) == wanted == float(c[-1]), f"{float(c[0])} instead of {wanted}")
        for graph in (first, second, third):
            graph.reset()
    return "three graphs of one pool, in order"


def eager_pool(card: Card) -> str:
    """Operators called one by one allocate from the pool that the capture then takes."""
    torch, core = card.torch, card.torch._C
    with _Streams(card) as (low, _):
        pool = torch.cuda.graph_pool_handle()
        core._cuda_beginAllocateCurrentThreadToPool(0, pool)
        try:
            with _on(card, low):
                address = torch.zeros(8 << 20, device="cuda").data_ptr()
        finally:
            core._cuda_endAllocateToPool(0, pool)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph, made = _capture(card, low, pool, lambda: torch.zeros(8 << 20, device="cuda"))
        more, same = torch.cuda.memory_reserved() - before, made.data_ptr() == address
        graph.reset()
        del made
        core._cuda_releasePool(0, pool)
    hold(more == 0, f"the capture took {more >> 20} MiB more")
    return "the capture takes the same memory again" + ("" if same else ", at another address")


def draws(card: Card) -> str:
    """A generator over two pieces, replayed twice, beside its draws one by one."""
    torch = card.torch
    default = torch.cuda.default_generators[0]
    plain = torch.Generator("cuda").manual_seed(7)
    wanted = [torch.rand(1000, device="cuda", generator=plain) for _ in range(4)]
    with _Streams(card) as (low, high):
        mine, pool = torch.Generator("cuda").manual_seed(7), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(mine)
        try:
            pieces = [_capture(card, low, pool, lambda: torch.rand(1000, device="cuda")) for _ in range(2)]
            found = []
            for _ in range(2):
                _replay(card, high, *(graph for graph, _ in pieces))
                found += [made.clone() for _, made in pieces]
                torch.cuda.synchronize()
        finally:
            default.graphsafe_set_state(before)
        for graph, _ in pieces:
            graph.reset()
    same = [bool(torch.equal(a, b)) for a, b in zip(found, wanted, strict=True)]
    hold(all(same), f"equal to the plain draws: {same}")
    return "two pieces, twice: the plain draws, bit for bit"


def products(card: Card) -> str:
    torch = card.torch
    with _Streams(card) as (low, high):
        a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
        wanted, pool = a @ b @ b, torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        first, c = _capture(card, low, pool, lambda: a @ b)
        second, d = _capture(card, low, pool, lambda: c @ b)
        _replay(card, high, first, second)
        said = _near(card, d, wanted, 5e-3)
        for graph in (first, second):
            graph.reset()
    return f"in two captures of one pool, {said}"


def numbers(card: Card) -> str:
    """A list of tensors times a number that lies on the GPU: as optimizers read their learning rates."""
    torch = card.torch
    with _Streams(card) as (low, high):
        tensors = [torch.ones(100 + i, device="cuda") for i in range(40)]
        rate = torch.full((), 2.0, device="cuda")
        torch.cuda.synchronize()
        graph, _ = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: torch._foreach_mul_(tensors, rate))
        wanted = 1.0
        for value in (2.0, 3.0):
            rate.fill_(value)
            torch.cuda.synchronize()
            _replay(card, high, graph)
            wanted *= value
            hold(float(tensors[-1][0]) == wanted, f"{float(tensors[-1][0])} instead of {wanted}")
        graph.reset()
    return "each replay reads its own"


def attention(card: Card) -> str:
    torch = card.torch
    said = []
    with _Streams(card) as (low, high):
        for dtype, causal, rows in (
            (torch.float32, False, 128),
            (torch.bfloat16, False, 128),
            (torch.bfloat16, True, 197),
        ):
            q, k, v = (torch.randn(2, 8, length, 64, device="cuda").to(dtype) for length in (128, rows, rows))
            way = int(torch._fused_sdp_choice(q, k, v, None, 0.0, causal))
            attend = torch.nn.functional.scaled_dot_product_attention
            scores = (q.float() @ k.float().transpose(-2, -1)) * 64**-0.5
            if causal:
                scores = scores.masked_fill(
                    torch.ones(128, rows, device="cuda", dtype=torch.bool).tril().logical_not(), -torch.inf
                )
            wanted = torch.softmax(scores, -1) @ v.float()
            with _on(card, low):
                attend(q, k, v, is_causal=causal)
            torch.cuda.synchronize()
            graph, made = _capture(
                card,
                low,
                torch.cuda.graph_pool_handle(),
                lambda: attend(q, k, v, is_causal=causal),  # noqa: B023
            )
            _replay(card, high, graph)
            name = WAYS[way] if 0 <= way < len(WAYS) else str(way)
            what = f"{str(dtype).removeprefix('torch.')}{f', causal, 128 by {rows}' if causal else ''}: {name}"
            said.append(f"{what} ({_near(card, made, wanted, 2e-2)})")
            graph.reset()
    return "; ".join(said)


def batch_norm(card: Card) -> str:
    torch = card.torch
    with _Streams(card) as (low, high):
        x = torch.randn(8, 64, 28, 28, device="cuda")
        weight, bias, mean, var = (torch.rand(64, device="cuda") for _ in range(4))

        def norm() -> Any:
            return torch.ops.aten.cudnn_batch_norm.default(x, weight, bias, mean, var, True, 0.1, 1e-5)[0]

        wanted = torch.ops.aten.native_batch_norm.default(x, weight, bias, mean.clone(), var.clone(), True, 0.1, 1e-5)[
            0
        ]
        with _on(card, low):
            norm()
        torch.cuda.synchronize()
        graph, made = _capture(card, low, torch.cuda.graph_pool_handle(), norm)
        _replay(card, high, graph)
        said = _near(card, made, wanted)
        graph.reset()
    return said


def recurrent(card: Card) -> str:
    torch = card.torch
    with _Streams(card) as (low, high):
        layer, x = torch.nn.LSTM(64, 64).cuda(), torch.randn(20, 8, 64, device="cuda")
        with torch.no_grad():
            with _on(card, low):
                wanted = layer(x)[0].clone()
            torch.cuda.synchronize()
            graph, made = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: layer(x)[0])
        _replay(card, high, graph)
        said = _near(card, made, wanted)
        graph.reset()
    return f"an LSTM, {said}"


def training(card: Card) -> str:
    """A whole step, forward, backward and optimizer, after two steps one by one on the same stream."""
    torch = card.torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    x, y = torch.randn(128, 64, device="cuda"), torch.randint(0, 10, (128,), device="cuda")

    def step() -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with _Streams(card) as (low, high):
        torch.cuda.synchronize()
        with _on(card, low):
            first = float(step())
            step()
        graph, loss = _capture(card, low, torch.cuda.graph_pool_handle(), step)
        for _ in range(30):
            _replay(card, high, graph)
        last = float(loss)
        graph.reset()
    hold(last < first / 2, f"the loss was {first:.3f} and is {last:.3f} after 30 steps")
    return f"loss {first:.3f}, {last:.3f} after 30 replays"


def beside_a_capture(card: Card) -> str:
    """One thread replays while another captures."""
    torch = card.torch
    said: list[str] = []
    with _Streams(card) as (low, high):
        x = torch.ones(1 << 16, device="cuda")
        torch.cuda.synchronize()
        graph, y = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: x + 1)

        def other() -> None:
            try:
                card.gpu.enter()
                torch.cuda.set_device(0)
                for _ in range(20):
                    _replay(card, high, graph)
                said.append("")
            except Exception as error:  # noqa: BLE001  reported below
                said.append(f"{type(error).__name__}: {error}")

        def body() -> Any:
            made = x * 2
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(REACHED_S)
            return made * 2

        beside, z = _capture(card, low, torch.cuda.graph_pool_handle(), body)
        _replay(card, high, beside)
        hold(said == [""], f"the thread that replays: {said[0] if said else 'has not ended'}")
        hold((float(y[0]), float(z[0])) == (2, 4), "wrong results")
        for each in (graph, beside):
            each.reset()
    return "20 replays during a capture"


def share(card: Card) -> str:
    """Operators and products on a green context's stream, called and captured, with the primary context current."""
    torch = card.torch
    stream = card.gpu.confined_stream(card.green(), card.least)
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    wanted = (a @ b).relu()
    torch.cuda.synchronize()
    with _on(card, stream):
        called = (a @ b).relu()
    card.until(lambda: card.gpu.idle(stream))
    _near(card, called, wanted, 5e-3)
    graph, made = _capture(card, stream, torch.cuda.graph_pool_handle(), lambda: (a @ b).relu())
    _replay(card, stream, graph)
    said = _near(card, made, wanted, 5e-3)
    graph.reset()
    torch.cuda.synchronize()
    card.gpu.destroy_stream(stream)
    return f"called and captured, {said}"


def triton_kernel(card: Card) -> str:
    torch = card.torch
    from microbench.cuda.smoke_triton import add_one

    with _Streams(card) as (low, high):
        x, y = torch.arange(1000.0, device="cuda"), torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with _on(card, low):
            add_one(x, y)
        card.until(lambda: card.gpu.idle(low))
        hold(float(y[999]) == 1000, f"{float(y[999])} instead of 1000")
        y.zero_()
        torch.cuda.synchronize()
        graph, _ = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: add_one(x, y))
        _replay(card, high, graph)
        hold(float(y[999]) == 1000, f"{float(y[999])} instead of 1000 when replayed")
        graph.reset()
    return "compiled, called and captured"


def readable(card: Card) -> str:
    """Whether a captured graph could be taken over: every node's parameters can be asked for and made again."""
    torch = card.torch
    from microbench.cuda.rebuild import rebuild

    layer, x = torch.nn.Linear(256, 256).cuda(), torch.randn(64, 256, device="cuda")
    with _Streams(card) as (low, _):
        with torch.no_grad(), _on(card, low):
            layer(x).relu()
        torch.cuda.synchronize()
        with torch.no_grad():
            graph, _ = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: layer(x).relu(), keep_graph=True)
        graph.instantiate()
        made = rebuild(card.kernels, bindings().CUgraph(int(graph.raw_cuda_graph())))
        graph.reset()
    hold(not made.failed, "; ".join(f"{kind}: {why}" for kind, why in made.why.items()))
    return ", ".join(f"{count} {kind.lower()}" for kind, count in made.done.items())


def failed_capture(card: Card) -> str:
    """A capture that an operator makes impossible, and one after it."""
    torch = card.torch
    with _Streams(card) as (low, high):
        x = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        try:
            _capture(card, low, torch.cuda.graph_pool_handle(), lambda: float(x.sum()))
            said = ""
        except RuntimeError as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
        hold(bool(said), "reading a value was captured")
        graph, y = _capture(card, low, torch.cuda.graph_pool_handle(), lambda: x + 1)
        _replay(card, high, graph)
        hold(float(y[0]) == 2, f"{float(y[0])} instead of 2 afterwards")
        graph.reset()
    return f"the next one works; it said: {said}"


def goes_on(card: Card) -> str:
    """After a capture that fails, the same job draws and captures, by the device's own code."""
    torch = card.torch
    from gpumux.device.cuda.compute import CudaCompute
    from gpumux.errors import JobFailed

    plain = torch.Generator("cuda").manual_seed(7)
    wanted = [torch.rand(1000, device="cuda", generator=plain) for _ in range(2)]
    found: list[Any] = []
    x, cudnn = torch.ones(1000, device="cuda"), torch.backends.cuda.cudnn_sdp_enabled()
    compute = CudaCompute(card.gpu, 0)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    pool = compute.pool()
    torch.cuda.synchronize()
    with _Streams(card) as (low, high), compute.drawing_from(compute.generator(7)):

        def read() -> None:
            float(x.sum())

        def draw() -> None:
            found.append(torch.rand(1000, device="cuda"))

        try:
            compute.capture(low, pool, read)
            said = ""
        except JobFailed as error:
            said = error.message
        hold(bool(said), "reading a value was captured")
        with compute.on(low), compute.allocating(pool):
            draw()
        graph = compute.capture(low, pool, draw)
        card.until(lambda: card.gpu.idle(low))
        graph.replay(high)
        card.until(lambda: card.gpu.idle(high))
        same = [bool(torch.equal(a, b)) for a, b in zip(found, wanted, strict=True)]
        graph.drop()
    compute.drop_pool(pool)
    hold(all(same), f"equal to the plain draws: {same}")
    return "called and captured: the plain draws, bit for bit"


def streams(card: Card) -> str:
    """Two random streams in one capture, as of two models, replayed twice beside the draws of each by itself; then from
    a state that was set."""
    torch = card.torch
    from gpumux.device.cuda.compute import CudaCompute

    wanted = []
    for seed in (7, 8):
        plain = torch.Generator("cuda").manual_seed(seed)
        wanted.append([torch.rand(1000, device="cuda", generator=plain) for _ in range(2)])
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    compute = CudaCompute(card.gpu, 0)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    pool, made = compute.pool(), []
    own, generators = compute.generator(1), [compute.generator(seed) for seed in (7, 8)]
    begun = [generator.get_state() for generator in generators]
    with _Streams(card) as (low, high), compute.drawing_from(own):

        def draw() -> None:
            for generator in generators:
                with compute.drawing_from(generator):
                    made.append(torch.rand(1000, device="cuda"))

        graph = compute.capture(low, pool, draw, generators=generators)
        card.until(lambda: card.gpu.idle(low))

        def replayed() -> list[Any]:
            graph.replay(high)
            card.until(lambda: card.gpu.idle(high))
            return [tensor.clone() for tensor in made]

        found = [replayed(), replayed()]
        for generator, state in zip(generators, begun, strict=True):
            generator.set_state(state)
        found.append(replayed())
        torch.cuda.synchronize()
        graph.drop()
    compute.drop_pool(pool)
    expected = [[each[turn] for each in wanted] for turn in (0, 1, 0)]
    same = [[bool(torch.equal(a, b)) for a, b in zip(*turn, strict=True)] for turn in zip(found, expected, strict=True)]
    hold(all(map(all, same)), f"equal to the plain draws, by replay and stream: {same}")
    return "two streams in one capture: the plain draws of each, also from a state that was set"


ASSUMPTIONS: tuple[tuple[str, Callable[[Card], str]], ...] = (
    ("torch shares the context", shared_context),
    ("torch runs on the driver's streams", external_stream),
    ("torch captures on one, replays on another", captured),
    ("torch's graphs are uploaded", uploaded),
    ("operators queue up behind a busy GPU", occupied),
    ("three graphs share a pool", shared_pool),
    ("steps before a capture use its pool", eager_pool),
    ("draws go on over pieces and replays", draws),
    ("streams draw on over replays", streams),
    ("products in two captures", products),
    ("lists read a number from memory", numbers),
    ("attention is captured", attention),
    ("cuDNN's batch norm is captured", batch_norm),
    ("cuDNN's recurrent layers are captured", recurrent),
    ("a training step is captured", training),
    ("one thread captures, another replays", beside_a_capture),
    ("torch runs on a share", share),
    ("a Triton kernel is captured", triton_kernel),
    ("a captured graph can be read", readable),
    ("a capture that fails harms no other", failed_capture),
    ("a job goes on after one that fails", goes_on),
)
