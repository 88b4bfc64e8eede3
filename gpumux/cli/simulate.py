"""`gpumux simulate`: what sharing a GPU would give, or a cluster with a plan, from profiles, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from gpumux import config, files, pictures
from gpumux.cli.text import ProgressLine, emit, emit_json, printable, table
from gpumux.device.sim.cost import guesses_blocks
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile
from gpumux.program.saved_plan import SavedPlan, load
from gpumux.simulate import workload
from gpumux.simulate.cluster import ClusterSimulation
from gpumux.simulate.comparison import ClusterCase, Comparison, LowJob, picture
from gpumux.simulate.daemon import DaemonSettings
from gpumux.simulate.result import Result, timelines
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload, from_profile
from gpumux.types import Priority
from gpumux.wording import counted

EX_INTERRUPTED = 130
DEFAULT_STEPS, DEFAULT_WARMUP = 500, 200
DEFAULT_ITERATIONS = 60  # of a plan, and as many to warm up: each is a step for every part of it
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class JobRequest:
    """One --high or --low: the profile, and how its client behaves."""

    profile: StepProfile
    priority: Priority
    options: dict[str, float]


def run(args: argparse.Namespace) -> int:
    spec = preset(args.gpu_model)
    if args.show_device:
        _show_device(spec, as_json=args.json)
        return 0
    if args.profiles:
        _show_profiles(as_json=args.json)
        return 0
    if args.plan:
        return _run_plan(args, spec)
    if args.trace:
        raise ConfigError("--trace without --plan", "it writes the launches of a plan's GPUs; name one with --plan")
    asked = [_parse(text, Priority.HIGH) for text in args.high] + [_parse(text, Priority.LOW) for text in args.low]
    if not asked:
        names = ", ".join(workload.names())
        raise ConfigError(
            "no jobs to simulate", f"name some with --high and --low: a profile's file, or one of {names}"
        )
    jobs = _workloads(asked, spec, args.max_slowdown)
    policies = config.POLICIES if args.policy == "all" else (args.policy,)
    if args.plot:
        pictures.check(Path(args.plot))
    results: list[Result] = []
    for policy in policies:
        results.append(_simulate(jobs, spec, policy, args))
        if results[-1].interrupted:
            break
    notes = _notes(asked, spec)
    if args.json:
        emit_json({"results": [result.figures() for result in results], "notes": notes})
    else:
        texts = [describe(result, explain=args.explain) for result in results]
        emit("\n\n".join([*texts, *([compare(results)] if len(results) > 1 else []), "\n".join(notes)]))
    if args.plot:
        timelines(results, Path(args.plot))
    return EX_INTERRUPTED if results[-1].interrupted else 0


# ---- the request


def _parse(text: str, priority: Priority) -> JobRequest:
    """Parse NAME[:option=value,...]. A path may hold colons: options follow the last one, if a `=` comes after it."""
    name, colon, rest = text.rpartition(":")
    if not colon or "=" not in rest:
        name, rest = text, ""
    options: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in ("think", "rate", "weight", "start"):
            raise ConfigError(f"{text!r} has the unknown option {key!r}", "options are think, rate, weight and start")
        options[key] = _time(value) if key in ("think", "start") else _number(value)
    return JobRequest(workload.find(name), priority, options)


def _time(text: str) -> float:
    """Seconds of "5ms", "200us", "1.5s" or "0.005"."""
    for unit, seconds in _UNITS.items():
        if text.endswith(unit):
            return _number(text.removesuffix(unit)) * seconds
    return _number(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no number", "times may end in us, ms or s") from None


def _workloads(asked: Sequence[JobRequest], spec: GpuSpec, max_slowdown: float) -> list[Workload]:
    """Jobs, with different names if several run the same profile."""
    made: list[Workload] = []
    for each in asked:
        name, number = each.profile.name, 1
        while any(job.name == name for job in made):
            number += 1
            name = f"{each.profile.name}-{number}"
        options = each.options
        made.append(
            from_profile(
                each.profile,
                spec,
                each.priority,
                name=name,
                think_s=options.get("think", 0.0),
                rate=options.get("rate"),
                weight=options.get("weight", 1.0),
                starts_at=options.get("start", 0.0),
                max_slowdown=max_slowdown,
            )
        )
    return made


def _simulate(jobs: Sequence[Workload], spec: GpuSpec, policy: str, args: argparse.Namespace) -> Result:
    steps = DEFAULT_STEPS if args.steps is None and args.seconds is None else args.steps
    warmup = DEFAULT_WARMUP if args.warmup is None else args.warmup
    simulation = Simulation(jobs, spec, policy, seed=args.seed, timeline=bool(args.plot))
    line = ProgressLine()

    def progress(now: Simulation) -> None:
        counted = [c for c in now.clients if c.high] or now.clients
        done = min(len(client.step_seconds) for client in counted)
        of = "" if steps is None else f" of {steps + warmup}"
        line.say(f"{policy}: {now.now:.3f} s simulated, {done}{of} steps")

    try:
        return simulation.run(seconds=args.seconds, steps=steps, warmup_steps=warmup, progress=progress)
    finally:
        line.end()


# ---- the results


def describe(result: Result, *, explain: bool = False) -> str:
    """One run as text; with `explain`, the scheduler's sentences about each job at the end."""
    header = ("JOB", "PRIORITY", "STEPS", "ALONE", "SLOWDOWN", "P99", "OVER", "THROUGHPUT")
    rows = [
        (
            printable(job.name),
            job.priority.name.lower(),
            str(job.steps),
            f"{job.solo.step_s * 1e3:.3f} ms",
            _figure(job.mean_slowdown),
            _figure(job.p99_slowdown),
            str(job.steps_over_target),
            _figure(job.relative_throughput),
        )
        for job in result.jobs
    ]
    busy = result.busy.device_s / result.ended_at if result.ended_at else 0.0
    head = f"{result.policy} on a simulated {result.device}: {result.ended_at:.3f} s, device busy {busy:.0%}"
    if result.interrupted:
        head += " (interrupted: this is what is known)"
    total = f"throughput of all jobs, each over its own alone: {_figure(result.total_throughput)}"
    if not result.window_s:
        total += "; no figures: it ended within the warm-up (--warmup)"
    return "\n".join([head, table(header, rows), total, *(_explained(result) if explain else [])])


def _explained(result: Result) -> list[str]:
    return [f"  {printable(sentence)}" for sentences in result.explanations.values() for sentence in sentences]


def compare(results: Sequence[Result]) -> str:
    """The policies side by side: the worst high job, and the low jobs' throughput."""
    rows = []
    for result in results:
        high, low = result.of(Priority.HIGH), result.of(Priority.LOW)
        rows.append(
            (
                result.policy,
                _figure(max((job.mean_slowdown for job in high), default=float("nan"))),
                _figure(max((job.p99_slowdown for job in high), default=float("nan"))),
                _figure(sum(job.relative_throughput for job in high) if high else float("nan")),
                _figure(sum(job.relative_throughput for job in low) if low else float("nan")),
                _figure(result.total_throughput),
            )
        )
    return table(("POLICY", "HIGH SLOWDOWN", "P99", "HIGH THROUGHPUT", "LOW THROUGHPUT", "TOTAL"), rows)


def _figure(value: float) -> str:
    return "-" if isnan(value) else f"{value:.3f}"


def _notes(asked: Sequence[JobRequest], spec: GpuSpec) -> list[str]:
    """The assumptions behind the figures."""
    notes = [f"slowdown: step time over alone on the same simulated {spec.name}; over: steps above the target"]
    for profile in {each.profile.name: each.profile for each in asked}.values():
        sources = ", ".join(f"{count} {source}" for source, count in sorted(profile.sources().items()))
        note = f"{profile.name}: {counted(len(profile.ops), 'operator')} ({sources})"
        guessed = sum(guesses_blocks(op) for op in profile.ops)
        if guessed:
            note += f"; how {guessed} of them fill a GPU is guessed"
        if profile.device != spec.name:
            note += f"; times are of {profile.device}, taken as they are"
        notes.append(printable(note))
    return notes


def _show_device(spec: GpuSpec, *, as_json: bool) -> None:
    constants = list(spec.constants())
    if as_json:
        emit_json(
            {name: {"value": value, "range": bounds, "source": source} for name, value, bounds, source in constants}
        )
        return
    emit(f"{spec.name}: {spec.title}")
    for name, value, bounds, source in constants:
        within = "" if bounds is None else f"  ({_shown(bounds[0])} to {_shown(bounds[1])})"
        emit(f"{name:<15} {_shown(value)}{within}\n    {source}")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _show_profiles(*, as_json: bool) -> None:
    found = [workload.find(name) for name in workload.names()]
    if as_json:
        emit_json([{"name": p.name, "seconds": p.seconds, "operators": len(p.ops), "note": p.note} for p in found])
        return
    rows = [(p.name, f"{p.seconds * 1e3:.2f} ms", str(len(p.ops)), p.note) for p in found]
    emit(table(("PROFILE", "STEP", "OPERATORS", "WHAT"), rows))


# ---- a plan on a cluster


def _run_plan(args: argparse.Namespace, spec: GpuSpec) -> int:
    """Compare a plan with low jobs beside it with other ways to use its GPUs."""
    if args.high:
        raise ConfigError("--high with --plan, which is the high job", "leave one of them out")
    plan = load(Path(args.plan))
    if not args.low and (args.plot or args.trace):
        raise ConfigError("a picture of a plan alone", "name low jobs with --low, or use `gpumux plan burst --plot`")
    if args.plot:
        pictures.check(Path(args.plot))
    if args.trace:
        files.check_writable(Path(args.trace))
    asked = [_parse(text, Priority.LOW) for text in args.low]
    low = _workloads(asked, spec, args.max_slowdown)
    compared = Comparison(
        plan=plan,
        low=[LowJob(job, each.profile.batch) for job, each in zip(low, asked, strict=True)],
        spec=spec,
        policies=config.POLICIES if args.policy == "all" else (args.policy,),
        iterations=args.steps or DEFAULT_ITERATIONS,
        warmup=DEFAULT_ITERATIONS if args.warmup is None else args.warmup,
        seconds=args.seconds,
        max_slowdown=args.max_slowdown,
        seed=args.seed,
        settings=DaemonSettings(timeline=bool(args.plot or args.trace)),
    )
    line = ProgressLine()

    def progress(policy: str, now: ClusterSimulation) -> None:
        done, of = len(now.gang.iterations), compared.iterations + compared.warmup
        line.say(f"{policy}: {now.now:.3f} s simulated, {done} of {of} iterations")

    try:
        cases = list(compared.cases(progress))
    finally:
        line.end()
    interrupted = any(case.result is not None and case.result.interrupted for case in cases)
    notes = _plan_notes(plan, spec, asked)
    if args.policy == "all" and not asked:
        notes.append("policies differ in how low jobs run beside the plan: name some with --low")
    if args.json:
        explained = {case.name: case.result.explanations for case in cases if args.explain and case.result is not None}
        emit_json(
            {"model": plan.model, "gpus": plan.gpus, "global_batch": plan.batch, "planned_s": plan.seconds,
             "single_gpu_s": plan.single_seconds, "max_slowdown": args.max_slowdown,
             "results": [case.figures() for case in cases], "explanations": explained, "notes": notes}
        )  # fmt: skip
    else:
        texts = [describe_cases(plan, cases)]
        for case in cases if args.explain else ():
            for job, sentences in case.result.explanations.items() if case.result is not None else ():
                texts.append("\n".join([f"{case.name}, {printable(job)}", *(f"  {printable(s)}" for s in sentences)]))
        emit("\n\n".join([*texts, "\n".join(notes)]))
    ran = [case for case in cases if case.result is not None]
    if args.plot and ran:
        picture(ran, Path(args.plot))
    if args.trace and ran:
        from gpumux.cli import trace  # which talks to daemons, and so loads zmq

        content = trace.cluster_trace(ran, f"{plan.model} on {plan.gpus} simulated {spec.name}")
        files.write_text(Path(args.trace), json.dumps(content, separators=(",", ":")))
    return EX_INTERRUPTED if interrupted else 0


def describe_cases(plan: SavedPlan, cases: Sequence[ClusterCase]) -> str:
    """The cases side by side, as a table."""
    rows = []
    for case in cases:
        some = case.low[: case.gpus] if case.policy else ()
        low = f"{_figure(min(some))} to {_figure(max(some))}" if some else "-"
        rows.append(
            (
                case.name,
                str(case.gpus),
                "-" if isnan(case.iteration_s) else f"{case.iteration_s * 1e3:.3f} ms",
                _figure(case.slowdown),
                low,
                _figure(case.low_throughput),
                _figure(case.throughput),
                "-" if case.samples_per_s is None else f"{case.samples_per_s:.0f}",
            )
        )
    header = ("CASE", "GPUS", "ITERATION", "SLOWDOWN", "LOW BESIDE IT", "LOW", "TOTAL", "SAMPLES/S")
    head = (
        f"{printable(plan.model)} on {counted(plan.gpus, 'GPU')}, global batch {plan.batch}, planned at"
        f" {plan.seconds * 1e3:.3f} ms an iteration ({plan.algorithm})"
    )
    if any(case.result is not None and case.result.interrupted for case in cases):
        head += " (interrupted: this is what is known)"
    return f"{head}\n{table(header, rows)}"


def _plan_notes(plan: SavedPlan, spec: GpuSpec, asked: Sequence[JobRequest]) -> list[str]:
    notes = [
        "slowdown: an iteration over the plan's alone, simulated with its host's time; low beside it: least and most of"
        " a GPU that the plan uses; low, total: in GPUs' worth"
    ]
    if plan.device != spec.name:
        notes.append(printable(f"{plan.model}: times are of {plan.device}, taken as they are on a {spec.name}"))
    return notes + _notes(asked, spec)[1:]
