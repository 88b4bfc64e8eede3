"""Results of operators over fake tensors, made again instead of computed: as torch's rules would give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumux.program import fake
from gpumux.program.check import fake_call
from gpumux.program.fake import FakeOperators

aten = torch.ops.aten
Make = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], FakeTensor]
F, INT = torch.float32, torch.int64


class Counted(FakeOperators):
    """Counts the results that torch computes."""

    def __init__(self, call: Callable[..., Any] = fake_call) -> None:
        self.computed = 0

        def counting(*given: Any) -> Any:
            self.computed += 1
            return call(*given)

        super().__init__(FakeTensorMode(allow_non_fake_inputs=False, allow_fallback_kernels=False), "cpu", counting)


@pytest.fixture
def operators() -> Iterator[Counted]:
    with torch.no_grad():
        yield Counted()


def described(value: Any, operands: list[torch.Tensor]) -> Any:
    """Types, sizes and memory of a result, and the operand that it is, or whose memory it has."""
    if isinstance(value, (list, tuple)):
        return type(value), [described(each, operands) for each in value]
    if value is None:
        return None
    same = [i for i, one in enumerate(operands) if one is value]
    shared = [i for i, one in enumerate(operands) if one.untyped_storage()._cdata == value.untyped_storage()._cdata]
    return (
        same, shared, type(value), value.dtype, value.size(), value.stride(), value.storage_offset(), value.device,
        value.untyped_storage().nbytes(),
    )  # fmt: skip


CASES: dict[str, Callable[[Make], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "broadcast": lambda m: (aten.add.Tensor, (m((4, 1), (1, 1), F), m((3,), (1,), F)), {"alpha": 2}),
    "transposed": lambda m: (aten.mul.Tensor, (m((4, 8), (1, 4), F), m((4, 8), (1, 4), F)), {}),
    "promoted": lambda m: (aten.add.Tensor, (m((4,), (1,), INT), m((), (), F)), {}),
    "number": lambda m: (aten.mul.Tensor, (m((4,), (1,), INT), 0.5), {}),
    "view": lambda m: (aten.transpose.int, (m((4, 8), (8, 1), F), 0, 1), {}),
    "slice": lambda m: (aten.slice.Tensor, (m((4, 8), (8, 1), F), 0, 1, 3), {}),
    "split": lambda m: (aten.split.Tensor, (m((6, 8), (8, 1), F), 2), {}),
    "expanded": lambda m: (aten.expand.default, (m((4, 1), (1, 1), F), [4, 5]), {}),
    "inplace": lambda m: (aten.add_.Tensor, (m((4,), (1,), F), m((4,), (1,), F)), {"alpha": -0.5}),
    "lists": lambda m: (aten._foreach_mul_.Scalar, ([m((4,), (1,), F), m((2,), (1,), F)], 0.5), {}),
    "list": lambda m: (aten._foreach_add.Scalar, ([m((4,), (1,), F), m((2, 2), (1, 2), F)], 1), {}),
    "several": lambda m: (aten.native_layer_norm.default, (m((4, 8), (8, 1), F), [8], None, None, 1e-5), {}),
    "none": lambda m: (
        aten.native_batch_norm_backward.default,
        (m((4, 3), (3, 1), F), m((4, 3), (3, 1), F), m((3,), (1,), F), None, None, m((3,), (1,), F), m((3,), (1,), F),
         True, 1e-5, [False, True, True]),
        {},
    ),
    "convolution": lambda m: (
        aten.convolution.default,
        (m((2, 3, 8, 8), (192, 1, 24, 3), F), m((4, 3, 3, 3), (27, 9, 3, 1), F), None, [1, 1], [1, 1], [1, 1], False,
         [0, 0], 1),
        {},
    ),
    "made": lambda m: (aten.full.default, ([2, 3], 1.0), {"dtype": torch.float64}),
    "empty": lambda m: (aten.mm.default, (m((0, 4), (4, 1), F), m((4, 3), (3, 1), F)), {}),
    "strided": lambda m: (aten.as_strided.default, (m((4, 8), (8, 1), F), [3, 2], [8, 1], 5), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_result_made_again_is_the_one_that_torch_computes(case: Any, operators: Counted) -> None:
    found = []
    for _ in range(2):
        func, args, kwargs = case(operators.empty)
        given = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
        found.append(described(operators.run(func, args, kwargs), given))
    assert operators.computed == 1
    assert found[0] == found[1]


def test_a_view_is_made_at_the_place_of_its_operand(operators: Counted) -> None:
    base = operators.empty((8, 4), (4, 1), F)
    rows = [operators.run(aten.select.int, (base, 0, i), {}) for i in (2, 5)]
    columns = [operators.run(aten.view.default, (row, [2, 2]), {}) for row in rows]
    assert [c.storage_offset() for c in columns] == [8, 20]
    assert operators.computed == 3


def test_a_view_of_another_type_is_at_the_same_bytes(operators: Counted) -> None:
    base = operators.empty((4, 6), (6, 1), torch.complex64)
    rows = [operators.run(aten.slice.Tensor, (base, 0, i, i + 2), {}) for i in (2, 0)]
    pairs = [operators.run(aten.view_as_real.default, (row,), {}) for row in rows]
    assert [p.storage_offset() for p in pairs] == [24, 0]
    numbers = operators.empty((8,), (1,), F)
    operators.run(aten.view.dtype, (operators.run(aten.slice.Tensor, (numbers, 0, 2, 6), {}), torch.float64), {})
    with pytest.raises(RuntimeError, match="divisible"):
        operators.run(aten.view.dtype, (operators.run(aten.slice.Tensor, (numbers, 0, 3, 7), {}), torch.float64), {})


def test_operands_that_share_memory_are_another_case_than_separate_ones(operators: Counted) -> None:
    base, other = (operators.empty((8,), (1,), F) for _ in range(2))
    halves = [operators.run(aten.slice.Tensor, (base, 0, a, a + 4), {}) for a in (0, 4)]
    operators.run(aten.add_.Tensor, (halves[0], operators.run(aten.slice.Tensor, (other, 0, 0, 4), {})), {})
    before = operators.computed
    operators.run(aten.add_.Tensor, (halves[0], halves[1]), {})
    assert operators.computed == before + 1
    overlapping = operators.run(aten.slice.Tensor, (base, 0, 2, 6), {})
    operators.run(aten.add_.Tensor, (halves[0], overlapping), {})
    assert operators.computed == before + 2 + 1  # the slice at 2 as well


@pytest.mark.parametrize(
    ("first", "second"),
    [((2,), (2.0,)), ((1,), (True,)), ((1.5,), (2.5,))],
    ids=["int and float", "int and bool", "another number"],
)
def test_numbers_that_are_equal_in_python_are_told_apart(first: Any, second: Any, operators: Counted) -> None:
    tensor = operators.empty((4,), (1,), INT)
    kinds = [operators.run(aten.mul.Tensor, (tensor, *number), {}).dtype for number in (first, second)]
    plain = [(torch.ones(4, dtype=INT) * number[0]).dtype for number in (first, second)]
    assert kinds == plain
    assert operators.computed == 2


def test_the_default_type_decides_again(operators: Counted) -> None:
    tensor = operators.empty((4,), (1,), INT)
    found = []
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found.append(operators.run(aten.mul.Tensor, (tensor, 0.5), {}).dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]


@pytest.mark.parametrize("func", [aten.t_.default, aten.squeeze_.default])
def test_an_operator_that_changes_its_operands_sizes_is_computed_each_time(func: Any, operators: Counted) -> None:
    for _ in range(2):
        changed = operators.empty((1, 4), (4, 1), F)
        operators.run(func, (changed,), {})
        assert changed.size() != (1, 4)
    assert operators.computed == 2


def _two_over_new_memory(func: Any, args: Any, kwargs: Any, device: str) -> Any:
    made = torch.empty(8)
    return made[:4], made[4:]


def _larger_memory(func: Any, args: Any, kwargs: Any, device: str) -> Any:
    return torch.empty(8)[:4]


@pytest.mark.parametrize("call", [_two_over_new_memory, _larger_memory])
def test_results_over_shared_or_larger_memory_are_computed_each_time(call: Any) -> None:
    operators = Counted(call)
    for _ in range(2):
        operators.run(aten.neg.default, (operators.empty((4,), (1,), F),), {})
    assert operators.computed == 2


def test_a_refused_call_is_refused_again(operators: Counted) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            operators.run(aten.mm.default, (operators.empty((2, 3), (3, 1), F), operators.empty((4, 5), (5, 1), F)), {})


def test_what_is_known_is_bounded(operators: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "MAX_KNOWN", 3)
    for size in range(1, 9):
        operators.run(aten.neg.default, (operators.empty((size,), (1,), F),), {})
    assert len(operators.known) <= 3


@pytest.mark.parametrize(("running", "training"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_statistics_of_a_batch_norm_under_autocast_have_the_type_that_the_kernel_gives(
    affine: bool, running: bool, training: bool
) -> None:
    """BatchNorm(affine=False), as in MoCo v3 and Barlow Twins, has no weight to take it from."""

    def norm(call: Callable[..., Any]) -> list[torch.dtype]:
        weight, bias = (torch.ones(3), torch.zeros(3)) if affine else (None, None)
        mean, var = (torch.zeros(3), torch.ones(3)) if running else (None, None)
        data = torch.ones(4, 3, dtype=torch.bfloat16)
        return [one.dtype for one in call((data, weight, bias, mean, var, training, 0.1, 1e-5))]

    real = norm(lambda args: aten.native_batch_norm.default(*args))
    with FakeTensorMode():
        assert norm(lambda args: fake_call(aten.native_batch_norm.default, args, {}, "cpu")) == real
