"""What the CUDA device assumes, checked on one GPU in less than a minute: a line each, PASS or FAIL, with its
microseconds and what the driver or torch said.

Each assumption is checked by itself, so that one that fails hides no other. After one that hangs the program begins
anew, with the next. Those that need torch are skipped, by name, where torch can't use the GPU. What was found is in the
--out file after each line.

Exit status: 0 all hold; 1 one does not; 3 none failed, some were skipped; 69 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from microbench.cuda import smoke_driver, smoke_torch
from microbench.cuda.driver import NoDevice
from microbench.cuda.smoke_driver import Card

LIMIT_S = 40.0
ONE_S = 15.0  # an assumption that takes longer hangs
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
FAILED, SKIPPED, NO_DEVICE = 1, 3, 69
WORDS = 300  # characters of an error that are shown


class Report:
    """The findings, on the screen and in the file."""

    def __init__(self, out: Path | None, found: Sequence[dict[str, Any]] = ()) -> None:
        """`found`: what was found before the program began anew."""
        self._out = out
        self.device: dict[str, Any] = {}
        self.found: list[dict[str, Any]] = [*found]
        self._lock = threading.Lock()

    def add(self, name: str, verdict: str, microseconds: float, said: str) -> None:
        with self._lock:
            self.found.append({"name": name, "verdict": verdict, "us": round(microseconds, 1), "said": said})
            print(f"{verdict} {name:<46} {microseconds:>9.0f} us  {said.replace(chr(10), ' ')[:WORDS]}", flush=True)
            if self._out is not None:
                body = {"program": "smoke", "device": self.device, "counts": self.counts(), "found": self.found}
                unready = self._out.with_suffix(self._out.suffix + ".new")
                unready.write_text(json.dumps(body, indent=1) + "\n")
                unready.replace(self._out)

    def counts(self) -> dict[str, int]:
        return {each: sum(row["verdict"] == each for row in self.found) for each in (PASS, FAIL, SKIP)}

    def summary(self) -> str:
        counts = self.counts()
        return f"{counts[PASS]} hold, {counts[FAIL]} don't, {counts[SKIP]} were skipped"


class Watch:
    """Calls `go_on` when an assumption hangs, and ends the process if that returns: a call into a driver that does not
    return can't be interrupted."""

    def __init__(self, report: Report, one_s: float, go_on: Callable[[], None]) -> None:
        self._report, self._one_s, self._go_on = report, one_s, go_on
        self._name, self._began, self._over = "", 0.0, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()

    def end(self) -> None:
        self._name = ""

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            name, seconds = self._name, time.monotonic() - self._began
            if name and seconds > self._one_s:
                self._report.add(name, FAIL, 1e6 * seconds, "no answer")
                self._go_on()
                print(self._report.summary(), flush=True)
                os._exit(FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(
        prog="python -m microbench.cuda.smoke",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--out", type=Path, metavar="FILE.json", help="where the findings go, too")
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="these alone, as --list calls them")
    arguments.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="default: %(default).0f")
    arguments.add_argument("--list", action="store_true", help="name the assumptions, and ask nothing")
    arguments.add_argument("--found", default="[]", help=argparse.SUPPRESS)  # JSON, before the program began anew
    args = arguments.parse_args(argv)
    asked = [*smoke_driver.ASSUMPTIONS, *smoke_torch.ASSUMPTIONS]
    if args.only and (unknown := set(args.only) - {name for name, _ in asked}):
        arguments.error(f"nothing is called {', '.join(sorted(unknown))}; --list says what there is")
    asked = [(name, ask) for name, ask in asked if not args.only or name in args.only]
    if args.list:
        print("\n".join(name for name, _ in asked))
        return 0
    try:
        card = Card()
    except NoDevice as error:
        print(f"nothing was asked: {error}", file=sys.stderr)
        return NO_DEVICE
    report = Report(args.out, json.loads(args.found))
    report.device = card.facts
    print(card.describe(), flush=True)
    known = {row["name"] for row in report.found}
    ask_all([(name, ask) for name, ask in asked if name not in known], card, report, args.limit, go_on=begin_anew)
    print(report.summary(), flush=True)
    counts = report.counts()
    return FAILED if counts[FAIL] else SKIPPED if counts[SKIP] else 0


def begin_anew(report: Report, left_s: float) -> None:
    """Replace this process by one that asks what was not asked yet."""
    sys.stdout.flush()
    more = ["--found", json.dumps(report.found), "--limit", f"{max(left_s, 1.0):.1f}"]
    os.execv(sys.executable, [*sys.orig_argv, *more])


def ask_all(
    asked: Sequence[tuple[str, Callable[[Card], str]]], card: Card, report: Report, limit_s: float,
    one_s: float = ONE_S, go_on: Callable[[Report, float], None] = lambda report, left_s: None,
) -> None:  # fmt: skip
    """Check one assumption after the other, each by itself. `go_on`: called with the seconds left when one hangs,
    before the process ends."""
    end = time.monotonic() + limit_s
    watch = Watch(report, one_s, lambda: go_on(report, end - time.monotonic()))
    without = ""  # why torch can't be asked
    torchs = {name for name, _ in smoke_torch.ASSUMPTIONS}
    try:
        for name, ask in asked:
            if time.monotonic() > end:
                report.add(name, SKIP, 0.0, f"the {limit_s:.0f} s were up")
                continue
            if name in torchs and not card.torch and not without:  # loading torch may take longer than an assumption
                without = smoke_torch.begin(card)
                report.device = card.facts
            if name in torchs and without:
                report.add(name, SKIP, 0.0, without)
                continue
            watch.begin(name)
            began = time.perf_counter()
            verdict = PASS
            try:
                said = ask(card)
            except Exception as error:  # noqa: BLE001  whatever it is, the others are asked
                verdict, said = FAIL, f"{type(error).__name__}: {error}"
            watch.end()
            report.add(name, verdict, 1e6 * (time.perf_counter() - began), said)
    finally:
        watch.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not by way of a driver's own end, which may hang after a failure
