"""Members of enumerations decide in a step as they do outside one, also where they meet numbers that change."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.errors import CaptureError
from tests.client.parity import Work, check


class Norm(IntEnum):
    SIGN = 1
    MEAN = 2
    NONE = 3


class Parts(IntFlag):
    DECAY = 1
    MOVE = 2


class ByEnumeration(torch.optim.Optimizer):
    """Takes another update for each member, and for what equals none of them."""

    def __init__(self, params: Any, kind: Any, same: Callable[[Any, Any], bool], keeps: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "kind": kind, "kinds": (kind, 2), "parts": Parts.DECAY | Parts.MOVE})
        self.same = same
        self.keeps = keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = torch.full_like(p, 7.0)
                if self.same(group["kind"], Norm.SIGN):
                    update = p.grad.sign()
                elif self.same(group["kind"], Norm.MEAN):
                    update = p.grad / p.grad.abs().mean()
                if self.same(group["kinds"][0], Norm.SIGN):
                    update = update * 1.5
                if group["parts"] & Parts.DECAY:
                    p.mul_(0.9)
                p.add_(update, alpha=-group["lr"])
                if self.keeps:
                    self.state[p]["kind"] = group["kind"]


def work(kind: Any, same: Callable[[Any, Any], bool], later: Any) -> Work:
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    optimizer = ByEnumeration(model.parameters(), kind, same)
    data = torch.randn(8, 5, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def loop(call: Any) -> list[Any]:
        found = []
        for at, x in enumerate(data):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + at)
            if at == 5:
                optimizer.param_groups[0]["kind"] = later
            found.append(call(x))
        return found

    return Work([model], [optimizer], [(step, (data[0],))], loop)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "later", "same"),
    [
        (Norm.SIGN, Norm.MEAN, operator.eq),
        (Norm.SIGN, Norm.MEAN, operator.is_),
        (Norm.MEAN, Norm.NONE, lambda a, b: b == a),
        (1, 2, operator.eq),  # a number, which is lifted, and equals the member
        (1, 2, lambda a, b: b == a),
        (2, 1, lambda a, b: not a < b and not b < a),
        (2.0, 1.0, lambda a, b: a - b == 0),
    ],
)
def test_an_optimizer_that_decides_by_an_enumeration(
    kind: Any, later: Any, same: Callable[[Any, Any], bool], endpoint: str
):
    check(lambda: work(kind, same, later), endpoint)


def test_an_optimizers_state_with_a_member_is_refused_by_name(endpoint: str):
    model = nn.Linear(4, 3)
    optimizer = ByEnumeration(model.parameters(), Norm.SIGN, operator.eq, keeps=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CaptureError, match=r"kind is a Norm"):
        client.submit(step, example=(torch.randn(5, 4),), model=model, optimizer=optimizer, endpoint=endpoint)


def test_members_in_variables_attributes_and_batches(endpoint: str):
    """Beside a number in the closure that changes at each step, and is compared with them."""

    def make() -> Work:
        torch.manual_seed(4)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.norm = Norm.SIGN
        turn, data = 0, torch.randn(8, 5, 4)

        def step(x: torch.Tensor, norm: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * (3.0 if norm == Norm.MEAN else 1.0)
            if model.norm is Norm.MEAN or turn == Norm.NONE:
                loss = loss * 5.0
            loss = loss * turn * norm
            loss.backward()
            optimizer.step()
            return loss

        def loop(call: Any) -> list[Any]:
            nonlocal turn
            found = []
            for at, x in enumerate(data):
                turn = at
                model.norm = Norm.MEAN if at == 6 else Norm.SIGN
                found.append(call(x, (Norm.SIGN, Norm.MEAN, 2, 1)[at % 4]))
            return found

        return Work([model], [optimizer], [(step, (data[0], Norm.SIGN))], loop)

    check(make, endpoint)
