"""How programs are cut into pieces, by measured times."""

from __future__ import annotations

import pytest

from gpumux.device.cuda.cuts import SETTLE_STEPS, Cuts


def run_cut_0(cuts: Cuts, op_s: list[float]) -> None:
    """Two steps. In each another operator waits for another job's kernels."""
    for step in range(2):
        assert (cuts.warming, cuts.timing) == (step == 0, True)
        delayed = [seconds + 80e-3 * (index == step) for index, seconds in enumerate(op_s)]
        cuts.timed(0, delayed[:1])
        cuts.timed(1, delayed[1:])
        assert cuts.wanted() is None
        cuts.stepped(0)


def test_the_first_two_steps_are_timed_and_cut_by() -> None:
    cuts = Cuts(4, 100e-6)
    run_cut_0(cuts, [100e-6] * 4)
    bounds = cuts.wanted()
    assert bounds == (0, 1, 2, 3, 4)
    cuts.cut(bounds)
    assert cuts.newest == 1
    assert cuts.seconds(1) == (100e-6,) * 4
    assert cuts.bounds(0) is not None  # for steps that began under it
    assert not cuts.warming
    assert not cuts.timing


@pytest.mark.parametrize(("real", "again"), [(10e-6, (0, 4)), (100e-6, None), (90e-6, None)])
def test_pieces_far_from_the_target_are_cut_again_once(real: float, again: tuple[int, ...] | None) -> None:
    cuts = Cuts(4, 100e-6)
    run_cut_0(cuts, [100e-6] * 4)
    wanted = cuts.wanted()
    assert wanted is not None
    cuts.cut(wanted)
    for _ in range(SETTLE_STEPS):
        assert cuts.wanted() is None
        for piece in range(4):
            cuts.ran(1, piece, real)
        cuts.stepped(1)
    assert cuts.wanted() == again
    if again is not None:
        cuts.cut(again)
        assert cuts.bounds(0) is None
        assert cuts.seconds(2) == (pytest.approx(4 * real),)
        cuts.stepped(2)
        assert cuts.wanted() is None


def test_steps_of_an_old_cut_count_for_nothing() -> None:
    cuts = Cuts(2, 100e-6)
    run_cut_0(cuts, [100e-6] * 2)
    bounds = cuts.wanted()
    assert bounds is not None
    cuts.cut(bounds)
    for _ in range(3 * SETTLE_STEPS):
        cuts.stepped(0)
    assert cuts.wanted() is None


def test_pieces_are_as_long_as_wanted_after_a_step_of_the_newest_cut() -> None:
    cuts = Cuts(4, 400e-6)
    run_cut_0(cuts, [100e-6] * 4)
    cuts.cut(cuts.wanted() or ())
    cuts.aim(100e-6)
    assert cuts.wanted() is None, "one of an older cut may be under way"
    cuts.ran(1, 0, 800e-6)  # twice what was predicted
    cuts.stepped(1)
    assert cuts.wanted() == (0, 1, 2, 3, 4)
    cuts.cut((0, 1, 2, 3, 4))
    assert cuts.seconds(2) == (pytest.approx(200e-6),) * 4
    cuts.stepped(2)
    assert cuts.wanted() is None
    cuts.aim(None)
    assert cuts.wanted() == (0, 2, 4), "by what they were found to take"
    cuts.cut((0, 2, 4))
    cuts.stepped(2)
    cuts.aim(400e-6)
    assert cuts.wanted() is None
