"""`gpumux completion`: completion scripts for shells, generated from the command line's own parser.

    bash   eval "$(gpumux completion bash)"                                 in ~/.bashrc
    zsh    eval "$(gpumux completion zsh)"                                  in ~/.zshrc, after compinit
    fish   gpumux completion fish > ~/.config/fish/completions/gpumux.fish

The script holds commands, flags, verbs and fixed values. For the JOB of `gpumux jobs` it asks the daemon, for a second
at most and without messages. Shells expand what they complete with. A job whose name has characters other than letters,
digits, dots and dashes is therefore offered by its short id only.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from gpumux.cli.text import emit

SHELLS = ("bash", "zsh", "fish")
FILES = frozenset({"FILE", "FILE.json", "FILE.png", "DIR"})  # metavars that stand for a path
JOB = "JOB"


class Flag(NamedTuple):
    """values: what may follow the flag. takes: whether it takes an argument. is_path: the argument is a file."""

    names: tuple[str, ...]
    meaning: str
    takes: bool
    values: tuple[str, ...]
    is_path: bool


class CommandSpec(NamedTuple):
    """A command or subcommand, as completions need it."""

    words: tuple[str, ...]  # ("jobs",) or ("plan", "burst")
    meaning: str
    flags: tuple[Flag, ...]
    words_after: tuple[str, ...]  # subcommands, or the values of an argument that is no job
    jobs: bool  # whether the first argument is a job


def run(args: argparse.Namespace) -> int:
    emit(script(args.shell, args.parser))
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The completion script of a shell for the whole command line of `parser`."""
    commands = _commands(parser)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


# ---- the commands


def _commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = (), meaning: str = "") -> list[CommandSpec]:
    flags, after, below = [], (), []  # type: list[Flag], tuple[str, ...], list[CommandSpec]
    metavars = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            after = tuple(action.choices)
            meanings = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                below += _commands(sub, (*words, name), meanings.get(name, ""))
        elif action.option_strings:
            if action.help != argparse.SUPPRESS:
                flags.append(_flag(action))
        else:
            metavars.append(action.metavar)
            after = after or tuple(map(str, action.choices or ()))
    return [CommandSpec(words, meaning, tuple(flags), after, JOB in metavars), *below]


def _flag(action: argparse.Action) -> Flag:
    metavar = str(action.metavar or "")
    values = tuple(map(str, action.choices or ())) or (tuple(metavar.split("|")) if "|" in metavar else ())
    takes = action.nargs != 0
    return Flag(tuple(action.option_strings), (action.help or "").replace("\n", " "), takes, values, metavar in FILES)


# ---- bash, and zsh by way of it

_BASH = """\
# gpumux completion for bash; made by `gpumux completion bash`
_gpumux_jobs() {{
  gpumux jobs --json --timeout 1 2>/dev/null |
    sed -n 's/^ *"\\(short\\|name\\)": "\\([A-Za-z0-9._-]*\\)",\\{{0,1\\}}$/\\2/p'
}}
_gpumux() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" index=1 plain=0
  COMPREPLY=()
  while [ "$index" -lt "$COMP_CWORD" ]; do
    case "$command:${{COMP_WORDS[index-1]}}" in
      {takes}) index=$((index + 1)); continue ;;
    esac
    case "${{COMP_WORDS[index]}}" in
      -*) ;;
      *) case "$command ${{COMP_WORDS[index]}}" in
{paths}
           *) plain=$((plain + 1)) ;;
         esac ;;
    esac
    index=$((index + 1))
  done
  case "$command:$before" in
{values}
  esac
  case "$word" in
    -*) case "$command" in
{flags}
        esac
        return ;;
  esac
  case "$command" in
{words}
  esac
}}
complete -F _gpumux gpumux"""


def _bash(commands: list[CommandSpec]) -> str:
    paths, values, flags, words = [], [], [], []
    takes = [f'"{" ".join(c.words)}:{name}"' for c in commands for flag in c.flags if flag.takes for name in flag.names]
    for command in commands:
        path = " ".join(command.words)
        if path:
            above = " ".join(command.words[:-1])
            paths.append(f'           "{above} {command.words[-1]}") command="{path}"; plain=0 ;;')
        for flag in command.flags:
            patterns = "|".join(f'"{path}:{name}"' for name in flag.names)
            if flag.is_path:
                values.append(f'    {patterns}) COMPREPLY=($(compgen -f -- "$word")); return ;;')
            elif flag.values:
                values.append(
                    f'    {patterns}) COMPREPLY=($(compgen -W "{" ".join(flag.values)}" -- "$word")); return ;;'
                )
            elif flag.takes:
                values.append(f"    {patterns}) return ;;")
        names = " ".join(name for flag in command.flags for name in flag.names)
        flags.append(f'          "{path}") COMPREPLY=($(compgen -W "{names}" -- "$word")) ;;')
        words += _bash_words(path, command)
    lines = {"takes": ["|".join(takes)], "paths": paths, "values": values, "flags": flags, "words": words}
    return _BASH.format(**{name: "\n".join(found) for name, found in lines.items()})


def _bash_words(path: str, command: CommandSpec) -> list[str]:
    words = f'COMPREPLY=($(compgen -W "{" ".join(command.words_after)}" -- "$word"))'
    if command.jobs:
        return [
            f'    "{path}") case "$plain" in',
            '        0) COMPREPLY=($(compgen -W "$(_gpumux_jobs)" -- "$word")) ;;',
            *([f"        1) {words} ;;"] if command.words_after else []),
            "      esac ;;",
        ]
    return [f'    "{path}") {words} ;;'] if command.words_after else []


def _zsh(commands: list[CommandSpec]) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash(commands).replace("for bash", "for zsh").replace(
        "completion bash", "completion zsh"
    )


# ---- fish


def _fish(commands: list[CommandSpec]) -> str:
    lines = [
        "# gpumux completion for fish; made by `gpumux completion fish`",
        "complete -c gpumux -f",
        "function __gpumux_jobs",
        (
            '    gpumux jobs --json --timeout 1 2>/dev/null | string match -rg \'^ *"(?:short|name)":'
            ' "([A-Za-z0-9._-]+)",?$\''
        ),
        "end",
    ]
    for command in commands:
        lines += _fish_command(command, {other.words: other for other in commands})
    return "\n".join(lines)


def _fish_command(command: CommandSpec, known: dict[tuple[str, ...], CommandSpec]) -> list[str]:
    here = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
    here = here or "__fish_use_subcommand"
    lines = []
    for word in command.words_after:
        below = known.get((*command.words, word))
        none_yet = "" if not command.words else f"; and not __fish_seen_subcommand_from {' '.join(command.words_after)}"
        said = f" -d '{_quoted(below.meaning)}'" if below is not None and below.meaning else ""
        lines.append(f"complete -c gpumux -n '{here}{none_yet}' -a {word}{said}")
    if command.jobs:
        lines.append(f"complete -c gpumux -n '{here}' -a '(__gpumux_jobs)'")
    for flag in command.flags:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
        more = (
            f" -xa '{' '.join(flag.values)}'"
            if flag.values
            else " -rF"
            if flag.is_path
            else " -x"
            if flag.takes
            else ""
        )
        lines.append(f"complete -c gpumux -n '{here}' {names}{more} -d '{_quoted(flag.meaning)}'")
    return lines


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%")
