"""How long pieces are to be, handed on to the process that cuts them. No torch."""

from __future__ import annotations

from gpumux.device.cpu.jobs import Cut, Errand, Executor
from gpumux.model import JobId, ProgramId


class Aims:
    """The part of the CPU device that is contract.Device.cut."""

    def _live(self, job: JobId) -> Executor | None:
        raise NotImplementedError

    def _send(self, executor: Executor, command: Errand) -> None:
        raise NotImplementedError

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        """See contract.Device."""
        executor = self._live(job)
        if executor is not None:
            self._send(executor, Cut(program, target_s))
