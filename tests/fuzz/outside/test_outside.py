"""A few scripts in every run of the tests; `python -m tests.fuzz.outside.hunt FIRST LAST` runs more."""

from __future__ import annotations

import pytest

from gpumux.capture.outside.tensors import Outside
from tests.fuzz.outside import compare, grammar
from tests.fuzz.outside.grammar import Work

SEEDS = range(30024, 30032)  # 30030 needs `Outside.follow`


@pytest.fixture(autouse=True)
def as_the_daemon(one_thread: None) -> None:
    pass


def test_a_script_is_what_it_is_plainly(endpoint: str) -> None:
    ran = 0
    for seed in SEEDS:
        one = compare.valid(grammar.script(seed))
        if one is None:
            continue
        words, ours = compare.difference(one, endpoint)
        assert not words, f"seed {seed}: {words}\n{one.text()}"
        ran += ours.done
    assert ran > 2 * len(SEEDS)  # operations


def test_a_difference_is_found_and_shrunk(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outside, "follow", lambda outside: None)
    one = Work(SETUP, ("note(t0)", 'run("step", *batch(1))', "t0[0] = 9", 'run("step", *batch(2))'), True)
    smaller, words = compare.shrunk(one, endpoint)
    assert smaller.lines == ("t0[0] = 9", 'run("step", *batch(2))')
    assert words.startswith("step of")


SETUP = """
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
t0 = torch.rand(3)
def step(x, y):
    loss = F.cross_entropy(model(x), y, weight=t0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
functions(step=step)
submitted(model=model, optimizer=optimizer)
"""


def test_a_seed_makes_the_same_script_again() -> None:
    assert [grammar.script(seed) for seed in range(20)] == [grammar.script(seed) for seed in range(20)]
    assert len({grammar.script(seed).setup for seed in range(20)}) == 20
    assert not any("kill()" in " ".join(grammar.script(seed).lines) for seed in range(100))
    assert any("kill()" in " ".join(grammar.script(seed, kills=True).lines) for seed in range(100))
