"""State is copied to and from the daemon in portions, through shared memory of a bounded size. Programs are encoded
once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.client import remote
from gpumux.client.remote import Remote
from gpumux.program import codec
from gpumux.program.ir import aligned

pytestmark = pytest.mark.usefixtures("one_thread")  # as the daemon has


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], bool, int]]:
    """The transfers in order: sizes of their buffers, whether they push, how many were under way before."""
    found: list[tuple[list[int], bool, int]] = []
    ask, wait = Remote._transfer, Remote._wait_transfer
    under_way = 0

    def asked(self: Remote, buffers: Sequence[int], push: bool) -> Any:
        nonlocal under_way
        found.append(([aligned(self._table.buffers[b].nbytes) for b in buffers], push, under_way))
        under_way += 1
        return ask(self, buffers, push)

    def ended(self: Remote, number: int) -> Any:
        nonlocal under_way
        frames = wait(self, number)
        under_way -= 1
        return frames

    monkeypatch.setattr(Remote, "_transfer", asked)
    monkeypatch.setattr(Remote, "_wait_transfer", ended)
    return found


def test_state_is_copied_in_portions_and_all_of_it(
    moved: list[tuple[list[int], bool, int]], monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    portion = 2048
    monkeypatch.setattr(remote, "PORTION_BYTES", portion)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64, bias=False), nn.Linear(64, 3), nn.BatchNorm1d(3))
    plain.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    ours = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64, bias=False), nn.Linear(64, 3), nn.BatchNorm1d(3))
    ours.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(5, 16)

    def train(model: nn.Module) -> Any:
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, optimizer

    (step, _), (ours_step, optimizer) = train(plain), train(ours)
    with client.submit(ours_step, example=(x,), model=ours, optimizer=optimizer, endpoint=endpoint) as job:
        for _ in range(3):
            assert torch.equal(job.step(x).result(), step(x))
        job.sync()
        assert all(
            torch.equal(a, b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True)
        )
        job.load_state()
        assert torch.equal(job.step(x).result(), step(x))
        job.sync()
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True))
    for push in (True, False):
        sizes = [some for some, into, _ in moved if into is push]
        assert len(sizes) > 3
        assert max(map(sum, sizes)) == 4096  # of one parameter, which is larger than a portion
        assert all(sum(some) <= portion or len([n for n in some if n]) == 1 for some in sizes)
    # While one portion is written, exactly one other is under way.
    assert max(before for _, _, before in moved) == 1


def test_a_program_is_encoded_once(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    encoded: list[bytes] = []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda program: encoded.append(encode(program)) or encoded[-1])
    with client.submit(lambda x: x + 1, example=(torch.zeros(3),), endpoint=endpoint) as job:
        assert torch.equal(job.step(torch.ones(3)).result(), torch.full((3,), 2.0))
    assert len(encoded) == 1
