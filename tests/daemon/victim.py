"""A client that is about to die: starts something that takes the daemon a while, says so, and waits for
ever. Arguments: the endpoint, and what to start (steps, check, transfer, alone)."""

from __future__ import annotations

import sys
import threading

from gpumux.client.session import Session
from gpumux.program import codec
from gpumux.program.ir import Op, Program, Storage, TensorRef, View
from gpumux.wire import messages as msg
from tests.daemon.live import LiveJob, slow
from tests.program import samples

JOB = "d" * 32


def long(operators: int) -> bytes:
    """A Program whose check and load take seconds."""
    views = tuple(View(storage, "float32", (2,), (1,)) for storage in range(2))
    first = Op("aten.add.Tensor", (TensorRef(0), TensorRef(0)), outs=(1,))
    more = Op("aten.add_.Tensor", (TensorRef(1), TensorRef(0)), outs=(1,))
    storages = (Storage("input", 8, 0), Storage("temp", 8))
    return codec.encode(Program(storages, views, (first, *[more] * (operators - 1)), (0,), (1,)))


def steps(session: Session) -> object:
    job = LiveJob(session, slow(), name="victim")
    job.post(bytes(4 * 1024 * 1024), slot=0)
    job.post(bytes(4 * 1024 * 1024), slot=1)
    return job


def check(session: Session) -> object:
    session.register(JOB, lambda message, frames: None)
    session.call(msg.OpenJob(0, JOB, "victim", 0, 1.0, 1.1, None, 2, 0))
    session.post(msg.LoadProgram(0, JOB, 0, [], []), [long(8000)])
    return None


def transfer(session: Session) -> object:
    job = LiveJob(session, samples.counter(), name="victim", new_buffers=[4, 1 << 28], binding=[0])
    session.post(msg.OpenTransfer(1 << 40, job.id, 1, [0, 1], False))
    return job


def alone(session: Session) -> object:
    """Steps one after the other until the device takes them by itself, and then for ever."""
    job = LiveJob(session, samples.add_one(), name="victim")
    for _ in range(50):
        job.run(bytes(16))[0].release()
    print("submitted", flush=True)
    while True:
        job.run(bytes(16))[0].release()


if __name__ == "__main__":
    session = Session.connect(sys.argv[1])
    kept = {"steps": steps, "check": check, "transfer": transfer, "alone": alone}[sys.argv[2]](session)
    print("submitted", flush=True)
    threading.Event().wait()
