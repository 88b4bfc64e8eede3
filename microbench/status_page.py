"""The status page as pictures: with no, few and many jobs, on a wide and a narrow screen, light and dark.

    python -m microbench.status_page --out build/status_page
    python -m microbench.status_page --sheets docs/img       # also the two contact sheets of docs/operating.md

Each number of jobs has a daemon of its own on a simulated GPU, and one client process that steps them all; a headless
Chromium watches for a while and takes the pictures, then asks for an explanation, and looks again when no answer comes
any more. Nothing in the pictures is made up or touched up. Two cores that clients, daemon and browser share delay steps
by more than the usual promise of 1.10 allows, so high jobs are promised 3.00 here, and only the first of 30 jobs 1.10.
"""

from __future__ import annotations

import argparse
import html
import re
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from microbench.browser import Browser, BrowserFailed, Page, find, writer
from microbench.daemon import RunningDaemon, running_daemon

NUMBERS = (0, 3, 30)
WATCH_S = 60.0
EMPTY_S = 3.0  # where nothing happens
START_S = 120.0
STOP_S = 60.0
WIDTH, LAYERS = 1024, 12  # of the clients' networks: small states, much work for a GPU
WIDE, NARROW, HEIGHT = 1280, 400, 900
SCREENS = tuple((width, dark) for width in (WIDE, NARROW) for dark in (False, True))
SHEETS = {
    "status_page.png": ("3_1280_light", "3_400_dark", "30_1280_dark", "30_400_light"),
    "status_page_states.png": ("explained_30_1280_light", "0_400_dark", "gone_1280_dark", "gone_400_light"),
}
SHEET = """<!doctype html><meta charset="utf-8"><style>body { margin: 12px; background: #8b949e; width: 1160px;
display: flex; flex-wrap: wrap; gap: 12px; align-items: flex-start }
img { display: block; width: var(--w); max-height: 770px; object-fit: cover; object-position: top }
</style>%s"""
SHEET_WIDTH, SCALE = 1184, 0.66  # pixels; of a picture in a sheet


# ---- The client


def serve_jobs(endpoint: str, number: int) -> None:
    """Step so many jobs, one high in ten at least, until stdin ends."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from gpumux import client
    from gpumux.errors import SimulatedDeviceWarning

    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", SimulatedDeviceWarning)
    important, over = max(1, number // 10), threading.Event()

    def run(job: client.Job[[Tensor, Tensor]], batch: tuple[Tensor, Tensor], pause_s: float) -> None:
        while not over.is_set():
            job.step(*batch).result()
            over.wait(pause_s)

    running = []
    for i in range(number):
        high = i < important
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        size = 2048 if high else 256 * (2 + i % 5)

        def step(x: Tensor, y: Tensor, model: nn.Sequential = model, optimizer: torch.optim.SGD = optimizer) -> Tensor:
            optimizer.zero_grad()
            x = model[0](x)
            for _ in range(LAYERS):
                x = F.relu(model[1](x))
            loss = F.cross_entropy(model[2](x), y)
            loss.backward()
            optimizer.step()
            return loss

        batch = (torch.randn(size, 16), torch.randint(0, 10, (size,)))
        name = ("translate", "search", "speech")[i % 3] + "-serve" if high else f"sweep-lr-{i}"
        job = client.submit(
            step, example=batch, model=model, optimizer=optimizer, name=name, priority="high" if high else "low",
            endpoint=endpoint, max_slowdown=1.1 if i == 0 and number > 10 else 3.0,
        )  # fmt: skip
        pause_s = 0.05 * important if high else 0.0005 * number
        running.append((job, threading.Thread(target=run, args=(job, batch, pause_s))))
        running[-1][1].start()
    select.select([sys.stdin], [], [])
    over.set()
    for job, thread in running:
        thread.join()
        job.close()


@contextmanager
def clients(daemon: RunningDaemon, number: int) -> Iterator[None]:
    """Have that many jobs, in a process. Raises RuntimeError if they don't come, or end too early."""
    if not number:
        yield
        return
    command = [sys.executable, "-m", "microbench.status_page", "--client", daemon.endpoint, str(number)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + START_S
        while len(daemon.status()["jobs"]) < number:
            if process.poll() is not None:
                raise RuntimeError(f"the client ended with {process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError(f"{number} jobs did not come within {START_S:.0f} s")
            time.sleep(0.2)
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the client ended with {process.returncode}")
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(STOP_S)


# ---- The pictures


def pictures(browser: Browser, number: int, seconds: float, write: Callable[[str, bytes], None]) -> None:
    """Take those of a daemon with that many jobs, after `seconds` of watching."""
    with running_daemon(policy="guarded", device="sim", settings={"GPUMUX_METRICS_NAMES": "shown"}) as daemon:
        (address,) = re.findall(r"metrics at (http://\S+)/metrics", daemon.log.read_text())
        with clients(daemon, number):
            pages = [(width, dark, browser.open(f"{address}/", width, HEIGHT, dark=dark)) for width, dark in SCREENS]
            time.sleep(seconds if number else EMPTY_S)
            take(pages, str(number), write)
            if number:
                for _, _, page in pages:
                    page.evaluate("explain(document.querySelector('#high button').ariaLabel.split(' ')[1])")
                    until(page, "document.querySelector('#explained-text .verdict')")
                take(pages, "explained" if number == NUMBERS[1] else f"explained_{number}", write, whole=False)
                for _, _, page in pages:
                    page.evaluate("document.querySelector('#close').click()")
            if number == NUMBERS[1]:
                for _, _, page in pages:
                    page.cut_off()
                    until(page, "problem")
                take(pages, "gone", write)
    for _, _, page in pages:
        page.close()


def take(
    pages: Sequence[tuple[int, bool, Page]], state: str, write: Callable[[str, bytes], None], *, whole: bool = True
) -> None:
    for width, dark, page in pages:
        write(f"{state}_{width}_{'dark' if dark else 'light'}", page.picture(whole=whole))


def until(page: Page, condition: str) -> None:
    end = time.monotonic() + STOP_S
    while not page.evaluate(f"Boolean({condition})"):
        if time.monotonic() > end:
            raise RuntimeError(f"the page did not come to {condition}")
        time.sleep(0.1)


def sheet(browser: Browser, folder: Path, names: Sequence[str]) -> bytes:
    """Some of the pictures in `folder` as one."""
    images = ""
    for name in names:
        width = int(name.split("_")[-2])
        images += f'<img src="{html.escape(name)}.png" style="--w: {width * SCALE:.0f}px">'
    made = folder / "sheet.html"
    made.write_text(SHEET % images)
    page = browser.open(f"file://{made.resolve()}", SHEET_WIDTH, HEIGHT)
    try:
        return page.picture(whole=True)
    finally:
        page.close()
        made.unlink()


def main() -> int:
    made = argparse.ArgumentParser(prog="python -m microbench.status_page", description=(__doc__ or "").splitlines()[0])
    made.add_argument(
        "--out",
        type=Path,
        default=Path("build/status_page"),
        metavar="DIR",
        help="where pictures go (default: %(default)s)",
    )
    made.add_argument("--sheets", type=Path, metavar="DIR", help="where contact sheets go, too")
    made.add_argument("--jobs", type=int, nargs="+", default=NUMBERS, metavar="N", help="how many (default: 0 3 30)")
    made.add_argument("--seconds", type=float, default=WATCH_S, help="to watch each daemon (default: %(default)s)")
    made.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.client:
        serve_jobs(args.client[0], int(args.client[1]))
        return 0
    if args.sheets and (not args.sheets.is_dir() or set(NUMBERS) - set(args.jobs)):
        made.error("--sheets takes a directory that is there, and pictures of 0, 3 and 30 jobs")
    args.out.mkdir(parents=True, exist_ok=True)
    write = writer(args.out)
    try:
        with Browser(find()) as browser:
            for number in args.jobs:
                print(f"{number} jobs: watched for {args.seconds:.0f} s", flush=True)
                pictures(browser, number, args.seconds, write)
            for name, parts in SHEETS.items() if args.sheets else ():
                (args.sheets / name).write_bytes(sheet(browser, args.out, parts))
    except BrowserFailed as error:
        made.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
