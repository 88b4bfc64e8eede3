"""Pictures of `gpumux top`, quickly: few looks at few simulated jobs."""

from __future__ import annotations

import asyncio

import pytest

from gpumux.device.sim.spec import preset
from microbench import top_screens


@pytest.mark.every(2)
@pytest.mark.parametrize("count", [0, 3])
def test_the_screen_has_the_jobs_of_the_simulated_daemon(count):
    bodies = list(top_screens.answers(count, preset("a100"), looks=2))
    assert [len(body["jobs"]) for body in bodies] == [count] * 2
    picture = asyncio.run(top_screens.screen(bodies, 80, 24))
    assert ("sweep-1" in picture, "sweep-2" in picture, "NO&#160;JOBS" in picture) == (
        (True, True, False) if count else (False, False, True)
    )
    assert "@font-face" not in picture


def test_a_screen_can_be_that_of_a_dialog():
    bodies = list(top_screens.answers(0, preset("a100"), looks=1))
    assert "these&#160;keys" in asyncio.run(top_screens.screen(bodies, 80, 40, keys=["question_mark"]))


def test_a_tenth_of_the_jobs_is_high_one_of_them_with_a_promise_that_is_too_much():
    made = top_screens.workloads(30, preset("a100"))
    assert [work.name for work in made if work.priority.name == "HIGH"] == ["translate", "rank", "caption"]
    assert [work.max_slowdown for work in made[:3]] == [1.1, 1.1, 1.002]
    assert len({work.name for work in made}) == 30


def test_pictures_are_written_one_for_each_number_and_size(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(top_screens, "SIZES", ((80, 24), (40, 24)))
    assert top_screens.main(["--out", str(tmp_path), "--jobs", "0"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["top-40x24-0.svg", "top-80x24-0.svg"]
    assert "top-80x24-0.svg: " in capsys.readouterr().out


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SystemExit):
        top_screens.main(["--out", str(tmp_path / "none")])
