"""The Programs of all ranks of one step: what each is given of the batch, what each gives of the results, and whether
they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpumux.errors import ProgramError
from gpumux.program.ir import ITEM_BYTES, Collective, Out, Program, Storage, TensorRef, View, extent
from gpumux.program.memory import traffic
from gpumux.program.validate import op_args, out_views, tensor_refs

# ---- inputs: a rank is sent the samples that its operators read


@dataclass(frozen=True, slots=True)
class InputPart:
    """What a rank is given of one tensor of the batch: samples [start, stop) along dimension 0; None: all of it."""

    position: int
    samples: tuple[int, int] | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of the batch tensor, as a view."""
        return tensor if self.samples is None else tensor[self.samples[0] : self.samples[1]]


def narrowed(program: Program) -> tuple[Program, tuple[InputPart, ...]]:
    """The Program with those inputs alone that it reads, of each only the samples that it reads, and what these are.
    The state of the random generator is an input that stays as it is."""
    used = _used(program)
    storages = list(program.storages)
    shifts: dict[int, int] = {}  # storage of an input -> elements that are left out before its first
    inputs: dict[int, View] = {}  # storage of an input that stays -> the view over it
    parts: list[InputPart] = []
    for position, index in enumerate(program.inputs):
        whole = program.views[index]
        readers = [program.views[v] for v in used if program.views[v].storage == whole.storage]
        if not readers and index != program.generator:
            continue
        samples = None if index == program.generator else _samples(whole, readers)
        if samples is not None:
            shifts[whole.storage] = samples[0] * whole.stride[0]
            whole = replace(whole, size=(samples[1] - samples[0], *whole.size[1:]))
        storages[whole.storage] = Storage("input", extent(whole) or storages[whole.storage].nbytes, len(parts))
        inputs[whole.storage] = whole
        parts.append(InputPart(position, samples))
    return _Renumbered(program, storages, inputs, shifts).program, tuple(parts)


def _samples(whole: View, readers: Sequence[View]) -> tuple[int, int] | None:
    """The samples that views of a batch tensor read, None if that is all, or if samples are not laid one behind the
    other."""
    if not whole.size or whole.size[0] < 2:
        return None
    step = whole.stride[0]
    others = [(n, s) for n, s in zip(whole.size[1:], whole.stride[1:], strict=True) if n > 1]
    if step < max((n * s for n, s in others), default=1):
        return None
    start = min(view.offset // step for view in readers)
    stop = max(-(-(extent(view) // ITEM_BYTES[view.dtype]) // step) for view in readers)
    if any(view.dtype != whole.dtype for view in readers) or (start, stop) == (0, whole.size[0]):
        return None
    return start, min(stop, whole.size[0])


def _used(program: Program) -> set[int]:
    used = {ref.view for op in program.ops for ref in tensor_refs(op_args(op))}
    used |= {view for op in program.ops for view in out_views(op.outs)} | set(program.results)
    for one in program.collectives:
        used |= {*one.views, *(view for _, view in (*one.sends, *one.receives))}
    return used


class _Renumbered:
    """A Program with other input storages, and without storages and views that nothing uses."""

    def __init__(
        self, program: Program, storages: Sequence[Storage], inputs: dict[int, View], shifts: dict[int, int]
    ) -> None:
        self._program, self._shifts = program, shifts
        self._storages: dict[int, int] = {}
        self._views: dict[View, int] = {}
        kept = [index for index, storage in enumerate(program.storages) if storage.kind != "input" or index in inputs]
        self._storages = {index: place for place, index in enumerate(kept)}
        given = [self._place(replace(view, storage=self._storages[storage])) for storage, view in inputs.items()]
        ops = tuple(
            [
                replace(
                    op,
                    args=self._arg(op.args),
                    kwargs=tuple([(name, self._arg(value)) for name, value in op.kwargs]),
                    outs=tuple([self._out(out) for out in op.outs]),
                    stream=None if op.stream is None else self._view(op.stream),
                )
                for op in program.ops
            ]
        )
        collectives = tuple([self._collective(one) for one in program.collectives])
        results = tuple([self._view(view) for view in program.results])
        generator = None if program.generator is None else self._view(program.generator)
        self.program = replace(
            program, storages=tuple([storages[index] for index in kept]), views=tuple(self._views), ops=ops,
            inputs=tuple(given), results=results, collectives=collectives, generator=generator,
        )  # fmt: skip

    def _place(self, view: View) -> int:
        return self._views.setdefault(view, len(self._views))

    def _view(self, index: int) -> int:
        view = self._program.views[index]
        offset = view.offset - self._shifts.get(view.storage, 0)
        return self._place(replace(view, storage=self._storages[view.storage], offset=offset))

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return TensorRef(self._view(arg.view))
        return tuple([self._arg(a) for a in arg]) if isinstance(arg, tuple) else arg

    def _out(self, out: Out) -> Out:
        if out is None:
            return None
        return tuple([self._view(v) for v in out]) if isinstance(out, tuple) else self._view(out)

    def _collective(self, one: Collective) -> Collective:
        pairs = [tuple([(rank, self._view(view)) for rank, view in each]) for each in (one.sends, one.receives)]
        return replace(one, views=tuple([self._view(v) for v in one.views]), sends=pairs[0], receives=pairs[1])


# ---- whether the ranks' Programs fit together


def check_together(programs: Sequence[Program]) -> None:
    """Check that the Programs of all ranks of one step end: that members of every collective know it by the same number
    and kind, and that what one sends is what the other receives. Each rank meets its collectives in rising order (which
    `validate` checks), so the one with the lowest number that has not ended can always begin on all its members: no
    ranks wait for each other in a circle. Raises ProgramError."""
    count = len(programs)
    known: dict[int, dict[int, Collective]] = {}
    for rank, program in enumerate(programs):
        if (program.rank, program.ranks) != (rank, count):
            raise _apart(f"the Program in place {rank} of {count} is for rank {program.rank} of {program.ranks}")
        for one in program.collectives:
            known.setdefault(one.sequence, {})[rank] = one
    for sequence, by_rank in known.items():
        members = next(iter(by_rank.values())).members
        if tuple(sorted(by_rank)) != members or any(one.members != members for one in by_rank.values()):
            raise _apart(f"collective {sequence}: ranks {sorted(by_rank)} take part in one of {members}")
        if len({one.kind for one in by_rank.values()}) > 1:
            raise _apart(f"collective {sequence} is of another kind on different ranks")
        if by_rank[members[0]].kind == "all_reduce":
            sums = {(_form(programs[rank], one.views), one.scale) for rank, one in by_rank.items()}
            if len(sums) > 1:
                raise _apart(f"collective {sequence} sums other values on different ranks")
            continue
        for source in members:
            for target in members:
                out = [view for rank, view in by_rank[source].sends if rank == target]
                into = [view for rank, view in by_rank[target].receives if rank == source]
                if _form(programs[source], out) != _form(programs[target], into):
                    raise _apart(f"collective {sequence}: rank {target} awaits other values than rank {source} sends")


def _form(program: Program, views: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple([(program.views[v].dtype, program.views[v].size) for v in views])


def _apart(what: str) -> ProgramError:
    return ProgramError(f"the Programs of the ranks do not fit together: {what}", "submit them as burst/ makes them")


# ---- bytes


def bytes_moved(programs: Sequence[Program]) -> dict[tuple[int, int], int]:
    """Bytes that each rank sends to each other one in a step: (source, target) -> bytes."""
    found: dict[tuple[int, int], int] = {}
    for rank, program in enumerate(programs):
        for one in program.collectives:
            for target, (sent, _) in traffic(program, one).items():
                if sent:
                    found[rank, target] = found.get((rank, target), 0) + sent
    return found
