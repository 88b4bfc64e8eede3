"""The proof of a split finds every mistake, and names where it begins."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch
from torch import nn

from gpumux.burst import proof as proof_of_ranks
from gpumux.burst import split
from gpumux.burst.placement import RankPlacement, data_parallel
from gpumux.burst.programs import check_together
from gpumux.burst.proof import Lockstep, Proven, prove_ranks
from gpumux.capture.microbatch import proof as proof_of_parts
from gpumux.capture.microbatch.proof import Load, largest_of
from gpumux.capture.recorder import RawOp
from gpumux.capture.values.machine import Machine
from gpumux.errors import NotSplittable, ProgramError
from gpumux.program.validate import validate
from tests.burst.emulate import Change
from tests.burst.mutations import (
    OF_EQUAL_LAYERS,
    OF_OPERATORS,
    OF_OPTIMIZERS,
    OF_PROGRAMS,
    PLACEMENT,
    drop_a_rescale,
    swap_sums_on_one_rank,
)
from tests.burst.subjects import SUBJECTS, Built, Subject, compare

VGG = SUBJECTS["vgg"]


def refusal(
    subject: Subject, placement: RankPlacement, change: Callable[[Lockstep], None], patch: pytest.MonkeyPatch,
    proof: int = 1,
) -> NotSplittable:  # fmt: skip
    """What the proof says of a split with a mistake, in this one of its traces."""

    count = 0

    def mistaken(run: Lockstep, load: Load, proven: Proven) -> None:
        nonlocal count
        count += 1
        if count == proof:
            change(run)
        prove_ranks(run, load, proven)

    patch.setattr(split, "prove_ranks", mistaken)
    with pytest.raises(NotSplittable) as error:
        compare(subject, placement, proof)
    assert count == proof
    return error.value


@pytest.mark.every(5)
@pytest.mark.parametrize("proof", [1, 2], ids=["in the first step", "in later ones"])
@pytest.mark.parametrize("change", OF_OPERATORS)
def test_a_mistake_in_a_ranks_operators_is_found_at_capture(
    change: Callable[[Lockstep], None], proof: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In later steps the layers are proven, and the optimizer is by itself."""
    error = refusal(VGG, PLACEMENT, change, monkeypatch, proof)
    # where it begins is an operator with the user's line, or the sum over ranks
    assert re.search(r"subjects\.py:\d+|the sum over ranks", str(error)), error
    assert error.remedy


@pytest.mark.parametrize("proof", [1, 2], ids=["in the first step", "in later ones"])
@pytest.mark.parametrize("change", OF_OPTIMIZERS)
def test_a_mistake_in_a_ranks_optimizer_is_found_at_capture(
    change: Callable[[Lockstep], None], proof: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that runs as the whole step's does is run on no numbers."""
    assert refusal(VGG, data_parallel(2), change, monkeypatch, proof).remedy


@pytest.mark.parametrize("change", OF_EQUAL_LAYERS)
def test_a_mistake_is_found_where_ranks_run_the_proven_parts(
    change: Callable[[Lockstep], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged, they are run on no numbers."""
    error = refusal(SUBJECTS["transformer"], data_parallel(2), change, monkeypatch)
    assert re.search(r"subjects\.py:\d+|the sum over ranks", str(error)), error


def equal_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def build_counting(model: nn.Module) -> Built:
    """Returns the loss, how many samples are right, a whole number, and which."""
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().sum()
        loss.backward()
        optimizer.step()
        right = out.argmax(1) == x.argmax(1)
        return loss, right.sum(), right

    return [model], [optimizer], [step]


COUNTING = Subject("counting", equal_layers, build_counting, lambda: (torch.randn(8, 6),), ("0", "2"))


def put_results_in_another_order(run: Lockstep) -> None:
    result = run.traces.results[-1]
    assert result.ranks == (0, 1)
    run.traces.results[-1] = replace(result, ranks=(1, 0), views=result.views[::-1])


def give_one_result_twice(run: Lockstep) -> None:
    result = run.traces.results[-1]
    run.traces.results[-1] = replace(result, ranks=(0, 0), views=(result.views[0],) * 2)


@pytest.mark.parametrize("change", [put_results_in_another_order, give_one_result_twice])
def test_samples_that_are_not_put_together_as_those_of_the_parts_are_found(
    change: Callable[[Lockstep], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "which the step returns" in str(refusal(VGG, data_parallel(2), change, monkeypatch))


def build_frozen(model: nn.Module) -> Built:
    """A step at the beginning of a warm-up: the gradients are all that it computes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [model], [optimizer], [step]


FROZEN = Subject("frozen", equal_layers, build_frozen, lambda: (torch.randn(4, 6),), ("0", "2"))


def test_gradients_exchanged_within_a_sum_are_found_where_the_learning_rate_is_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two gradients of one size that change places on one rank would be summed without an error."""
    error = refusal(FROZEN, data_parallel(2), swap_sums_on_one_rank, monkeypatch)
    assert "the sum over ranks of what" in str(error)


def test_a_rescale_that_is_missing_is_found_where_the_learning_rate_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = RankPlacement(2, {"0": (0, 1), "2": (0,)})
    error = refusal(FROZEN, placement, drop_a_rescale, monkeypatch)
    assert "test_proof.py" in str(error)


@pytest.mark.parametrize("change", OF_PROGRAMS)
@pytest.mark.every(4)
def test_a_mistake_in_a_ranks_program_is_refused_or_changes_what_is_computed(change: Change) -> None:
    _, gang = compare(VGG, PLACEMENT, 1)
    assert gang.last is not None
    changed = [change(rank, step.lowered.program) for rank, step in enumerate(gang.last.ranks)]
    assert changed != [step.lowered.program for step in gang.last.ranks]
    try:
        for program in changed:
            validate(program)
        check_together(changed)
    except ProgramError:
        return
    try:
        difference, _ = compare(VGG, PLACEMENT, 3, change=change)
    except AssertionError:  # copies of a parameter differ
        return
    assert difference.largest > 1e-6


def test_the_unchanged_programs_compute_what_plain_torch_computes() -> None:
    for subject, placement in ((VGG, PLACEMENT), (FROZEN, data_parallel(2))):
        difference, _ = compare(subject, placement, 3)
        assert difference.largest < 1e-12


SOME = RankPlacement(2, dict.fromkeys(SUBJECTS["transformer"].layers, (0, 1)) | {"blocks.1": (0,)})
LAYERS_BY_PROOF = {  # parts and ranks in the first phase, then ranks in the second
    "a plan": ("vgg", PLACEMENT, [True, True, True, False]),
    "layers on some ranks": ("transformer", SOME, [True, True, False]),
    "samples returned": ("vgg", data_parallel(2), [True, False, False]),
    "parts": ("transformer", data_parallel(2), [True, False, False]),
    "counts behind the optimizer": ("counting", data_parallel(2), [True, False, True, False]),
    "branches": ("inception", data_parallel(4), [True, False, False]),
}


@pytest.mark.parametrize("case", LAYERS_BY_PROOF)
def test_layers_are_run_once_for_parts_and_once_for_ranks_that_run_others(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW makes its state in the first step, and SGD its momentum: the layers compute what they do in later ones."""
    name, placement, expected = LAYERS_BY_PROOF[case]
    layers: list[int] = []  # their operators, by proof
    run = Machine.run

    def counted(self: Machine, op: RawOp) -> None:
        layers[-1] += op.target in ("aten.convolution.default", "aten.addmm.default", "aten.mm.default")
        run(self, op)

    def noted(proof: Callable[..., Any]) -> Callable[..., Any]:
        def prove(*args: Any, **options: Any) -> Any:
            layers.append(0)
            return proof(*args, **options)

        return prove

    monkeypatch.setattr(Machine, "run", counted)
    monkeypatch.setattr(proof_of_parts, "prove", noted(proof_of_parts.prove))
    monkeypatch.setattr(split, "prove_ranks", noted(prove_ranks))
    subject = (SUBJECTS | {"counting": COUNTING})[name]
    difference, gang = compare(subject, placement, 3)
    assert len(gang.checked) == 2  # phases
    assert [count > 0 for count in layers] == expected
    assert difference.largest < 1e-12


@pytest.mark.parametrize("placement", [data_parallel(2), RankPlacement(2, {"0": (0, 1), "2": (0,)})])
@pytest.mark.parametrize("numbered", [True, False])
def test_counts_are_summed(placement: RankPlacement, numbered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numbered:
        monkeypatch.setattr(proof_of_ranks._ByNumbers, "prove", lambda self: False)
    difference, _ = compare(COUNTING, placement, 3)
    assert difference.largest < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64])
def test_the_largest_magnitude_is_that_of_any_element_and_of_what_is_not_finite(dtype: torch.dtype) -> None:
    values = torch.tensor([1, -7, 3, 5, 2, 4], dtype=dtype).view(2, 3).t()
    assert largest_of(values) == 7
    assert largest_of(values[:0]) == 0
    if not dtype.is_floating_point:
        return
    assert largest_of(values.masked_fill(values == 3, -float("inf"))) == float("inf")
    for size in (1, 2, 9, 1000):
        assert isnan(largest_of(torch.zeros(size, dtype=dtype).index_fill_(0, torch.tensor(size // 2), float("nan"))))


def test_an_optimizer_over_sums_is_run_on_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sums shares that were compared where the layers left them, and runs the whole step's operators."""
    left, behind = set[int](), 0
    run, compare_left = Machine.run, proof_of_ranks._Run._compare_left

    def counted(self: Machine, op: RawOp) -> None:
        nonlocal behind
        behind += op.by_optimizer
        run(self, op)

    def summed(*args: Any) -> None:
        nonlocal behind
        behind += 1

    def compared(self: proof_of_ranks._Run, storage: int) -> None:
        left.add(storage)
        compare_left(self, storage)

    monkeypatch.setattr(Machine, "run", counted)
    monkeypatch.setattr(proof_of_ranks._ByNumbers, "prove", lambda self: False)  # so that the layers are run
    monkeypatch.setattr(proof_of_ranks._Run, "_sum", summed)
    monkeypatch.setattr(proof_of_ranks._Run, "_compare_left", compared)
    difference, gang = compare(VGG, data_parallel(2), 3)
    assert len(gang.checked) == 2  # phases
    assert len(left) > len(list(VGG.make().parameters()))  # the loss, too
    assert behind == 0
    assert difference.largest < 1e-12
