"""`make burst` shows what it claims, says what did not hold, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from clients import burst
from clients.burst import Measured, Rank
from clients.common import INTERRUPTED
from clients.models.vgg import vgg
from microbench.soaking.watch import marked


@pytest.mark.slow
@pytest.mark.extended
def test_the_demo_trains_over_four_daemons_what_the_plain_loop_trains(capfd: pytest.CaptureFixture[str]) -> None:
    status = burst.main(["--quick"])
    out, err = capfd.readouterr()
    assert status == 0, out + err
    assert len(re.findall(r"^[0-3] +\d+ of 11 +[1-9][\d,]* ", out, re.MULTILINE)) == burst.RANKS
    assert re.search(r"^promised: at most 1\.10 of the time alone; beside low jobs \d", out, re.MULTILINE)
    assert re.search(r"after 12 steps .* plain loop: \S+ of losses, \S+ of parameters$", out, re.MULTILINE)


def test_the_plan_gives_layers_of_the_model_one_two_and_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    plan = burst.make_plan()
    assert {row.gpus for row in plan.rows if not row.transfer} == {1, 2, 4}
    assert {layer.name for layer in plan.layers} <= {name for name, _ in vgg("tiny").named_modules()}
    assert "features.0        4" in capsys.readouterr().out


def test_a_difference_that_rounding_does_not_explain_is_found() -> None:
    models = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
    models[1].load_state_dict(models[0].state_dict())
    assert burst.differences([(1.0, 1.0), (2.0, 2.0)], models) == (0, 0)
    assert burst.complaints((1e-15, 1e-15)) == []
    with torch.no_grad():
        models[1].bias[0] += 1e-6
    apart = burst.differences([(1.0, 1.0), (2.0, 2.0 + 1e-6)], models)
    assert [line.split()[0] for line in burst.complaints(apart)] == ["losses", "parameters"]
    assert len(burst.complaints((float("nan"), float("nan")))) == 2


@pytest.mark.parametrize(("slowdown", "said"), [(1.05, "1.05: kept"), (1.3, "1.30: not kept on this machine")])
def test_the_demo_says_whether_the_gangs_promise_was_kept(slowdown: float, said: str) -> None:
    measured = {"alone": Measured([0.1, 0.2]), "beside low jobs": Measured([0.1 * slowdown, 0.2 * slowdown])}
    assert said in burst.verdict(measured)


def test_what_ranks_did_is_the_difference_of_what_was_seen_before_and_after() -> None:
    ranks = [Rank()]
    burst.add(ranks, [Rank(0, 0.0, 1.0, 10, 20, 3)], [Rank(0, 0.0, 1.5, 30, 50, 5)], 4, 2.0)
    burst.add(ranks, [Rank(0, 0.0, 1.5, 30, 50, 5)], [Rank(0, 0.0, 2.5, 31, 51, 6)], 4, 2.0)
    assert ranks == [Rank(8, 4.0, 1.5, 21, 31, 3)]


@pytest.mark.slow
@pytest.mark.extended
def test_an_interrupted_demo_leaves_nothing_running() -> None:
    mark = f"BURST_TEST={os.getpid()}"
    name, _, value = mark.partition("=")
    # Two daemons, since a start takes seconds.
    program = "import sys; from clients import burst; burst.RANKS = 2; sys.exit(burst.main([]))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {name: value},
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            if "daemons are up" in line:
                break
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == INTERRUPTED
    assert "everything that was started has been stopped" in err
    assert "Traceback" not in err
    assert marked(mark) == []
