"""The `gpumux` command. Nothing here imports torch, so that every --help is quick.

Exit codes: 0 done, 1 a check or request failed, 64 wrong usage, 70 an error inside gpumux,
75 the endpoint, port or device is taken, 78 the configuration is wrong (sysexits.h has the names).
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import platform
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from gpumux import __version__, config
from gpumux.cli import arguments
from gpumux.cli.cluster import arguments as cluster
from gpumux.cli.completion import SHELLS
from gpumux.cli.setup import deploy as deployment
from gpumux.cli.setup import grants, installation
from gpumux.cli.text import emit, emit_json
from gpumux.config import ENV_CONFIG
from gpumux.errors import ConfigError, EndpointBusy, GpumuxError
from gpumux.types import WEIGHTS
from gpumux.wire.endpoint import parse
from gpumux.wording import nearest

# ---- Errors in usage or configuration. A daemon that is to log JSON reports them as a line of its log, where a log
# collector finds them and can parse them.


EX_USAGE = 64
SIMULATED = f"{'|'.join(config.GPU_MODELS)}[+shared-queue]"


class WrongUsage(SystemExit):
    """Wrong usage on the command line. `usage`: the right usage, "" if the error alone suffices."""

    def __init__(self, command: str, message: str, remedy: str = "", usage: str = "") -> None:
        super().__init__(EX_USAGE)
        self.command = command
        self.message = message
        self.remedy = remedy
        self.usage = usage


def print_error(error: WrongUsage | GpumuxError, argv: Sequence[str]) -> None:
    """Print an error on stderr, in the form that the daemon's log would have."""
    if log_format(argv, os.environ) == "json":
        from gpumux.daemon import logs

        logs.set_up("info", "json")
        text = f"{error.message} — {error.remedy}" if error.remedy else error.message
        logging.getLogger("gpumux.daemon").error("%s", text)
        return
    said = f"{error.usage}{error.command}: error" if isinstance(error, WrongUsage) else "gpumux"
    remedy = f"\n  {error.remedy}" if error.remedy else ""
    sys.stderr.write(f"{said}: {error.message}{remedy}\n")


def log_format(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The log format that `gpumux serve` was asked for, read from sources that may themselves hold the error; else
    "text"."""
    if argv[:1] != ["serve"]:
        return "text"
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--log-format")
    parser.add_argument("--config")
    try:
        flags, _ = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit):
        return "text"
    given = flags.log_format or environ.get("GPUMUX_LOG_FORMAT")
    path = flags.config or environ.get(ENV_CONFIG)
    if given is None and path:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("daemon")
        except (OSError, ValueError):  # this may be the error to report
            return "text"
        given = table.get("log_format") if isinstance(table, dict) else None
    return given if isinstance(given, str) else "text"


# ---- The parser.


EX_OK, EX_FAILED, EX_SOFTWARE, EX_TEMPFAIL, EX_CONFIG = 0, 1, 70, 75, 78

MAX_WAIT_S = 86_400
# Settings that `gpumux serve` has flags for.
SETTINGS = (
    "log_format", "gpu", "device", "gpu_shares", "gpu_model", "endpoint", "policy", "threads", "metrics_host",
    "metrics_port", "state_dir", "log_level",
)  # fmt: skip
JOB_VERBS = {
    "list": "list all jobs",
    "pause": "start no further piece of a job; what is on the device finishes",
    "resume": "let a paused job go on",
    "stop": "close a job",
    "priority": "make a job high or low",
    "weight": "change a job's share among jobs of its priority",
    "profile": "write what a job's operators cost, for `gpumux simulate`",
    "explain": "say how a job fares, why, and what to do about it",
}

_EXAMPLES = """\
examples:
  gpumux doctor                         what this machine offers and what is wrong with it
  gpumux serve --gpu 0                  own GPU 0 until told to stop
  gpumux serve --device cpu --threads 1
  gpumux status                         the daemon, its device and its jobs
  gpumux top                            the jobs as they run: promises, steps/s, device share, what is held
  gpumux trace -o trace.json            record five seconds of it; open the file in Perfetto
  gpumux interference                   which programs slow which others down, as measured
  gpumux jobs pause resnet-sweep        hold a job back; `jobs resume` lets it go on
  gpumux simulate --high a.json --low b.json   try a pair of jobs without a GPU
  gpumux plan burst vgg16 --gpus 8 --global-batch 32   how many GPUs each layer should have
  gpumux tune sweep:factory --space space.toml --trials 32 --steps 2000    search hyper-parameters
  gpumux config --defaults > gpumux.toml   every setting of a daemon, to start from

exit codes: 0 done, 1 a check or request failed, 64 wrong usage, 70 an error inside gpumux, 75 the endpoint, port or
device is taken, 78 the configuration is wrong or a package is missing, 130 interrupted
"""
_SERVE = """\
Settings come from the --config file, then GPUMUX_* variables, then these flags; the last one wins.
GPUMUX_METRICS_PORT=off and --metrics-port off mean the same.

examples:
  gpumux serve                                     GPU 0 where a driver and a CUDA build of torch are, else the CPU
  gpumux serve --gpu 0                             GPU 0, never the CPU; needs cuda-bindings, new and unproven
  gpumux serve --device cpu --threads 1
  gpumux serve --config gpumux.toml --policy fifo
  gpumux serve --device sim --gpu-model h200       a simulated GPU: keeps time, computes nothing, warns its clients
  gpumux serve --endpoint ipc:///run/gpumux/0/gpu0.sock --metrics-port 0

SIGHUP has the file read again: access rules, limits and the log change at once, and the log says what waits for a
restart.

exit codes: 0 stopped cleanly, 64 wrong usage, 70 internal error, 74 the device is lost, 75 endpoint, port or device
taken, 78 wrong configuration
"""
_JOBS = """\
JOB is a job's id, the beginning of one, its short id (j3) or its name, if only one job has it.
A job can be changed by its owner, by root and by operators ([access] in the configuration); others see that it is
there, and not its name.

examples:
  gpumux jobs                           list them
  gpumux jobs pause j3                  starts no further piece; what is on the device finishes
  gpumux jobs resume j3
  gpumux jobs priority j3 high          from its next launch on; `low` as well
  gpumux jobs weight j3 2.5             its share among jobs of its priority
  gpumux jobs stop j3 --drain           answer what was submitted (a paused job is resumed), then close
  gpumux jobs list --json
  gpumux jobs explain j3                how it fares, by which neighbour it is slow or held, and what to do about it
  gpumux jobs profile j3 -o bert.json   what its operators cost, for `gpumux simulate`
"""
_TOP = """\
Rates are of the last interval. DEVICE is device seconds a second, counted as pieces end (above 100% where
pieces run at once), PROMISE a high job's newest steps over the same alone, and whether that is within what was
promised; of a low job, for which part of the interval it was held, or for how long by now, for which job and why.

On a terminal it has history and keys (? lists them) where Textual is installed (pip install 'textual>=8'), else it is a
table. Elsewhere tables follow one another.

examples:
  gpumux top
  gpumux top --interval 0.5
  gpumux top --plain                    a table without history and keys
  gpumux top --once                     measure for one interval, print, and go
  gpumux top --json | jq -c .device     one line of JSON an interval
"""
_INTERFERENCE = """\
The daemon measures what each low program costs each range of operators of each high program, by the share of the device
that the low one runs on, and launches low work by it. HIGH TAKES: how many times as long the high program takes with
the low one beside it. LOW GETS: how fast the low one is there, 1 as alone. Programs are named by the job that had them
last, where it is yours, and by their content hash. With --state-dir all this is kept, and taken up after a restart.

examples:
  gpumux interference
  gpumux interference --program bert --ranges      range by range
  gpumux interference --plot heat.png              a heat map: high programs by low ones
  gpumux interference --json | jq '.pairs[] | [.high.name, .low.name, .slowdown]'
"""
_TRACE = """\
The file holds Chrome trace events: open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing.
Each job's stream on the device is a track, with every piece by its operators; below are each job's steps from arrival
to answer, when and for whom it was held, and the bans against it. Of other users' jobs you see when they ran, not what.
Ctrl-C ends a recording early and writes what there is. One recording at a time; none costs anything while nobody
records.

examples:
  gpumux trace -o trace.json                   five seconds of all jobs
  gpumux trace -o trace.json --seconds 0.5
"""
_SIMULATE = """\
The daemon's own scheduler runs over a simulated GPU, on a virtual clock: nothing waits, nothing is computed, and the
same seed gives the same answer. JOB is a profile: a file that `gpumux jobs profile` recorded, or the name of one that
comes with gpumux (--profiles lists them). After a colon, separated by commas: think=TIME (the client pauses after each
step), rate=N (steps a second at random moments), weight=N, start=TIME; times end in us, ms or s.

The figures leave out the first --warmup steps of every high job, in which the scheduler learns. Ctrl-C ends a run early
and prints what is known.

With --plan, a plan that `gpumux plan burst --save` wrote is the high job, on as many simulated GPUs as it was made for,
each with a daemon of its own, and every GPU gets the low jobs. Steps are the plan's iterations. Beside it stand the
model data parallel on all GPUs, and the cluster parted into GPUs for it and for low jobs. LOW and TOTAL are in GPUs'
worth: work over what one GPU alone does of the same job. docs/planning.md says what is simulated.

examples:
  gpumux simulate --high vgg16-b4-ddp --low vgg16-b16              would the background job hurt?
  gpumux simulate --high bert.json:think=2ms --low sweep.json --low sweep.json --policy all
  gpumux simulate --high transformer-b2:think=1ms --low vgg16-b4 --max-slowdown 1.05 --plot timeline.png
  gpumux plan burst vgg16 --gpus 8 --global-batch 32 --save plan.json
  gpumux simulate --plan plan.json --low small-kernels-b4 --policy all --plot gpus.png --trace gpus.json
  gpumux simulate --show-device --gpu-model h200                   every constant of the model, and where it is from
"""
_DEPLOY = """\
README.md among the files has the commands that put them to use, from a directory with these names. Manual pages need
none.

examples:
  gpumux deploy systemd -o deploy/systemd          a hardened unit, its users and directories, gpumux.toml
  gpumux deploy prometheus -o deploy/prometheus    a scrape job, recording rules, alerts
  gpumux deploy grafana -o deploy/grafana          the dashboard
  gpumux deploy kubernetes -o deploy/kubernetes    a daemon on every GPU node
  gpumux deploy slurm -o deploy/slurm              prolog and epilog scripts
  gpumux deploy man -o ~/.local/share/man          gpumux(1) and gpumux.toml(5)

exit codes: 0 done, 64 wrong usage, 78 a file is there and differs, or can't be written
"""
_COMPLETION = """\
examples:
  eval "$(gpumux completion bash)"                                            now, or in ~/.bashrc
  eval "$(gpumux completion zsh)"                                             in ~/.zshrc, after compinit
  gpumux completion fish > ~/.config/fish/completions/gpumux.fish
"""
_CONFIG = """\
Settings come from the file, then from GPUMUX_* variables; `gpumux serve` has flags for some, which count last. Whatever
is not the default says where it comes from. docs/configuration.md has them all in a table.

examples:
  gpumux config --defaults > gpumux.toml     every setting with its default, commented out, to start from
  gpumux config --config gpumux.toml         what a daemon with this file would take
  gpumux config --json

exit codes: 0 done, 64 wrong usage, 78 a setting is wrong
"""
_KEYS = """\
A daemon that listens on tcp:// has keys, and so has each client that may connect: docs/security.md.

examples:
  gpumux keys gpu-server -o /etc/gpumux           the daemon's: curve_secret_key, and gpu-server.key for its clients
  gpumux keys laptop                              a client's: laptop.key goes into the daemon's curve_client_keys
"""
_DOCTOR = """\
Every line is ok, warn or fail; what isn't ok says how to mend it. Exits with 1 when something fails.

examples:
  gpumux doctor
  gpumux doctor --config gpumux.toml --json
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but wrong usage exits with EX_USAGE."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Let each command report unknown arguments itself, with its own usage."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            flag = next((word.partition("=")[0] for word in rest if word.startswith("--")), "")
            near = nearest(flag, self._option_string_actions) if flag else None
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f": did you mean {near}?" if near else ""))
        return known, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, with the nearest one."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(each) for each in action.choices]
        near = nearest(str(value), choices)
        advice = f"did you mean {near}?" if near else f"choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"there is no {value!r}: {advice}")

    def error(self, message: str) -> NoReturn:
        raise WrongUsage(self.prog, message, usage=self.format_usage())


def _add(subparsers: argparse._SubParsersAction[_Parser], name: str, meaning: str, epilog: str = "") -> _Parser:
    return subparsers.add_parser(
        name,
        help=meaning,
        description=meaning[0].upper() + meaning[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _seconds(text: str) -> float:
    """A time to wait: a number of seconds above 0, a day at most."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_WAIT_S:  # false for nan, too
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and up to {MAX_WAIT_S}")
    return seconds


def _endpoint(text: str) -> str:
    try:
        return parse(text).text
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.message}; {error.remedy}") from error


def _settings(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting that operators change often; the others are only for the file."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML file with settings (also GPUMUX_CONFIG)")
    add("--gpu", metavar="N", help="index of the GPU to own; means --device cuda where no device is named")
    add("--device", metavar="|".join(config.DEVICES), help="what runs the work (default auto)")
    add("--gpu-shares", metavar="off|on", help="whether low jobs may be confined to parts of a GPU (default off)")
    add("--gpu-model", metavar=SIMULATED, help="the GPU that --device sim simulates (default a100)")
    add("--endpoint", metavar="URL", action="append", help="ipc://PATH or tcp://HOST:PORT; may be given again")
    add("--policy", metavar="|".join(config.POLICIES), help="which job runs next (default guarded)")
    add("--threads", metavar="N", help="intra-op threads a piece on the CPU")
    add("--metrics-host", metavar="ADDRESS", help="address of /metrics and the status page (default 127.0.0.1)")
    add("--metrics-port", metavar="N", help="port of both (default 9402); 0 picks one, off serves none")
    add("--state-dir", metavar="DIR", help="for snapshots of jobs, so that a killed daemon loses none, and crash.log")
    add("--log-level", metavar="|".join(config.LOG_LEVELS), help="least important line that is logged (default info)")
    add(
        "--log-format",
        metavar="|".join(config.LOG_FORMATS),
        help="lines for people (default), or JSON, one object a line",
    )


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return count


def _slowdown(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1000:  # false for nan, too
        raise argparse.ArgumentTypeError(f"{text!r} is no factor from 1 to 1000")
    return value


def _simulation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--high", metavar="JOB", action="append", default=[], help="an important job; may be given again")
    add("--low", metavar="JOB", action="append", default=[], help="a background job; may be given again")
    add("--plan", metavar="FILE.json", help="the high job is this plan, on all its GPUs (gpumux plan burst --save)")
    add(
        "--gpu-model",
        metavar=SIMULATED,
        choices=config.SIMULATED_GPUS,
        default="a100",
        help="the GPU that is simulated (default a100); +shared-queue: all streams share one queue of launches",
    )
    policies = (*config.POLICIES, "all")
    default = config.Config().policy
    add(
        "--policy",
        metavar="|".join(policies),
        choices=policies,
        default=default,
        help=f"which job runs next (default {default})",
    )
    add(
        "--steps",
        metavar="N",
        type=arguments.whole,
        help="steps of each high job, after the warm-up (default 500; --plan: 60)",
    )
    add("--seconds", metavar="SECONDS", type=_seconds, help="virtual time at most")
    add("--warmup", metavar="N", type=_count, help="steps of each high job left out (default 200; plan: 60)")
    add("--seed", metavar="N", type=int, default=0, help="of clients that submit at random moments")
    add("--max-slowdown", metavar="X", type=_slowdown, default=1.10, help="what high jobs are promised (default 1.10)")
    add("--explain", action="store_true", help="also print why each job is slow or held, as the scheduler says it")
    add("--plot", metavar="FILE.png", help="draw slowdowns and a timeline (pip install matplotlib)")
    add("--trace", metavar="FILE.json", help="--plan: write all GPUs' launches for https://ui.perfetto.dev")
    add("--profiles", action="store_true", help="list the profiles that come with gpumux")
    add("--show-device", action="store_true", help="list the simulated device's constants with their sources")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="gpumux",
        description="Let many PyTorch jobs share one device without the important one noticing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpumux {__version__}")
    subparsers: argparse._SubParsersAction[_Parser] = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    serve = _add(subparsers, "serve", "run the daemon that owns a device", _SERVE)
    _settings(serve)

    status = _add(subparsers, "status", "show the daemon, its device and its jobs")
    top = _add(subparsers, "top", "watch the jobs as they run", _TOP)
    top.add_argument("--interval", metavar="SECONDS", type=_seconds, default=1.0, help="between two looks (default 1)")
    top.add_argument("--once", action="store_true", help="print one interval and end")
    top.add_argument("--plain", action="store_true", help="a table without history and keys, as without Textual")
    pairs = _add(subparsers, "interference", "show which programs slow which others down", _INTERFERENCE)
    pairs.add_argument("--program", metavar="NAME", help="only pairs with this job's program, or this content hash")
    pairs.add_argument("--ranges", action="store_true", help="every measured range of the high programs")
    pairs.add_argument("--plot", metavar="FILE.png", help="draw a heat map (pip install matplotlib)")
    trace = _add(subparsers, "trace", "record what runs, for Perfetto", _TRACE)
    trace.add_argument("-o", "--out", metavar="FILE", required=True, help="where to write it")
    trace.add_argument("--seconds", metavar="N", type=_seconds, default=5.0, help="how long (default 5, at most 600)")
    jobs = _add(subparsers, "jobs", "list jobs, or change, profile or explain one", _JOBS)
    verbs = _job_verbs(jobs)
    cluster.add(_add(subparsers, "cluster", "place jobs on many daemons", cluster.ABOUT), _Parser)
    doctor = _add(subparsers, "doctor", "say what this machine offers and what is wrong with it", _DOCTOR)
    doctor.add_argument("--config", metavar="FILE", help="TOML file to check (also GPUMUX_CONFIG)")
    simulate = _add(subparsers, "simulate", "try jobs together on a simulated GPU", _SIMULATE)
    _simulation(simulate)
    arguments.add(_add(subparsers, "plan", "plan training before asking for GPUs", " "))
    arguments.add_tuning(_add(subparsers, "tune", "search hyper-parameters, many models as one job", " "))
    deploy = _add(
        subparsers,
        "deploy",
        "write the files for systemd, Prometheus, Grafana, Kubernetes or Slurm, or man pages",
        _DEPLOY,
    )
    kinds = (*deployment.KINDS, deployment.MAN)
    deploy.add_argument("kind", choices=kinds, metavar="|".join(kinds), help="what they are for")
    deploy.add_argument("-o", "--out", metavar="DIR", required=True, help="where to write them")
    deploy.add_argument("--force", action="store_true", help="replace files that are there and differ")
    settings = _add(subparsers, "config", "show the settings of a daemon", _CONFIG)
    settings.add_argument("--config", metavar="FILE", help="TOML file with settings (also GPUMUX_CONFIG)")
    instead = settings.add_mutually_exclusive_group()
    instead.add_argument("--defaults", action="store_true", help="a file with all of them, commented out")
    instead.add_argument("--reference", action="store_true", help="docs/configuration.md")
    instead.add_argument("--json", action="store_true", help="print JSON, for scripts")
    for sub in (settings, deploy):
        sub.set_defaults(flags={name: f"--{name.replace('_', '-')}" for name in SETTINGS})
    keys = _add(subparsers, "keys", "make CURVE keys, for daemons that are reached over TCP", _KEYS)
    keys.add_argument("name", metavar="NAME", help="whose keys: laptop makes laptop.key and laptop.key_secret")
    keys.add_argument("-o", "--out", metavar="DIR", default=".", help="where to write them (default here)")
    grants.add(_add(subparsers, "grants", "give programs shares of a daemon's device", grants.ABOUT), _Parser)
    completion = _add(subparsers, "completion", "print completions for a shell", _COMPLETION)
    completion.add_argument("shell", choices=SHELLS, help="which shell")
    for sub in (completion, deploy):
        sub.set_defaults(parser=parser)
    version = _add(subparsers, "version", "print the version of gpumux and of its protocol")
    for sub in (status, top, pairs, trace, jobs, doctor, *verbs):
        kind = str if sub is doctor else _endpoint  # the doctor reports a bad one as a finding
        given = argparse.SUPPRESS if sub in verbs else None  # before the verb it counts, too
        where = "which daemon (also GPUMUX_ENDPOINT; default: GPU 0 here)"
        sub.add_argument("--endpoint", metavar="URL", type=kind, default=given, help=where)
        wait = given or 5.0
        sub.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=wait, help="how long to wait for it")
    for sub in (status, top, pairs, trace, jobs, doctor, simulate, version, *verbs):
        unless = argparse.SUPPRESS if sub in verbs else False
        sub.add_argument("--json", action="store_true", default=unless, help="print JSON, for scripts")
    return parser


def _job_verbs(jobs: argparse.ArgumentParser) -> list[_Parser]:
    """The verbs of `gpumux jobs`; without one it lists."""
    subparsers: argparse._SubParsersAction[_Parser] = jobs.add_subparsers(
        dest="verb", metavar="VERB", parser_class=_Parser
    )
    jobs.set_defaults(verb="list")
    made = {name: _add(subparsers, name, meaning) for name, meaning in JOB_VERBS.items()}
    for name, verb in made.items():
        if name != "list":
            verb.add_argument("job", metavar="JOB", help="its id, the beginning of one, its short id (j3) or its name")
    made["priority"].add_argument("value", choices=("low", "high"), help="from its next launch on")
    made["weight"].add_argument(
        "value", metavar="NUMBER", type=_weight, help=f"{WEIGHTS[0]:g} to {WEIGHTS[1]:g}; 1 is the usual one"
    )
    made["stop"].add_argument("--drain", action="store_true", help="answer what was submitted first")
    made["profile"].add_argument("-o", "--out", metavar="FILE", required=True, help="where to write it")
    made["profile"].add_argument("--program", metavar="N", type=int, help="of which program, if not the busiest one")
    made["explain"].add_argument(
        "--story", action="store_true", help="also all that is known, and what happened to it last"
    )
    return list(made.values())


def _weight(text: str) -> str:
    """A job's weight, as it was written."""
    least, most = WEIGHTS
    try:
        if least <= float(text) <= most:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")


def exit_code(error: GpumuxError) -> int:
    """The exit code of a process that ends with `error`."""
    if isinstance(error, ConfigError):
        return EX_CONFIG
    return EX_TEMPFAIL if isinstance(error, EndpointBusy) else EX_FAILED


# Verbs without a module of their own: (module, function).
_ELSEWHERE = {
    "serve": ("main", "run_serve"),
    "status": ("jobs", "run_status"),
    "top": ("top.command", "run"),
    "version": ("main", "run_version"),
    "deploy": ("setup.deploy", "run"),
    "config": ("setup.settings", "run"),
    "keys": ("setup.keys", "run"),
    "grants": ("setup.grants", "run"),
    "cluster": ("cluster.verbs", "run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; errors become one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of jobs and files need not fit a terminal's encoding
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except WrongUsage as error:
        print_error(error, argv)
        return EX_USAGE
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    try:
        module, function = _ELSEWHERE.get(args.command, (args.command, "run"))
        return int(getattr(import_module(f"gpumux.cli.{module}"), function)(args))
    except WrongUsage as error:
        print_error(error, argv)
        return EX_USAGE
    except GpumuxError as error:
        print_error(error, argv)
        return exit_code(error)
    except ModuleNotFoundError as error:
        needed = installation.missing(error)
        if needed is None:
            raise
        print_error(needed, argv)
        return exit_code(needed)
    except BrokenPipeError:  # `gpumux status | head` is no error; keep the interpreter from reporting it
        sys.stderr.close()
        return EX_OK
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Open /dev/null as each of the three streams that the caller has closed. Otherwise a socket would get its number,
    and what Python or a library writes to the stream would go to a daemon."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it takes the lowest free number: the stream's


# ---- `gpumux serve` and `gpumux version`.


def run_serve(args: argparse.Namespace) -> int:
    installation.check_torch()  # the processes that run jobs import it
    from gpumux.daemon.main import run  # what the daemon needs is more than any other command does

    flags = {name: getattr(args, name) for name in SETTINGS}
    try:
        for text in config.from_flags(flags).get("endpoint", ()):
            parse(text)
    except ConfigError as error:  # wrong on the command line is wrong usage; wrong in a file is not
        raise WrongUsage("gpumux serve", error.message, error.remedy) from error

    def load() -> config.Config:
        return config.load(flags, path=args.config)

    return run(load(), last=True, again=load)


def run_version(args: argparse.Namespace) -> int:
    from gpumux.wire.messages import PROTOCOL_VERSION

    facts = {"gpumux": __version__, "protocol": PROTOCOL_VERSION, "python": platform.python_version()}
    if args.json:
        emit_json(facts)
    else:
        emit(f"gpumux {facts['gpumux']}, protocol {facts['protocol']}, Python {facts['python']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
