"""A simulated client: it speaks the protocol as gpumux.client does, and holds the daemon to what it promises.

It trains on batches that follow from its name, saves its state now and then, and when its session, its job or the
daemon is gone it comes back: it finds its job's snapshots, opens the job again, restores one and runs later steps
again. It knows what the state is after every step, so a step that is lost, repeated or moved shows at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from gpumux.program import codec
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES
from gpumux.wire import messages as msg
from tests.faults.parts import GENERATOR, STATE, advance
from tests.program import samples

if TYPE_CHECKING:
    from tests.faults.world import World

PROGRAM = codec.encode(samples.add_one())
RETRY_S = 0.3
GIVE_UP_S = 120.0  # of asking for a job that is said to be open still
# Errors of a job that recovers; the last one is of a read whose writer died.
COMES_BACK = {"executor_crashed", "daemon_gone", "internal", "unknown_job", "snapshot_failed"}
BUSY = {"admission_refused", "not_owner", "draining", "config"}

Life = Generator[float | None, Any, None]  # yields seconds to sleep, or None to wait for a message


class Lost(Exception):
    """The session, the job or the daemon is gone."""


class Broken(AssertionError):
    """The daemon broke a promise."""


class Client:
    def __init__(self, world: World, name: str, uid: int, steps: int, *, sheltered: bool = False) -> None:
        self.world, self.name, self.uid, self.sheltered = world, name, uid, sheltered
        self.random = world.random_for(name)
        self.batches = [blake(name, number) for number in range(steps)]
        self.states = [bytes(STATE)]
        for batch in self.batches:
            self.states.append(advance(self.states[-1], batch))
        self.job = world.job_id(name)
        self.session = ""
        self.inbox: list[tuple[Any, list[bytes]]] = []
        self.finished = self.dead = self.began = False
        self.answered: set[int] = set()
        self.lives = 0
        self.snapshot = 0  # number of the newest one asked for
        self.kept = 0  # steps in the newest one that is saved
        self._refs = self._transfers = 0
        self._saving = False
        self._open: dict[int, int] = {}  # steps that are not answered in this life, with their slots

    # ---- one life after the other

    def life(self) -> Life:
        while not self.finished:
            try:
                yield from self._connect()
                at = yield from self._open_job()
                yield from self._train(at)
                yield from self._close()
            except Lost:
                if self.session:
                    self.world.leave(self)
                if self.finished:
                    return
                self.lives += 1
                self._open.clear()
                self._saving = False
                yield self.random.uniform(0.05, 1.0)

    def _connect(self) -> Life:
        while not self.world.connect(self):
            yield RETRY_S
        self.inbox.clear()

    def _open_job(self) -> Generator[float | None, Any, int]:
        """Returns the number of steps in the job's state."""
        numbers: list[int] = []
        if self.began:
            found = yield from self._patiently(lambda ref: msg.FindKept(ref, self.name), {"unknown_job"})
            if isinstance(found, msg.KeptFound):
                self.job, numbers = found.job, list(found.snapshots)
                if self.snapshot and not numbers:
                    raise Broken(f"{self.name}: kept, without snapshots")
            elif self.kept:
                raise Broken(f"{self.name}: {self.kept} steps were saved, and nothing is kept: {found}")
        yield from self._patiently(
            lambda ref: msg.OpenJob(ref, self.job, self.name, int(self.sheltered), 1.0, 1.1, None, 2, 0), set()
        )
        self.began = True
        loaded, _ = yield from self._ask(lambda ref: msg.LoadProgram(ref, self.job, 0, [STATE], []), PROGRAM)
        if isinstance(loaded, msg.Refusal):
            raise self._refused(loaded)
        self._slots = loaded.slots
        at = 0
        state = self.states[0]
        if numbers:
            read, frames = yield from self._ask(lambda ref: msg.ReadSnapshot(ref, self.job, numbers[: msg.MAX_ASKED]))
            if isinstance(read, msg.Refusal):
                raise self._refused(read)
            data = frames[0]
            notes = data[aligned(STATE) + GENERATOR_BYTES :]
            at, state = int.from_bytes(notes, "little"), data[:STATE]
            self.snapshot = max(self.snapshot, numbers[0])
            if state != self.states[at]:
                raise Broken(f"{self.name}: snapshot {read.snapshot} says {at} steps and holds another state")
            if data[aligned(STATE) + 8 :][: len(GENERATOR)] != GENERATOR:
                raise Broken(f"{self.name}: a snapshot without its generator")
            if read.bad:
                raise Broken(f"{self.name}: snapshots {read.bad} can't be read, which no fault here causes")
            if at < self.kept:
                raise Broken(f"{self.name}: {self.kept} steps were saved, the newest snapshot holds {at}")
        yield from self._push(state)
        replays = len([number for number in self.answered if number >= at])
        if self.lives:
            done, _ = yield from self._ask(lambda ref: msg.Replay(ref, self.job, replays, 1), b"")
            if isinstance(done, msg.Refusal):
                raise self._refused(done)
        return at

    def _push(self, state: bytes) -> Life:
        self._transfers += 1
        number = self._transfers
        made, _ = yield from self._ask(lambda ref: msg.OpenTransfer(ref, self.job, number, [0], True))
        if isinstance(made, msg.Refusal):
            raise self._refused(made)
        self.world.say(self, msg.FillTransfer(self._ref(), self.job, number, 1), state.ljust(made.nbytes, b"\0"))
        yield from self._moved(number)

    def _moved(self, number: int) -> Generator[float | None, Any, list[bytes]]:
        while True:
            message, frames = yield from self._next()
            if isinstance(message, msg.TransferDone) and message.transfer == number:
                if message.code:
                    raise self._refused(message)
                return frames

    def _train(self, at: int) -> Life:
        steps, number = len(self.batches), at
        next_save = number + self.random.randint(2, 6)
        while number < steps or self._open:
            free = set(range(self._slots)) - set(self._open.values())
            if number < steps and free and len(self._open) < 2:
                slot = min(free)
                self._open[number] = slot
                self.world.say(self, msg.Step(self.job, number, 0, slot, [], 1), self.batches[number])
                number += 1
                if number >= next_save and not self._saving:
                    next_save = number + self.random.randint(2, 6)
                    yield from self._save(number)
                yield self.random.choice((0.0, 0.0, 0.002, 0.02))
                continue
            yield from self._next()

    def _save(self, steps: int) -> Life:
        done, _ = yield from self._ask(lambda ref: msg.PrepareSnapshot(ref, self.job))
        if isinstance(done, msg.Refusal):
            if done.code in BUSY:
                return
            raise self._refused(done)
        self.snapshot += 1
        number, self._saving = self.snapshot, True
        notes = steps.to_bytes(8, "little")
        self._steps_of = {number: steps}
        done, _ = yield from self._ask(lambda ref: msg.TakeSnapshot(ref, self.job, number, steps, 1), notes)
        if isinstance(done, msg.Refusal):
            self._saving = False
            if done.code not in BUSY:
                raise self._refused(done)

    def _close(self) -> Life:
        self._transfers += 1
        number = self._transfers
        made, _ = yield from self._ask(lambda ref: msg.OpenTransfer(ref, self.job, number, [0], False))
        if isinstance(made, msg.Refusal):
            raise self._refused(made)
        frames = yield from self._moved(number)
        if bytes(frames[0][:STATE]) != self.states[-1]:
            raise Broken(f"{self.name}: the state at the end is not that of {len(self.batches)} steps in order")
        self.finished = True  # whatever happens from here on: the daemon may have closed it, and forgotten the job
        yield from self._ask(lambda ref: msg.CloseJob(ref, self.job, True))
        self.world.leave(self)

    # ---- messages

    def _ref(self) -> int:
        self._refs += 1
        return self._refs

    def _ask(self, make: Any, *frames: bytes) -> Generator[float | None, Any, tuple[Any, list[bytes]]]:
        """Send a request, and wait for its answer; what else comes meanwhile is taken note of."""
        ref = self._ref()
        self.world.say(self, make(ref), *frames)
        while True:
            message, answer = yield from self._next()
            if getattr(message, "ref", None) == ref:
                return message, answer

    def _patiently(self, make: Any, final: set[str]) -> Generator[float | None, Any, Any]:
        """Ask until the answer is no refusal, or one of these codes."""
        began = self.world.now
        while True:
            answer, _ = yield from self._ask(make)
            if not isinstance(answer, msg.Refusal) or answer.code in final:
                return answer
            if answer.code not in BUSY:
                raise self._refused(answer)
            if self.world.now - began > GIVE_UP_S:
                raise Broken(f"{self.name}: refused for {GIVE_UP_S:.0f} s: {answer.message}")
            yield RETRY_S

    def _next(self) -> Generator[float | None, Any, tuple[Any, list[bytes]]]:
        while not self.inbox:
            yield None
        message, frames = self.inbox.pop(0)
        self._note(message, frames)
        return message, frames

    def _note(self, message: Any, frames: list[bytes]) -> None:
        if isinstance(message, msg.StepDone):
            if message.step not in self._open:
                raise Broken(f"{self.name}: step {message.step} is answered, and was not open")
            del self._open[message.step]
            if bytes(frames[0][:STATE]) != self.states[message.step + 1]:
                raise Broken(f"{self.name}: step {message.step} did not follow the steps before it")
            self.answered.add(message.step)
        elif isinstance(message, msg.SnapshotSaved):
            self._saving = False
            if not message.code:
                self.kept = max(self.kept, self._steps_of[message.snapshot])
        elif isinstance(message, msg.StepFailed | msg.JobEnded) or (
            isinstance(message, msg.Refusal) and message.ref == 0
        ):
            raise self._refused(message)
        elif isinstance(message, msg.Leaving):
            raise Lost

    def _refused(self, message: Any) -> Exception:
        """What an error means: the job comes back, or the daemon broke a promise."""
        if self.sheltered and self.world.blameless(self):
            return Broken(f"{self.name} was to be left alone: {message}")
        if message.code in COMES_BACK or message.code in BUSY or not message.code:
            return Lost()
        return Broken(f"{self.name}: {message}")


def blake(name: str, number: int) -> bytes:
    return advance(name.encode(), number.to_bytes(8, "little"))


def unfinished(clients: Iterable[Client]) -> list[str]:
    return [client.name for client in clients if not (client.finished or client.dead)]
