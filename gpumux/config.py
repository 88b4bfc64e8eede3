"""The daemon's configuration: defaults, then a TOML file, then GPUMUX_* variables, then flags.

A later source wins, setting by setting. Every setting is declared once, on `Config`; its table in the
file, its variable (`GPUMUX_` and the name in capitals) and its checks follow from that. Nothing is
guessed: an unknown key, a bad type or a value out of range raises ConfigError, which names the source of the
value and the nearest existing name.

    [daemon]
    gpu = 0
    policy = "paced"
    [limits]
    max_jobs_per_user = 4
    [access]
    allow_ops = ["mylib.scale.default"]
    [access.rules.students]
    groups = ["students"]
    max_priority = "low"

Access rules are only set in the file (`_READERS` below lists their settings).
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from ipaddress import ip_network
from math import isfinite
from pathlib import Path
from typing import Any

from gpumux.access import DEFAULT, Rule
from gpumux.errors import ConfigError
from gpumux.types import PRIORITIES, Priority
from gpumux.wording import nearest

# ---- The tables [access.rules.NAME] of a configuration file as access rules, with every name checked.
#
#     [access.rules.students]
#     groups = ["students"]          # names or numbers
#     max_priority = "low"
#     max_jobs = 2
#
#     [access.rules.default]         # all users that no other rule names
#     submit = false
#
# A rule is read whole or not at all: an unknown user, group or key would silently leave a user under another rule.
# Groups are those the kernel recorded for a connection, so no directory service is asked while the daemon runs.


MAX_RULES = 1024
MAX_ID = 2**32 - 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read(tables: Any, where: str) -> tuple[Rule, ...]:
    """The rules in a table of tables, in order. `where` names the file. Raises ConfigError."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{where} must be tables, not {tables!r}", "write [access.rules.NAME] and its settings below")
    if len(tables) > MAX_RULES:
        raise ConfigError(f"{where}: {len(tables)} rules", f"write {MAX_RULES} at most; one can name many users")
    rules = tuple(_rule(name, body, f"{where}.{name}") for name, body in tables.items())
    _check_unique(rules, where)
    return rules


def _rule(name: str, body: Any, where: str) -> Rule:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is no name for a rule", "use letters, digits, dots and dashes")
    if not isinstance(body, dict):
        raise ConfigError(f"{where} must be a table, not {body!r}", f"write [access.rules.{name}]")
    for key in body:
        if key not in _READERS:
            near = nearest(key, _READERS)
            remedy = f"did you mean {near}?" if near else "a rule has: " + ", ".join(_READERS)
            raise ConfigError(f"{where}: {key} is no setting of a rule", remedy)
    values = {key: _READERS[key](value, f"{where}: {key}") for key, value in body.items()}
    rule = Rule(name, **values)
    named = bool(rule.users or rule.groups or rule.keys)
    if named is (name == DEFAULT):
        meaning = "is for everybody no other rule names" if named else "names nobody"
        raise ConfigError(f"{where} {meaning}", "give every rule but `default` users, groups or keys")
    return rule


def _check_unique(rules: tuple[Rule, ...], where: str) -> None:
    for kind in ("users", "groups", "keys"):
        seen: dict[Any, str] = {}
        for rule in rules:
            for one in getattr(rule, kind):
                if one in seen:
                    raise ConfigError(
                        f"{where}: {one} stands in the {kind} of both {seen[one]!r} and {rule.name!r}", "keep one"
                    )
                seen[one] = rule.name


def _ids(value: Any, where: str, lookup: Callable[[str], int], what: str) -> frozenset[int]:
    """Names and numbers as ids."""
    found = set()
    for one in _list(value, where):
        if isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MAX_ID:
            found.add(one)
        elif isinstance(one, str):
            try:
                found.add(lookup(one))
            except (KeyError, ValueError):
                raise ConfigError(
                    f"{where}: there is no {what} {one!r} on this machine",
                    f"mend the name, or write the {what}'s number",
                ) from None
        else:
            raise ConfigError(f"{where}: {one!r} is no {what}", "write names in quotes, or numbers")
    return frozenset(found)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, not {value!r}", 'write ["one", "two"]')
    return value


def _users(value: Any, where: str) -> frozenset[int]:
    return _ids(value, where, lambda name: pwd.getpwnam(name).pw_uid, "user")


def users_together(sets: Sequence[str]) -> tuple[frozenset[int], ...]:
    """The user ids of each set in `fuse_together`. Raises ConfigError."""
    where = "[fusion] fuse_together"
    found = tuple(_users([int(one) if one.isdecimal() else one for one in each.split()], where) for each in sets)
    for each, users in zip(sets, found, strict=True):
        if len(users) < 2:
            raise ConfigError(f"{where}: {each!r} is one user, or none", 'write sets of users, such as ["ann bob"]')
    twice = [user for number, users in enumerate(found) for user in users if any(user in o for o in found[:number])]
    if twice:
        raise ConfigError(f"{where}: user {twice[0]} is in two sets", "write all that agree with one in a single set")
    return found


def _groups(value: Any, where: str) -> frozenset[int]:
    return _ids(value, where, lambda name: grp.getgrnam(name).gr_gid, "group")


def _keys(value: Any, where: str) -> frozenset[str]:
    names = _list(value, where)
    if not all(isinstance(name, str) and name and "/" not in name for name in names):
        raise ConfigError(f"{where} must name key files", 'write ["laptop"] for laptop.key in curve_client_keys')
    return frozenset(name.removesuffix(".key") for name in names)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, not {value!r}", "write it without quotes")
    return value


def _priority(value: Any, where: str) -> Priority:
    if not isinstance(value, str) or value not in PRIORITIES:
        raise ConfigError(f"{where} can't be {value!r}", 'choose "low" or "high"')
    return PRIORITIES[value]


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} must be a whole number of 1 or more, not {value!r}", "leave it out for no limit")
    return value


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{where} must be a number above 0, not {value!r}", "leave it out for no limit")
    return float(value)


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "users": _users,
    "groups": _groups,
    "keys": _keys,
    "submit": _flag,
    "max_priority": _priority,
    "max_jobs": _count,
    "max_bytes": _count,
    "max_weight": _weight,
    "operator": _flag,
}

# What each of them means, for the reference of settings.
RULE_SETTINGS: Mapping[str, str] = {
    "users": "names or numbers of users it is for",
    "groups": "names or numbers of groups it is for",
    "keys": "names of CURVE keys it is for, without .key",
    "submit": "whether they may submit jobs (true)",
    "max_priority": "the highest priority of their jobs, low or high (high)",
    "max_jobs": "open jobs of each of them (no limit but max_jobs_per_user)",
    "max_bytes": "device bytes that the jobs of each may be charged (no limit but max_bytes_per_user)",
    "max_weight": "the largest weight of their jobs (no limit)",
    "operator": "whether they may see, change and end the jobs of all users (false)",
}


# ---- The settings.


DEVICES = ("auto", "cpu", "cuda", "sim")
GPU_MODELS = ("v100", "a100", "a100-80gb", "h100", "h200")  # that can be simulated
SIMULATED_GPUS = (*GPU_MODELS, *(f"{model}+shared-queue" for model in GPU_MODELS))  # and how (device/sim/spec.py)
POLICIES = ("fifo", "streams", "paced", "guarded")
CONFINEMENTS = ("auto", "require", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
TABLES = ("daemon", "limits", "access", "gangs", "fusion")
ENV_PREFIX = "GPUMUX_"
ENV_CONFIG = "GPUMUX_CONFIG"  # names the file, so it can't be a setting in it
ENV_OTHERS = frozenset(  # the variable for the compiled core (compiled.py), and those for clients
    {
        ENV_CONFIG,
        "GPUMUX_CORE",
        "GPUMUX_CLUSTER",
        "GPUMUX_CLUSTER_JOB",
        "GPUMUX_CURVE_KEY",
        "GPUMUX_CURVE_SERVER",
        "GPUMUX_GRANT",
        "GPUMUX_TRACEBACK",
    }
)
GIB = 1 << 30
_OPERATOR = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)  # namespace.name.overload
MIB = 1 << 20


def _setting(
    default: Any,
    meaning: str,
    *,
    table: str = "daemon",
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    words: Mapping[str, Any] | None = None,
    reload: bool = False,
) -> Any:
    """One setting. words: spellings that stand for a value (`off`), in the file and outside it. reload: a daemon that
    reads its file again takes the new value; other settings are fixed at the start, in sockets, in the device, or in
    what clients were told when they connected."""
    meta = {"meaning": meaning, "table": table, "low": low, "high": high, "choices": choices, "words": words or {}}
    return field(default=default, metadata={**meta, "reload": reload})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a daemon. Sizes are bytes and times are seconds."""

    gpu: int = _setting(0, "index of the GPU this daemon owns; naming one means a GPU", low=0, high=1023)
    device: str = _setting(
        "auto",
        "what runs the work; auto takes the GPU where a driver and a CUDA build of torch are, and is cuda if gpu"
        " is set",
        choices=DEVICES,
        words={"gpu": "cuda"},
    )
    endpoint: tuple[str, ...] = _setting((), "where to listen; empty means the default of the GPU on this machine")
    gpu_shares: str = _setting(
        "off", "whether low jobs may be confined to parts of a GPU (green contexts; not yet proven on one)",
        choices=("off", "on"),
    )  # fmt: skip
    gpu_model: str = _setting("a100", "the GPU that --device sim simulates", choices=SIMULATED_GPUS)
    profiles: tuple[str, ...] = _setting((), "files of `gpumux jobs profile` whose times a simulated GPU uses")
    policy: str = _setting("guarded", "scheduling policy: which job's piece is launched next", choices=POLICIES)
    threads: int = _setting(0, "intra-op threads a piece on the CPU; 0 leaves it to the device", low=0, high=1024)
    low_nice: int = _setting(
        19, "niceness of low jobs' processes on the CPU, so that they give way to high ones; 0 for none", low=0, high=19
    )
    confine: str = _setting(
        "auto",
        "what keeps the processes of jobs from harm (users, system calls): auto takes what this machine allows, require"
        " does not start without all of it, off leaves out what can be left out",
        choices=CONFINEMENTS,
    )
    metrics_host: str = _setting("127.0.0.1", "address the metrics are served on")
    metrics_port: int = _setting(
        9402, "port of /metrics; 0 picks a free one, off serves none", low=-1, high=65535, words={"off": -1}
    )
    state_dir: str = _setting(
        "",
        "directory of this daemon alone, for snapshots of jobs and for crash.log; empty: no recovery, crashes to"
        " stderr",
    )
    snapshot_s: float = _setting(
        30.0,
        "seconds between snapshots of a job, with state_dir; off takes none",
        low=0.0,
        high=86400,
        words={"off": 0},
    )
    keep_s: float = _setting(
        86400.0, "how long a job whose client left is kept, to be resumed", low=0.0, high=31_536_000, reload=True
    )
    log_level: str = _setting("info", "least important line that is logged", choices=LOG_LEVELS, reload=True)
    log_format: str = _setting("text", "lines for people, or one JSON object a line", choices=LOG_FORMATS, reload=True)
    heartbeat_s: float = _setting(2.0, "a side silent for this long sends a heartbeat", low=0.05, high=3600)
    lease_s: float = _setting(10.0, "a client unheard for this long is gone, and its jobs with it", low=0.1, high=86400)
    drain_s: float = _setting(
        5.0, "how long a leaving daemon waits for jobs to be unloaded", low=0.0, high=3600, reload=True
    )

    max_sessions: int = _setting(256, "connections at a time", table="limits", low=1, high=1_000_000, reload=True)
    max_sessions_per_user: int = _setting(
        128, "connections of one user", table="limits", low=1, high=1_000_000, reload=True
    )
    max_jobs: int = _setting(1024, "open jobs at a time", table="limits", low=1, high=1_000_000, reload=True)
    max_jobs_per_user: int = _setting(64, "open jobs of one user", table="limits", low=1, high=1_000_000, reload=True)
    max_bytes_per_user: int = _setting(
        0, "device bytes one user's jobs may be charged; 0 means all of the device", table="limits", low=0, reload=True
    )
    max_programs_per_job: int = _setting(
        64, "programs one job may load", table="limits", low=1, high=1_000_000, reload=True
    )
    max_inflight: int = _setting(
        64, "unanswered steps one job may ask for", table="limits", low=1, high=65536, reload=True
    )
    max_message_bytes: int = _setting(
        256 * MIB, "size of any one frame of a message", table="limits", low=4096, high=16 * GIB
    )
    max_shared_bytes: int = _setting(
        0,
        "shared memory for batches, results and transfers; 0 means half of the machine's",
        table="limits",
        low=0,
        reload=True,
    )
    max_shared_bytes_per_user: int = _setting(
        0, "shared memory for one user; 0 means all of max_shared_bytes", table="limits", low=0, reload=True
    )

    max_snapshot_bytes_per_user: int = _setting(
        0,
        "bytes one user's snapshots may hold on the disk; 0 leaves it to the disk",
        table="limits",
        low=0,
        reload=True,
    )

    allow_ops: tuple[str, ...] = _setting((), "operators allowed beside the built-in list", table="access")
    curve_secret_key: str = _setting("", "file with the daemon's CURVE secret key, for tcp://", table="access")
    curve_client_keys: str = _setting("", "directory of CURVE public keys that may connect", table="access")
    grants: str = _setting(
        "", "directory of grants, for pods and Slurm jobs that ask for a share of the device", table="access"
    )
    grants_endpoint: str = _setting(
        "", "ipc:// endpoint where programs with a grant connect, and no others", table="access"
    )
    metrics_names: str = _setting(
        "hidden",
        "whether /metrics and the status page, which ask for no password, name jobs",
        table="access",
        choices=("hidden", "shown"),
        reload=True,
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "host names by which /metrics and the status page may be asked for, beside this machine's own",
        table="access",
    )
    rules: tuple[Rule, ...] = _setting((), "access rules: what each user may do", table="access", reload=True)

    stores: tuple[str, ...] = _setting(
        (),
        "networks where clients may run the store of a job on several devices, beside this machine",
        table="gangs",
        reload=True,
    )

    fuse_most: int = _setting(
        32, "the most equal jobs that run as one, of those submitted with fusible=True; 1: none do", table="fusion",
        low=1, high=1024,
    )  # fmt: skip
    fuse_wait_s: float = _setting(
        0.02, "how long a step of a job in a group waits for the others' steps, before it runs by itself",
        table="fusion", low=0.0, high=60,
    )  # fmt: skip
    fuse_gather_s: float = _setting(
        0.1, "how long steps wait once, when a group begins, until all of its jobs have one", table="fusion",
        low=0.0, high=60,
    )  # fmt: skip
    fuse_settle_s: float = _setting(
        1.0, "how long from the first two equal jobs to their group, so that others may come", table="fusion",
        low=0.1, high=3600,
    )  # fmt: skip
    fuse_retry_s: float = _setting(
        10.0, "how long from the end of a group to the next, and until one may end for a larger one", table="fusion",
        low=0.0, high=86400,
    )  # fmt: skip
    fuse_together: tuple[str, ...] = _setting(
        (), "sets of users whose jobs may run as one with each other's, names or numbers with spaces between; by"
        " default a user's jobs run so with each other alone", table="fusion",
    )  # fmt: skip


RELOADABLE = frozenset(each.name for each in fields(Config) if each.metadata["reload"])
FILE_ONLY = frozenset({"rules"})  # too much for a variable or a flag


def _settings() -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(Config)}


def _nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    near = nearest(name, names)
    return f"did you mean {near}?" if near else "known are: " + ", ".join(names)


def _nearest_in(table: str, name: str, known: Mapping[str, Field[Any]]) -> str:
    """A remedy for an unknown key of a table: the nearest name may be another table's, the list is this table's."""
    if nearest(name, known):
        return _nearest(name, known)
    return f"[{table}] has: " + ", ".join(sorted(key for key, spec in known.items() if spec.metadata["table"] == table))


def _number(kind: type[Any], value: Any, where: str) -> Any:
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            pass
    elif isinstance(value, bool):
        pass
    elif isinstance(value, int) or (kind is float and isinstance(value, float)):
        return kind(value)
    noun = "a whole number" if kind is int else "a number"
    raise ConfigError(f"{where} must be {noun}, not {value!r}", f"write {where.split()[-1]} as {noun}")


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings; outside the file it is one string with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ConfigError(f"{where} must be a string or a list of strings, not {value!r}", 'write ["one", "two"]')


def _check(spec: Field[Any], value: Any, where: str) -> Any:
    """The value of one setting, of the right type and within its range."""
    meta = spec.metadata
    if isinstance(value, str) and value in meta["words"]:
        return meta["words"][value]
    if isinstance(spec.default, tuple):
        return _texts(value, where)
    if isinstance(spec.default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{where} must be a string, not {value!r}", "put it in quotes")
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{where} can't be {value!r}", _nearest(value, [*meta["choices"], *meta["words"]]))
        return value
    kind: type[Any] = type(spec.default)
    number = _number(kind, value, where)
    low, high = meta["low"], meta["high"]
    if number != number or (low is not None and number < low) or (high is not None and number > high):
        least = 0 if "off" in meta["words"] else low  # the number that `off` stands for is not for people
        span = f"at least {least}" if high is None else f"between {least} and {high}"
        words = "".join(f", or {word}" for word in meta["words"])
        raise ConfigError(f"{where} is {number}, out of range", f"choose a value {span}{words}")
    return number


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, which says `what` it is."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {what} {path}: {error.strerror}", "check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "mend that line") from error


def from_file(path: Path) -> dict[str, Any]:
    """The checked settings of a TOML file. Raises ConfigError."""
    tables = read_toml(path, "the configuration file")
    known = _settings()
    found: dict[str, Any] = {}
    for table, body in tables.items():
        if table not in TABLES or not isinstance(body, dict):
            home = known[table].metadata["table"] if table in known else ""
            remedy = f"move it into [{home}]" if home else _nearest(table, TABLES)
            raise ConfigError(f"{path}: no table [{table}] here", remedy)
        for key, value in body.items():
            where = f"{path}: [{table}] {key}"
            if key not in known:
                raise ConfigError(f"{where} is not a setting", _nearest_in(table, key, known))
            if known[key].metadata["table"] != table:
                raise ConfigError(f"{where} is in the wrong table", f"move it into [{known[key].metadata['table']}]")
            found[key] = read(value, where) if key in FILE_ONLY else _check(known[key], value, where)
    return found


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The checked settings of GPUMUX_* variables. Raises ConfigError."""
    known = {ENV_PREFIX + name.upper(): spec for name, spec in _settings().items() if name not in FILE_ONLY}
    found: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in ENV_OTHERS:
            continue
        if name not in known:
            raise ConfigError(f"the environment variable {name} is not a setting", _nearest(name, known))
        found[known[name].name] = _check(known[name], value, f"the environment variable {name}")
    return found


def from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The checked settings of flags (None: not given). Raises ConfigError."""
    known = _settings()
    found: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if name not in known or name in FILE_ONLY:
            raise ConfigError(f"{flag} is not a setting", _nearest(name, known))
        found[name] = _check(known[name], value, flag)
    return found


def _together(config: Config) -> None:
    """Checks that need more than one setting."""
    if config.lease_s < 2 * config.heartbeat_s:
        raise ConfigError(
            f"lease_s ({config.lease_s}) is shorter than two heartbeats ({config.heartbeat_s} each)",
            "a lease of at least twice heartbeat_s forgives one lost heartbeat",
        )
    for op in config.allow_ops:
        if not _OPERATOR.fullmatch(op):
            raise ConfigError(
                f"allow_ops: {op!r} is not an operator's name", "write it like aten.add.Tensor or mylib.scale.default"
            )
    for network in config.stores:
        try:
            ip_network(network, strict=False)
        except ValueError:
            raise ConfigError(
                f"[gangs] stores: {network!r} is no network", 'write addresses like "10.0.0.0/8" or "192.168.1.7"'
            ) from None
    users_together(config.fuse_together)
    for endpoint in config.endpoint:
        if not endpoint.startswith(("ipc://", "tcp://")):
            raise ConfigError(
                f"the endpoint {endpoint!r} names no known transport", "write ipc://PATH or tcp://HOST:PORT"
            )
    if bool(config.grants) is not bool(config.grants_endpoint):
        raise ConfigError(
            "[access] grants and grants_endpoint belong together",
            "set both: the directory that grants lie in, and the ipc:// endpoint for programs that have one",
        )
    if config.grants_endpoint and not config.grants_endpoint.startswith("ipc://"):
        raise ConfigError(f"grants_endpoint {config.grants_endpoint!r} is not on this machine", "write ipc://PATH")
    if any(e.startswith("tcp://") for e in config.endpoint) and not (
        config.curve_secret_key and config.curve_client_keys
    ):
        raise ConfigError(
            "a tcp:// endpoint needs CURVE keys: without them anyone who reaches the port could run work",
            "set [access] curve_secret_key and curve_client_keys",
        )


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Config:
    """The configuration from all sources. `path` (or GPUMUX_CONFIG) names the file; with neither
    there is none. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    path = path or environ.get(ENV_CONFIG)
    values: dict[str, Any] = from_file(Path(path)) if path else {}
    values.update(from_environment(environ))
    values.update(from_flags(flags or {}))
    if "gpu" in values and values.get("device", "auto") == "auto":
        values["device"] = "cuda"  # a daemon that was given a GPU never serves the CPU instead
    config = Config(**values)
    _together(config)
    return config
