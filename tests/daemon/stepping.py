"""Support: a job that steps in a daemon of fakes, and picking the messages it gets."""

from __future__ import annotations

from gpumux.wire import messages as msg

JOB, OTHER = "a" * 32, "b" * 32


def step(number, slot=0, program=0, job=JOB, scalars=(), frames=0):
    return msg.Step(job, number, program, slot, list(scalars), frames)


def only(answers):
    ((message, _frames),) = answers
    return message
