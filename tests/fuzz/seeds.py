"""The first inputs: one of each message, each sample Program, a recording. `python -m tests.fuzz.seeds` adds them to
corpus/."""

from __future__ import annotations

from gpumux.program import codec as programs
from gpumux.wire import messages as m
from gpumux.wire import messages as r
from gpumux.wire.codec import encode
from tests.program import samples

JOB = "0123456789abcdef" * 2

MESSAGES: tuple[tuple[m.Message, int], ...] = (
    (m.Hello(m.PROTOCOL_VERSION, "0.1.0", "client", 7, "2.13", False), 0),
    (m.GrantedHello(m.PROTOCOL_VERSION, "0.1.0", "client", 7, "2.13", False, "name.secret"), 0),
    (m.Welcome(1, "0.1.0", "s", "/run/x", b"n" * 32, 2.0, 10.0, 1 << 28, {"a": [1, 2.0, None], "b": {"c": "d"}}), 0),
    (m.Refusal(1, "refused", "no", "ask"), 0),
    (m.OpenJob(1, JOB, "name", 1, 1.0, 1.1, None, 2, 2**64 - 1), 0),
    (m.OpenJob(1, JOB, "", 0, 1.0, 1.1, 1 << 30, 2, 0), 0),
    (m.OpenFusibleJob(1, JOB, "", 0, 1.0, 1.1, 1 << 30, 2, 0), 0),
    (m.JobOpened(1, JOB), 0),
    (m.LoadProgram(1, JOB, 1, [4, 1 << 20], [0, 1]), 1),
    (m.ProgramLoaded(1, JOB, 1, 5, 2, 4096, ["slow"]), 0),
    (m.Step(JOB, 1, 1, 0, [0.1, 3, float("nan")], 0), 0),
    (m.Step(JOB, 2**40, 0, 1, [], 2), 2),
    (m.StepDone(JOB, 1, 0.0, 1e-3, 2e-3, 0), 0),
    (m.GroupStepDone(JOB, 1, 0.0, 1e-3, 2e-3, 0, 8, 7, True, "ab" * 32), 0),
    (m.StepFailed(JOB, 1, "job_failed", "it", "that"), 0),
    (m.OpenTransfer(1, JOB, 1, [0, 1, 2], True), 0),
    (m.TransferSegment(1, JOB, 1, 2, 64), 0),
    (m.FillTransfer(1, JOB, 1, 1), 1),
    (m.TransferDone(JOB, 1, "", "", "", 0), 0),
    (m.PauseJob(1, JOB), 0),
    (m.ResumeJob(1, JOB), 0),
    (m.CloseJob(1, JOB, True), 0),
    (m.JobEnded(JOB, "", "", ""), 0),
    (m.Done(1), 0),
    (m.JobStats(1, JOB), 0),
    (m.GetStatus(1), 0),
    (m.Report(1, {"jobs": [{"a": 1}], "x": None}), 0),
    (m.Heartbeat(1.5), 0),
    (m.Goodbye(), 0),
    (m.Leaving("bye"), 0),
    (m.ProfileJob(1, JOB, None), 0),
    (m.JobProfile(1, JOB, 1, 1), 1),
    (m.ExplainJob(1, JOB), 0),
    (m.GetInterference(1, "x"), 0),
    (m.Reserve(1, JOB, 1, 1 << 20, 5.0), 0),
    (m.ConfirmReservation(1, JOB, 5.0), 0),
    (m.ReleaseReservation(1, JOB), 0),
    (m.PlaceJob(1, JOB, "n", 1, 2, 1 << 30, ["ab"], 0, True, 0), 0),
    (m.JobPlaced(JOB, 1, ["ipc:///x", "tcp://y:1"], ["a/0", "b/0"], True), 0),
    (m.JobNotStarted(JOB, 1, 1 << 30, "no room"), 0),
    (m.ProgramsKnown(JOB, ["ab", "cd"]), 0),
    (m.GangSizes(JOB, [1, 2]), 0),
    (m.VacateDevices(JOB, 1, True, "it drains"), 0),
    (m.DevicesVacated(JOB, 1), 0),
    (m.PlacedJobEnded(1, JOB, ""), 0),
    (m.JobAnswered(JOB, "refused", "no device is as large"), 0),
    (m.DrainNode(1, "a", True), 0),
    (m.RecordTrace(1, 5.0), 0),
    (m.TracePart(1, True, 5.0, "", 1), 1),
    (m.ChangeJob(1, JOB, 1, 2.0), 0),
    (m.ChangeJob(1, JOB, None, None), 0),
)
RECORDS: list[r.Record] = [
    r.JobSeen("j1", "name", "high", True),
    r.ProgramSeen("j1", 0, ["aten.mm.default"]),
    r.PieceRan("j1", 1, 2, 0, 0, 0, 1, 1.0, 0.0, 0.1, 0.2, "done"),
    r.StepRan("j1", 2, 0.0, 0.2, 0.1, 0.1),
    r.WasHeld("j2", "j1", "tail", 0.0, 0.1),
    r.WasBanned("j1", "j2", 0, 1, 1.0, 2.0, "tail", 0.0, 0.1),
    r.Happened("j1", 0.1, "paused", ""),
    r.LoadSeen("j1", 0.1, 1, 1, 1 << 20),
]


def seeds() -> dict[str, list[bytes]]:
    """By target."""
    packets = [bytes(encode(message, [b""] * frames)[0]) for message, frames in MESSAGES]
    encoded = [programs.encode(make()) for make in samples.ALL.values()]
    return {
        "message": [bytes([frames]) + packet for packet, (_, frames) in zip(packets, MESSAGES, strict=True)],
        "channel": packets,
        "program": encoded,
        "edge": encoded,
        "trace": [bytes(r.pack(RECORDS)), *[bytes(r.pack([record])) for record in RECORDS]],
    }


if __name__ == "__main__":
    from tests.fuzz.decoders import read, write  # atheris

    for target, inputs in seeds().items():
        write(target, read(target) + inputs)
