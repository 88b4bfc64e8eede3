"""Autocast of a step that is traced on the CPU for a GPU, compared with torch's own. Torch's autocast kernels for a GPU
are part of every build and take fake tensors. The operators of whole calls, forward and backward, were recorded with a
CUDA build (microbench/cuda/casts.py)."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gpumux
from gpumux.capture.gpu import autocast as casts
from gpumux.capture.gpu.autocast import autocast_of_a_gpu
from gpumux.capture.gpu.operators import as_on_a_gpu, as_they_are
from gpumux.capture.patches import RngTape
from gpumux.capture.watch.watches import modes
from gpumux.errors import CaptureError
from microbench.cuda.casts import cast, named, under
from microbench.cuda.operators import Operators
from tests.client.test_ongpu import DIFFER, GROUPS, LEFT_TO_THE_DAEMON, WINDOWS, skip_if_it_looks

Call = tuple[str, Any]
RECORDED: dict[str, str] = json.loads(
    (Path(gpumux.__file__).parents[1] / "microbench/results/casts-on-a-gpu.json").read_text()
)["calls"]
LOW = (torch.float16, torch.bfloat16)


@contextmanager
def traced(replace: bool = True, home: torch.device | None = None) -> Iterator[None]:
    with autocast_of_a_gpu(True, home), as_on_a_gpu(RngTape(), True, replace):
        yield


# ---- each operator, compared with torch's kernel for it


class Reached(Exception):
    """An operator is called, after autocast, with this."""


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


@contextmanager
def stopped(names: list[str], key: str) -> Iterator[None]:
    """Inside, these operators stop at autograd and record their arguments."""
    library = torch.library.Library("aten", "IMPL")

    def stop(name: str) -> Callable[..., Any]:
        def reached(*args: Any, **kwargs: Any) -> Any:
            arguments = [each.name for each in overload(name)._schema.arguments]
            told = dict(zip(arguments, args, strict=False)) | kwargs
            defaults = {each.name: each.default_value for each in overload(name)._schema.arguments}
            raise Reached(name, pytree.tree_map_only(torch.Tensor, lambda t: t.dtype, defaults | told))

        return reached

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch notes that kernels are put over others
            for name in names:
                library.impl(name, stop(name), key)
        yield
    finally:
        library._destroy()


def argument(kind: str, dtypes: Iterator[torch.dtype], device: str) -> Any:
    if kind in ("Tensor", "Optional[Tensor]"):
        return torch.empty(2, 2, device=device, dtype=next(dtypes))
    if kind == "List[Tensor]":
        return [torch.empty(2, 2, device=device, dtype=next(dtypes)) for _ in range(2)]
    if kind == "List[Optional[Tensor]]":
        return [torch.empty(2, device=device, dtype=torch.int64), None]
    plain: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 0.5, "bool": False, "str": "mean", "number": 2}
    if kind.startswith("Optional["):
        return None
    return [1, 1] if kind.startswith("List[") else plain[kind]


def reached(name: str, dtypes: list[torch.dtype], device: str, **more: Any) -> Any:
    operator, left = overload(name), itertools.cycle(dtypes)
    wanted = [each for each in operator._schema.arguments if not each.kwarg_only]
    args = [argument(str(each.type), left, device) for each in wanted]
    try:
        operator(*args, **more)
    except Reached as found:
        return found.args
    except RuntimeError as error:
        return str(error).splitlines()[0].split(" Exception")[0]
    raise AssertionError(f"{name} stopped nowhere")


def kinds(low: torch.dtype) -> list[list[torch.dtype]]:
    """Types of an operator's tensors, in turn."""
    other = LOW[low == torch.float16]
    every = [torch.float32, low, torch.float64, torch.int64, other]
    return (
        [[each] for each in every]
        + [every[i:] + every[:i] for i in range(5)]
        + [[low, torch.float32], [torch.float32, low]]
    )


def named_dimensions(name: str) -> bool:
    return (
        any("Dimname" in str(each) or each.name == "names" for each in overload(name)._schema.arguments)
        or "imname" in name
    )


RULES = {rule.__name__: [n for n in names if casts.rules().get(n) is rule] for names, rule in casts.RULES}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "recurrent"])
def test_an_operator_is_called_with_what_torchs_own_kernel_calls_it_with(rule: str, low: torch.dtype) -> None:
    names = [name for name in RULES[rule] if not named_dimensions(name)]
    assert names
    everything = sorted({*names, "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype"})
    asked = [(name, dtypes, {}) for name in names for dtypes in kinds(low)]
    if rule == "in_float32":
        asked += [(name, [low], {"dtype": torch.float64}) for name in names if ".int" not in name]
    with stopped(everything, "AutogradCUDA"), under(low), FakeTensorMode():
        want = [reached(name, dtypes, "cuda", **more) for name, dtypes, more in asked]
    with stopped(everything, "AutogradCPU"), traced(replace=False), under(low):
        got = [reached(name, dtypes, "cpu", **more) for name, dtypes, more in asked]
    for (name, dtypes, _), a, b in zip(asked, want, got, strict=True):
        assert a == b, f"{name} of {dtypes}"
    raised = sum(isinstance(each, str) for each in want)
    assert raised == len(want) if rule == "unsafe" else raised < len(want) / 2
    assert raised or rule != "widest", "of two lower types torch takes neither"


def test_all_that_torch_casts_on_a_gpu_is_known() -> None:
    """No other operator is listed, except names that only some versions and builds of torch have."""
    rules = casts.rules()
    assert [name for name, rule in rules.items() if rule is casts.unknown] == []
    listed = {name for names, _ in casts.RULES for name in names}
    old = {name for name in listed if "imname" in name or name == "norm.names_ScalarOpt_dim"}
    assert listed - set(rules) <= old | {"rms_norm"}


def test_a_rule_that_is_not_known_is_refused_where_it_is_met() -> None:
    with pytest.raises(CaptureError, match="does not know"):
        casts.unknown((torch.ops.aten.mm.default, (), {}))


# ---- whole calls, compared with a CUDA build of torch


class Traced(Operators):
    def inside(self) -> Any:
        return as_they_are()


def ours(name: str, low: torch.dtype) -> str:
    with warnings.catch_warnings(), traced():
        warnings.simplefilter("ignore")
        return cast(named(name), low, "cpu", Traced(typed=True))


def plain(operators: str) -> list[str]:
    found = [each.replace("new_zeros(f)", "zeros()").replace("zeros(f)", "zeros()") for each in operators.split()]
    return [each for each in found if each.partition("(")[0] not in WINDOWS]


def cases() -> list[str]:
    """In float16 only what differs from bfloat16."""

    def alike(name: str) -> bool:
        return RECORDED[f"{name}, float16"].replace("h", "b") == RECORDED[f"{name}, bfloat16"].replace("h", "b")

    calls = [name.rsplit(", ", 1) for name in RECORDED]
    return [f"{name}, {low}" for name, low in calls if low == "bfloat16" or not alike(name)]


@pytest.mark.parametrize("case", cases())
def test_a_call_is_cast_as_on_a_gpu(case: str) -> None:
    name, low = case.rsplit(", ", 1)
    skip_if_it_looks(name)
    want, got = plain(RECORDED[case]), plain(ours(name, getattr(torch, low)))
    letter = low[0].replace("f", "h")
    if name in DIFFER or any(each in name for each in ("batch norm, ", "instance norm")):
        assert casts_of(got, letter) == casts_of(want, letter)
    elif name in LEFT_TO_THE_DAEMON or name in ("attention of a product", GROUPS):
        fused = [each for each in got if each.startswith("_scaled_dot_product")]
        assert len(fused) == 2
        assert all({*each.partition("(")[2].split(")")[0]} <= {letter, "f", "i"} for each in fused)
        assert fused[0].split("(")[1][:3] == 3 * letter
        before = [each for each in got[: got.index(fused[0])] if "pad" not in each]  # of a mask's rows
        assert before == want[: len(before)]
    elif want[0] == "!" and "AcceleratorError:" in want:
        assert [each for each in got if each.startswith("_cudnn_rnn(h")], "nobody knows what a GPU runs"
        assert {each.split("(")[1].split(")")[0] for each in got if each.startswith("_cudnn_rnn(")} <= {
            "h" * n for n in range(30)
        }
    elif "rms norm of halves" in name and "rms_norm" in casts.rules():
        assert [each for each in got if "rms" in each] == [
            "_fused_rms_norm(ff)>ff",
            "_fused_rms_norm_backward(ffff)>ff",
        ]
    else:
        assert got == want


def casts_of(operators: list[str], letter: str) -> list[str]:
    return [each for each in operators if each.startswith("_to_copy") and letter in each]


# ---- the state that a step sees


def state() -> tuple[Any, ...]:
    on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return on("cuda"), on("cpu"), dtype("cuda"), dtype("cpu"), torch.is_autocast_cache_enabled()


OFF = (False, False, torch.float16, torch.bfloat16, True)


def test_both_names_mean_the_jobs_autocast() -> None:
    """The device of a traced tensor is the CPU, and code that reads it means the GPU."""
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    with warnings.catch_warnings(), traced():
        warnings.simplefilter("error")
        assert state() == OFF
        with torch.autocast("cuda"):
            assert state() == (True, True, torch.float16, torch.float16, True)
            assert (x @ w).dtype == torch.float16
            with torch.autocast(x.device.type, enabled=False):
                assert state()[:2] == (False, False)
                assert (x @ w).dtype == torch.float32
            assert state()[:2] == (True, True)
        with torch.autocast("cpu"):
            assert state() == (True, True, torch.bfloat16, torch.bfloat16, True)
            assert (x @ w).dtype == torch.bfloat16
            assert x.bfloat16().softmax(-1).dtype == torch.float32, "the GPU's list"
            with torch.autocast("cuda", torch.float16, cache_enabled=False):
                assert state() == (True, True, torch.float16, torch.float16, False)
                assert (x @ w).dtype == torch.float16
            assert (x @ w).dtype == torch.bfloat16
        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cpu", torch.float16):
            assert (x @ w).dtype == torch.float16
        assert state() == OFF
        torch.set_autocast_enabled("cpu", True)
        assert torch.is_autocast_cpu_enabled()
        torch.set_autocast_enabled(False)
        assert state() == OFF
    assert state() == OFF
    assert (x @ w).dtype == torch.float32


class Casts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("modes", ["gg", "nn", "gn", "ng", "ngn", "gng", "ig", "ing"])
def test_a_weight_is_cast_once_and_has_its_gradient_in_whatever_order_it_is_cast(modes: str) -> None:
    """As torch does on the CPU, by the code that it has for GPUs, too: with gradients, under no_grad, in inference
    mode."""
    w, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4, dtype=torch.bfloat16)
    under_way = {"g": torch.enable_grad, "n": torch.no_grad, "i": torch.inference_mode}

    def uses(device: str) -> tuple[int, list[bool]]:
        wanted = []
        with Casts() as casts, torch.autocast(device, torch.bfloat16):
            for mode in modes:
                with under_way[mode]():
                    wanted.append((x @ w).requires_grad)
        return casts.count, wanted

    want = uses("cpu")
    assert want[1] == [mode == "g" for mode in modes]
    with traced():
        assert uses("cuda") == want


def test_where_the_model_lies_on_a_gpu_its_types_are_meant() -> None:
    with traced(home=torch.device("cuda", 0)):
        assert torch.get_autocast_dtype("cpu") == torch.float16
        with torch.autocast("cpu"):
            assert state()[2] == torch.float16


@pytest.mark.parametrize("gpu", [False, True])
def test_autocast_of_the_cpu_around_a_step_is_the_jobs_unless_the_model_lies_on_a_gpu(gpu: bool) -> None:
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        before = state()
        with traced(home=torch.device("cuda", 0) if gpu else None):
            assert (x @ w).dtype == (torch.float32 if gpu else torch.bfloat16)
            assert torch.is_autocast_enabled("cuda") is not gpu
        assert state() == before
    assert state() == OFF


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns none off where it sees a GPU")
def test_one_made_outside_the_step_has_been_turned_off_by_torch_which_is_said() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        outside = torch.autocast("cuda", torch.bfloat16)
    with traced():
        with pytest.warns(UserWarning, match="Make it inside the step"), outside:
            assert not torch.is_autocast_enabled("cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autocast("cuda", enabled=False), torch.autocast("cuda"), outside:
                assert not torch.is_autocast_enabled("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns none off where it sees a GPU")
def test_without_a_gpu_autocast_is_torchs() -> None:
    with autocast_of_a_gpu(False, None):
        with pytest.warns(UserWarning, match="CUDA is not available"):
            off = torch.autocast("cuda")
        with off, torch.autocast("cpu"):
            assert state()[:2] == (False, True)


def test_a_type_that_would_be_cast_to_is_looked_at_at_every_call() -> None:
    watch = modes()
    now = watch.read()
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert watch.read() != now
    finally:
        torch.set_autocast_dtype("cuda", torch.float16)
    assert watch.read() == now


def product(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x, w)
    return x @ w


def its_gradients(ctx: Any, grad: torch.Tensor) -> Any:
    x, w = ctx.saved_tensors
    return grad @ w.t(), x.t() @ grad


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return product(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert not torch.is_autocast_enabled("cuda")
        return its_gradients(ctx, grad)


class Following(Cast):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return product(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        return its_gradients(ctx, grad)


@pytest.mark.parametrize("kind", [Cast, Following])
def test_functions_that_say_what_they_take_get_it(kind: Any) -> None:
    x, w = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    with traced():
        with torch.autocast("cuda", torch.bfloat16):
            y = kind.apply(x.bfloat16(), w)
            assert y.dtype == (torch.float32 if kind is Cast else torch.bfloat16)
        y.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32
