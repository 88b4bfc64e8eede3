"""What one piece costs the host: the device's own launch and its query for the end (gpumux/device/cuda/launches.py),
beside the same driver calls made with the binding alone, and each driver call through the wrapper beside the bare
binding. On the stand-in, where streams can be held, also a piece that is queued behind another of its stream, as all
are but the first of a step.

Needs a libcuda: a card's, or the stand-in of tests/stub, where the driver's own part is nearly nothing and what is left
is Python. Processor time of the thread, in turns, so that what else the machine does counts for little; the ratio is
the figure to go by.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

from gpumux.device.cuda.driver import CudaDriver, bindings
from gpumux.device.cuda.launches import LaunchTracker
from gpumux.errors import GpumuxError
from microbench import common
from microbench.cuda.driver import Driver

PIECES = 2000  # a turn
QUEUED = 20  # of them at once
CALLS = 5000


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=7, help="turns of each (default: %(default)s)")
    args = arguments.parse_args(argv)
    driver = CudaDriver()
    try:
        facts = driver.open(0)
    except GpumuxError as error:
        print(f"not measured: {error.message}; {error.remedy}", file=sys.stderr)
        return 69
    executable = _empty_graph()
    stream = driver.stream(facts.priorities[0])
    pieces = compared(
        {
            "bare binding": _bare(driver, executable, stream),
            "device": _device(driver, executable, stream, facts.priorities[1]),
        },
        args.repeats,
    )
    table = {"a piece": pieces}
    hold = getattr(ctypes.CDLL("libcuda.so.1"), "stub_hold", None)
    if hold is not None:
        queued = _queued(driver, executable, stream, facts.priorities[1], hold)
        table["a piece behind another"] = compared(
            {"bare binding": _bare(driver, executable, stream), "device": queued}, args.repeats
        )
    calls = {name: compared(ways, args.repeats) for name, ways in _calls(driver, stream).items()}
    driver.destroy_stream(stream)
    rows = [
        [
            name,
            *(f"{1e6 * each.median:.2f}" for each in list(of.values())[:2]),
            f"{of['ratio'].median:.2f}",
            f"{of['ratio'].low:.2f} to {of['ratio'].high:.2f}",
        ]
        for name, of in {**table, **calls}.items()
    ]
    print(f"{facts.name}, driver {facts.driver_version}; {common.describe(common.machine())}")
    print(common.table(["host time", "bare us", "gpumux us", "ratio", "lowest to highest"], rows))
    result = {"card": facts.name, "driver": facts.driver_version, "piece_s": table, "calls_s": calls}
    common.report("cuda.host_time", args.out, result)
    return 0


def compared(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, common.Figure]:
    """Seconds of the two ways, measured alternately, and the second over the first."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            samples[name].append(ways[name]())
    first, second = samples.values()
    found = {name: common.figure(of) for name, of in samples.items()}
    return found | {"ratio": common.figure([b / a for a, b in zip(first, second, strict=True)])}


def _empty_graph() -> Any:
    plain = Driver()
    api = plain.api
    stream = plain.call("cuStreamCreateWithPriority", api.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
    plain.call("cuStreamBeginCapture", stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    graph = plain.call("cuStreamEndCapture", stream)
    made = plain.call("cuGraphInstantiate", graph, 0)
    plain.call("cuStreamDestroy", stream)
    return made


def _bare(driver: CudaDriver, executable: Any, stream: int) -> Callable[[], float]:
    """Event, graph, event, number; then the queries for its end and times."""
    api = bindings()
    memory = driver.pin(64)
    number = memory.view().cast("I")
    start, end = (api.cuEventCreate(0)[1] for _ in range(2))
    handle = api.CUstream(stream)

    def piece(value: int) -> None:
        api.cuEventRecord(start, handle)
        api.cuGraphLaunch(executable, handle)
        api.cuEventRecord(end, handle)
        api.cuStreamWriteValue32(handle, memory.device_address, value, 0)
        while number[0] != value:
            pass
        while int(api.cuEventQuery(end)[0]):
            pass
        api.cuEventElapsedTime(start, end)
        api.cuEventElapsedTime(start, end)  # both times are relative to an anchor

    return _timed(piece, PIECES)


def _device(driver: CudaDriver, executable: Any, stream: int, priority: int) -> Callable[[], float]:
    tracker: LaunchTracker[int] = LaunchTracker(driver, time.monotonic, priority)
    number = int(executable)

    def work() -> None:
        driver.launch(number, stream)

    def piece(value: int) -> None:
        tracker.launch(value, stream, 0.0, work)
        while not tracker.completed():
            pass

    return _timed(piece, PIECES)


def _queued(
    driver: CudaDriver, executable: Any, stream: int, priority: int, hold: Callable[[int], Any]
) -> Callable[[], float]:
    tracker: LaunchTracker[int] = LaunchTracker(driver, time.monotonic, priority)
    number = int(executable)

    def work() -> None:
        driver.launch(number, stream)

    def turn() -> float:
        began = time.thread_time()
        for _ in range(PIECES // QUEUED):
            hold(1)
            for value in range(QUEUED):
                tracker.launch(value, stream, 0.0, work, waits=False)
            hold(0)
            left = QUEUED
            while left:
                left -= len(tracker.completed())
        return (time.thread_time() - began) / (PIECES // QUEUED * QUEUED)

    return turn


def _calls(driver: CudaDriver, stream: int) -> dict[str, dict[str, Callable[[], float]]]:
    """The calls of a piece, each by the bare binding and by the wrapper."""
    api = bindings()
    memory = driver.pin(64)
    event = driver.event(timed=True)
    driver.record(event, stream)
    bare_event, bare_stream = api.CUevent(event), api.CUstream(stream)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "record": (lambda: api.cuEventRecord(bare_event, bare_stream), lambda: driver.record(event, stream)),
        "reached": (lambda: api.cuEventQuery(bare_event), lambda: driver.reached(event)),
        "elapsed": (lambda: api.cuEventElapsedTime(bare_event, bare_event), lambda: driver.elapsed(event, event)),
        "wait": (lambda: api.cuStreamWaitEvent(bare_stream, bare_event, 0), lambda: driver.wait(stream, event)),
        "write_value": (
            lambda: api.cuStreamWriteValue32(bare_stream, memory.device_address, 1, 0),
            lambda: driver.write_value(memory.device_address, 1, stream),
        ),
    }
    return {name: {"bare binding": _repeated(bare), "wrapper": _repeated(own)} for name, (bare, own) in pairs.items()}


def _repeated(call: Callable[[], Any]) -> Callable[[], float]:
    return _timed(lambda _: call(), CALLS)


def _timed(each: Callable[[int], Any], count: int) -> Callable[[], float]:
    """Processor seconds of one, over `count` of them. What they are given goes up and never repeats."""
    done = 0

    def turn() -> float:
        nonlocal done
        began = time.thread_time()
        for value in range(done + 1, done + count + 1):
            each(value)
        done += count
        return (time.thread_time() - began) / count

    return turn


if __name__ == "__main__":
    sys.exit(main())
