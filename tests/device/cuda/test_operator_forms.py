"""Operators that CUDA graphs can't capture as they are: replaced by forms with the same results, or refused at load."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.device.cuda import operators
from gpumux.device.cuda.operators import FORMS, form_temporary_bytes
from gpumux.errors import ProgramError
from gpumux.program.ir import Op, ProgramBuilder, TensorRef
from tests.device.cuda.forms import ADAM, SGD, calls, number_of


class Called(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


# Their CUDA kernels ask a tensor for its value, which waits for the GPU: no capture allows it.
ON_THE_HOST = {
    "_local_scalar_dense",
    "masked_fill.Tensor",
    "masked_fill_.Tensor",
    "index_fill.int_Tensor",
    "index_fill_.int_Tensor",
    "is_nonzero",
    "equal",
    "nonzero",
    "multinomial",
    "normal.float_Tensor",
    "normal.Tensor_Tensor",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_forms_compute_what_the_operators_do_and_ask_no_tensor_for_its_value(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    checked = 0
    for call in calls(dtype, number_of(0.3)):
        with Called() as called:
            got = call.form(*call.fed, **call.options)
        assert not called.names & ON_THE_HOST, call.target
        got, want = call.fed[0] if got is None else got, call.plain(0.3)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m, t=call.target: f"{t}: {m}")
        checked += 1
    assert checked > 40


STEPS: list[tuple[str, dict[str, Any], str]] = [
    *[
        (name, ADAM, varied)
        for name in ("_fused_adam_", "_fused_adamw_")
        for varied in ADAM
        if ADAM[varied] is not True
    ],
    *[("_fused_sgd_", SGD, varied) for varied in ("momentum", "weight_decay", "dampening")],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "numbers", "varied"), STEPS)
def test_fused_steps_with_a_number_in_memory_are_the_operators_and_ask_no_tensor_for_its_value(
    name: str, numbers: dict[str, Any], varied: str, dtype: torch.dtype
) -> None:
    """Whichever number that is, beside the learning rate."""
    draw = torch.Generator().manual_seed(1)
    given = [
        [(torch.rand(4, generator=draw) + 0.1).to(dtype) for _ in range(3)] for _ in range(5 if "adam" in name else 3)
    ]
    if "adam" in name:
        given.append([torch.tensor(2.0) for _ in range(3)])
    want = [[x.clone() for x in xs] for xs in given]
    getattr(torch.ops.aten, name).default(*want, lr=0.05, **numbers)
    fed = {**numbers, varied: number_of(numbers[varied])}
    with Called() as called:
        FORMS[f"aten.{name}.default"](*given, lr=number_of(0.05), **fed)
    assert not called.names & ON_THE_HOST
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    for xs, ys in zip(given, want, strict=True):
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


WITHOUT_COPIES = {f"aten.{name}" for name in ("add_.Scalar", "sub_.Scalar", "mul_.Scalar", "div_.Scalar", "add_.Tensor",
                                              "sub_.Tensor", "pow_.Scalar")}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forms_of_half_types_compute_in_float32_and_round_once(dtype: torch.dtype) -> None:
    """Bit for bit as on tensors in float32, the commonest of them without a copy in float32."""
    checked, seen = 0, set()
    for call in calls(dtype, number_of(1.7)):
        if "_foreach_" in call.target or not isinstance(call.fed[0], torch.Tensor):
            continue
        wide = [each.float() if isinstance(each, torch.Tensor) and each.dtype == dtype else each for each in call.fed]
        wide = [each.clone() if isinstance(each, torch.Tensor) else each for each in wide]
        with Called() as called:
            got = call.form(*call.fed, **call.options)
        assert torch.equal(got, call.form(*wide, **call.options).to(got.dtype)), call.target
        assert got.dtype in (dtype, torch.bool)
        if call.target in WITHOUT_COPIES:
            assert not {name for name in called.names if "copy" in name}, call.target
            seen.add(call.target)
        checked += 1
    assert checked > 20
    assert seen == WITHOUT_COPIES


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forms_of_half_types_keep_the_shape_of_a_single_number(dtype: torch.dtype) -> None:
    x = torch.tensor(3.0, dtype=dtype)
    for name in ("mul.Scalar", "mul_.Scalar", "pow.Tensor_Scalar"):
        assert FORMS[f"aten.{name}"](x, number_of(0.5)).shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_soft_shrinking_by_a_number_in_memory_is_the_operators(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.0, -0.3, -0.25, -0.0, 0.0, 0.2, 0.3, 5.0, float("inf"), -float("inf")], dtype=dtype)
    got = FORMS["aten.softshrink.default"](x, number_of(0.25))
    assert got.dtype == dtype
    assert torch.equal(got, torch.nn.functional.softshrink(x, 0.25))


class Made(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                nbytes = tensor.untyped_storage().nbytes()
                self.now += nbytes
                weakref.finalize(tensor, self._gone, nbytes)
        self.most = max(self.most, self.now)
        return out

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


TEMPORARY_LISTS = {"add_.List": 1, "sub_.List": 1, "addcmul_.Scalar": 2, "addcdiv_.Scalar": 2, "lerp_.Scalar": 1}


@pytest.mark.parametrize("name", TEMPORARY_LISTS)
def test_a_form_over_lists_makes_one_list_beside_and_the_program_is_charged_for_it(name: str) -> None:
    target = f"aten._foreach_{name}"
    lists = [[torch.rand(100) + 0.5 for _ in range(3)] for _ in range(1 + TEMPORARY_LISTS[name])]
    number = number_of(0.3)
    option = {"alpha": number} if name.endswith("List") else {}
    with Made() as made:
        FORMS[target](*lists, *([] if option else [number]), **option)
    b = ProgramBuilder()
    refs = [tuple(b.state("float32", (100,)) for _ in each) for each in lists]
    scalar = b.scalar("float")
    b.add_op(target, *refs, *([] if option else [scalar]), kwargs={"alpha": scalar} if option else None)
    program = b.build()
    assert made.most == form_temporary_bytes(program, program.ops[0]) == 3 * 400


@pytest.mark.parametrize("in_place", [False, True])
def test_filling_by_a_mask_with_a_tensors_value_stays_on_the_device(in_place: bool) -> None:
    tensors = (TensorRef(0), TensorRef(1), TensorRef(2))
    call = operators.call(0, Op(f"aten.masked_fill{'_' * in_place}.Tensor", tensors, (), (3,)), lambda target: True)
    x, mask, value = torch.arange(6.0).view(2, 3), torch.tensor([True, False, True]), torch.tensor(9.0)
    with Called() as called:
        made = call(x.clone(), mask, value)
    assert not called.names & ON_THE_HOST
    assert torch.equal(made, x.masked_fill(mask, value))


X, INDEX, VALUE = torch.arange(12.0).view(3, 4), torch.tensor([2, 0]), torch.tensor(9, dtype=torch.int64)
WEIGHTS = torch.tensor([[0.1, 0.4, 0.0, 0.5], [3.0, 1.0, 2.0, 0.5]])
ASKING = [
    ("index_fill.int_Tensor", (X, 1, INDEX, VALUE)),
    ("index_fill.int_Tensor", (X, -2, INDEX, VALUE)),
    ("index_fill.int_Tensor", (torch.tensor(1.0), 0, torch.tensor([0]), VALUE)),
    ("index_fill_.int_Tensor", (X, 0, torch.tensor(1), VALUE)),
    ("index_fill_.int_Tensor", (X, 0, INDEX[:0], VALUE)),
    ("normal.float_Tensor", (2.0, torch.tensor([0.5, 3.0]))),
    ("normal.Tensor_Tensor", (torch.zeros(2, 1), torch.tensor([0.5, 3.0]))),
    ("multinomial.default", (WEIGHTS, 1, True)),
    ("multinomial.default", (WEIGHTS, 3)),
    ("multinomial.default", (WEIGHTS[0], 1)),
]


@pytest.mark.parametrize(("name", "arguments"), ASKING)
def test_they_compute_and_draw_what_the_operator_does(name: str, arguments: Any) -> None:
    operator = getattr(getattr(torch.ops.aten, name.split(".")[0]), name.split(".")[1])
    call = operators.call(0, Op(f"aten.{name}", (TensorRef(0),), (), (1,)), lambda target: True)
    runs = []
    for each in (operator, call):
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        torch.manual_seed(3)
        with Called() as called:
            made = each(*given)
        runs.append((made, given[0], torch.get_rng_state()))
    assert not called.names & ON_THE_HOST
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert runs[0][0].dtype == runs[1][0].dtype


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("aten.linalg_eig.default", ()), ("aten.histc.default", ()), ("aten.histc.default", (10, 1.0, 1.0))],
)
def test_what_nothing_else_tells_is_refused_by_name(target: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ProgramError, match=f"operator 4 .{target}") as raised:
        operators.refuse_uncapturable(4, Op(target, (TensorRef(0), *arguments), (), (1,)))
    assert "outside the step" in raised.value.remedy
    operators.refuse_uncapturable(4, Op("aten.histc.default", (TensorRef(0), 10, 0.0, 1.0), (), (1,)))
