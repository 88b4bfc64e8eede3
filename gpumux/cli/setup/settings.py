"""`gpumux config`: the settings of a daemon, as a file to start from, as a reference, or as they are here.

All of it is made from the declarations in gpumux/config.py. docs/configuration.md is what `reference` returns, which a
test holds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from gpumux import config
from gpumux.cli.text import emit, emit_json, printable
from gpumux.config import ENV_CONFIG, ENV_PREFIX, FILE_ONLY, RULE_SETTINGS, TABLES, Config

WIDTH = 100  # of comments

# What each table of the file is about.
ABOUT = {
    "daemon": "The daemon: what it owns, how it runs, where it is reached and what it writes.",
    "limits": "What clients may ask for. Further requests are refused.",
    "access": "Who may do what, and who is let in from other machines.",
    "gangs": "Jobs that run on several devices.",
    "fusion": "Equal jobs whose steps run as one ([fusion.md](fusion.md#equal-jobs-of-separate-processes)).",
}

HEAD = """\
# Configuration

All settings of `gpumux serve`. They come from a TOML file (`--config FILE`, or `GPUMUX_CONFIG`), then from `GPUMUX_*`
variables, then from flags; the last one wins. An unknown name, a value of another type or out of range is an error that
names the source and the nearest name. Names that end in `_s` are seconds, in `_bytes` bytes.

```console
$ gpumux config --defaults > gpumux.toml    # every setting, commented out, to start from
$ gpumux config --config gpumux.toml        # what a daemon would take, and where each value comes from
$ gpumux doctor --config gpumux.toml        # whether this machine can do it
```

Outside the file, lists are written with commas. *Reload*: changed by SIGHUP (`systemctl reload gpumux@0`) while the
daemon runs; all others take a restart ([more](operating.md#changing-things-while-it-runs)). This page is what
`gpumux config --reference` prints.
"""

RULES_HEAD = """
## Access rules

`[access.rules.NAME]`, in the file alone, any number of them; `[access.rules.default]` is for everybody that no other
rule names ([security.md](security.md#access-rules)). What holds where a rule does not say is in parentheses.

| setting | meaning |
|---|---|
"""


def run(args: argparse.Namespace) -> int:
    if args.reference:
        emit(reference(args.flags).rstrip("\n"))
        return 0
    if args.defaults:
        emit(defaults().rstrip("\n"))
        return 0
    found = in_force(args.config, os.environ)
    if args.json:
        emit_json({name: {"value": value, "from": source} for name, (value, source) in found.items()})
    else:
        emit(describe(found))
    return 0


def declared(table: str) -> list[Field[Any]]:
    """The settings of a table of the file, in the order of their declaration, without access rules."""
    return [each for each in fields(Config) if each.metadata["table"] == table and each.name not in FILE_ONLY]


def defaults() -> str:
    """A file with every setting, commented out, with its default and what it means."""
    lines = ["# Settings of `gpumux serve --config FILE`. What is commented out has the value shown."]
    for table in TABLES:
        lines += ["", f"# {ABOUT[table]}", f"[{table}]"]
        for each in declared(table):
            lines += [
                "",
                *_comment(f"{sentence(each)}{allowed(each, '; ')}"),
                f"# {each.name} = {toml(each.default)}",
            ]
    lines += [
        "", "# Access rules, one table each; `default` is for everybody that no other rule names.",
        "# [access.rules.students]", '# groups = ["students"]', '# max_priority = "low"',
        "# [access.rules.default]", "# submit = false",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def reference(flags: Mapping[str, str]) -> str:
    """docs/configuration.md. flags: the flag of `gpumux serve` for each setting that has one."""
    parts = [HEAD]
    for table in TABLES:
        parts.append(f"\n## [{table}]\n\n{ABOUT[table]}\n\n")
        parts.append("| setting | default | values | reload | meaning |\n|---|---|---|---|---|\n")
        for each in declared(table):
            other = f"`{ENV_PREFIX}{each.name.upper()}`" + (f", `{flags[each.name]}`" if each.name in flags else "")
            reload = "yes" if each.metadata["reload"] else ""
            name, default = f"`{each.name}`<br>{other}", f"`{toml(each.default)}`"
            cells = (name, default, allowed(each), reload, each.metadata["meaning"])
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    parts.append(RULES_HEAD)
    parts += [f"| `{name}` | {meaning} |\n" for name, meaning in RULE_SETTINGS.items()]
    return "".join(parts)


def in_force(path: str | None, environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Each setting's value and where it comes from, without flags. Raises ConfigError."""
    file = path or environ.get(ENV_CONFIG)
    whole = config.load({}, environ, file)  # with the checks of values together
    by_file = config.from_file(Path(file)) if file else {}
    by_environment = config.from_environment(environ)
    found = {}
    for each in fields(Config):
        name, source = each.name, "default"
        if name in by_environment:
            source = ENV_PREFIX + name.upper()
        elif name in by_file:
            source = str(file)
        value = getattr(whole, name)
        if name == "device" and value != {**by_file, **by_environment}.get(name, each.default):
            source = "since gpu is set"
        found[name] = ([rule.name for rule in value] if name in FILE_ONLY else value, source)
    return found


def describe(found: Mapping[str, tuple[Any, str]]) -> str:
    """Settings in force as lines of TOML; where a value is not the default a comment says where it is from."""
    lines: list[str] = []
    for table in TABLES:
        lines += [*([""] if lines else []), f"[{table}]"]
        for each in declared(table):
            value, source = found[each.name]
            said = "" if source == "default" else f"  # {printable(source)}"
            lines.append(f"{each.name} = {_written(each, value)}{said}")
        if table == "access" and found["rules"][0]:
            rules, source = found["rules"]
            lines.append(f"# rules: {printable(', '.join(rules))}  # {printable(source)}")
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    """A text as comment lines of at most WIDTH characters."""
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]


def sentence(each: Field[Any]) -> str:
    meaning = each.metadata["meaning"]
    return str(meaning[0].upper() + meaning[1:])


def allowed(each: Field[Any], before: str = "") -> str:
    """Which values a setting may have, after `before`; "" if any of its type."""
    meta = each.metadata
    words = "".join(f" or {word}" for word in meta["words"])
    if meta["choices"]:
        also = {meant: word for word, meant in meta["words"].items()}
        choices = (f"{choice} (or {also[choice]})" if choice in also else choice for choice in meta["choices"])
        return before + ", ".join(choices)
    if meta["low"] is None:
        return ""
    low = 0 if "off" in meta["words"] else meta["low"]  # the number that `off` stands for is not for people
    if meta["high"] is None:
        return f"{before}at least {low:g}{words}"
    return f"{before}{low:g} to {meta['high']:.12g}{words}"


def _written(each: Field[Any], value: Any) -> str:
    """A setting's value as the file has it, with the word that stands for it, if there is one that is not a choice."""
    words = [word for word, meant in each.metadata["words"].items() if meant == value and not each.metadata["choices"]]
    return toml(words[0] if words else value)


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml(each) for each in value)}]"
    # JSON escapes characters beyond 16 bits in a way that TOML does not know; of the others TOML refuses DEL unescaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
