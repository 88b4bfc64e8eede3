"""Device events to core events, with what the daemon has to do in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumux.core import events as ev
from gpumux.daemon.books import JobRecord, ProgramRecord, aligned_total
from gpumux.daemon.desk import Desk, as_fault, log
from gpumux.daemon.loans import Loans
from gpumux.daemon.requests import start_load
from gpumux.device import contract as dev
from gpumux.errors import GpumuxError, ProgramError
from gpumux.model import Fault, Footprint
from gpumux.program.outline import outline
from gpumux.wire import messages as msg

MAX_SCALARS = 28_000  # of 9 bytes each: what fits a Step (wire/limits.py, max_control_bytes)
_SCALARS: dict[str, type] = {"float": float, "int": int}


class Completions:
    """`handlers` by class of event: one for each a device may report."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._books = desk.books
        feed = desk.feed
        self.handlers: dict[type, Callable[[Any], None]] = {
            dev.LaunchDone: lambda e: feed(ev.PieceDone(e.launch, e.started, e.ended, e.answered, e.suspended)),
            dev.LaunchFailed: lambda e: feed(ev.PieceFailed(e.launch, e.fault)),
            dev.Recut: lambda e: feed(ev.ProgramReady(e.job, e.program, e.cut, e.pieces, e.bounds)),
            dev.TransferDone: lambda e: feed(ev.TransferEnded(e.job, e.transfer, e.fault)),
            dev.JobLost: lambda e: feed(ev.JobDied(e.job, e.fault)),
            dev.JobUnloaded: lambda e: feed(ev.JobReleased(e.job)),
            dev.ProgramChecked: self._checked,
            dev.ProgramLoaded: self._loaded,
            dev.ProgramRefused: self._refused,
            dev.ProgramProfiled: self._profiled,
        }

    def use(self, loans: Loans) -> None:
        """The device borrows lanes: hear of those that are back."""
        feed = self._desk.feed

        def lost(event: dev.JobLost) -> None:
            loans.gone(event.job)
            feed(ev.JobDied(event.job, event.fault))

        def unloaded(event: dev.JobUnloaded) -> None:
            loans.gone(event.job)
            feed(ev.JobReleased(event.job))

        self.handlers |= {dev.LaneReturned: loans.returned, dev.JobLost: lost, dev.JobUnloaded: unloaded}

    def _program(self, event: Any) -> tuple[JobRecord, ProgramRecord] | None:
        """The records an event is about, or None when the job ended while the device was at it."""
        job = self._books.jobs.get(event.job)
        program = job.programs.get(event.program) if job is not None else None
        return (job, program) if job is not None and program is not None and not job.over else None

    def _checked(self, event: dev.ProgramChecked) -> None:
        self._desk.checks.ended(event.job, event.program)
        found = self._program(event)
        if found is None:
            return
        job, program = found
        program.slot_bytes = event.footprint.slot_bytes
        program.scalars = tuple(_SCALARS[kind] for kind in event.scalars)
        # A program that runs on the state of the job's earlier ones adds only what it asks for anew.
        state_bytes = aligned_total(program.new_buffers)
        # The device speaks of one slot, the core charges the whole data segment.
        slot_bytes = program.slots * program.slot_bytes
        footprint = Footprint(state_bytes, event.footprint.transient_bytes, slot_bytes)
        try:
            _check_scalars(len(event.scalars))
            if job.session.inline:
                program.outline = outline(program.encoded)
        except GpumuxError as error:
            self._drop(job, program, as_fault(error))
            return
        program.offered = True
        log.info(
            "job %s: program %d checked, %d operators, %s",
            job.short,
            program.id,
            len(event.operators),
            event.content_hash,
        )
        self._desk.feed(ev.ProgramOffered(job.id, program.id, footprint, event.content_hash, event.operators))

    def _loaded(self, event: dev.ProgramLoaded) -> None:
        if self._program(event) is not None:
            self._desk.feed(ev.ProgramReady(event.job, event.program, 0, event.pieces, event.bounds))

    def _refused(self, event: dev.ProgramRefused) -> None:
        self._desk.checks.ended(event.job, event.program)
        found = self._program(event)
        if found is None:
            return
        job, program = found
        if program.offered:
            self._desk.feed(ev.ProgramDropped(event.job, event.program, event.fault))
        else:
            self._drop(job, program, event.fault)

    def _profiled(self, event: dev.ProgramProfiled) -> None:
        """Answers come in the order they were asked for."""
        job = self._books.jobs.get(event.job)
        if job is None or not job.profiles:
            return  # the job ended, and whoever asked has heard
        session, ref = job.profiles.popleft()
        if event.fault is not None:
            self._desk.refuse(session, ref, event.fault)
        else:
            self._desk.reply(session, msg.JobProfile(ref, event.job, event.program, 1), [event.text])

    def _drop(self, job: JobRecord, program: ProgramRecord, fault: Fault) -> None:
        """Refuse a program the core has not heard of."""
        del job.programs[program.id]
        self._desk.refuse(job.session, program.ref, fault)
        if job.loading is program:
            job.loading = None
            start_load(self._desk, job)


def _check_scalars(count: int) -> None:
    if count > MAX_SCALARS:
        raise ProgramError(
            f"the program takes {count} host scalars with every step, and {MAX_SCALARS} fit",
            "give parameters one learning rate and one step count between them, as optimizers with foreach do",
        )


def lanes_first(events: list[dev.DeviceEvent]) -> list[dev.DeviceEvent]:
    """What ran with a lane that is back, the core is told before anything else."""
    return events if len(events) < 2 else sorted(events, key=_is_no_lane)


def _is_no_lane(event: dev.DeviceEvent) -> bool:
    return type(event) is not dev.LaneReturned
