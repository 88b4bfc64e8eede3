"""The whole check of an encoded Program before a device touches it (DESIGN 4).

Imports torch and runs slowly (a few hundred microseconds an operator): a child process of the daemon
calls it, with a time and memory limit of its own. It is a check, not a sandbox: shapes, kinds, names
and aliases are right afterwards; some kernels still crash on bad *values* (`CheckReport.notes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from gpumux.errors import ProgramError
from gpumux.model import Footprint
from gpumux.program import allowlist, schemas
from gpumux.program.codec import decode
from gpumux.program.fake import FakeRun
from gpumux.program.guards import guard
from gpumux.program.ir import Arg, Op, Program, TensorRef
from gpumux.program.limits import DEFAULT, Limits
from gpumux.program.plan import Plan, footprint, plan
from gpumux.program.show import describe_op
from gpumux.program.validate import leaves, op_args, tensor_refs, validate

_DIVISIONS = frozenset({"div", "div_", "floor_divide", "floor_divide_", "fmod", "fmod_", "remainder", "remainder_"})


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A Program that passed. `content_hash` is that of the encoding. In `footprint`, state holds the
    state slots and the constants, each rounded up to 64 bytes; transient is the plan's peak and what
    one operator returns that no view names. `notes`: values that could still crash a kernel."""

    program: Program
    content_hash: str
    footprint: Footprint
    plan: Plan
    notes: tuple[str, ...]


def check(encoded: bytes, limits: Limits = DEFAULT, extra_ops: Collection[str] = ()) -> CheckReport:
    """Decodes and checks a Program. Raises ProgramError naming the operator and what differs."""
    program = decode(encoded, limits)
    validate(program, limits)
    run = FakeRun(program)
    with run.active():
        for index, op in enumerate(program.ops):
            try:
                _operator(program, op, run, extra_ops)
            except ProgramError as e:
                line = describe_op(program, index).strip()
                raise ProgramError(f"operator {index}, {op.target}: {e.message} [{line:.400}]", e.remedy) from e
    planned = plan(program)
    return CheckReport(
        program,
        hashlib.sha256(encoded).hexdigest(),
        footprint(program, planned, run.unseen_bytes),
        planned,
        _notes(program),
    )


def _operator(program: Program, op: Op, run: FakeRun, extra_ops: Collection[str]) -> None:
    allowlist.resolve(op.target, extra_ops)
    schema = schemas.match(op)
    for arg in schemas.written(op):
        for ref in tensor_refs((arg,)):
            storage = program.storages[program.views[ref.view].storage]
            if storage.kind == "const":
                raise ProgramError("it changes a constant", "make what changes from step to step state")
    guard(program, op)
    run.run(op, schema)


def _notes(program: Program) -> tuple[str, ...]:
    notes = []
    for index, op in enumerate(program.ops):
        name = op.target.split(".")[1]
        if name in _DIVISIONS and all(_is_integer(program, leaf) for leaf in leaves(op_args(op))):
            notes.append(f"operator {index}, {op.target}: integer division traps on the least value by -1")
        for position in allowlist.INDEX_ARGS.get(op.target, ()):
            for ref in tensor_refs(op.args[position : position + 1]):
                view = program.views[ref.view]
                if program.storages[view.storage].kind != "input" and view.dtype != "bool":
                    notes.append(f"operator {index}, {op.target}: indices made by the step can't be checked ahead")
    return tuple(notes)


def _is_integer(program: Program, arg: Arg) -> bool:
    if isinstance(arg, TensorRef):
        return program.views[arg.view].dtype in ("int8", "int16", "int32", "int64")
    return not isinstance(arg, float)
