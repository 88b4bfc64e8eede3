"""Whether Programs of several ranks fit together, and what of the batch each is given."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpumux.burst.programs import InputPart, check_together, narrowed
from gpumux.errors import ProgramError
from gpumux.program.ir import Collective, Program, ProgramBuilder, TensorRef


def rank_of_two(rank: int) -> Program:
    """A sum over both ranks; then rank 0 sends rank 1 a value."""
    b = ProgramBuilder(rank=rank, ranks=2)
    x = b.input("float64", (4, 3))
    doubled = b.call("aten.add.Tensor", x, x, dtype="float64", size=(4, 3))
    b.collective(Collective(1, "all_reduce", 0, (0, 1), (doubled.view,), 0.5))
    other = ((1 - rank, doubled.view if rank == 0 else b.add_tensor("temp", "float64", (4, 3))),)
    ways = {"sends": other} if rank == 0 else {"receives": other}
    b.collective(Collective(1, "exchange", 1, (0, 1), **ways))
    b.result(b.call("aten.neg.default", doubled, dtype="float64", size=(4, 3)))
    return b.build()


def with_collective(number: int, change: Callable[[Collective], Collective]) -> list[Program]:
    """Both ranks, of which the second one has another collective in this place."""
    first, second = rank_of_two(0), rank_of_two(1)
    collectives = list(second.collectives)
    collectives[number] = change(collectives[number])
    return [first, replace(second, collectives=tuple(collectives))]


def smaller(program: Program) -> Program:
    views = tuple([replace(view, size=(2, 3)) if view.size == (4, 3) else view for view in program.views])
    return replace(program, views=views)


def test_programs_that_belong_together_fit() -> None:
    check_together([rank_of_two(0), rank_of_two(1)])


@pytest.mark.parametrize(
    ("programs", "says"),
    [
        (lambda: [rank_of_two(1), rank_of_two(0)], "place 0 of 2 is for rank 1 of 2"),
        (lambda: [rank_of_two(0)], "place 0 of 1 is for rank 0 of 2"),
        (lambda: with_collective(0, lambda one: replace(one, scale=1.0)), "collective 0 sums other values"),
        (lambda: with_collective(0, lambda one: replace(one, members=(0, 1, 2))), "take part in one of"),
        (lambda: with_collective(0, lambda one: replace(one, sequence=7)), r"collective \d: ranks \[\d\] take part"),
        (lambda: with_collective(1, lambda one: replace(one, kind="all_reduce")), "collective 1 is of another kind"),
        (lambda: with_collective(1, lambda one: replace(one, receives=())), "rank 1 awaits other values than rank 0"),
        (lambda: [smaller(rank_of_two(0)), rank_of_two(1)], "collective 0 sums other values"),
    ],
)  # fmt: skip
def test_programs_that_do_not_fit_together_are_refused(programs: Callable[[], list[Program]], says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        check_together(programs())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rank_is_given_the_samples_that_it_reads_if_they_lie_behind_each_other(transposed: bool) -> None:
    b = ProgramBuilder()
    storage, stride = b.add_storage("input", 4 * 3 * 8), (1, 4) if transposed else (3, 1)
    b.input_view(b.add_view(storage, "float64", (4, 3), stride))
    some = b.add_view(storage, "float64", (2, 3), stride, 2 * stride[0])
    b.result(b.call("aten.neg.default", TensorRef(some), dtype="float64", size=(2, 3)))
    program, parts = narrowed(b.build())
    assert parts == (InputPart(0, None if transposed else (2, 4)),)
    batch = torch.arange(12.0).view(4, 3)
    assert parts[0].of(batch).shape == program.views[program.inputs[0]].size
