"""`gpumux grants`: make, list and release shares of a daemon's device, for programs that hold a token."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpumux.cli.text import emit, emit_json
from gpumux.errors import Refused
from gpumux.types import PRIORITIES
from gpumux.wire.grants import TOKEN, GrantDirectory

VERBS = {
    "make": "grant a share of the device, and print its token",
    "list": "list the grants there are",
    "release": "take a grant back; its holder's jobs end",
}
ABOUT = f"""\
DIR is the daemon's [access] grants. A client with the token in {TOKEN}, and the daemon's grants_endpoint in
GPUMUX_ENDPOINT, may open jobs that together take this part of the device's memory and, beside others, of its time. The
device plugin for Kubernetes and the prolog for Slurm make grants by themselves.

examples:
  gpumux grants make --dir /run/gpumux-slurm/grants/0 slurm-17 25        a quarter of the device, low priority
  gpumux grants list --dir /run/gpumux-slurm/grants/0
  gpumux grants release --dir /run/gpumux-slurm/grants/0 slurm-17

exit codes: 0 done, 1 there is no such grant, 64 wrong usage, 78 a name or number is wrong, or DIR can't be written to
"""


def add(parser: argparse.ArgumentParser, parser_class: type[argparse.ArgumentParser]) -> None:
    """The verbs of `gpumux grants`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=parser_class)
    made = {
        name: verbs.add_parser(name, help=meaning, description=meaning[0].upper() + meaning[1:] + ".")
        for name, meaning in VERBS.items()
    }
    for verb in made.values():
        verb.add_argument("--dir", metavar="DIR", required=True, help="the daemon's directory of grants")
    for name in ("make", "release"):
        made[name].add_argument("name", metavar="NAME", help="the grant's name: letters, digits, dashes, underscores")
    made["make"].add_argument("shares", metavar="SHARES", type=int, help="how many shares of the device")
    made["make"].add_argument("--of", metavar="N", type=int, default=100, help="how many it has in all (default 100)")
    made["make"].add_argument(
        "--max-priority", choices=PRIORITIES, default="low", help="the highest priority of its jobs (default low)"
    )
    made["list"].add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(args: argparse.Namespace) -> int:
    directory = GrantDirectory(Path(args.dir))
    if args.verb == "make":
        emit(directory.make(args.name, args.shares, args.of, max_priority=PRIORITIES[args.max_priority]))
        return 0
    if args.verb == "release":
        if directory.release(args.name):
            return 0
        raise Refused(f"there is no grant {args.name} in {args.dir}", "`gpumux grants list` shows those there are")
    found = [
        {
            "name": record.name,
            "shares": record.shares,
            "of": record.of,
            "max_priority": record.max_priority.name.lower(),
            "devices": list(record.devices),
        }
        for record in directory.records()
    ]
    if args.json:
        emit_json(found)
        return 0
    if not found:
        emit(f"no grants in {args.dir}" + ("" if Path(args.dir).is_dir() else ", which is not there"))
    for each in found:
        emit(f"{each['name']}  {each['shares']} of {each['of']} shares, priority up to {each['max_priority']}")
    return 0
