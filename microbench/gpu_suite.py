"""Everything that needs a GPU, in parts of less than nine minutes, the most important first: what is taken for granted,
tests, experiments, benchmarks.

Each part writes gpu-PART.json, gpu-PART.txt and gpu-PART-logs.tgz, the programs' whole output, into --out after every
program it ran. Run again with the same --out (or with the earlier files' folder as --resume) it goes on where it was;
--fresh begins anew. --check imports what the parts need, which takes no GPU, and says what is missing.

Exit status: 0 all of it ran, and passed or was skipped by name; 1 something failed; 69 there is no CUDA device (what
would run is listed); 75 the time was up first, run the same command again; 64 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from microbench import common, suite_check, suite_parts
from microbench.cuda import probe
from microbench.suite_parts import PARTS, Job

LIMIT_S = 520.0  # of a part: below nine minutes with what starting and ending takes
PASSED, FAILED, PARTLY = "passed", "failed", "partly"
SKIPPED = "skipped"  # tests of which none ran: each says what this card or driver lacks
BROKEN, USAGE, NO_DEVICE, OVER, INTERRUPTED = 1, 64, 69, 75, 130  # exit statuses
TAIL = 4000  # characters of a failed program's output that are kept
END_S = 10.0  # for a program to end in order
LOG = 1 << 20  # characters of each of a program's outputs that are packed: their ends


def main(argv: Sequence[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(
        prog="python -m microbench.gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--part", choices=PARTS, action="append", help="which part (default: all, one after the other)"
    )
    arguments.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default: only printed)")
    arguments.add_argument("--resume", type=Path, metavar="DIR", help="where earlier results lie (default: --out)")
    arguments.add_argument("--fresh", action="store_true", help="run again what ran before")
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="these programs of the part, as --list calls them")
    arguments.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of a part (default: %(default).0f)"
    )
    arguments.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    arguments.add_argument("--check", action="store_true", help="say what the parts lack here, and run nothing")
    arguments.add_argument(
        "--driver",
        action="store_true",
        help="look for the card by the driver alone: torch may lack CUDA, and what needs it fails",
    )
    args = arguments.parse_args(argv)
    parts = args.part or list(PARTS)
    jobs = {part: suite_parts.jobs(part) for part in parts}
    if args.only and (unknown := set(args.only) - {job.name for of in jobs.values() for job in of}):
        arguments.print_usage(sys.stderr)
        print(f"gpu_suite: nothing is called {', '.join(sorted(unknown))}; --list says what there is", file=sys.stderr)
        return USAGE
    if args.only:
        chosen = {part: [job for job in of if job.name in args.only] for part, of in jobs.items()}
        jobs = {part: of for part, of in chosen.items() if of}
    if args.list:
        print(listing(jobs))
        return 0
    if args.check:
        return check()
    card = probe.find(by_driver=args.driver)
    if not card.card:
        print(listing(jobs))
        print(f"\nNothing was run: there is no CUDA device here. {card.why}.", file=sys.stderr)
        return NO_DEVICE
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    statuses = []
    for part, of in jobs.items():
        suite = Suite(part, of, asdict(card), args.out, None if args.fresh else args.resume or args.out)
        statuses.append(suite.run(args.limit))
        if statuses[-1] == INTERRUPTED:
            break
    return next((status for status in (INTERRUPTED, BROKEN, OVER) if status in statuses), 0)


def check() -> int:
    """Say what is there and what is missing; the exit status."""
    print(f"Python {sys.version.split()[0]} at {sys.executable}", flush=True)
    missing = []
    for each in suite_check.look():
        print(suite_check.row(each), flush=True)  # as it comes: the time may be up before all is found
        if each.missing:
            missing.append(each)
    for each in missing:
        print(f"{each.name} is missing: {each.found}; needed for {each.needed_for}. {each.remedy}", file=sys.stderr)
    return BROKEN if missing else 0


def listing(jobs: Mapping[str, Sequence[Job]]) -> str:
    """What there is to run, by part."""
    lines = []
    for part, of in jobs.items():
        lines.append(f"{part}: {len(of)} program{'s' * (len(of) != 1)}")
        width = max((len(job.name) for job in of), default=0)
        lines += [f"  {job.name.ljust(width)}  {job.title}" for job in of]
    return "\n".join(lines)


class Suite:
    """One part: what ran already, what is left, and the files that say so. `found[name]` has `status`, `seconds`,
    `result` (what the program wrote) and, where it failed, the end of its `output`."""

    def __init__(
        self, part: str, jobs: Sequence[Job], device: Mapping[str, Any], out: Path | None, resume: Path | None
    ) -> None:
        self.part, self.jobs, self.device, self.out = part, jobs, device, out
        self.found: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, bytes] = {}
        if resume and (resume / self.file("json")).exists():
            earlier = json.loads((resume / self.file("json")).read_text())
            same = all(earlier["device"][key] == device[key] for key in ("card", "torch"))
            if same:
                self.found = earlier["programs"]
                self.logs = unpacked(resume / f"gpu-{part}-logs.tgz")
            else:
                print(
                    f"earlier results are of {earlier['device']['card']}, torch {earlier['device']['torch']}: not used",
                    flush=True,
                )

    def file(self, suffix: str) -> str:
        return f"gpu-{self.part}.{suffix}"

    def run(self, limit_s: float) -> int:
        """Run what has not passed, for at most `limit_s` seconds; the exit status."""
        began = time.monotonic()
        # What never ran comes first: one that takes several runs must not keep the others waiting.
        left = [job for job in self.jobs if job.name not in self.found]
        left += [job for job in self.jobs if self.found.get(job.name, {}).get("status") in (PARTLY, FAILED)]
        over = False
        try:
            for place, job in enumerate(left):
                room = limit_s - (time.monotonic() - began)
                if room < job.least_s:
                    over = True  # a shorter one may fit yet
                    continue
                print(f"[{self.part} {place + 1}/{len(left)}, {room:.0f} s left] {job.name}", flush=True)
                earlier = self.found.get(job.name, {}).get("result")
                self.found[job.name], log = run_job(job, min(room, job.most_s), earlier)
                self.logs[f"{job.name.replace(' ', '_')}.log"] = log.encode()
                over = over or self.found[job.name]["status"] == PARTLY
                self.save()
        except KeyboardInterrupt:
            print("interrupted; what ran is kept", file=sys.stderr)
            return INTERRUPTED
        finally:
            self.save()
        print(self.text(), flush=True)
        if any(self.found.get(job.name, {}).get("status") == FAILED for job in self.jobs):
            return BROKEN
        return OVER if over else 0

    def save(self) -> None:
        if self.out is None:
            return
        body = {
            "suite": self.part, "device": self.device, "machine": common.machine(), "programs": self.found,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        files = {
            self.file("json"): (json.dumps(body, indent=1) + "\n").encode(),
            self.file("txt"): (self.text() + "\n").encode(),
        }
        if self.logs:
            files[f"gpu-{self.part}-logs.tgz"] = packed(self.logs)
        for name, content in files.items():
            unready = self.out / f"{name}.new"
            unready.write_bytes(content)
            unready.replace(self.out / name)

    def text(self) -> str:
        """For people: one line a program, then what each printed last."""
        rows = []
        for job in self.jobs:
            ran = self.found.get(job.name)
            rows.append([job.name, ran["status"], f"{ran['seconds']:.0f}"] if ran else [job.name, "not run yet", ""])
        title = f"{self.part} on {self.device['card']}, torch {self.device['torch']}"
        blocks = [title, common.table(["program", "status", "seconds"], rows)]
        for job in self.jobs:
            if (ran := self.found.get(job.name)) and ran["shown"]:
                blocks.append(f"== {job.name}: {job.title}\n{ran['shown']}")
        return "\n\n".join(blocks)


def packed(logs: Mapping[str, bytes]) -> bytes:
    """A compressed archive of files by name."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in logs.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def unpacked(path: Path) -> dict[str, bytes]:
    """What `packed` packed; nothing where there is no such file, or half of one."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for entry in archive:
                if (content := archive.extractfile(entry)) is not None:
                    found[entry.name] = content.read()
    except (OSError, EOFError, tarfile.TarError):
        pass
    return found


def run_job(job: Job, within_s: float, earlier: Any) -> tuple[dict[str, Any], str]:
    """Run one program in a process group of its own and read what it wrote; its output beside that. `earlier`: what it
    wrote the last time, which a program that goes on where it was finds in its file."""
    with tempfile.TemporaryDirectory(prefix="gm-suite-") as directory:
        wrote, said, warned = (Path(directory) / name for name in ("result", "said", "warned"))
        if job.resumes and earlier is not None:
            wrote.write_text(json.dumps(earlier))
        began = time.monotonic()
        status = _run(job.command(wrote, within_s), said, warned, within_s)
        seconds = time.monotonic() - began
        output, errors = (path.read_text(errors="replace") for path in (said, warned))
        result = suite_parts.read(wrote)
    told: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "result": result,
        "command": " ".join(job.command(Path("FILE"), within_s)),
    }
    state = PASSED if status == 0 else PARTLY if status in (OVER, None) and job.resumes else FAILED
    counts = result.get("counts") if isinstance(result, dict) else None
    if state == PASSED and counts and not counts.get("passed"):
        state = SKIPPED
    shown = job.shown(output, result) if state != FAILED else f"{output}\n{errors}"[-TAIL:]
    if status is None:
        shown += f"\nended after {within_s:.0f} s, which is all it was given"
    log = f"{told['command']}\nexit {status} after {seconds:.1f} s\n\n{output[-LOG:]}\n==== stderr\n{errors[-LOG:]}"
    return {"status": state, "exit": status, **told, "shown": shown.strip()}, log


def _run(command: Sequence[str], said: Path, warned: Path, within_s: float) -> int | None:
    """The exit status, or None where it had to be ended. What it started ends with it."""
    with said.open("wb") as out, warned.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True, cwd=suite_parts.ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # so that daemons it started are ended in order
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    pass
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what is left of its session
            except ProcessLookupError:
                pass
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
