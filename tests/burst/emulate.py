"""Ranks that run one after another in this process: Programs on plain torch, with a memory for each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from gpumux.burst.placement import RankPlacement
from gpumux.burst.programs import bytes_moved
from gpumux.burst.ranks import BurstSplitter, RankedStep
from gpumux.capture.staleness import StalenessHooks, Wording
from gpumux.capture.state import StateTable, byte_view
from gpumux.capture.step import Choice, KeepMore, StepFunction
from gpumux.capture.structure import State, Structure, from_local
from gpumux.capture.tracer import Tracer
from gpumux.program import operators
from gpumux.program.check import check
from gpumux.program.codec import decode, encode
from gpumux.program.ir import DIRECT_BYTES, Collective, Complex, Program, ScalarRef, Tag, TensorRef, View
from gpumux.program.validate import validate


class Memory:
    """A Program's storages on one rank, and the operators that run on them."""

    def __init__(self, program: Program, buffers: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.program = program
        self._bytes: dict[int, torch.UntypedStorage] = {}
        for index, storage in enumerate(program.storages):
            if storage.kind == "state":
                self._bytes[index] = buffers[storage.slot].untyped_storage()
            elif storage.kind == "const":
                data = program.consts[storage.slot]
                flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
                self._bytes[index] = flat.untyped_storage()
        for index, tensor in zip(program.inputs, inputs, strict=True):
            view = program.views[index]
            flat = torch.zeros(program.storages[view.storage].nbytes, dtype=torch.uint8)
            self._bytes[view.storage] = flat.untyped_storage()
            self.tensor(index).copy_(tensor)

    def tensor(self, index: int) -> torch.Tensor:
        view = self.program.views[index]
        return self._window(view)

    def _window(self, view: View) -> torch.Tensor:
        dtype = getattr(torch, view.dtype)
        return torch.empty(0, dtype=dtype).set_(self._bytes[view.storage], view.offset, view.size, view.stride)

    def receive(self, index: int, value: torch.Tensor) -> None:
        storage = self.program.views[index].storage
        if storage not in self._bytes:
            flat = torch.zeros(self.program.storages[storage].nbytes, dtype=torch.uint8)
            self._bytes[storage] = flat.untyped_storage()
        self.tensor(index).copy_(value)

    def run(self, at: int, scalars: Sequence[float]) -> None:
        op = self.program.ops[at]
        _, name, overload = op.target.split(".")
        call = getattr(getattr(torch.ops.aten, name), overload)
        returned = call(*[self._arg(a, scalars) for a in op.args], **{k: self._arg(a, scalars) for k, a in op.kwargs})
        values = returned if isinstance(returned, (tuple, list)) and len(op.outs) != 1 else (returned,)
        for out, value in zip(op.outs, values, strict=False):
            for index, tensor in zip(out, value, strict=True) if isinstance(out, tuple) else [(out, value)]:
                if index is not None:
                    self._born(self.program.views[index], tensor)

    def _born(self, view: View, made: torch.Tensor) -> None:
        if view.storage in self._bytes:
            return
        nbytes = self.program.storages[view.storage].nbytes
        alike = made.stride() == view.stride and made.storage_offset() == view.offset == 0
        if alike and made.untyped_storage().nbytes() >= nbytes:
            self._bytes[view.storage] = made.untyped_storage()
            return
        self._bytes[view.storage] = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
        self._window(view).copy_(made)

    def _arg(self, arg: Any, scalars: Sequence[float]) -> Any:
        if isinstance(arg, TensorRef):
            return self.tensor(arg.view)
        if isinstance(arg, tuple):
            return [self._arg(a, scalars) for a in arg]
        if isinstance(arg, ScalarRef):
            return scalars[arg.index]
        if isinstance(arg, Complex):
            return complex(arg.re, arg.im)
        if isinstance(arg, Tag):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
        return arg


Change = Callable[[int, Program], Program]


@dataclass
class Ranks:
    """The memories of all ranks of one job. `moved`: bytes sent, by (source, target)."""

    ranks: int
    buffers: list[dict[int, torch.Tensor]] = field(init=False)
    moved: dict[tuple[int, int], int] = field(default_factory=dict)
    generators: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = [{} for _ in range(self.ranks)]

    def run(
        self, programs: list[Program], bindings: Sequence[Sequence[int]], inputs: list[list[torch.Tensor]],
        scalars: Sequence[Sequence[float]],
    ) -> list[list[torch.Tensor]]:  # fmt: skip
        memories, generators = [], []
        for rank, program in enumerate(programs):
            bound = [self.buffers[rank][b] for b in bindings[rank]]
            memories.append(Memory(program, bound, inputs[rank]))
            given = program.generator
            generators.append(torch.default_generator.get_state() if given is None else memories[-1].tensor(given))
        at = [0] * self.ranks
        done = [0] * self.ranks  # collectives
        while any(at[r] < len(p.ops) for r, p in enumerate(programs)):
            for rank, program in enumerate(programs):
                torch.default_generator.set_state(generators[rank].clone())
                while at[rank] < len(program.ops) and not self._waits(program, at[rank], done[rank]):
                    memories[rank].run(at[rank], scalars[rank])
                    at[rank] += 1
                generators[rank] = torch.default_generator.get_state()
            waiting = {
                rank: program.collectives[done[rank]]
                for rank, program in enumerate(programs)
                if done[rank] < len(program.collectives)
            }
            if not waiting:
                continue
            sequence = min(one.sequence for one in waiting.values())
            members = {rank: one for rank, one in waiting.items() if one.sequence == sequence}
            assert tuple(sorted(members)) == next(iter(members.values())).members
            self._collective(members, memories)
            for rank in members:
                done[rank] += 1
        for rank, program in enumerate(programs):
            if program.generator is not None:
                memories[rank].tensor(program.generator).copy_(generators[rank])
        torch.default_generator.set_state(generators[0])
        return [[m.tensor(v).clone() for v in p.results] for m, p in zip(memories, programs, strict=True)]

    def _waits(self, program: Program, at: int, done: int) -> bool:
        return done < len(program.collectives) and program.collectives[done].op == at

    def _collective(self, members: dict[int, Collective], memories: list[Memory]) -> None:
        some = next(iter(members.values()))
        if some.kind == "all_reduce":
            for place in range(len(some.views)):
                tensors = [memories[rank].tensor(members[rank].views[place]) for rank in some.members]
                total = tensors[0].clone()
                for tensor in tensors[1:]:
                    total += tensor
                for tensor in tensors:
                    tensor.copy_(total * some.scale if some.scale != 1.0 else total)
            self._count_sum(some, memories[some.members[0]])
            return
        mail: dict[tuple[int, int], list[torch.Tensor]] = {}
        for rank, one in members.items():
            for target, view in one.sends:
                tensor = memories[rank].tensor(view).clone()
                mail.setdefault((rank, target), []).append(tensor)
                self._count(rank, target, tensor.numel() * tensor.element_size())
        for rank, one in members.items():
            for source, view in one.receives:
                memories[rank].receive(view, mail[source, rank].pop(0))
        assert not any(mail.values())

    def _count_sum(self, one: Collective, memory: Memory) -> None:
        """Count a sum as the executors carry it out: the elements of each type, one behind the other, whole to every
        member if they are few; otherwise each member sends every other one the elements that the other adds up, and
        then those that it added up itself."""
        elements: dict[torch.dtype, int] = {}
        for tensor in map(memory.tensor, one.views):
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
        members = len(one.members)
        for dtype, count in elements.items():
            edges = [place * count // members for place in range(members + 1)]
            shares = [(stop - start) * dtype.itemsize for start, stop in pairwise(edges)]
            for rank, own in zip(one.members, shares, strict=True):
                for target, theirs in zip(one.members, shares, strict=True):
                    if target != rank:
                        whole = count * dtype.itemsize
                        self._count(rank, target, whole if whole <= DIRECT_BYTES else theirs + own)

    def _count(self, source: int, target: int, nbytes: int) -> None:
        self.moved[source, target] = self.moved.get((source, target), 0) + nbytes


class Gang:
    """A step over emulated ranks, called as a job's step is. `change`: of each rank's Program before it runs. `over`:
    splits the step, by the placement."""

    def __init__(
        self, model: Any, optimizer: Any, steps: Sequence[Callable[..., Any]], placement: RankPlacement,
        *, change: Change | None = None, over: BurstSplitter | None = None,
    ) -> None:  # fmt: skip
        models = model if isinstance(model, list) else [model]
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.table = StateTable(models, optimizers)
        self._structures: dict[Structure, Structure] = {}
        structure, host = from_local(self.table)
        self.state = State(self._intern(structure), host, frozenset(i for i, _ in structure.kept))
        self.ranks = Ranks(placement.ranks)
        self.change = change
        words = Wording("the gang", "", "sync", "load")
        hooks = StalenessHooks(words, self.table, _Local(self))
        self.functions = [
            StepFunction(
                step, self.table, Tracer(self.table, operators.is_allowed), hooks,
                intern=self._intern, over=over or BurstSplitter(placement), clients_generator=True,
            )
            for step in steps
        ]  # fmt: skip
        self.homes: dict[int, tuple[int, ...]] = {}
        self.checked: set[int] = set()
        self.last: RankedStep | None = None
        self.predicted: dict[tuple[int, int], int] = {}  # bytes that the Programs run so far move

    def _intern(self, structure: Structure) -> Structure:
        return self._structures.setdefault(structure, structure)

    def __call__(self, *args: Any, which: int = 0) -> Any:
        choice = self.functions[which].choose(args, {}, self.state)
        if isinstance(choice, KeepMore):
            self.state.keep = choice.keep
            choice = self.functions[which].choose(args, {}, self.state)
        assert isinstance(choice, Choice)
        step: RankedStep = choice.program.ranked
        self.last = step
        self._place(step.homes)
        programs = [rank.lowered.program for rank in step.ranks]
        if id(step) not in self.checked:
            self.checked.add(id(step))
            for program in programs:
                assert decode(encode(program)) == program
                validate(program)
                if not program.collectives:
                    check(encode(program))
        for way, count in bytes_moved(programs).items():
            self.predicted[way] = self.predicted.get(way, 0) + count
        programs = [self.change(r, p) for r, p in enumerate(programs)] if self.change else programs
        tensors = list(choice.tensors)
        if choice.program.lowered.words != 0:
            tensors.append(torch.default_generator.get_state())
        inputs = [[part.of(tensors[part.position]) for part in rank.inputs] for rank in step.ranks]
        scalars = [choice.values[: choice.program.lowered.counts[0]] for _ in step.ranks]
        given = self.ranks.run(programs, [r.lowered.binding for r in step.ranks], inputs, scalars)
        host = choice.values[sum(choice.program.lowered.counts) :]
        value = choice.program.value(step.put_together(given), host)
        self.state = choice.after(self.state.keep)
        choice.apply(self.table)
        return value

    def _place(self, homes: dict[int, tuple[int, ...]]) -> None:
        """Put buffers that are new on their ranks, as the local model has them."""
        for number, buffer in enumerate(self.table.buffers):
            ranks = homes.get(number)
            if ranks is None:
                continue
            assert self.homes.setdefault(number, ranks) == ranks, buffer.name
            for rank in ranks:
                if number not in self.ranks.buffers[rank]:
                    flat = torch.zeros(buffer.nbytes, dtype=torch.uint8)
                    for storage, start in buffer.home if buffer.filled else ():
                        flat[start : start + storage.nbytes()].copy_(byte_view(storage))
                    self.ranks.buffers[rank][number] = flat

    def sync(self) -> None:
        """Copy the parameters and buffers of the first rank of each into the local model. All ranks must agree."""
        for number, ranks in self.homes.items():
            values = [self.ranks.buffers[rank][number] for rank in ranks]
            for value in values[1:]:
                assert torch.equal(value, values[0]), self.table.buffers[number].name
            for storage, start in self.table.buffers[number].home:
                byte_view(storage).copy_(values[0][start : start + storage.nbytes()])


class _Local:
    """A source of state for StalenessHooks that holds nothing newer than the local model."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def structure(self) -> Structure:
        return self._gang.state.structure

    def fetch(self, parts: object) -> None:
        raise AssertionError("nothing is newer")
