"""What `gpumux top` shows at several sizes with several numbers of jobs, as pictures to look at: the daemon's own
scheduler over a simulated GPU, on a virtual clock, and the real screen. The same pictures at each run.

    python -m microbench.top_screens --out /tmp/screens          # SVG; --png as well, with Chromium

Of three high jobs among thirty one has a promise that can't be kept.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpumux.cli.top.app import TopApp
from gpumux.cli.top.feed import Heard, Question, StatusAnswer
from gpumux.config import Config
from gpumux.daemon.records import Records, SessionRecord
from gpumux.daemon.report import Identity, status
from gpumux.device.base import MemoryFigures
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.scheduler.scheduler import Scheduler
from gpumux.simulate.daemon import Clock, DaemonSettings, SimulatedDaemon
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload, find, from_profile
from gpumux.types import DeviceInfo, Peer, Priority, SessionId
from microbench.browser import Browser, BrowserFailed
from microbench.browser import find as find_browser

SIZES = ((120, 36), (80, 24), (40, 24))
JOBS = (0, 3, 30)
LOOKS, INTERVAL_S = 40, 0.25
ENDPOINT = "ipc:///run/gpumux/0/gpumux.sock"
CELL = (12.2, 24.4)  # pixels of a cell in Textual's pictures
FRAME = (20, 60)


def workloads(count: int, spec: GpuSpec) -> list[Workload]:
    """So many jobs, a tenth of them high, one at least."""
    high, low = max(1, count // 10), ("vgg16-b16", "small-kernels-b4", "transformer-b16")
    made = []
    for i in range(count):
        important = i < high
        name = ("translate", "rank", "caption")[i % 3] if important else f"sweep-{i - high + 1}"
        profile = find("transformer-b2" if important else low[i % 3])
        promise = 1.002 if important and i == 2 else 1.10
        made.append(
            from_profile(
                profile, spec, Priority.HIGH if important else Priority.LOW, name=name,
                think_s=0.004 * (i + 1) if important else 0.0, max_slowdown=promise,
            )
        )  # fmt: skip
    return made


def answers(count: int, spec: GpuSpec, looks: int = LOOKS) -> Iterator[dict[str, Any]]:
    """Bodies of GetStatus of a simulated daemon with so many jobs, INTERVAL_S apart."""
    clock, records = Clock(), Records()
    session = SessionRecord(SessionId("clients"), Peer(1000, 1000, 1), False, 0.0)
    if count:
        simulation = Simulation(workloads(count, spec), spec)
        scheduler = simulation.scheduler
        for client in simulation.clients:
            records.add_job(client.id, session, client.job_spec)
    else:
        daemon = SimulatedDaemon(spec, clock, DaemonSettings())
        daemon.open([])
        scheduler = daemon.scheduler
    assert isinstance(scheduler, Scheduler)
    info = DeviceInfo("sim", spec.title, spec.memory_bytes, None, 0, "", {}, shares=spec.shares)
    identity = Identity(config=Config(), endpoints=(ENDPOINT,), device=info, started=time.time())
    memory = MemoryFigures(info.memory_bytes, info.memory_bytes, {})
    for look in range(looks):
        if count:
            simulation.run(seconds=INTERVAL_S * (look + 1))
        body = status(identity, scheduler, records, 0, memory, lambda job: None)
        body["daemon"]["uptime_s"] = INTERVAL_S * (look + 1)
        for job in body["jobs"]:
            job["mine"] = True
        yield body


class Recorded:
    """Answers that were recorded, all at once; nothing can be asked."""

    def __init__(self, bodies: Sequence[dict[str, Any]]) -> None:
        self._bodies = bodies

    def start(self, tell: Callable[[Heard], object]) -> None:
        for body in self._bodies:
            tell(StatusAnswer(body))

    def ask(self, question: Question) -> None:
        raise NotImplementedError("a recording answers nothing")

    def close(self) -> None:
        pass


async def screen(bodies: Sequence[dict[str, Any]], columns: int, lines: int, keys: Sequence[str] = ()) -> str:
    """The screen after these answers and keys, as SVG."""
    app = TopApp(Recorded(bodies), INTERVAL_S, ENDPOINT, clock=lambda: 0.0)
    async with app.run_test(size=(columns, lines)) as pilot:
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
        await pilot.pause()
        return with_local_fonts(app.export_screenshot(title="gpumux top"))


def with_local_fonts(picture: str) -> str:
    """The picture without fonts from the network."""
    return re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def pixels(columns: int, lines: int) -> tuple[int, int]:
    """The size of a picture of that many cells."""
    return round(columns * CELL[0] + FRAME[0]), round(lines * CELL[1] + FRAME[1])


def make(out: Path, counts: Sequence[int], sizes: Sequence[tuple[int, int]], browser: Browser | None) -> list[Path]:
    """Write all pictures and return their paths."""
    made = []
    spec = preset("a100")
    for count in counts:
        bodies = list(answers(count, spec))
        for columns, lines in sizes:
            path = out / f"top-{columns}x{lines}-{count}.svg"
            path.write_text(asyncio.run(screen(bodies, columns, lines)))
            made.append(path)
            if browser is not None:
                picture = browser.open(path.resolve().as_uri(), *pixels(columns, lines)).picture()
                path.with_suffix(".png").write_bytes(picture)
                made.append(path.with_suffix(".png"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m microbench.top_screens", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where pictures go")
    parser.add_argument("--jobs", type=int, nargs="+", default=JOBS, metavar="N", help="numbers of jobs (0 3 30)")
    parser.add_argument("--png", action="store_true", help="as PNG, too")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.error(f"{args.out} is no directory")
    if not args.png:
        browser = None
    else:
        try:
            browser = Browser(find_browser())
        except BrowserFailed as error:
            parser.error(str(error))
    try:
        for path in make(args.out, args.jobs, SIZES, browser):
            print(f"{path}: {path.stat().st_size} bytes")
    finally:
        if browser is not None:
            browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
