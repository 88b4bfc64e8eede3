"""Lending a job's step lane to the device, so that its steps don't pass through the daemon.

A step that would be launched as soon as it came (scheduler/standing.py) needs nobody's decision. After a while
of such steps the device gets the lane (device.contract.Lending): it takes them from there, runs them,
answers them, and leaves a record. Here the records become the events the core would have had, at the
times they happened, so that all accounts are kept as ever. That is done before the core is told
anything else: then the lane is recalled, the step that runs becomes a launch like any other, and only
then comes what made the difference. The lane itself is back a little later, and so are the messages that
the client sent behind the steps on it (wire/lanereader.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from gpumux.daemon.context import Desk, log
from gpumux.daemon.records import JobRecord, SessionRecord, StepRecord
from gpumux.device.base import LaneReturned, Launch, Lending, LoanTerms, StepRan
from gpumux.scheduler import events as ev
from gpumux.scheduler.events import LaunchPiece
from gpumux.types import JobId, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.codec import encode_alone, step_head

LONGEST = 4096  # bytes of a Step; longer ones come through the daemon
STEP_BYTES = 64  # about what a Step takes on the lane, for the limits
AFTER_STEPS = 16  # that a job ran alone, one after the other, and the device answered


class Loans:
    """`tell(event, when)` hands an event to the core and carries out its commands; `clock` as the loop's."""

    def __init__(
        self, desk: Desk, device: Lending, tell: Callable[[ev.Event, float], None], clock: Callable[[], float]
    ) -> None:
        self.out: JobRecord | None = None  # whose lane the device may take steps from
        self.due: JobRecord | None = None  # whose lane is to be lent with its next step
        self.telling = False  # an event of a step that the device took is being told
        self._desk = desk
        self._device = device
        self._tell = tell
        self._clock = clock
        self._back: dict[JobId, JobRecord] = {}  # recalled, and not here yet
        self._last: JobRecord | None = None  # who ran the last steps, and how many alone
        self._alone = 0
        self._made: LaunchPiece | None = None
        desk.router.recall, desk.recall = self._recall, self.recall

    # ---- lending

    def finished(self, job: JobRecord, answered: bool) -> None:
        """A step of the job is over. Its lane is due to be lent once it has been alone for long enough."""
        if job is not self._last or not answered:
            self._last, self._alone, self.due = job, 0, None
            return
        self._alone += 1
        if self._alone >= AFTER_STEPS:
            self.due = job

    def takes(self, session: SessionRecord, step: Any) -> bool:
        """Lend the lane that is due, together with the step that has just been read from it, last of all; whether
        that was done. A step that came by itself, and not behind others, will be followed by such."""
        job = self.due
        if job is None or job.session is not session or type(step) is not msg.Step or step.job != job.id:
            return False
        if job.steps:
            self._desk.catch_up(job)  # it may be over, and we have not heard
        due, self.due, self._alone = self.due, None, 0
        if due is not job or job.steps or self.out is not None or self._back or self._desk.events:
            return False
        if self._desk.books.jobs.get(job.id) is not job:
            return False  # it ended; this is another one under its id
        if job.loading is not None or job.profiles:
            return False  # the device is asked for these behind the core's back, and must not read the lane then
        cuts = self._desk.core.standing(job.id)
        terms = [
            LoanTerms(program.id, cuts[program.id], program.slots, tuple(map(_kind, program.scalars)))
            for program in job.programs.values()
            if program.id in cuts and program.announced
        ]
        packet = bytes(encode_alone(step))
        if not terms or len(packet) > LONGEST or len(session.jobs) != 1 or not self._desk.router.lend(session.id):
            return False
        log.debug("job %s: its lane is lent to the device", job.short)
        self.out = job
        self._device.lend(job.id, step_head(job.id), job.last_step, terms, packet)
        return True

    # ---- what the device did meanwhile

    def hear(self) -> None:
        """Tell the core of the steps that ended since this was done last."""
        job = self.out
        if job is not None:
            self._catch_up(job, self._device.ran(job.id))

    def recall(self) -> None:
        """Let the device take no further step. Afterwards the core knows all that it did."""
        job, self.out = self.out, None
        if job is None:
            return
        self._back[job.id] = job
        log.debug("job %s: its lane is wanted back", job.short)
        runs = self._device.recall(job.id)
        self._catch_up(job, self._device.ran(job.id))
        self._alone, self.due = 0, None
        if runs is not None:
            launch = self._begin(job, runs)
            step = job.steps[launch.step]
            self._device.adopt(
                Launch(
                    launch.launch, job.id, launch.step, launch.program, launch.cut, launch.piece, step.slot,
                    step.scalars, launch.stream, launch.share, launch.submitted,
                )
            )  # fmt: skip

    def _recall(self, session: SessionId) -> None:
        if self.out is not None and self.out.session.id == session:
            self.recall()

    def returned(self, event: LaneReturned) -> None:
        """The device reads the lane no more."""
        job = self._over(event.job)
        if job is None:
            return
        ended = [step for step in event.ran if step.ended]
        log.debug("job %s: its lane is back", job.short)
        self._catch_up(job, ended)
        if len(ended) < len(event.ran):
            self._begin(job, event.ran[-1])  # the job is lost with it, which comes next
        self._alone, self.due = 0, None
        self._desk.router.take_back(job.session.id, event.packet, self._clock())

    def gone(self, job_id: JobId) -> None:
        """The device holds nothing of the job any more, so not its lane either."""
        job = self._over(job_id)
        if job is not None:
            self._desk.router.take_back(job.session.id, b"", self._clock())

    def _over(self, job_id: JobId) -> JobRecord | None:
        job = self._back.pop(job_id, None)
        if job is None and self.out is not None and self.out.id == job_id:
            job, self.out = self.out, None
        return job

    # ---- telling

    def _catch_up(self, job: JobRecord, ran: Sequence[StepRan]) -> None:
        if not ran:
            return
        for step in ran:
            launch = self._begin(job, step)
            self._tell(ev.PieceDone(launch.launch, step.started, step.ended, step.answered), step.ended)
        self._desk.router.took(job.session.id, len(ran), len(ran) * STEP_BYTES, self._clock())

    def _begin(self, job: JobRecord, ran: StepRan) -> LaunchPiece:
        """Tell of a step's arrival; the launch that the core makes of it."""
        program = job.programs[ran.program]
        job.last_step = ran.step
        job.steps[ran.step] = StepRecord(program, ran.slot, ())
        program.busy[ran.slot] = ran.step
        program.steps += 1
        self._desk.metrics.tally.received[msg.Step] += 1
        self._made, self.telling = None, True
        try:
            self._tell(ev.StepSubmitted(job.id, ran.step, ran.program), ran.submitted)
        finally:
            self.telling = False
        made = self._made
        assert made is not None, f"step {ran.step} of {job.short} ran where the core would not have launched it"
        assert made.step == ran.step, f"step {made.step} of {job.short} was launched, where step {ran.step} ran"
        return made

    def launched(self, launch: LaunchPiece) -> None:
        """The core launches a piece while it is told of a step that runs already."""
        self._made = launch


def _kind(scalar: type) -> Literal["float", "int"]:
    return "float" if scalar is float else "int"
