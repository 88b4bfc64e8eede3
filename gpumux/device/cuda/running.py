"""Which stream a job runs on, when it may change from one share of the multiprocessors to another between two pieces."""

from __future__ import annotations

from gpumux.device.cuda.driver import Driver
from gpumux.device.cuda.jobs import CudaJob
from gpumux.device.cuda.partitions import Partitions
from gpumux.device.cuda.turns import Turns


class Running:
    """`turns` are those of the whole GPU's streams."""

    def __init__(self, driver: Driver, turns: Turns, partitions: Partitions) -> None:
        self._driver, self._turns, self._partitions = driver, turns, partitions

    def take(self, job: CudaJob, number: int, share: float = 1.0) -> int:
        """A stream of class `number`, of a share there is (else of the whole). What the job has in the air runs before
        what it is given there."""
        turns = self._partitions.turns.get(share, self._turns)
        stream = turns.take(job.id, number)
        if job.stream and stream != job.stream:
            job.order = job.order or self._driver.event(timed=False)
            self._driver.record(job.order, job.stream)
            self._driver.wait(stream, job.order)
        job.stream = stream
        return stream

    def rest(self, job: CudaJob) -> None:
        """Give its streams back if it has nothing outstanding."""
        if job.quiet and job.stream:
            self.leave(job)
            job.stream = 0

    def leave(self, job: CudaJob) -> None:
        for turns in (self._turns, *self._partitions.turns.values()):
            turns.leave(job.id)
