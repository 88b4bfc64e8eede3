"""The check of an encoded Program without torch: its structure, its operators' names and its memory.

What the operators would make of their arguments is not looked at: nothing is computed here, so nothing can go
wrong there. A Program that passes here can still be refused by a real device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from sys import intern

from gpumux.device.contract import ProgramChecked, ProgramRefused
from gpumux.errors import ProgramError
from gpumux.model import Fault, Footprint, JobId, ProgramId
from gpumux.program import allowlist
from gpumux.program.codec import decode
from gpumux.program.ir import Program
from gpumux.program.limits import Limits
from gpumux.program.plan import footprint, plan
from gpumux.program.validate import validate


@dataclass(frozen=True, slots=True)
class Passed:
    program: Program
    footprint: Footprint
    content_hash: str


class Checks:
    """Programs that passed, until they are loaded or their job goes."""

    def __init__(self, limits: Limits, extra_ops: Collection[str]) -> None:
        self._limits = limits
        self._extra_ops = extra_ops
        self._passed: dict[tuple[JobId, ProgramId], Passed] = {}

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> ProgramChecked | ProgramRefused:
        try:
            passed = self._check(encoded)
        except ProgramError as error:
            return ProgramRefused(job, program, Fault(error.code, error.message, error.remedy))
        self._passed[job, program] = passed
        scalars = passed.program.scalars
        operators = tuple([intern(op.target) for op in passed.program.ops])
        return ProgramChecked(job, program, passed.footprint, passed.content_hash, operators, tuple(scalars))

    def take(self, job: JobId, program: ProgramId, encoded: bytes) -> Passed | None:
        """What the check of exactly these bytes found; None when they were not checked."""
        passed = self._passed.get((job, program))
        if passed is None or passed.content_hash != hashlib.sha256(encoded).hexdigest():
            return None
        return self._passed.pop((job, program))

    def forget(self, job: JobId) -> None:
        for key in [key for key in self._passed if key[0] == job]:
            del self._passed[key]

    def _check(self, encoded: bytes) -> Passed:
        program = decode(encoded, self._limits)
        validate(program, self._limits)
        for index, op in enumerate(program.ops):
            try:
                allowlist.resolve(op.target, self._extra_ops)
            except ProgramError as error:
                raise ProgramError(f"operator {index}: {error.message}", error.remedy) from None
        return Passed(program, footprint(program, plan(program)), hashlib.sha256(encoded).hexdigest())
