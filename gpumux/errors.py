"""Every error gpumux raises, and the stable codes they travel under.

    GpumuxError                 code, sentence, remedy
    +-- ConfigError             a flag, environment variable or configuration file is wrong
    +-- CaptureError            the step can't become a Program (the user's line or tensor is named)
    |   +-- NotRepeatable       two traces of the step differ
    |   +-- DataDependent       the step reads a tensor's value in Python
    |   +-- UnknownTensor       the step reaches a tensor that was not given
    |   +-- UnsupportedOperator an operator outside the allow-list
    |   +-- TooManyVariants     more shapes, flags or phases than the limit
    |   +-- NotSplittable       the step can't be split into microbatches
    |   +-- NotFusible          steps are not of one kind, or hold what can't run for several models at once
    +-- BadBatch                an index in a batch is out of range; the step was not run
    +-- BadValue                a value in a step failed a check that the step makes; the step was run
    +-- StaleState              the daemon holds newer state than the local model, and it can't be fetched
    |   +-- StaleGradient       a gradient was read that existed only inside the step
    +-- NoGraph                 backward() of a step's result, whose graph was in the step
    +-- LocalWrite              the local model was written while the daemon holds its state
    +-- ProgramError            a Program is malformed or fails its checks
    +-- ProtocolError           bytes that are not a valid message
    |   +-- VersionMismatch     the two ends speak different protocol versions
    +-- Refused                 the daemon said no
    |   +-- AdmissionRefused    memory, job count or another limit
    |   +-- AccessDenied        an access rule of the daemon's operator forbids it
    |   +-- NotOwner            a verb on another user's job
    |   +-- UnknownJob          no such job
    +-- JobFailed               the job's work failed; its state is lost
    |   +-- ExecutorCrashed     the process running the job died
    |   +-- PeersLost           another rank of the job's gang died, stalled or sent something else
    |   +-- InternalError       gpumux contradicted itself about the job: a bug, which ends this job alone
    +-- JobClosed               a verb on a closed job
    +-- SnapshotFailed          a job's state could not be saved; the job goes on
    +-- DaemonGone              the daemon left or stopped answering
    +-- DeviceLost              the device failed beyond repair; the daemon ends
    +-- RankLost                a process of a measured group did not come, ended or stopped answering
    +-- EndpointBusy            another daemon holds the endpoint or device
    +-- StateNotKept            a coordinator can't write its state, and ends
    +-- BuildFailed             the core can't be compiled
    +-- TrialFailed             a trial of a sweep: the user's factory, data, step or score raises

`wire/` carries an error as (code, message, remedy); `from_code` makes the same class again on the
other side, so that a user catches one type wherever the error occurred.
"""

from __future__ import annotations

import types
from contextlib import suppress
from typing import Any, ClassVar


class GpumuxError(Exception):
    """Base of all errors. `message` says what is wrong, `remedy` what to do about it."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message if not remedy else f"{message} — {remedy}")
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[GpumuxError], tuple[str, str]]:
        return (type(self), (self.message, self.remedy))


class SimulatedDeviceWarning(UserWarning):
    """A job was submitted to a daemon that only simulates its device: its results are zeros."""


class ConfigError(GpumuxError):
    code = "config"


class CaptureError(GpumuxError):
    code = "capture"


class NotRepeatable(CaptureError):
    code = "not_repeatable"


class DataDependent(CaptureError):
    code = "data_dependent"


class UnknownTensor(CaptureError):
    code = "unknown_tensor"


class UnsupportedOperator(CaptureError):
    code = "unsupported_operator"


class TooManyVariants(CaptureError):
    code = "too_many_variants"


class NotSplittable(CaptureError):
    code = "not_splittable"


class TooFewRanks(NotSplittable):
    """A job that goes on over fewer ranks than it was submitted for can't run this step there."""

    code = "too_few_ranks"


class NotFusible(CaptureError):
    code = "not_fusible"


class BadBatch(GpumuxError, IndexError, RuntimeError):
    """Also what torch's operators raise for an index out of range: IndexError or RuntimeError, by the operator."""

    code = "bad_batch"


class BadValue(GpumuxError, ValueError, RuntimeError):
    """Also what torch.distributions raises for arguments and samples out of range, and torch.linalg for matrices."""

    code = "bad_value"


class StaleState(GpumuxError):
    code = "stale_state"


class StaleGradient(StaleState):
    code = "stale_gradient"


class NoGraph(GpumuxError, RuntimeError):
    code = "no_graph"


class LocalWrite(GpumuxError):
    code = "local_write"


class ProgramError(GpumuxError):
    code = "program"


class ProtocolError(GpumuxError):
    code = "protocol"


class VersionMismatch(ProtocolError):
    code = "version_mismatch"


class Refused(GpumuxError):
    code = "refused"


class AdmissionRefused(Refused):
    code = "admission_refused"


class AccessDenied(Refused):
    code = "access_denied"


class NotOwner(Refused):
    code = "not_owner"


class UnknownJob(Refused):
    code = "unknown_job"


class JobFailed(GpumuxError):
    code = "job_failed"


class ExecutorCrashed(JobFailed):
    code = "executor_crashed"


class PeersLost(JobFailed):
    code = "peers_lost"


class InternalError(JobFailed):
    code = "internal"


class JobClosed(GpumuxError):
    code = "job_closed"


class SnapshotFailed(GpumuxError):
    code = "snapshot_failed"


class DaemonGone(GpumuxError):
    code = "daemon_gone"


class DeviceLost(GpumuxError):
    code = "device_lost"


class RankLost(GpumuxError):
    """A process of a group did not come, ended early or stopped answering."""

    code = "rank_lost"


class EndpointBusy(GpumuxError):
    code = "endpoint_busy"


class StateNotKept(GpumuxError):
    code = "state_not_kept"


class BuildFailed(GpumuxError):
    code = "build_failed"


class TrialFailed(GpumuxError):
    code = "trial_failed"


class _RaisedInStep(CaptureError):
    """A CaptureError that stands for an exception of the step's own: text and arguments are those of the exception, and
    what gpumux says is a note under it."""

    text = ""

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return CaptureError, (self.message, self.remedy)


def raised_in_step(error: Exception, message: str, remedy: str) -> CaptureError:
    """A CaptureError that is of the kind of `error` too, so that a script's own `except ValueError` catches it. A plain
    CaptureError for a class that has no such subclass."""
    kind = _raised_in_step(type(error))
    if kind is None:
        return CaptureError(f"{message}: {error}", remedy)
    try:
        made = kind.__new__(kind, *error.args)
        text = str(error)
    except Exception:  # noqa: BLE001 - a class of the user's may do anything there
        return CaptureError(f"{message}: {type(error).__name__}", remedy)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    for name, held in ((n, d) for base in type(error).__mro__ for n, d in vars(base).items() if n[0] != "_"):
        if isinstance(held, types.MemberDescriptorType):  # what Python's own classes keep, as OSError.errno
            with suppress(AttributeError, TypeError):
                setattr(made, name, getattr(error, name))
    made.text, made.message, made.remedy = text, f"{message}: {text}", remedy
    made.add_note(f"{message} — {remedy}")
    return made


_raised: dict[type[Exception], type[_RaisedInStep] | None] = {}  # made so far


def _raised_in_step(kind: type[Exception]) -> type[_RaisedInStep] | None:
    if kind not in _raised:
        try:
            _raised[kind] = type(f"CaptureError[{kind.__name__}]", (_RaisedInStep, kind), {"__module__": __name__})
        except TypeError:  # its memory, or its metaclass, goes with no other base
            _raised[kind] = None
    return _raised[kind]


def _tree(cls: type[GpumuxError]) -> dict[str, type[GpumuxError]]:
    found = {cls.code: cls} if "code" in vars(cls) else {}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


def from_code(code: str, message: str, remedy: str = "") -> GpumuxError:
    """The error class registered under `code`, or GpumuxError for a code from a newer peer."""
    return _tree(GpumuxError).get(code, GpumuxError)(message, remedy)
