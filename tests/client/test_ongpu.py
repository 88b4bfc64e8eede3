"""The operators that a step for a GPU is traced as, compared with those that a CUDA build of torch chooses
(microbench/cuda/operators.py): every call is the GPU's, or is listed here with the reason."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpumux
from gpumux.capture.gpu import operators as ongpu
from gpumux.capture.patches import RngTape
from gpumux.capture.watch.watches import modes
from microbench.cuda.operators import CALLS, Operators, asked

RECORDED: dict[str, Any] = json.loads(
    (Path(gpumux.__file__).parents[1] / "microbench/results/operators-by-device.json").read_text()
)

# Operators that differ from a GPU's on purpose.
LEFT_TO_THE_DAEMON = {  # device/cuda/kernels.py chooses for the GPU
    "batch norm, training", "batch norm, not training", "instance norm", "attention", "attention, causal",
    "attention with a mask", "attention with dropout", "multi-head attention", "encoder layer",
}  # fmt: skip
GROUPS = "attention in groups"  # torch's choice among kernels for it was recorded without a card: products
DIFFER = {"renorm": "the CPU adds up in double precision"}
# Not recorded in float32, float16 and float64, because cuDNN's operators need a driver.
NOT_RECORDED = {"lstm", "lstm both ways", "gru", "rnn"}
# Operators that differ between versions of torch and change no number: views of memory, and allocations.
WINDOWS = {
    "view", "_unsafe_view", "t", "transpose.int", "expand", "unsqueeze", "squeeze.dim", "select.int", "permute",
    "unbind.int", "slice.Tensor", "clone",
}  # fmt: skip


class RecordedOperators(Operators):
    """Records operators after their replacement."""

    def inside(self) -> Any:
        return ongpu.as_they_are()


def replaced(name: str, dtype: torch.dtype, tape: RngTape | None = None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ongpu.as_on_a_gpu(tape or RngTape(), True):
            return asked(CALLS[name], dtype, "cpu", RecordedOperators())


def plain(operators: str) -> list[str]:
    return [name.replace("new_zeros", "zeros") for name in operators.split() if name not in WINDOWS]


def cases() -> list[tuple[str, str]]:
    """In every type what differs in one, the rest in one."""
    split = [(*call.rsplit(", ", 1), "cpu" in each) for call, each in RECORDED["calls"].items()]
    different = {name for name, _, differs in split if differs}
    return [(name, dtype) for name, dtype, _ in split if name in different or dtype == "float32"]


def skip_if_it_looks(name: str) -> None:
    """Before torch 2.13, quantile() looks at the quantile's value on every device, and such a step is refused."""
    if name == "quantile" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this torch looks at the quantile's value")


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_a_call_is_told_as_a_gpu_runs_it(name: str, dtype: str) -> None:
    skip_if_it_looks(name)
    want, got = RECORDED["calls"][f"{name}, {dtype}"], replaced(name, getattr(torch, dtype))
    cuda, cpu = plain(want["cuda"]), plain(want.get("cpu", want["cuda"]))
    if want["cuda"].startswith("!"):
        assert name in NOT_RECORDED or cuda == cpu, f"nobody knows what a GPU runs: {cuda}"
        if name in NOT_RECORDED:
            assert {"_cudnn_rnn", "_cudnn_rnn_backward"} <= {*got.split()}
        return
    if name == GROUPS:
        fused = [each for each in plain(got) if each.startswith("_scaled_dot_product")]
        assert len(fused) == (0 if dtype == "float64" else 2), got
        assert fused or plain(got) == cuda
        return
    differs = name in DIFFER or name in LEFT_TO_THE_DAEMON
    if cuda == cpu or not differs:
        assert plain(got) == cuda
    elif name in DIFFER:
        assert plain(got) == cpu, "it is the GPU's now: strike it from the list"


def test_the_lists_of_what_differs_hold_nothing_else() -> None:
    for name in {*DIFFER, *LEFT_TO_THE_DAEMON}:
        entries = [each for call, each in RECORDED["calls"].items() if call.rsplit(", ", 1)[0] == name]
        assert any("cpu" in each for each in entries), name
    assert set(CALLS) == {call.rsplit(", ", 1)[0] for call in RECORDED["calls"]}


# Calls of torch's own database that differ, by the reason.
EXPLAINED = {
    "rms_norm": "rms norm", "dropout": "dropout", "multi_head_attention": "dropout", "scaled_dot_product": "attention",
    "batch_norm": "batch norm", "instance_norm": "batch norm", "grid_sample": "grid sample", "renorm": "renorm",
    "quantile": "the CPU looks whether the quantile lies between 0 and 1",
    "__getitem__": "an index that lies on the CPU", "masked_": "a mask that lies on the CPU",
    "signal_windows": "a window made on the CPU", "_batch_norm_with_update": "asks cuDNN, which asks the driver",
}  # fmt: skip


def test_what_differs_in_torchs_own_database_of_calls_is_known() -> None:
    database = RECORDED["database"]
    assert len(database["same"]) > 900
    strange = [name for name in database["differ"] if not any(known in name for known in EXPLAINED)]
    assert not strange
    stale = [known for known in EXPLAINED if not any(known in name for name in database["differ"])]
    assert not stale


def test_nothing_is_changed_where_no_gpu_is_to_run_the_step() -> None:
    with ongpu.as_on_a_gpu(RngTape(), False):
        got = asked(CALLS["dropout"], torch.float32, "cpu", Operators())
    assert "bernoulli_.float" in got
    assert "bernoulli_.float" in asked(CALLS["dropout"], torch.float32, "cpu", Operators())
    with pytest.raises(ZeroDivisionError), ongpu.as_on_a_gpu(RngTape(), True):
        raise ZeroDivisionError
    assert "bernoulli_.float" in asked(CALLS["dropout"], torch.float32, "cpu", Operators())


def test_dropout_that_torch_calls_itself_is_replaced_too() -> None:
    """Between recurrent layers, and in attention that no kernel fuses."""
    with ongpu.as_on_a_gpu(RngTape(), True):
        layered = asked(
            lambda d: nn.GRU(16, 12, 3, dropout=0.2, dtype=d)(torch.empty(3, 5, 16)),
            torch.float32,
            "cpu",
            RecordedOperators(),
        )
        inside = asked(
            lambda d: F.scaled_dot_product_attention(*[torch.empty(2, 3, 8, 5)] * 3, dropout_p=0.2),
            torch.float32,
            "cpu",
            RecordedOperators(),
        )
    assert (layered.split().count("native_dropout"), layered.split().count("_cudnn_rnn")) == (2, 3)
    assert "native_dropout" in inside
    assert "bernoulli_.float" not in layered + inside


def test_attention_that_is_recomputed_keeps_its_mask_apart() -> None:
    """After a position of the generator was saved, draws may be repeated from it, which a fused kernel can't do."""
    tape = RngTape()
    tape.save()
    got = replaced("attention with dropout", torch.float32, tape)
    assert "native_dropout" in got
    assert "_scaled_dot_product_efficient_attention" not in got


def test_every_allowed_operator_without_a_kernel_on_the_gpu_is_told_otherwise_or_refused() -> None:
    from gpumux.device.cuda import operators
    from gpumux.program.ir import Op

    def kernels(target: str) -> bool:
        return target not in RECORDED["without_kernel"]

    from gpumux.errors import ProgramError

    refused = []
    for target in RECORDED["without_kernel"]:
        try:
            operators.call(0, Op(target, (), (), (), None), kernels)
        except ProgramError:
            refused.append(target)
    assert {target.split(".")[1] for target in refused} == {
        "linear_backward", "mkldnn_linear", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "native_norm",
        "slow_conv3d_forward",
    }  # fmt: skip


@pytest.mark.parametrize("setting", ["cudnn", "mem_efficient_sdp"])
def test_a_setting_that_chooses_is_looked_at_at_every_call(setting: str) -> None:
    watch = modes()
    set_to, now = (
        getattr(torch._C, f"_set_{'cudnn_enabled' if setting == 'cudnn' else 'sdp_use_mem_efficient'}"),
        watch.read(),
    )
    name = {"cudnn": "lstm", "mem_efficient_sdp": "attention with dropout"}[setting]
    operator = {"cudnn": "_cudnn_rnn", "mem_efficient_sdp": "_scaled_dot_product_efficient_attention"}[setting]
    assert operator in replaced(name, torch.float32)
    set_to(False)
    try:
        assert watch.read() != now
        assert operator not in replaced(name, torch.float32)
    finally:
        set_to(True)
    assert watch.read() == now
