"""What a job holds of a device's memory, and whether another program fits."""

from __future__ import annotations

from typing import ClassVar

from gpumux.model import Fault, Footprint, ProgramId


class Charges:
    """The part of a device's record of a job that counts its memory. Needs the rest of it."""

    __slots__ = ()
    WHERE: ClassVar[str] = ""  # is what is free, for those who are refused
    charged: int  # bytes of its buffers and data
    transients: dict[ProgramId, int]  # of its programs, loaded or loading

    @property
    def memory(self) -> int:
        """Bytes it holds. Its programs never run at once, so they share the transient part."""
        return self.charged + max(self.transients.values(), default=0)

    def refuses(self, program: ProgramId, wanted: int, footprint: Footprint | None, free: int) -> Fault | None:
        """Why a program that adds `wanted` bytes of buffers and data can't be loaded, if it can't."""
        if footprint is None:
            return Fault("program", "the program was not checked", "check these bytes before loading them")
        if program in self.transients:
            return Fault("program", f"program {program} is loaded already", "choose another number")
        wanted += footprint.transient_bytes
        if wanted <= free:
            return None
        message = f"the program needs {wanted} bytes and {free} are free{self.WHERE}"
        return Fault("admission_refused", message, "use smaller batches, or wait for other jobs to end")
