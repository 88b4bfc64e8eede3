"""Can a captured graph be built again, node by node, from the parameters the driver tells, and does it compute the
same?"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from microbench.cuda.driver import DriverError, Gpu
from microbench.cuda.experiment import Experiment, Row, main, median

STEPS = 5


@dataclass
class Rebuilt:
    """A graph with the nodes and edges of another. `kept`: argument bytes its nodes point to until it is
    instantiated."""

    graph: Any
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)
    argument_bytes: int = 0
    kept: list[Any] = field(default_factory=list)


def rebuild(gpu: Gpu, graph: Any) -> Rebuilt:
    """Read the parameters of every node and make an equal node, then the edges with their data."""
    count = int(gpu.call("cuGraphGetNodes", graph, 0)[1])
    nodes = gpu.call("cuGraphGetNodes", graph, count)[0]
    made = Rebuilt(gpu.call("cuGraphCreate", 0))
    twins: dict[int, Any] = {}
    makers: dict[str, Callable[[Gpu, Rebuilt, Any], Any]] = {
        "KERNEL": _kernel, "MEMCPY": _memcpy, "MEMSET": _memset, "EMPTY": _empty,
    }  # fmt: skip
    for node in nodes:
        kind = gpu.call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
        try:
            if kind not in makers:
                raise LookupError("no parameters to ask for")
            twins[int(node)] = makers[kind](gpu, made, node)
            made.done[kind] += 1
        except (DriverError, LookupError) as error:
            made.failed[kind] += 1
            made.why[kind] = str(error)
    values = gpu.call("cuGraphGetEdges", graph, 0)
    if len(values) != 4:
        raise RuntimeError("this cuda-bindings tells edges without their data: install version 13 or newer")
    edges = int(values[3])
    if edges and not made.failed:
        begin, end, data, _ = gpu.call("cuGraphGetEdges", graph, edges)
        pairs = [[twins[int(node)] for node in side] for side in (begin, end)]
        gpu.call("cuGraphAddDependencies", made.graph, *pairs, data, edges)
    return made


def _kernel(gpu: Gpu, made: Rebuilt, node: Any) -> Any:
    asked = gpu.call("cuGraphKernelNodeGetParams", node)
    twin = gpu.api.CUDA_KERNEL_NODE_PARAMS()
    for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes", "ctx"):
        setattr(twin, name, getattr(asked, name))
    if int(asked.func):
        twin.func, ask = asked.func, ("cuFuncGetParamInfo", asked.func)
    else:
        twin.kern, ask = asked.kern, ("cuKernelGetParamInfo", asked.kern)
    sizes: list[int] = []
    while True:
        try:
            sizes.append(int(gpu.call(*ask, len(sizes))[1]))
        except DriverError as error:
            if error.name != "CUDA_ERROR_INVALID_VALUE":  # which says that there is no further argument
                raise
            break
    if sizes and not int(asked.kernelParams or 0):
        raise LookupError("its arguments are packed in a buffer")
    places: Any = (ctypes.c_size_t * len(sizes)).from_address(int(asked.kernelParams)) if sizes else []
    copies = [ctypes.create_string_buffer(ctypes.string_at(places[i], size), size) for i, size in enumerate(sizes)]
    array = (ctypes.c_void_p * max(1, len(sizes)))(*(ctypes.addressof(copy) for copy in copies))
    made.kept += [copies, array]
    made.argument_bytes += sum(sizes)
    twin.kernelParams, twin.extra = ctypes.addressof(array), 0
    added = gpu.call("cuGraphAddKernelNode", made.graph, [], 0, twin)
    gpu.call("cuGraphKernelNodeCopyAttributes", added, node)  # priority, clusters, cooperative launch
    return added


def _memcpy(gpu: Gpu, made: Rebuilt, node: Any) -> Any:
    params = gpu.call("cuGraphMemcpyNodeGetParams", node)
    return gpu.call("cuGraphAddMemcpyNode", made.graph, [], 0, params, gpu.context)


def _memset(gpu: Gpu, made: Rebuilt, node: Any) -> Any:
    params = gpu.call("cuGraphMemsetNodeGetParams", node)
    return gpu.call("cuGraphAddMemsetNode", made.graph, [], 0, params, gpu.context)


def _empty(gpu: Gpu, made: Rebuilt, node: Any) -> Any:
    return gpu.call("cuGraphAddEmptyNode", made.graph, [], 0)


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    import torch  # not needed to list the experiments

    torch.backends.cudnn.deterministic = True
    return [_measure(gpu, repeats, name, maker) for name, maker in (("dense", _dense), ("convolution", _convolution))]


def _measure(gpu: Gpu, repeats: int, name: str, make: Callable[[Any], Any]) -> Row:
    import torch

    torch.manual_seed(0)
    model = make(torch).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(0, 10, (64,), device="cuda")

    def step() -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        step()
    captured.instantiate()
    state = [t for group in optimizer.state.values() for t in group.values() if torch.is_tensor(t)]
    state += [*model.parameters(), *model.buffers()]
    first = [t.detach().clone() for t in state]

    def run(launch: Callable[[], None]) -> list[Any]:
        with torch.no_grad():
            for tensor, value in zip(state, first, strict=True):
                tensor.copy_(value)
        for _ in range(STEPS):
            launch()
        torch.cuda.synchronize()
        return [t.detach().clone() for t in state]

    made = rebuild(gpu, gpu.api.CUgraph(captured.raw_cuda_graph()))
    counts = ", ".join(f"{n} {kind.lower()}" for kind, n in made.done.items())
    row: Row = {
        "model": name,
        "rebuilt": counts,
        "failed": "; ".join(f"{k.lower()}: {w}" for k, w in made.why.items()) or None,
    }
    row |= {"argument_bytes": made.argument_bytes, "equal": "no", "replay_us": None, "rebuilt_us": None}
    if made.failed:
        return row
    again = gpu.instantiate(made.graph)
    stream = torch.cuda.current_stream().cuda_stream
    expected, repeated = run(captured.replay), run(captured.replay)
    found = run(lambda: gpu.launch(again, stream))
    same = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    moved = not all(torch.equal(a, b) for a, b in zip(expected, first, strict=True))
    repeats_itself = all(torch.equal(a, b) for a, b in zip(expected, repeated, strict=True))
    row["equal"] = "yes" if same and moved else "no" if repeats_itself else "the captured graph itself does not repeat"
    row["replay_us"] = 1e6 * median([gpu.timed(stream, captured.replay) for _ in range(repeats)])
    row["rebuilt_us"] = 1e6 * median([gpu.timed(stream, lambda: gpu.launch(again, stream)) for _ in range(repeats)])
    return row


def _dense(torch: Any) -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 10))


def _convolution(torch: Any) -> Any:
    nn = torch.nn
    body = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU())
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def answer(rows: Sequence[Row]) -> str:
    equal = [row["model"] for row in rows if row["equal"] == "yes"]
    if len(equal) == len(rows):
        return "yes: every node could be made again from its parameters, and the results are equal bit for bit"
    reasons = "; ".join(f"{row['model']}: {row['failed'] or row['equal']}" for row in rows if row["equal"] != "yes")
    return f"not for all ({reasons})"


EXPERIMENT = Experiment(
    "rebuild",
    "Can a captured graph be built again, node by node, from the parameters the driver tells, and does it compute the"
    " same?",
    "Two training steps captured by torch; every kernel's function, sizes, argument bytes (by the driver's layout of"
    " them) and attributes, every copy and memset, and the edges are read and put into a new graph, in the same"
    " process. Both are run 5 steps from the same state.",
    measure,
    answer,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
