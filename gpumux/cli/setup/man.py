"""Manual pages: gpumux(1) from the command line's own parser, gpumux.toml(5) from the declarations in
gpumux/config.py."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping

from gpumux import __version__
from gpumux.cli.setup.settings import ABOUT, allowed, declared, sentence, toml
from gpumux.config import ENV_CONFIG, ENV_PREFIX, RULE_SETTINGS, TABLES

COMMANDS, SETTINGS = "man1/gpumux.1", "man5/gpumux.toml.5"

SOURCES = f"""\
Settings of gpumux serve come from a TOML file, which --config or {ENV_CONFIG} names, then from {ENV_PREFIX}* variables,
then from flags; the last one wins. Names that end in _s are seconds, in _bytes bytes. In variables and flags, lists are
written with commas. Settings marked reload are read again on SIGHUP; all others take a restart."""
RULES = """\
A table [access.rules.NAME] for each rule, in the file alone; [access.rules.default] is for everybody that no other rule
names. What holds where a rule does not say is in parentheses."""
START = "gpumux config --defaults > gpumux.toml"


def pages(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> dict[str, bytes]:
    """The pages by their paths below a directory of manuals. flags: the flag of `gpumux serve` for each setting that
    has one."""
    return {
        name: ("\n".join(lines) + "\n").encode()
        for name, lines in ((COMMANDS, list(commands(parser))), (SETTINGS, list(settings(flags))))
    }


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """gpumux(1), a line at a time."""
    yield from _head("gpumux", 1, parser.description or "")
    yield from (".SH SYNOPSIS", f".B {_text(parser.prog)}", ".I COMMAND", "[options]")
    for title, body in _sections(parser.epilog or ""):
        yield f".SH {title}"
        yield from body
    yield ".SH COMMANDS"
    for command in _below(parser):
        yield f'.SS "{_text(command.prog)}"'
        yield from _filled(command.description or "")
        yield from _usage(command)
        for action in command._actions:
            if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
                yield from _option(action)
        yield from _verbatim(command.epilog or "")
    yield from (".SH SEE ALSO", r".BR gpumux.toml (5)")


def settings(flags: Mapping[str, str]) -> Iterator[str]:
    """gpumux.toml(5), a line at a time."""
    yield from _head("gpumux.toml", 5, "settings of a gpumux daemon")
    yield ".SH DESCRIPTION"
    yield from _filled(SOURCES)
    yield from (".PP", "A file with all of them, commented out:", *_verbatim(START))
    for table in TABLES:
        yield f'.SH "[{table}]"'
        yield from _filled(ABOUT[table])
        for each in declared(table):
            yield from (".TP", f'.BR {_text(each.name)} " = {_quoted(toml(each.default))}"')
            yield from _filled(f"{sentence(each)}{allowed(each, '; ')}.")
            others = [ENV_PREFIX + each.name.upper(), *([flags[each.name]] if each.name in flags else [])]
            yield from _filled(f"Also {', '.join(others)}{'; reload' if each.metadata['reload'] else ''}.")
    yield ".SH ACCESS RULES"
    yield from _filled(RULES)
    for name, meaning in RULE_SETTINGS.items():
        yield from (".TP", f".B {_text(name)}")
        yield from _filled(meaning.replace("`", ""))
    yield from (".SH SEE ALSO", r".BR gpumux (1)")


def _head(name: str, section: int, meaning: str) -> Iterator[str]:
    yield f'.TH {name.upper()} {section} "" "gpumux {__version__}"'
    yield from (".SH NAME", rf"{_text(name)} \- {_text(meaning[:1].lower() + meaning[1:].rstrip('.'))}")


def _below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every command, each followed by its own verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield sub
                yield from _below(sub)


def _sections(epilog: str) -> Iterator[tuple[str, list[str]]]:
    """The parts of the command's own epilog: examples and exit codes."""
    for part in epilog.strip().split("\n\n"):
        title, _, body = part.partition(":")
        yield title.upper(), list(_verbatim(body) if "\n  " in body else _filled(body))


def _usage(command: argparse.ArgumentParser) -> Iterator[str]:
    yield ".PP"
    yield from _filled(command.format_usage().removeprefix("usage: "))  # whose lines are those of this terminal


def _option(action: argparse.Action) -> Iterator[str]:
    if action.help == argparse.SUPPRESS:
        return
    value = "" if action.nargs == 0 else str(action.metavar or "|".join(action.choices or ()) or action.dest)
    yield from (".TP", f".B {_text(' '.join(filter(None, (', '.join(action.option_strings), value))))}")
    yield from _filled(action.help or "")


def _filled(text: str) -> Iterator[str]:
    """A paragraph, which the reader's terminal breaks into lines."""
    yield from (_text(line) for line in textwrap.wrap(" ".join(text.split()), 100, break_on_hyphens=False))


def _verbatim(text: str) -> Iterator[str]:
    """Text whose lines stay as they are."""
    body = textwrap.dedent(text).strip("\n")
    if body.strip():
        yield from (".PP", ".EX", *(_text(line) for line in body.split("\n")), ".EE")


def _text(text: str) -> str:
    """Text without what roff would take for its own: escapes, requests, and hyphens that it may break or replace."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("`", r"\`").replace("'", r"\(aq")
    text = text.replace("^", r"\(ha").replace("~", r"\(ti")
    return rf"\&{text}" if text.startswith(".") else text


def _quoted(text: str) -> str:
    """Text within the quotes of an argument."""
    return _text(text).replace('"', r"\(dq")
