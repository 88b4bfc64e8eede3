"""`submit`: capture a training step and open it as a job at the daemon."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from gpumux.burst.norms import BatchNorm, check_batch_norm
from gpumux.burst.placement import RankPlacement
from gpumux.burst.ranks import BurstSplitter
from gpumux.capture.batch.containers import flatten
from gpumux.capture.microbatch.split import check_microbatches
from gpumux.capture.source import folded
from gpumux.capture.state import StateTable
from gpumux.client.arguments import (
    check_compile,
    check_rng,
    check_waves,
    daemons_of,
    fewer_ranks,
    generator_of,
    in_cluster,
    job_spec,
    number,
    placement_of,
    read_plan,
    refuse_with_ranks,
    refuse_with_waves,
    refuse_without_cluster,
    several,
    whole,
    with_inner,
)
from gpumux.client.gang import GangRemote, GangSession
from gpumux.client.job import Batch, Job
from gpumux.client.placed.kept import find_in_cluster
from gpumux.client.placed.link import CoordinatorLink
from gpumux.client.placed.submit import connect_ranks, place_request, submit_placed
from gpumux.client.recovery import find_kept, open_job
from gpumux.client.remote import Remote
from gpumux.client.session import Session, connect_with_retry, devices_of
from gpumux.client.snapshots import write, write_of_rank
from gpumux.errors import ConfigError, NotOwner
from gpumux.program.saved_plan import SavedPlan
from gpumux.waves.steps import Waves
from gpumux.waves.trace import WaveSplitter
from gpumux.wire.codec import MAX_INT


@folded
def submit(
    step: Callable[Batch, Any], *, example: Any, model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Any = None, priority: Literal["high", "low"] = "low", name: str | None = None,
    endpoint: str | None = None, weight: float = 1.0, max_slowdown: float = 1.10, memory_limit: int | None = None,
    max_inflight: int = 2, seed: int | None = None, max_variants: int | None = None, microbatches: int = 1,
    compile: bool = False,  # noqa: A002
    rng: Literal["client", "own"] | None = None, resume: str | None = None,
    replay_bytes: int = 1 << 30, reconnect_s: float = 600.0,
    plan: str | Path | SavedPlan | RankPlacement | None = None, endpoints: Sequence[str] | None = None,
    devices: int | None = None,
    peers_timeout_s: float = 30.0, batch_norm: BatchNorm = "refuse", waves: int = 1,
    memory: Literal["own", "shared"] = "own", fusible: bool = False,
    cluster: str | None = None, gpus: int | None = None, min_gpus: int = 1, urgency: int = 0,
) -> Job[Batch]:  # fmt: skip
    """Capture `step` on the `example` batch, open a job at the daemon and push its state there.

    step: the loop body, called as `step(*example)`. It may use any tensor of `model` and `optimizer`, by any reference,
        and other tensors that its variables hold (docs/plain-loop.md, "Tensors outside"). It returns any pytree of
        tensors.
    example: the arguments as a tuple (or a dict of named ones, or one tensor), with real shapes. Besides tensors they
        may be numpy arrays, numbers, texts, and containers and objects that hold such values.
    model, optimizer: one or a sequence; an optimizer that another one holds is submitted with it. Without an optimizer
        the job is an inference job. A model may lie on the CPU or on one GPU, whatever the daemon's device is. Results,
        and the state that sync() fetches, go to the model's device. Names of GPUs inside the step mean the job's
        device.
    priority: "high" keeps the speed it has when alone, "low" uses the remaining time of the device.
    endpoint: the daemon's; default GPUMUX_ENDPOINT, else the one of GPU 0 on this machine.
    memory: "shared": its temporaries lie in one arena with those of the user's other low jobs that say so. The jobs are
        charged the largest step among them once, and take turns: one waits until another is past its peak.
    fusible: let the daemon run a step together with one of each equal job, also of other processes, as one fused step
        (docs/fusion.md, "Equal jobs of separate processes"): of jobs of this user, or of users that the daemon's
        configuration says agree. Results are equivalent, not bit-equal; `stats()["fusion"]` says what happens.
        For low jobs on a CPU; a step that can't be fused runs by itself.
    weight: share among jobs of one priority. max_slowdown: promise for a high job (>= 1.0).
    memory_limit: bytes this job may hold on the device. max_inflight: the most unanswered steps.
    rng: the source of random draws (dropout). "client": torch's default generator, as in the plain loop. A step begins
        from the state it has when step() is called, and step() leaves it in the state that the plain step would. "own":
        a generator of the job's own, independent of all other draws. Default: "client" if model and daemon compute on
        the CPU and there is no `seed`, else "own"; a GPU draws other numbers anyway.
    seed: of the job's own random generator, for rng="own"; default torch.initial_seed(), what torch.manual_seed set.
    max_variants: combinations of batch shapes and Python values that a function may be captured for. One more raises
        TooManyVariants. By default 32 are kept, and the least recently used makes room for another; its Program stays
        loaded in the daemon until the job ends.
    microbatches: run a step's batch as this many accumulated parts, for shorter pieces and less memory. Must divide the
        batch size. The result is equivalent, not bit-equal. The step's loss must be a mean or a sum over independent
        samples (NotSplittable says why it isn't). Dropout draws other masks.
    compile: have the daemon compile the step with torch's inductor: operators are fused, and loading takes much longer.
        The result is equivalent, not bit-equal, to the plain run; runs of the job with the same torch build on the same
        kind of machine are bit-equal to each other. The daemon's machine needs what inductor needs (a C++ compiler for
        the CPU, Triton for a GPU); ProgramError says what is missing.
    resume: name of a job of yours whose client is gone, or closed it with keep=True, and whose state the daemon kept.
        The models and optimizers are overwritten with that state and the job goes on from there. `job.resumed_steps`
        is the number of step() calls before it. If the job draws from torch's generator, that gets its state of then.
        Learning rates are restored with the optimizers: a scheduler that is advanced by as many steps must not change
        them. Raises UnknownJob if no state of that name was kept. With cluster= all of its daemons are asked, and the
        newest state counts; the job that goes on may run at another one, and has another id.
    replay_bytes: bytes of memory this process may use, besides a copy of the job's state, to recover the job when a
        daemon is killed and started again (README, "Nothing is lost"); 0: the job is not recovered.
    reconnect_s: seconds to wait for a daemon that is gone before DaemonGone is raised, also during this call. A daemon
        that can't be reached at first is not waited for.

    endpoints: of several daemons: the job runs on all of them, a rank on each (docs/burst.md). step() takes the whole
        batch, and each sample is computed as it is alone; the result is equivalent, not bit-equal. A list of one is
        the same as `endpoint`.
    devices: the same with the daemons of GPUs 0 to devices - 1 on this machine.
    plan: which layers run on which ranks: a file that `gpumux plan burst --save` wrote, or what
        gpumux.program.saved_plan.load made of one, or a gpumux.burst.placement.RankPlacement. Default: every layer on
        all ranks (data parallel).
    batch_norm: over several daemons, "refuse" a batch norm in training mode, take each "rank"'s own statistics (as
        DistributedDataParallel does), or "sync" them (what one device computes).
    peers_timeout_s: how long a rank waits for another one before the job fails.

    waves: 2 for two replicas that are trained in turns, each step with the mean of its gradients and those of the step
        before, so that steps run half a cycle apart in memory that both share (docs/waves.md, which says when not to).
        That is another training than the plain loop's, and no substitute for a larger batch under momentum.

    cluster: have the coordinator of a cluster choose the daemon (docs/cluster.md): its endpoint, or "auto" for that of
        GPUMUX_CLUSTER, else the one on this machine. The call waits until there are devices. The job may be moved to
        others, or go on there when its node is lost: the loop waits meanwhile, and results stay bit-equal. For that a
        copy of the newest snapshot, as large as the job's state, lies in this process besides replay_bytes.
        `memory_limit` is what is asked for on each device; without it an estimate, and twice as much each time that it
        was too little. The first such call of a script that `gpumux cluster run` started has the devices held for it.
    gpus: on so many devices of the cluster, as `endpoints` of as many daemons; default those of the plan, else 1.
    min_gpus: a job on several devices that lost some goes on with fewer, down to so many, if the cluster could not give
        it all of them again whatever runs there: its layers are split anew over what is left (docs/burst.md, "Fewer
        devices"). As large as `gpus` it forbids that: the job then waits for as many as it asked for.
    urgency: in a cluster, orders the user's own waiting jobs: the higher the sooner.

    Raises CaptureError (and its subclasses, naming the line or tensor; NotSplittable for a step that can't be split
    over ranks or run in waves), ConfigError for a bad argument, AdmissionRefused, DaemonGone. A failed submit changes
    no local object, unless it had already read the state to resume.
    """
    models = several(model, torch.nn.Module, "model")
    if any(isinstance(m, torch.jit.ScriptModule) for m in models):
        raise ConfigError(
            "model= is a TorchScript module, whose Python can't be captured", "submit the module it was made from"
        )
    optimizers = with_inner(several(optimizer, torch.optim.Optimizer, "optimizer"))
    replay_bytes = whole("replay_bytes", replay_bytes, 0, MAX_INT, "give bytes")
    name = resume if name is None else name
    spec = job_spec(step, priority, name, weight, max_slowdown, memory_limit, max_inflight, seed, memory, fusible)
    if max_variants is not None:
        max_variants = whole("max_variants", max_variants, 1, MAX_INT, "use 1 or more")
    check_microbatches(microbatches)
    check_compile(compile)
    if compile and fusible:
        raise ConfigError("fusible=True does not go together with compile=True", "leave out one of them")
    check_rng(rng, seed)
    plan = read_plan(plan)
    placement: RankPlacement | None
    if cluster is None:
        several_daemons = daemons_of(endpoint, endpoints, devices)
        placement = placement_of(plan, several_daemons)
        refuse_without_cluster(gpus=gpus is not None, min_gpus=min_gpus != 1, urgency=urgency != 0)
        fewer = {}
    else:
        placement, several_daemons = in_cluster(gpus, plan, endpoint, endpoints, devices), []
        fewer = fewer_ranks(placement, plan, min_gpus)
    ranks = 1 if placement is None else placement.ranks
    check_batch_norm(batch_norm)
    check_waves(waves)
    if placement is not None and placement.ranks == 1:  # nothing is split
        endpoint, placement = (several_daemons[0] if several_daemons else None), None
    if placement is not None:
        placement.check_names(models)
        refuse_with_ranks(microbatches=microbatches > 1, compile=compile, resume=resume is not None)
        refuse_with_ranks(memory=memory == "shared", fusible=fusible)
        timeout_s = number("peers_timeout_s", peers_timeout_s, lambda s: 0 < s <= 3600, "use seconds, at most 3600")

    if waves > 1:
        high = priority == "high"
        refuse_with_waves(microbatches=microbatches > 1, compile=compile, priority=high)
        refuse_with_waves(memory=memory == "shared", fusible=fusible)

    link = found_kept = None
    if cluster is not None:
        found_kept = find_in_cluster(cluster, resume) if resume is not None else None
        link = CoordinatorLink(
            cluster=cluster,
            request=place_request(spec, ranks, models, example, urgency, movable=replay_bytes > 0),
            connect=partial(connect_ranks, timeout_s=None if placement is None else timeout_s),
            limited=memory_limit is not None,
            reconnect_s=reconnect_s,
            kept=() if found_kept is None else found_kept.places,
        )

    def new_id() -> str:
        return uuid.uuid4().hex if link is None else link.job

    def attempt(session: Session) -> Job[Batch]:
        job: Job[Batch] | None = None
        try:
            table = StateTable(models, optimizers, *devices_of(session, 6))
            table.home = table.home or _first_device(example)
            kept = None if found_kept is None else found_kept.newest
            if link is None and resume is not None:
                kept = find_kept(session, resume)
            if kept is not None and kept.snapshot.waves is not None and waves == 1:
                raise ConfigError(f"the job {resume!r} that was kept trained two waves", "resume it with waves=2")
            generator = generator_of(rng, seed, spec, session, table)
            if kept is not None:
                kept.snapshot.put_back(table, generator=generator)
            job_id, last = (kept.job, kept.newest) if kept is not None and link is None else (new_id(), 0)
            open_job(session, job_id, spec, kept is not None or link is not None)
            if link is not None:
                link.accepted()
            snapshot = kept.snapshot if kept is not None else None
            two_waves: dict[str, Any] = {}
            if waves > 1:
                both = Waves(table)
                two_waves = {"over": WaveSplitter(), "waves": both, "write_notes": partial(write, waves=both)}
            job = Job(
                session, job_id, spec, table, max_variants=max_variants, replay_bytes=replay_bytes,
                reconnect_s=reconnect_s, kept=snapshot, last_snapshot=last, generator=generator,
                place=link, **two_waves,
            )  # fmt: skip
            job.capture(step, example, 4, microbatches, compile)
            job.start()
        except BaseException:
            if job is not None:
                job.close(drain=False)
            raise
        return job

    def on_ranks(session: GangSession) -> Job[Batch]:
        assert placement is not None
        job: Job[Batch] | None = None
        alike = cast("Session", session)  # it has what a job uses of one
        try:
            table = StateTable(models, optimizers, *devices_of(alike, 6))
            table.home = table.home or _first_device(example)
            job_id = new_id()
            try:
                session.open_job(job_id, spec)
            except (
                NotOwner
            ):  # the id is fresh, so one daemon was asked twice, or closes an earlier try of the cluster's
                if link is not None:
                    raise
                raise ConfigError("two of the endpoints are one daemon", "name each daemon once") from None
            if link is not None:
                link.accepted()
            split = BurstSplitter(placement, batch_norm, fewer if waves == 1 and replay_bytes else {})
            remote = cast("Callable[..., Remote]", partial(GangRemote, splitter=split))
            job = Job(
                alike, job_id, spec, table, max_variants=max_variants, replay_bytes=replay_bytes,
                reconnect_s=reconnect_s, generator=generator_of(rng, seed, spec, alike, table),
                write_notes=write_of_rank, over=WaveSplitter(split) if waves > 1 else split,
                waves=Waves(table) if waves > 1 else None, make_remote=remote,
                place=link,
            )  # fmt: skip
            job.capture(step, example, 4, microbatches, compile)
            job.start()
        except BaseException:
            if job is not None:
                job.close(drain=False)
            raise
        return job

    if link is not None:
        return submit_placed(
            link, attempt if placement is None else lambda session: on_ranks(cast("GangSession", session))
        )
    retry_s = reconnect_s if replay_bytes and resume is None else 0.0
    if placement is not None:
        return connect_with_retry(
            on_ranks, lambda timeout: GangSession.connect(several_daemons, timeout_s, timeout), retry_s
        )
    return connect_with_retry(attempt, lambda timeout: Session.connect(endpoint, timeout), retry_s)


def _first_device(example: Any) -> torch.device | None:
    """The device of the batch, to which the results of a step without state go."""
    found = [leaf for leaf in flatten(example)[0] if isinstance(leaf, torch.Tensor)]
    return found[0].device if found else None
