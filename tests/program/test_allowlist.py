"""The allow-list against torch's own schemas."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.errors import ProgramError
from gpumux.program import allowed_ops
from gpumux.program.operators import (
    ALLOWED,
    HIDDEN_WRITES,
    INDEX_ARGS,
    NOT_IN_EVERY_TORCH,
    PERHAPS_RANDOM,
    RANDOM,
    is_allowed,
    resolve,
    written_args,
)


def overload(target):
    _, name, which = target.split(".")
    return getattr(getattr(torch.ops.aten, name, None), which, None)


PRESENT = sorted(target for target in ALLOWED if overload(target) is not None)


def test_every_name_exists_in_torch_or_is_listed_as_absent_somewhere():
    assert set(ALLOWED) - set(PRESENT) <= NOT_IN_EVERY_TORCH
    assert NOT_IN_EVERY_TORCH <= ALLOWED
    assert len(ALLOWED) > 1000


def test_no_name_is_listed_twice():
    names = [name for family in allowed_ops.FAMILIES for name in family.split()]
    assert sorted(names) == sorted(set(names))


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.targets = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.targets.add(str(func))
        return func(*args, **(kwargs or {}))


def test_what_the_gradient_of_an_elementwise_operator_calls_is_listed():
    samples = {"Tensor": torch.full((2, 3), 0.3), "Optional[Tensor]": None, "int": 1, "number": 0.5, "float": 0.5}
    trained = 0
    for target in PRESENT:
        arguments = [str(a.type) for a in overload(target)._schema.arguments if not a.has_default_value()]
        if torch.Tag.pointwise not in overload(target).tags or not samples.keys() >= set(arguments):
            continue
        args = [samples[kind] for kind in arguments]
        args = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
        with Called() as called, contextlib.suppress(RuntimeError, NotImplementedError):  # not for these types
            found = overload(target)(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
            if isinstance(found, torch.Tensor) and found.requires_grad:
                found.abs().sum().backward()
                trained += 1
        # That of sgn is a tensor of zeros without memory, which is refused.
        assert called.targets <= ALLOWED | {"aten._efficientzerotensor.default"}, target
    assert trained > 150


def test_nothing_is_listed_that_reaches_outside_a_program():
    forbidden_types = {"Storage", "Generator", "Stream", "QScheme"}
    for target in PRESENT:
        schema = overload(target)._schema
        assert "out" not in {a.name for a in schema.arguments if a.is_out}, target
        required = [a for a in schema.arguments if not a.has_default_value()]
        assert not {str(a.real_type) for a in required} & forbidden_types, target
    words = ("set_", "resize", "from_file", "from_blob", "record_stream", "quant", "sparse", "mkldnn_reorder", "_print",
             "pin_memory", "_assert", "item", "_local_scalar", "nested", "to_mkldnn", "data_ptr", "_test",
             "tbl_")  # fmt: skip
    for target in ALLOWED:
        name = target.split(".")[1]
        assert not any(name.startswith(word) or f"_{word}" in name for word in words if word != "set_"), target
        assert name not in ("set_", "t_", "squeeze_", "unsqueeze_", "transpose_", "as_strided_", "swapaxes_", "detach_")


def test_written_arguments_are_what_the_schemas_say():
    for target in PRESENT:
        arguments = overload(target)._schema.arguments
        said = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
        if target in HIDDEN_WRITES:
            assert said == ()
            assert {"running_mean", "running_var"} == {arguments[i].name for i in written_args(target)}
        else:
            assert written_args(target) == said, target


def test_hidden_writes_are_real():
    """native_batch_norm changes its running statistics though its schema does not say so."""
    mean, var = torch.zeros(2), torch.ones(2)
    torch.native_batch_norm(torch.randn(4, 2, 3), None, None, mean, var, True, 0.5, 1e-5)
    assert mean.abs().sum() > 0
    assert "aten.native_batch_norm.default" in HIDDEN_WRITES


def test_random_operators_are_what_torch_says():
    seeded = {t for t in PRESENT if torch.Tag.nondeterministic_seeded in overload(t).tags}
    with_generator = {t for t in PRESENT if any("Generator" in str(a.real_type) for a in overload(t)._schema.arguments)}
    assert not RANDOM & PERHAPS_RANDOM
    assert seeded | with_generator == (RANDOM | PERHAPS_RANDOM) & set(PRESENT)


# Arguments named like indices that are none: targets of losses that compare numbers, and philox state.
NOT_INDICES = {"philox_offset", "is_target"}
NUMBER_LOSSES = ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss")


def test_index_arguments_are_all_listed():
    hints = ("ind", "target", "pivot", "offset", "lengths", "cu_seq", "cum_seq", "offs")
    for target in PRESENT:
        if any(loss in target for loss in NUMBER_LOSSES):
            assert target not in INDEX_ARGS
            continue
        found = tuple(
            i
            for i, a in enumerate(overload(target)._schema.arguments)
            if any(hint in a.name for hint in hints) and a.name not in NOT_INDICES and "Tensor" in str(a.real_type)
        )
        assert INDEX_ARGS.get(target, ()) == found, target
    assert set(INDEX_ARGS) <= ALLOWED


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.resize_.default",
        "aten.add.out",
        "aten.item.default",
        "aten.nonzero.default",
        "aten._conj.default",
        "aten.add",
        "aten.add.Tensor.x",
        "prims.add.default",
        "os.system.default",
        "",
        "aten.__class__.default",
    ],
)
def test_what_is_not_listed_is_refused_by_name(target):
    assert not is_allowed(target)
    with pytest.raises(ProgramError, match="allow-list") as error:
        resolve(target)
    assert repr(target) in error.value.message
    assert "allow_ops" in error.value.remedy


def test_an_operator_of_the_daemon_may_add_some():
    assert resolve("mylib.fused.default", {"mylib.fused.default"}) == "mylib.fused.default"
    assert resolve("aten.add.Tensor") == "aten.add.Tensor"
