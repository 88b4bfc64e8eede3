"""Programs of whole models, traced for a GPU: every operator of theirs has a kernel there, or a form that does what it
does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.optim import Optimizer

import gpumux
from gpumux.capture.tracer import Tracer
from gpumux.device.cuda import operators
from gpumux.fuse import member as members
from gpumux.program.check import check
from gpumux.program.codec import encode
from gpumux.program.ir import Program
from tests.client.workload_jobs import NAMES, work

RECORDED = json.loads((Path(gpumux.__file__).parents[1] / "microbench/results/operators-by-device.json").read_text())


def traced(name: str, monkeypatch: pytest.MonkeyPatch) -> Program:
    """As a client of a GPU daemon sends it, without one."""
    monkeypatch.setattr(members, "Tracer", lambda table, allowed, **_: Tracer(table, allowed))
    made = work(name, dropout=0.1)
    step, example = made.functions[0]
    optimizers: list[Optimizer] = made.optimizers
    member = members.Member(name, step, made.models, optimizers, max_variants=1, devices=("cpu", "cuda"), twice=False)
    try:
        return member.choose(example, {}).program.lowered.program
    finally:
        member.release()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every(3)
def test_every_operator_of_a_workload_is_known_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(name, monkeypatch)
    check(encode(program))
    for index, op in enumerate(program.ops):
        operators.refuse_uncapturable(index, op)
        operators.call(index, op, lambda target: target not in RECORDED["without_kernel"])
    operators.kept_draws(program)
    targets = {op.target for op in program.ops}
    if name in ("transformer", "bert_medium", "cnn"):
        assert "aten.native_dropout.default" in targets
    if name in ("transformer", "bert_medium"):
        assert "aten._scaled_dot_product_efficient_attention_backward.default" in targets
    assert "aten.bernoulli_.float" not in targets
    replaced = {target for target in targets if target in RECORDED["without_kernel"]}
    assert replaced <= {
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    }
