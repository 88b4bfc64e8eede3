"""One Program for jobs whose Programs are equal, and where each job's state, batch and results lie in it.

An array (`array.py`) is made of models that one client holds. Jobs of separate clients are known to a daemon as
Programs, buffers and batches only, and this module works on those alone (HFTA, section 3). The order of jobs in a group
is the order of the models in the fused Program.

- State: a slot's buffers of all jobs become one buffer, one job after another (`StackedState`). Each part starts a
  storage of its own, so that a job's own Program runs on its part as it does on its own buffers: a job whose partners
  have no step goes on by itself without being unstacked.
- Batches and results are bytes in slots of shared memory. A job's batch is copied to its part of each input; its
  results are a part of each result (`GroupLayout` in `gpumux/device/cpu/group.py`).
- Host scalars may differ between jobs at any step (learning rates, step counts), so that all of them are taken to.
- Random draws: a job's generator comes with each of its steps (`Program.generator`), and is the job's random stream for
  the fused one, one more line of state. Operators that draw run once a job, so each draws what it draws alone.

`serve` is the process that makes and proves a fused Program for a device (`gpumux/device/workers/fusing.py`).
`gpumux/scheduler/fusion/groups.py` decides when jobs run so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from gpumux.device.cpu.group import GroupLayout, StepFusion
from gpumux.device.run.operands import over
from gpumux.device.workers.channel import FUSED, MAX_BYTES, PROVEN, REFUSED, Channel, unpack
from gpumux.errors import GpumuxError, NotFusible
from gpumux.fuse import proof
from gpumux.fuse.fuse import fuse_template
from gpumux.fuse.template import Choose, Fused, align, first_models
from gpumux.program.codec import decode, encode
from gpumux.program.indices import raises_on_computed
from gpumux.program.ir import ITEM_BYTES, Program, aligned
from gpumux.program.validate import state_slots


@dataclass(frozen=True, slots=True)
class FusedJobs:
    """The fused Program of jobs that all run `program`. Make it with `fuse_jobs`."""

    program: Program
    fused: Fused
    layout: GroupLayout

    @property
    def jobs(self) -> int:
        return self.fused.models


class UnprovenJobs:
    """A fused Program that was made of fake tensors, and not proven yet. `made` may be used once `prove` has returned.

    `proof_bytes`: memory that the proof takes at most, beside that of the process."""

    def __init__(self, made: FusedJobs, fewer: Fused, each: Fused, values: Sequence[Sequence[float | int]]) -> None:
        self.made = made
        self._fewer, self._each, self._values = fewer, each, values
        self.proof_bytes = proof.most_bytes((fewer.program, each.program))

    def prove(self) -> FusedJobs:
        """Raises what `proof.check` raises."""
        proof.check(self._fewer, self._each, self._values)
        return self.made


def fuse_jobs(program: Program, jobs: int, choose: Choose = "fused") -> FusedJobs:
    """Make and prove the Program that does a step of `program` for each of `jobs` jobs. `choose`: as for `fuse.fuse`.

    Raises NotFusible, with the reason, for what can't run so, and what `fuse.fuse` and `proof.check` raise."""
    return make_jobs(program, jobs, choose).prove()


def make_jobs(program: Program, jobs: int, choose: Choose = "fused") -> UnprovenJobs:
    """Make the Program that `fuse_jobs` makes. No state is needed: it is made of fake tensors, and will be proven in
    memory for three jobs in float64.

    Raises NotFusible, with the reason, for what can't run so, and what `fuse.fuse` raises."""
    _refuse(program, jobs)
    alone, kinds = program, program.scalars
    # Each job's draws come from the state that came with its step, which `GroupSteps` copies to the job's stream.
    program = replace(program, generator=None)
    values = [[0.5 if kind == "float" else 1 for kind in kinds]] * jobs
    template = align([program] * jobs, frozenset(range(len(kinds))))

    def made(choose: Choose, models: int = jobs) -> Fused:
        return fuse_template(first_models(template, models), values[:models], batch_per_model=True, choose=choose)

    fused = made(choose)
    few = min(jobs, proof.PROVEN_MODELS)
    fewer = fused if few == jobs else made(choose, few)
    if [d.how for d in fewer.decisions] != [d.how for d in fused.decisions]:
        few, fewer = jobs, fused  # how an operator can run may depend on how many models there are
    # Numbers that differ, so that one job's in place of another's shows. Whole ones stay as they are: another may be
    # out of an operator's range.
    tried = [[v * (1 + job / 8) if isinstance(v, float) else v for v in values[job]] for job in range(few)]
    fusion = StepFusion(jobs, fused.scalars, tuple(table.rows for table in fused.tables))
    found = FusedJobs(alone, fused, GroupLayout(alone, fused.program, fusion))
    return UnprovenJobs(found, fewer, made("per-model", few), tried)


def _refuse(program: Program, jobs: int) -> None:
    """Raise NotFusible for jobs whose steps can't run as one."""
    alone = "let its jobs run by themselves"
    if jobs < 2:
        raise NotFusible(f"{jobs} job is no group", "fuse two or more jobs")
    if program.device != "cpu":
        raise NotFusible(f"its step was traced for {program.device}; equal jobs are fused on a CPU only", alone)
    if program.kind != "aten":
        raise NotFusible("its step is compiled", "submit it without compile=True")
    if program.ranks > 1 or program.collectives:
        raise NotFusible("its step exchanges data with other ranks", alone)
    if program.wave is not None:
        raise NotFusible("its step is one of two waves", "submit it without waves")
    if program.generator is None and any(op.random is not None for op in program.ops):
        raise NotFusible(
            "its step draws random numbers from a generator in the daemon",
            "keep its model on the CPU: then the client has the generator, and its state comes with each step",
        )
    if raises_on_computed(program):
        raise NotFusible("an operator may raise on what its step computes, and would end the steps of all jobs", alone)
    for view in program.views:
        storage = program.storages[view.storage]
        if storage.kind in ("state", "input") and storage.nbytes % ITEM_BYTES[view.dtype]:
            raise NotFusible(
                f"a tensor of {view.dtype} lies on {storage.nbytes} bytes, so that the next job's would begin amid an"
                " element",
                alone,
            )


class StackedState:
    """The state of a group of jobs while it runs as one: `lines`, by state slot, are the fused Program's buffers.

    It takes as many bytes as the jobs' own buffers, which keep what was in them until they are overwritten by
    `unstack`, and those of their generators if a step draws. Raises OSError when there is no memory."""

    def __init__(self, group: FusedJobs) -> None:
        self._jobs, self._own = group.jobs, len(state_slots(group.program))
        self._nbytes = [nbytes // group.jobs for nbytes in state_slots(group.fused.program)]
        self._starts = [0, *accumulate(aligned(nbytes * self._jobs) for nbytes in self._nbytes)]
        self.nbytes = self._starts[-1]
        self._memory = mmap.mmap(-1, max(1, self.nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.lines = [self._over(slot, 0, self._jobs) for slot in range(len(self._nbytes))]

    def _over(self, slot: int, first: int, count: int) -> torch.Tensor:
        nbytes = self._nbytes[slot]
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return over(self._memory, self._starts[slot] + first * nbytes, count * nbytes)

    def parts(self, job: int) -> list[torch.Tensor]:
        """The job's part of each line, by state slot: buffers for its own Program. They need not
        begin on 64 bytes, so that kernels may round otherwise than on the job's own. `job`: its position in the
        group."""
        return [self._over(slot, job, 1) for slot in range(self._own)]

    def stack(self, job: int, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the job's own buffers (bytes, by state slot) in."""
        for part, buffer in zip(self.parts(job), buffers, strict=True):
            part.copy_(buffer[: part.numel()])

    def unstack(self, job: int, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the job's part back into its own buffers. Bytes of a buffer that the Program has no use for stay."""
        for part, buffer in zip(self.parts(job), buffers, strict=True):
            buffer[: part.numel()].copy_(part)


# ---- The process that does it for a device.


def serve(channel: Channel, settings: dict[str, Any]) -> None:
    """Make one fused Program, and prove it when told to: its memory can be charged in between. Ends when it is proven
    or refused. Raises EOFError when the daemon has closed the channel."""
    torch.set_num_threads(1)
    _, body, (fd,) = channel.receive()
    (jobs,) = unpack(body)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            unproven = make_jobs(decode(bytes(memory[:])), jobs)
        made = unproven.made
        encoded = encode(made.fused.program)
        if len(encoded) > MAX_BYTES // 2:
            raise NotFusible(f"its constants take {len(encoded)} bytes together", "keep large tensors in the model")
        state = state_slots(made.fused.program)
        channel.send(FUSED, [encoded, made.layout.fusion.packed(), state, unproven.proof_bytes])
        channel.receive()
        unproven.prove()
    except GpumuxError as error:
        channel.send(REFUSED, [error.code, error.message, error.remedy])
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, NotImplementedError, MemoryError) as error:
        why = NotFusible(f"fusing it failed: {error}"[:500], "let its jobs run by themselves, and report the step")
        channel.send(REFUSED, [why.code, why.message, why.remedy])
    else:
        channel.send(PROVEN, [])
    finally:
        os.close(fd)
