"""The user's verb: hand a training step to the daemon."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.capture.microbatch.split import check_microbatches
from gpumux.capture.state import StateTable
from gpumux.client.arguments import check_compile, check_rng, draws_from_client, job_spec, several, whole
from gpumux.client.job import Job
from gpumux.client.recovery import find_kept, open_job, open_message
from gpumux.client.session import Session, devices_of, through
from gpumux.errors import ConfigError
from gpumux.wire.codec import MAX_INT
from gpumux.wire.messages import Replay


def submit(
    step: Callable[..., Any], *, example: Any, model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Any = None, priority: str = "low", name: str | None = None, endpoint: str | None = None,
    weight: float = 1.0, max_slowdown: float = 1.10, memory_limit: int | None = None, max_inflight: int = 2,
    seed: int | None = None, max_variants: int = 4, microbatches: int = 1, compile: bool = False,  # noqa: A002
    rng: str | None = None, resume: str | None = None,
    replay_bytes: int = 1 << 30, reconnect_s: float = 600.0,
) -> Job:  # fmt: skip
    """Capture `step` on the `example` batch, open a job at the daemon and put its state there.

    step: the loop body, called as `step(*example)`. It may use any tensor of `model` and `optimizer`,
        by whatever reference; other tensors must be arguments. It returns any pytree of tensors.
    example: the arguments as a tuple (or a dict of named ones, or one tensor), with real shapes.
    model, optimizer: one or a sequence. No optimizer: an inference job. A model may lie on the CPU or on one GPU,
        whatever the daemon's device: results, and state on sync(), go to where it lies. Names of GPUs inside the step
        mean the job's device.
    priority: "high" keeps its speed as if alone, "low" uses what is left.
    endpoint: which daemon; default GPUMUX_ENDPOINT, else the one of GPU 0 on this machine.
    weight: share among jobs of one priority. max_slowdown: promise for a high job (>= 1.0).
    memory_limit: bytes this job may hold on the device. max_inflight: unanswered steps at most.
    rng: where random draws (dropout) come from. "client": from torch's default generator, as in the plain loop; a step
    begins
        where it stands when step() is called, and step() leaves it where the plain step would. "own": from a generator of the
        job's, whatever else the program draws. Default: "client" where model and daemon compute on the CPU; "own" with
        `seed`, and where a GPU is on either side, which draws other numbers anyway.
    seed: of the job's own random generator, for rng="own"; default torch.initial_seed(), what torch.manual_seed set.
    max_variants: combinations of batch shapes and Python flags captured per function.
    microbatches: run a step's batch as so many accumulated parts, for shorter pieces and less memory;
        must divide the batch size. Equivalent, no longer bit-equal; the step must be one whose loss averages or
        adds up over independent samples (NotSplittable says why it isn't). Dropout draws other masks.
    compile: have the daemon compile the step with torch's inductor: operators are fused, and loading takes much longer.
        Equivalent, no longer bit-equal to the plain run; runs of the job with the same torch build on the same kind of
        machine are bit-equal to each other. The daemon's machine needs what inductor does (a C++ compiler for the
        CPU, Triton for a GPU); ProgramError says what is missing.
    resume: name of a job of yours whose client is gone, or closed it with keep=True, and whose state the daemon kept.
        The models and optimizers are overwritten with it and the job goes on from there; `job.resumed_steps` says how
        many step() calls are behind it. Where the job draws from torch's generator, that stands where it stood then.
        Learning rates come back with the optimizers: a scheduler that is put forward by as many steps must not change
        them. Raises UnknownJob where nothing of that name was kept.
    replay_bytes: memory this process may use, beside a copy of its state, to bring the job back when the daemon is
        killed and started again (README, "Nothing is lost"); 0: it does not come back.
    reconnect_s: how long a daemon that is gone is waited for before DaemonGone is raised, be it amid this call (one
        that was never there is not).

    Raises CaptureError (and its kin, naming the line or tensor), ConfigError for a bad argument,
    AdmissionRefused, DaemonGone. Nothing local is changed by a failed submit, unless what was resumed had been read by
    then.
    """
    models = several(model, torch.nn.Module, "model")
    if any(isinstance(m, torch.jit.ScriptModule) for m in models):
        raise ConfigError(
            "model= is a TorchScript module, whose Python can't be captured", "submit the module it was made from"
        )
    optimizers = several(optimizer, torch.optim.Optimizer, "optimizer")
    replay_bytes = whole("replay_bytes", replay_bytes, 0, MAX_INT, "give bytes")
    name = resume if name is None else name
    spec = job_spec(step, priority, name, weight, max_slowdown, memory_limit, max_inflight, seed)
    max_variants = whole("max_variants", max_variants, 1, MAX_INT, "use 1 or more")
    check_microbatches(microbatches)
    check_compile(compile)
    check_rng(rng, seed)

    def attempt(session: Session) -> Job:
        job: Job | None = None
        try:
            table = StateTable(models, optimizers, *devices_of(session, 5))
            table.home = table.home or _first_device(example)
            kept = find_kept(session, resume) if resume is not None else None
            if kept is not None:
                kept.keepsake.put_back(table)
            job_id, last = (kept.job, kept.newest) if kept is not None else (uuid.uuid4().hex, 0)
            open_job(session, open_message(job_id, spec), kept is not None)
            keepsake = kept.keepsake if kept is not None else None
            clients_generator = draws_from_client(rng, seed, session, table)
            job = Job(
                session, job_id, spec, table, max_variants, replay_bytes, reconnect_s, keepsake, last, clients_generator
            )
            job._capture(step, example, 4, microbatches, compile)
            if keepsake is not None:
                session.call(Replay(0, job_id, 0, 1), [keepsake.generator])
            job._recovery.ready(job)
        except BaseException:
            if job is not None:
                job.close(drain=False)
            raise
        return job

    return through(attempt, endpoint, reconnect_s if replay_bytes and resume is None else 0.0)


def _first_device(example: Any) -> torch.device | None:
    """Where a step without state would leave its results."""
    found = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    return found[0].device if found else None
