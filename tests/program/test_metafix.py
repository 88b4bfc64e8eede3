"""Fake execution gives what the CPU kernels really return, also if torch alone does not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpumux.program.check import fake_call
from tests.onednn import skip_without_bfloat16_lstm

aten = torch.ops.aten
BF16 = torch.bfloat16


def seen(value):
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [(t.dtype, tuple(t.shape), t.stride(), t.untyped_storage().nbytes()) for t in values if t is not None]


def ones(*size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)


def norms(dtype):
    x = ones(4, 8, 2, dtype=dtype)
    row = ones(4, 8, dtype=dtype)
    return {
        "batch": (aten.native_batch_norm.default, (x, ones(8), ones(8), ones(8), ones(8), True, 0.1, 1e-5)),
        "batch without weight": (aten.native_batch_norm.default, (x, None, None, None, None, True, 0.1, 1e-5)),
        "layer": (aten.native_layer_norm.default, (row, [8], ones(8), ones(8), 1e-5)),
        "layer without weight": (aten.native_layer_norm.default, (row, [8], None, None, 1e-5)),
        "group": (aten.native_group_norm.default, (x, ones(8), ones(8), 4, 8, 2, 2, 1e-5)),
        "group backward": (
            aten.native_group_norm_backward.default,
            (x, x, ones(4, 2), ones(4, 2), ones(8), 4, 8, 2, 2, [True] * 3),
        ),
    }


def others():
    labels = torch.zeros(4, dtype=torch.long)
    return {
        "multi margin": (aten.multi_margin_loss_backward.default, (ones(), ones(4, 3), labels, 1, 1.0, None)),
        "gamma": (aten._standard_gamma_grad.default, (ones(3), ones(3))),
        "dirichlet": (aten._sample_dirichlet.default, (ones(2, 3),)),
        "binomial": (aten.binomial.default, (ones(3), ones(3) / 2)),
    }


def of_unlike_strides():
    """A gradient in the layout of a fused convolution's, and the input of the activation."""
    plain, turned = ones(3, 4, 5, 2), ones(4, 3, 5, 2).transpose(0, 1)
    numbers = {
        aten.hardswish_backward.default: (),
        aten.hardsigmoid_backward.default: (),
        aten.hardtanh_backward.default: (-1.0, 1.0),
        aten.softplus_backward.default: (1.0, 20.0),
        aten.logit_backward.default: (None,),
        aten.gelu_backward.default: (),
        aten.threshold_backward.default: (0.0,),
    }
    found = {}
    for func, more in numbers.items():
        found[f"{func} of turned"] = (func, (turned, plain, *more))
        found[f"{func} turned"] = (func, (plain, turned, *more))
    return found | {"log sigmoid": (aten.log_sigmoid_forward.default, (turned,))}


def mixed():
    """Operands that have different orders in memory."""
    a, b = torch.rand(3, 5, 4), torch.rand(5, 3, 4).transpose(0, 1)
    names = {
        "hardsigmoid_backward": (), "hardswish_backward": (),
        "hardtanh_backward": (-0.5, 0.5), "softplus_backward": (0.3, 1.0), "gelu_backward": (), "silu_backward": (),
        "sigmoid_backward": (), "tanh_backward": (), "threshold_backward": (0.3,), "mish_backward": (),
        "leaky_relu_backward": (0.3, False), "logit_backward": (), "_softmax_backward_data": (1, torch.float32),
        "_log_softmax_backward_data": (1, torch.float32),
    }  # fmt: skip
    found = {
        "elu_backward": (aten.elu_backward.default, (a, 1.0, 1.0, 0.3, False, b)),
        "elu_backward, exchanged": (aten.elu_backward.default, (b, 1.0, 1.0, 0.3, False, a)),
    }
    for name, rest in names.items():
        for order, pair in (("", (a, b)), (", exchanged", (b, a))):
            found[f"{name}{order}"] = (getattr(aten, name).default, (*pair, *rest))
        if "softmax" not in name:  # one gradient for all
            found[f"{name}, broadcast"] = (getattr(aten, name).default, (a[0], b, *rest))
    for name, rest in {"mse": (0,), "smooth_l1": (0, 1.0), "huber": (0, 1.0)}.items():
        for order, pair in (("", (a, b, a)), (", exchanged", (b, a, b))):
            found[f"{name}{order}"] = (getattr(aten, f"{name}_loss_backward").default, (*pair, *rest))
    found["bce"] = (aten.binary_cross_entropy.default, (b, a, b, 0))
    found["bce backward"] = (aten.binary_cross_entropy_backward.default, (a, b, a, None, 0))
    found["unasked gradient"] = (
        aten.native_batch_norm_backward.default,
        (a, a, ones(5), ones(5), ones(5), ones(5), ones(5), True, 1e-5, [False, True, True]),
    )
    return found


CASES = [("bf16 " + k, *v) for k, v in norms(BF16).items()] + [
    ("f32 " + k, *v) for k, v in norms(torch.float32).items()
]
CASES += [(k, *v) for k, v in (others() | of_unlike_strides() | mixed()).items()]


@pytest.mark.parametrize(("name", "func", "args"), CASES, ids=[case[0] for case in CASES])
def test_fake_and_real_agree(name, func, args):
    real = func(*args)
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
        fake = fake_call(func, fakes, {}, "cpu")
    assert seen(fake) == seen(real)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_layers_of_an_lstm_make_what_the_kernel_makes(biased: bool, dtype: torch.dtype, reverse: bool):
    """With the workspace, whose size the kernel is asked for, and two gradients of biases in memory of their own."""
    if dtype == BF16:
        skip_without_bfloat16_lstm()
    weights = [ones(36, 7, dtype=dtype), ones(36, 9, dtype=dtype)]
    weights += [ones(36, dtype=dtype)] * 2 if biased else weights
    tensors = [ones(6, 3, 7, dtype=dtype), *weights, ones(3, 9, dtype=dtype), ones(3, 9, dtype=dtype)]
    how = (2, 9, 1, biased)
    layer, backward = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default

    def both(call, x):
        with torch.enable_grad():
            out, hy, cy, workspace = call(layer, (*x, reverse, [], *how, False, False, True))
        with torch.no_grad():
            assert call(layer, (*x, reverse, [], *how, False, False, True))[3] is None
        given = (*x, out, hy, cy, out, None, cy, reverse, *how, True, False, [], False, workspace)
        return (out, hy, cy, workspace), call(backward, given)

    real = both(lambda func, args: func(*args), tensors)
    with FakeTensorMode(allow_fallback_kernels=False) as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        fake = both(lambda func, args: fake_call(func, args, {}, "cpu"), fakes)
    for got, want in zip(fake, real, strict=True):
        assert seen(got) == seen(want)
        for each in (got, want):
            assert len({t.untyped_storage()._cdata for t in each}) == len(each)


SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}


def test_fused_optimizers_have_a_rule():
    sgd, adagrad = aten._fused_sgd_.default, aten._fused_adagrad_.default
    with FakeTensorMode(allow_fallback_kernels=False):
        two = [ones(3), ones(2, 2)]
        assert fake_call(sgd, (two, two, two), {**SGD, "is_first_step": False}, "cpu") is None
        assert fake_call(sgd, (two, two, []), {**SGD, "is_first_step": False}, "cpu") is None
        assert fake_call(adagrad, (two, two, two, [ones(), ones()]), ADAGRAD, "cpu") is None


@pytest.mark.parametrize(
    "grads", [[(3,)], [(3,), (2, 2), (1,)], [(3,), (2, 3)], []], ids=["fewer", "more", "of another shape", "none"]
)
def test_fused_optimizers_get_lists_that_fit(grads: list[tuple[int, ...]]):
    """Their kernels walk all lists by the length of the first one."""
    with FakeTensorMode(allow_fallback_kernels=False):
        params, wrong, counts = [ones(3), ones(2, 2)], [ones(*size) for size in grads], [ones(), ones()]
        calls = [
            (aten._fused_sgd_.default, (params, wrong, params), {**SGD, "is_first_step": False}),
            (aten._fused_adagrad_.default, (params, params, wrong, counts), ADAGRAD),
            (aten._fused_adagrad_.default, (params, params, params, wrong), ADAGRAD),
        ]
        for func, args, kwargs in calls:
            with pytest.raises(ValueError, match="takes"):
                fake_call(func, args, kwargs, "cpu")


def of_unlike_types():
    x, w, one = ones(2, 3), ones(3, 4, dtype=torch.float64), ones(1, dtype=torch.float64)
    image, kernel = ones(1, 2, 5, 5), ones(3, 2, 3, 3)
    wide = image.double()
    places = torch.zeros(2, dtype=torch.long)
    return {
        "mm": (aten.mm.default, (x, w)),
        "mv": (aten.mv.default, (x, ones(3, dtype=torch.float64))),
        "addmm": (aten.addmm.default, (one, x, ones(3, 4))),
        "convolution backward": (
            aten.convolution_backward.default,
            (ones(1, 3, 3, 3), wide, kernel, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3),
        ),
        "layer norm": (aten.native_layer_norm.default, (x, [3], w[:, 0], w[:, 0], 1e-5)),
        "float16 among doubles": (aten.native_layer_norm.default, (x.half(), [3], w[:, 0], w[:, 0], 1e-5)),
        "binary cross entropy": (aten.binary_cross_entropy.default, (ones(3), ones(3, dtype=torch.float64))),
        "weights of classes": (aten.nll_loss_forward.default, (x, places, w[:, 0], 1, -100)),
        "classes in int32": (aten.nll_loss_forward.default, (x, places.int(), None, 1, -100)),
        "index add": (aten.index_add.default, (ones(5), 0, places, ones(2, dtype=torch.float64))),
        "index put": (aten.index_put.default, (ones(5), [places], ones(2, dtype=torch.float64))),
        "prelu": (aten._prelu_kernel.default, (x, one)),
        "grid sampler": (aten.grid_sampler_2d.default, (image, ones(1, 2, 2, 2, dtype=torch.float64), 0, 0, False)),
        "softmax backward": (aten._softmax_backward_data.default, (x, x.double(), 0, torch.float32)),
    }


@pytest.mark.parametrize(("func", "args"), of_unlike_types().values(), ids=of_unlike_types())
def test_types_that_a_kernel_refuses_are_refused(func, args):
    with pytest.raises(RuntimeError):
        func(*args)
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map(lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, args)
        with pytest.raises(RuntimeError, match="takes"):
            fake_call(func, fakes, {}, "cpu")
