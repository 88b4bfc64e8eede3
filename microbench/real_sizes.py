"""Seven real models at their real sizes, as jobs and in plain torch: memory by process, the seconds of submit, the
first steps, steady steps, and whether all bits are equal.

Each part runs in a process of its own, and this one samples their memory several times a second (proportional sizes, so
that shared pages count once; and shared memory that no process has mapped):

plain     build, five steps: its peak is what memory is compared with
job       submit, five steps, a snapshot, sync, on a daemon of its own that keeps snapshots
rates     a plain model and a job of the same weights: the first three steps of each, all state compared after them,
          then steps in turn
lengths   (`--lengths MODEL`) batches of five lengths in turn, twice: plain, and as a job

Jobs are of high priority, for the processes of low ones give way to whatever else runs on the machine, and that would
be measured. One thread each. Shares of the machine that others take show in the spreads, and in "load" of the result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from microbench import common
from microbench.daemon import RunningDaemon, running_daemon
from microbench.process_memory import Sampler

MODELS = ("resnet50", "gpt2", "bert-base", "vit-b16", "t5-small", "whisper-tiny", "llama-160m")
STEPS = 5  # of a job, or the plain loop, whose memory is measured
FIRST = 3
TURNS, EACH = 5, 2  # of rates: turns of each kind, steps of a turn
INTERPRETERS = 600 << 20
MARKS = {"memory": 1.3, "first": 1.5, "steady": 0.95, "charged": 0.10}

# ---- what runs in processes of its own ---------------------------------------------------------------


def say(kind: str, **what: Any) -> None:
    print("@" + json.dumps({"kind": kind, **what}), flush=True)


def seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    float(step())
    return time.perf_counter() - began


def plain_part(name: str, size: str, endpoint: str) -> None:
    from microbench.real_models import build

    made = build(name, size)
    say("phase", name="steps")
    for i in range(STEPS):
        float(made.step(*made.batch(i)).detach())


def plain_lengths_part(name: str, size: str, endpoint: str) -> None:
    from microbench.real_models import build

    made = build(name, size)
    for round_ in range(2):
        for length in made.batches:
            say("phase", name=f"{length}" if round_ == 0 else f"{length} again")
            for i in range(3):
                float(made.step(*made.batch(i, length)).detach())


@contextmanager
def parts_of_submit() -> Iterator[dict[str, float]]:
    """Seconds that go by in loading Programs (which has them checked first) and in copying state, while this is
    active."""
    from gpumux.client.remote import Remote

    spent = {"load": 0.0, "state": 0.0}
    load, push = Remote.load, Remote.push

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return run

    Remote.load, Remote.push = timed("load", load), timed("state", push)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Remote.load, Remote.push = load, push  # type: ignore[method-assign]


def _submit(made: Any, name: str, endpoint: str) -> tuple[Any, dict[str, float]]:
    from gpumux import client

    with parts_of_submit() as spent:
        began = time.perf_counter()
        job = client.submit(
            made.step, example=made.batch(0), model=made.model, optimizer=made.optimizer, name=name, priority="high",
            endpoint=endpoint, max_variants=8,
        )  # fmt: skip
        whole = time.perf_counter() - began
    return job, {"whole": whole, "capture": whole - sum(spent.values()), **spent}


def job_part(name: str, size: str, endpoint: str) -> None:
    from microbench.real_models import build

    made = build(name, size)
    say("phase", name="submit")
    job, spent = _submit(made, name, endpoint)
    say("result", submit=spent)
    say("phase", name="steps")
    for i in range(STEPS):
        job.step(*made.batch(i)).result()
    say("phase", name="snapshot")
    saved = job._persist(job._recovery.save) if job._recovery.snapshots is not None else None
    say("phase", name="after", wait=True)
    sys.stdin.readline()
    say("phase", name="sync")
    began = time.perf_counter()
    job.sync()
    synced = time.perf_counter() - began
    state = sum(t.nbytes for t in made.model.state_dict().values())
    state += sum(t.nbytes for s in made.optimizer.state.values() for t in s.values() if hasattr(t, "nbytes"))
    time.sleep(1)  # so that the next step is looked at
    job.step(*made.batch(0)).result()
    stats = job.stats()
    said = {"sync_s": synced, "saved": saved, "charged": stats["memory_bytes"], "measured": stats["measured_bytes"]}
    say("result", **said, state_bytes=state, parameters=sum(p.numel() for p in made.model.parameters()))
    job.close(sync=False)


def lengths_part(name: str, size: str, endpoint: str) -> None:
    from microbench.real_models import build

    made = build(name, size)
    say("phase", name="submit")
    job, _ = _submit(made, name, endpoint)
    for round_ in range(2):
        for length in made.batches:
            say("phase", name=f"{length}" if round_ == 0 else f"{length} again")
            for i in range(3):
                job.step(*made.batch(i, length)).result()
    say("result", charged=job.stats()["memory_bytes"])
    job.close(sync=False)


def rates_part(name: str, size: str, endpoint: str) -> None:
    import torch

    from microbench.real_models import build

    plain, ours = build(name, size), build(name, size)
    torch.manual_seed(1)
    first_plain = [seconds(lambda i=i: plain.step(*plain.batch(i)).detach()) for i in range(FIRST)]  # type: ignore[misc]
    torch.manual_seed(1)
    job, _ = _submit(ours, name, endpoint)
    first = [seconds(lambda i=i: job.step(*ours.batch(i)).result()) for i in range(FIRST)]  # type: ignore[misc]
    job.sync()
    equal = [torch.equal(a, b) for a, b in zip(_tensors(plain), _tensors(ours), strict=True)]
    say(
        "result",
        first={"plain": first_plain, "job": first},
        equal=all(equal),
        tensors=len(equal),
        unequal=equal.count(False),
    )
    steady: dict[str, list[float]] = {"plain": [], "job": []}
    for _ in range(2):  # the pieces are cut and timed by then
        job.step(*ours.batch(0)).result()
    for turn in range(TURNS):
        for i in range(EACH):
            steady["plain"].append(seconds(lambda i=i: plain.step(*plain.batch(i)).detach()))  # type: ignore[misc]
        for i in range(EACH):
            steady["job"].append(seconds(lambda i=i: job.step(*ours.batch(i)).result()))  # type: ignore[misc]
        say("note", text=f"{name}: turn {turn + 1} of {TURNS}")
    say("result", steady=steady)
    job.close(sync=False)


def _tensors(made: Any) -> list[Any]:
    """All of a model's state and its optimizer's, in order."""
    import torch

    found = list(made.model.state_dict().values())
    for parameter in made.model.parameters():
        state = made.optimizer.state.get(parameter, {})
        found += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return found


PARTS = {
    "plain": plain_part, "job": job_part, "rates": rates_part, "lengths": lengths_part,
    "plain-lengths": plain_lengths_part,
}  # fmt: skip

# ---- what starts and watches them --------------------------------------------------------------------


def run_part(part: str, model: str, size: str, daemon: RunningDaemon | None) -> tuple[dict[str, Any], Sampler]:
    """What the part said, and its memory. Raises RuntimeError when it failed."""
    command = [sys.executable, "-m", "microbench.real_sizes", "--part", part, "--models", model, "--size", size]
    command += ["--endpoint", daemon.endpoint if daemon is not None else ""]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    said: dict[str, Any] = {}
    try:
        with Sampler(process.pid, daemon.process.pid if daemon is not None else 0) as sampler:
            for line in process.stdout:
                if not line.startswith("@"):
                    print(line, end="")
                    continue
                heard = json.loads(line[1:])
                kind = heard.pop("kind")
                if kind == "phase":
                    sampler.enter(heard["name"])
                    if heard.get("wait"):
                        time.sleep(0.5)  # what has settled is sampled
                        said["settled"] = sampler.sample()
                        process.stdin.write("\n")
                        process.stdin.flush()
                elif kind == "result":
                    said |= heard
        if process.wait():
            raise RuntimeError(f"the part {part} of {model} ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()
    return said, sampler


@contextmanager
def own_daemon() -> Iterator[RunningDaemon]:
    where = Path(tempfile.mkdtemp(prefix="gm-", dir="/tmp"))
    try:
        with running_daemon(policy="guarded", threads=1, flags=["--state-dir", str(where / "state")]) as daemon:
            yield daemon
    finally:
        shutil.rmtree(where, ignore_errors=True)


def peaks(sampler: Sampler) -> dict[str, Any]:
    made = {phase: {"total": p.total, "then": p.then} for phase, p in sampler.phases.items()}
    whole = sampler.peak()
    return {"peak": whole.total, "then": whole.then, "by_role": whole.by_role, "phases": made}


def measure(model: str, size: str, parts: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"load_before": common.machine()["load_1min"]}
    plain_peak = 0
    if "job" in parts:
        _, sampler = run_part("plain", model, size, None)
        plain_peak = sampler.peak().total
        result["plain_memory"] = plain_peak
        with own_daemon() as daemon:
            said, sampler = run_part("job", model, size, daemon)
        settled = said.pop("settled", {})
        mark = MARKS["memory"] * plain_peak + said["state_bytes"] + INTERPRETERS
        said["submit"]["check"] = min(sampler.checking_s, said["submit"]["load"])
        said["submit"]["load"] -= said["submit"]["check"]
        result |= {
            "job": said, "memory": peaks(sampler), "settled": settled, "memory_mark": mark,
            "memory_over_mark": sampler.peak().total / mark,
            "measured_over_charged": said["measured"] / said["charged"] if said["charged"] else 0.0,
        }  # fmt: skip
    if "rates" in parts:
        with own_daemon() as daemon:
            said, _ = run_part("rates", model, size, daemon)
        first, steady = said["first"], said["steady"]
        turns = [
            sum(steady["plain"][at : at + EACH]) / sum(steady["job"][at : at + EACH])
            for at in range(0, TURNS * EACH, EACH)
        ]
        result |= {
            "first": {k: sum(v) for k, v in first.items()}, "first_steps": first,
            "first_over_plain": sum(first["job"]) / sum(first["plain"]),
            "step_s": {k: common.figure(v) for k, v in steady.items()},
            "rate_over_plain": common.figure(turns),
            "rate_of_medians": statistics.median(steady["plain"]) / statistics.median(steady["job"]),
            "equal": said["equal"], "tensors": said["tensors"], "unequal": said["unequal"],
        }  # fmt: skip
    if "lengths" in parts:
        _, alone = run_part("plain-lengths", model, size, None)
        with own_daemon() as daemon:
            said, sampler = run_part("lengths", model, size, daemon)
        result["lengths"] = {
            "plain": peaks(alone), "job": peaks(sampler), "charged": said["charged"],
            "over_plain": sampler.peak().total / alone.peak().total,
        }  # fmt: skip
    return result


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}"


def show(model: str, r: dict[str, Any]) -> None:
    if "job" in r:
        said, memory = r["job"], r["memory"]
        spent = said["submit"]
        parts = ", ".join(f"{part} {spent[part]:.1f}" for part in ("capture", "check", "load", "state"))
        print(
            f"{model}: submit {spent['whole']:.1f} s ({parts}), sync {said['sync_s']:.1f} s; state"
            f" {megabytes(said['state_bytes'])} MB"
        )
        for phase, peak in memory["phases"].items():
            print(
                f"  {phase:9} {megabytes(peak['total']):>6} MB: "
                + ", ".join(f"{k} {megabytes(v)}" for k, v in peak["then"].items())
            )
        print(
            f"  peak {megabytes(memory['peak'])} MB, plain {megabytes(r['plain_memory'])}, mark "
            f"{megabytes(r['memory_mark'])} ({r['memory_over_mark']:.2f} of it); "
            f"charged {megabytes(said['charged'])}, measured {megabytes(said['measured'])} "
            f"({r['measured_over_charged']:.2f} of that)"
        )  # fmt: skip
    if "first" in r:
        rate = r["rate_over_plain"]
        print(
            f"{model}: first three {r['first']['job']:.1f} s, plain {r['first']['plain']:.1f} s"
            f" ({r['first_over_plain']:.2f}); steady rate {rate.median:.3f} of plain ({rate.low:.3f} to"
            f" {rate.high:.3f}); bits "
            + (f"equal in all {r['tensors']} tensors" if r["equal"] else f"UNEQUAL in {r['unequal']} of {r['tensors']}")
        )
    if "lengths" in r:
        found = r["lengths"]
        print(
            f"{model}: five lengths: peak {megabytes(found['job']['peak'])} MB, plain"
            f" {megabytes(found['plain']['peak'])} ({found['over_plain']:.2f})"
        )
    sys.stdout.flush()


def targets(models: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}

    def add(name: str, value: float, target: float, met: bool) -> None:
        made[name] = {"value": value, "target": target, "met": met}

    for model, r in models.items():
        if "job" in r:
            add(f"{model}: peak memory over its mark", r["memory_over_mark"], 1.0, r["memory_over_mark"] <= 1.0)
            ratio = r["measured_over_charged"]
            add(f"{model}: measured memory over charged", ratio, 1.0, abs(ratio - 1) <= MARKS["charged"])
        if "first" in r:
            add(
                f"{model}: first three steps over plain",
                r["first_over_plain"],
                1.5,
                r["first_over_plain"] <= MARKS["first"],
            )
            rate = r["rate_over_plain"].median
            add(f"{model}: steady rate over plain", rate, MARKS["steady"], rate >= MARKS["steady"])
            add(f"{model}: tensors that differ", r["unequal"], 0, r["equal"])
    return made


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to see that it runs")
    parser.add_argument("--only", nargs="+", default=["job", "rates"], choices=("job", "rates"), help="which parts")
    parser.add_argument(
        "--lengths", nargs="*", default=["gpt2"], choices=MODELS, metavar="MODEL", help="five lengths of these"
    )
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        import torch

        torch.set_num_threads(1)
        with suppress(BrokenPipeError):
            PARTS[args.part](args.models[0], args.size, args.endpoint)
        return 0
    facts = common.machine()
    print(common.describe(facts), flush=True)
    models: dict[str, Any] = {}
    options = {name: value for name, value in vars(args).items() if name not in ("out", "part", "endpoint")}
    for model in args.models:
        parts = [*args.only, *(["lengths"] if model in args.lengths else [])]
        models[model] = measure(model, args.size, parts)
        show(model, models[model])
        common.report(
            "real_sizes", args.out, {"machine": facts, "options": options, "models": models, "targets": targets(models)}
        )  # after each: a later one may fail
    missed = [name for name, target in targets(models).items() if not target["met"]]
    print("all marks met" if not missed else "missed: " + "; ".join(missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
