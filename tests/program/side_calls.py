"""Valid calls of allowed operators with several tensors that torch's own samples do not make (guard_pages.py)."""

from __future__ import annotations

from typing import Any

import torch

Args = tuple[Any, ...]
Calls = list[tuple[Any, Args, dict[str, Any]]]
aten = torch.ops.aten


def r(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.1


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def n(*shape: int) -> torch.Tensor:
    return torch.randint(1, 4, shape)


_NORM = (r(2, 3, 4), r(3), r(3))
_CONV2 = (r(2, 3, 6, 6), r(4, 3, 3, 3))
_CONV3 = (r(2, 3, 5, 5, 5), r(4, 3, 2, 2, 2))
_UP2 = (r(2, 3, 4, 4), r(3, 4, 3, 3))
_UP3 = (r(2, 3, 3, 3, 3), r(3, 4, 2, 2, 2))
_QKV = (r(2, 3, 4, 8), r(2, 3, 6, 8), r(2, 3, 6, 8))
_FUSED = {"weight_decay": 0.0, "maximize": False, "grad_scale": r(1), "found_inf": torch.zeros(1)}
_LISTS = tuple([r(3, 4), r(5)] for _ in range(5))
_STEPS = [r(1).squeeze(), r(1).squeeze()]
_ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": True, **_FUSED}
_SGD = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False, **_FUSED}
_ADAGRAD = {"lr_decay": 0.0, "eps": 1e-8, **_FUSED}

# By name without "aten."; ".default" is left out. Each: arguments, and keywords last if there are any.
_TABLE: dict[str, Args] = {
    "_addmm_activation": (r(5), r(4, 3), r(3, 5)),
    "_amp_foreach_non_finite_check_and_unscale": ([r(3, 3), r(3)], torch.zeros(1), r(1)),
    "_amp_foreach_non_finite_check_and_unscale_": ([r(3, 3), r(3)], torch.zeros(1), r(1)),
    "_amp_update_scale": (r(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 3),
    "_amp_update_scale_": (r(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 3),
    "_batch_norm_no_update": (*_NORM, r(3), r(3), 0.1, 1e-5),
    "_batch_norm_with_update_functional": (*_NORM, r(3), r(3), 0.1, 1e-5),
    "_convolution": (
        *_CONV2, r(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False,
    ),
    "_dirichlet_grad": (r(3, 4), r(3, 4), r(3, 4)),
    "_embedding_bag_dense_backward": (
        r(2, 4), i(0, 1, 2, 1), i(0, 0, 1, 1), i(2, 2), i(), 9, False, 0, r(4),
    ),
    "_embedding_bag_forward_only": (r(9, 4), i(0, 0, 0, 0), i(0, 2), False, 0, False, r(4)),
    "_euclidean_dist": (r(5, 3), r(4, 3)),
    "_fused_rms_norm": (r(4, 5), [5], r(5), 1e-5),
    "_grouped_mm": (torch.rand(2, 8, 16).bfloat16(), torch.rand(2, 16, 8).bfloat16()),
    "_index_put_impl_": (r(4, 5), [i(0, 1)], r(2, 5)),
    "_int_mm": (n(17, 16).to(torch.int8), n(16, 8).to(torch.int8)),
    "_masked_softmax": (r(2, 3, 4, 4), b(4, 4), 3, 0),
    "_native_batch_norm_legit.no_stats": (*_NORM, True, 0.1, 1e-5),
    "_native_batch_norm_legit_functional": (*_NORM, r(3), r(3), True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": (*_NORM, r(3), r(3), 0.1, 1e-5),
    "_scaled_dot_product_attention_math": (*_QKV, r(4, 6)),
    "_scaled_mm": (
        torch.rand(16, 16).to(torch.float8_e4m3fn), torch.rand(16, 16).to(torch.float8_e4m3fn).t(), r(1), r(1),
    ),
    "_stack": ([r(3, 4), r(3, 4)], 0),
    "_standard_gamma_grad": (r(3, 4), r(3, 4)),
    "_thnn_differentiable_gru_cell_backward": (r(2, 3), r(2, 9), r(2, 9), r(2, 3), r(9), r(9)),
    "_thnn_differentiable_lstm_cell_backward": (
        r(2, 3), r(2, 3), r(2, 12), r(2, 12), r(12), r(12), r(2, 3), r(2, 3),
    ),
    "_unsafe_index.Tensor": (r(4, 5), [i(0, 1)]),
    "_unsafe_index_put": (r(4, 5), [i(0, 1)], r(2, 5)),
    "_weight_norm_interface": (r(6, 4), r(6, 1), 0),
    "_weight_norm_interface_backward": (r(6, 4), r(6, 4), r(6, 1), r(6, 1), 0),
    "bernoulli.Tensor": (r(3, 4), torch.rand(3, 4)),
    "bernoulli_.Tensor": (r(3, 4), torch.rand(3, 4)),
    "binomial": (n(3, 4).float(), torch.rand(3, 4)),
    "conv_tbc": (r(5, 2, 3), r(3, 3, 4), r(4), 0),
    "conv_tbc_backward": (r(3, 2, 4), r(5, 2, 3), r(3, 3, 4), r(4), 0),
    "copy": (r(3, 4), r(3, 4)),
    "cummaxmin_backward": (r(3, 4), r(3, 4), torch.zeros(3, 4).long(), 1),
    "cumprod_backward": (r(3, 4), r(3, 4), 1, r(3, 4)),
    "embedding_renorm": (r(9, 4), i(0, 0, 0), 1.0, 2.0),
    "embedding_renorm_": (r(9, 4), i(0, 0, 0), 1.0, 2.0),
    "fill.Tensor": (r(3, 4), r(1).squeeze()),
    "fill_.Tensor": (r(3, 4), r(1).squeeze()),
    "ger": (r(3), r(4)),
    "glu_backward_jvp": (r(4, 6), r(4, 3), r(4, 6), r(4, 3), r(4, 6), 1),
    "glu_jvp": (r(4, 3), r(4, 6), r(4, 6), 1),
    "index_fill_.int_Scalar": (r(4, 5), 0, i(0, 1), 1.5),
    "index_fill_.int_Tensor": (r(4, 5), 0, i(0, 1), r(1).squeeze()),
    "infinitely_differentiable_gelu_backward": (r(3, 4), r(3, 4)),
    "isclose": (r(3, 4), r(3, 4)),
    "kl_div": (r(3, 4), r(3, 4)),
    "linear": (r(2, 3), r(4, 3), r(4)),
    "max.other": (r(3, 4), r(3, 4)),
    "min.other": (r(3, 4), r(3, 4)),
    "masked_fill_.Tensor": (r(3, 4), b(3, 4), r(1).squeeze()),
    "masked_scatter_": (r(3, 4), b(3, 4), r(3, 4)),
    "randint_like.Tensor": (r(3, 4), i(5).squeeze()),
    "rrelu_with_noise_functional": (r(20), r(20), 0.1, 0.3, True),
    "scatter.value_reduce": (r(4, 5), 0, torch.zeros(2, 5).long(), 1.5, {"reduce": "add"}),
    "scatter_.value_reduce": (r(4, 5), 0, torch.zeros(2, 5).long(), 1.5, {"reduce": "add"}),
    "scatter_.reduce": (r(4, 5), 0, torch.zeros(2, 5).long(), r(2, 5), {"reduce": "add"}),
    "searchsorted.Scalar": (r(7), 0.5, {"sorter": torch.arange(7)}),
    "searchsorted.Tensor": (r(3, 7), r(3, 4), {"sorter": torch.arange(7).repeat(3, 1)}),
    "slice_scatter": (r(4, 5), r(2, 5), 0, 1, 3),
    "take_along_dim": (r(4, 5), torch.zeros(2, 5).long(), 0),
    "value_selecting_reduction_backward": (r(4), 1, torch.zeros(4).long(), [4, 5], False),
    "where.ScalarOther": (b(3, 4), r(3, 4), 1.0),
    "where.ScalarSelf": (b(3, 4), 1.0, r(3, 4)),
    **{
        name: (r(3, 4), r(3, 4))
        for name in ("atan2_", "copysign_.Tensor", "floor_divide_.Tensor", "ldexp_", "pow_.Tensor", "xlogy_.Tensor")
    },
    **{
        f"__{name}__.Tensor": (n(3, 4), n(3, 4))
        for name in ("and", "iand", "ilshift", "ior", "irshift", "ixor", "lshift", "or", "rshift", "xor")
    },
    **{
        f"{name}_{overload}": (*lists, {"lr": r(1).squeeze() if overload else 0.1, **how})
        for name, lists, how in (
            ("_fused_adam", (*_LISTS, _STEPS), _ADAM),
            ("_fused_adamw", (*_LISTS, _STEPS), _ADAM),
            ("_fused_sgd", _LISTS[:3], _SGD),
            ("_fused_adagrad", (*_LISTS[:3], _STEPS), _ADAGRAD),
        )
        for overload in ("", ".tensor_lr")
    },
}  # fmt: skip


def operator(name: str) -> Any:
    """The operator of a name such as aten.add.Tensor."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def written() -> Calls:
    calls: Calls = []
    for name, args in _TABLE.items():
        keywords = args[-1] if isinstance(args[-1], dict) else {}
        full = f"aten.{name}" if "." in name else f"aten.{name}.default"
        calls.append((operator(full), args[: len(args) - bool(keywords)], keywords))
    return calls


def of_lists(names: list[str]) -> Calls:
    """Calls of operators on lists (_foreach_*), made by their schemas."""
    calls: Calls = []
    for name in names:
        func = operator(name)
        args: list[Any] = []
        for argument in func._schema.arguments:
            kind = str(argument.type)
            if kind == "List[Tensor]":
                args.append([r(3, 3), r(3, 3)])
            elif kind == "Tensor":
                args.append(r(2) if "addc" in name else r(1).squeeze())
            elif argument.has_default_value():
                break
            else:
                args.append([0.5, 0.7] if kind.startswith("List") else 0.5)
        calls.append((func, tuple(args), {}))
    return calls
