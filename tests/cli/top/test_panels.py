"""What stands above the table: it says in five seconds whether the important job is fine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.cli.top import panels
from gpumux.cli.top.drawing import BEYOND, LIMIT, cells, plain
from gpumux.cli.top.history import History
from gpumux.cli.top.rates import compare
from gpumux.cli.top.state import TopState
from gpumux.errors import DaemonGone

from .bodies import BREAKS, BROKEN, KEPT, UNMEASURED, body, job, later

ENDPOINT = "ipc:///run/gpumux/0/gpumux.sock"


def view(*jobs, **changes):
    before = body(jobs=list(jobs), **changes)
    return compare(before, later(before, j1=(50, 1.0), j2=(10, 0.4)))


def head(found, silent=None, width=60):
    line = panels.headline(found, silent, width)
    assert cells(line.text) == width
    return line.text.strip(), line.style


@pytest.mark.parametrize(
    ("jobs", "text", "style"),
    [
        ([], "NO JOBS", "banner"),
        ([job("j2")], "NO HIGH JOB: low jobs share the device", "banner"),
        ([job("j1", "high"), job("j2")], "✓ PROMISE KEPT: j1 job j1", "good banner"),
        ([job("j1", "high"), job("j3", "high")], "✓ ALL PROMISES KEPT: 2 high jobs", "good banner"),
        ([job("j1", "high", UNMEASURED)], "? NOT MEASURED YET: 1 high job", "banner"),
        ([job("j1", "high") | {"promise": None}], "? NOT MEASURED YET: 1 high job", "banner"),
        (
            [job("j1", "high"), job("j3", "high", UNMEASURED)],
            "✓ PROMISES KEPT: 2 high jobs, 1 not measured yet",
            "good banner",
        ),
        ([job("j1", "high", BREAKS)], "✗ PROMISE BROKEN: j1 job j1", "bad banner"),
        (
            [job("j1", "high"), job("j10", "high", BREAKS), job("j2", "high", BREAKS)],
            "✗ PROMISE BROKEN, 2 of 3: j2 job j2, j10 job j10",
            "bad banner",
        ),
    ],
)
def test_one_line_says_whether_important_jobs_are_fine(jobs, text, style):
    assert head(view(*jobs)) == (text, style)


def test_without_a_guard_nothing_is_promised():
    text, style = head(view(job("j1", "high") | {"promise": None}, guard=None))
    assert text == "? NO PROMISES under policy guarded: nothing is measured"
    assert style == "banner"


def test_silence_is_said_before_all_else():
    assert head(view(job("j1", "high")), 90.0) == (
        "✗ NO ANSWER for 1m30s: what stands below was so before",
        "bad banner",
    )
    assert head(None, 3.0) == ("✗ NO ANSWER for 3.0s", "bad banner")
    assert head(None) == ("? no answer yet", "banner")


def lines(found, width, most):
    made = [plain(line) for line in panels.verdicts(found, width, most)]
    assert all(cells(line) <= width for line in made)
    assert len(made) <= most
    return made


def test_each_verdict_is_said_in_the_words_of_status_broken_ones_first():
    found = view(job("j1", "high"), job("j2", "high", BREAKS), job("j3"))
    assert lines(found, 100, 4) == [f" ✗ j2 job j2: {BROKEN}", f" ✓ j1 job j1: {KEPT}"]


def test_a_narrow_terminal_leaves_out_the_number_of_steps_before_it_breaks_lines():
    (line,) = lines(view(job("j2", "high", BREAKS)), 77, 1)
    assert line == " ✗ j2 job j2: mean 1.04 of 1.10, tail 2.36 of 1.20: BROKEN for 12 s"
    assert lines(view(job("j2", "high", BREAKS)), 40, 4) == [
        " ✗ j2 job j2: mean 1.04 of 1.10, tail",
        "   2.36 of 1.20: BROKEN for 12 s",
    ]


def test_verdicts_that_do_not_fit_are_counted():
    found = view(job("j1", "high"), *(job(f"j{i}", "high", BREAKS) for i in range(2, 9)))
    made = lines(found, 100, 4)
    assert [line[:5] for line in made[:3]] == [" ✗ j2", " ✗ j3", " ✗ j4"]
    assert made[3] == "   5 more high jobs, 4 broken"
    assert lines(view(*(job(f"j{i}", "high") for i in range(6))), 100, 3)[-1] == "   4 more high jobs, none broken"


@given(st.integers(1, 150), st.integers(1, 8), st.integers(0, 12), st.integers(0, 3))
def test_verdicts_keep_to_their_room_and_something_is_said_of_broken_ones(width, most, broken, kept):
    jobs = [job(f"j{i}", "high", BREAKS if i < broken else None) for i in range(broken + kept)]
    made = lines(view(*jobs), width, most)
    assert bool(made) == bool(jobs)


def test_the_daemon_says_what_it_is_as_far_as_there_is_room():
    found = view(job("j1"))
    assert plain(panels.about(found, ENDPOINT, 30)) == " cpu: A CPU, 1 job, 3 clients"
    assert plain(panels.about(found, ENDPOINT, 120)).endswith(ENDPOINT)
    assert plain(panels.about(found, ENDPOINT, 6)) == " cpu:…"


def test_meters_say_in_words_what_their_bars_show():
    found = view(job("j1", "high"), job("j2"))
    device, memory, guard = [plain(line) for line in panels.meters(found, 120, 3)]
    assert device.endswith("70%: █ high 50%, ▒ low 20%")
    assert device.count("█") == 20 + 1
    assert device.count("▒") == 8 + 1
    assert memory.endswith("512.0 MiB of 1.0 GiB")
    assert guard == " guard  low work held 0%, beside high jobs 0%, 1 ban in force"
    for width in (40, 60, 80, 120):
        assert all(cells(plain(line)) <= width for line in panels.meters(found, width, 3))
    assert plain(panels.meters(found, 40, 1)[0]).endswith(" 70%: █ 50%, ▒ 20%")


def test_a_device_that_runs_pieces_at_once_has_a_full_bar():
    before = body(jobs=[job("j1", "high"), job("j2")])
    found = compare(before, later(before, j1=(1, 3.0), j2=(1, 3.0)))
    assert plain(panels.meters(found, 120, 1)[0]).endswith("300%: █ high 150%, ▒ low 150%")


def test_the_guard_says_why_as_far_as_there_is_room():
    before, after = body(), later(body())
    after["guard"]["held_s"] = {"budget": 1.2, "gap": 1.0}
    found = compare(before, after)
    assert plain(panels.meters(found, 120, 3)[2]).endswith("1 ban in force, reasons: gap 50%, budget 10%")
    assert plain(panels.meters(found, 40, 3)[2]) == " guard  low work held 60%"
    assert plain(panels.meters(view(guard=None), 120, 3)[2]) == " guard  none under policy guarded"


def drawn(found, history, width, height, chosen=""):
    made = panels.charts(found, history, chosen, width, panels.room(width, height))
    assert all(cells(plain(line)) <= width for line in made)
    return [plain(line) for line in made]


def test_charts_show_slowdown_device_and_queue_as_far_as_there_is_room():
    found, history = view(job("j1", "high"), job("j2")), History(1.0)
    history.add(found)
    wide = drawn(found, history, 120, 36)
    assert [text in wide[0] for text in ("mean slowdown of j1: 1.04 of 1.10", "device 70%", "2 steps queued")] == [
        True
    ] * 3
    assert "device" in drawn(found, history, 80, 24)[0]
    assert "queued" not in drawn(found, history, 80, 24)[0]
    assert drawn(found, history, 40, 24)[0].startswith(" mean slowdown of j1")
    assert drawn(found, history, 120, 20) == []
    assert any(LIMIT in line and " 1.10 " in line for line in wide)


def test_without_a_measured_high_job_there_is_no_chart_of_slowdown():
    found = view(job("j1", "high", UNMEASURED), job("j2"))
    assert drawn(found, History(1.0), 40, 24)[0].startswith(" device")


def test_the_job_that_is_worst_off_is_drawn_or_the_one_under_the_cursor():
    found, history = view(job("j1", "high"), job("j2", "high", BREAKS), job("j3")), History(1.0)
    assert "slowdown of j2" in drawn(found, history, 40, 24)[0]
    assert "slowdown of j1" in drawn(found, history, 40, 24, chosen="j1")[0]
    assert "slowdown of j2" in drawn(found, history, 40, 24, chosen="j3")[0]


def test_a_slowdown_far_beyond_its_limit_leaves_the_limit_in_the_picture():
    found, history = view(job("j1", "high", BREAKS | {"slowdown": 30.0})), History(1.0)
    history.add(found)
    made = drawn(found, history, 60, 40)
    assert any(" 1.10 ┄" in line for line in made)
    assert BEYOND in made[1]


def test_a_promise_close_to_1_has_digits_enough():
    found, history = view(job("j1", "high", {"promised": 1.005, "slowdown": 1.004})), History(1.0)
    made = drawn(found, history, 60, 40)
    assert "1.004 of 1.005" in made[0]
    assert any("1.005 ┄" in line for line in made)


@given(st.integers(20, 250), st.integers(5, 80), st.integers(0, 300))
def test_at_least_half_of_the_terminal_is_left_for_the_jobs_that_need_it(width, height, jobs):
    room = panels.room(width, height, jobs)
    above = 2 + room.verdict_lines + room.meters + (room.chart_lines + 2 if room.charts else 0)
    assert height - above - 1 >= min(jobs + 1, height // 3)


def test_a_lost_daemon_is_explained_with_what_to_do():
    made = [plain(line) for line in panels.away(DaemonGone("it is gone", "start it"), ENDPOINT, 60)]
    assert made[:2] == [" it is gone", " start it"]
    assert ENDPOINT in made[2]


def noted(**changes):
    state = TopState(1.0)
    state.take(body(), 0.0)
    for name, value in changes.items():
        setattr(state, name, value)
    return "".join(plain(line) for line in panels.notes(state, len(state.rows()), 100))


def test_what_is_special_about_the_rows_is_said():
    assert noted() == ""
    assert noted(wanted=" high ") == " 'high': 1 of 3 jobs (Esc: all)"
    assert noted(sorted_by="MEMORY", backwards=True) == " by MEMORY, backwards"
    assert noted(frozen={"jobs": []}).startswith(" table frozen (space goes on)")


def test_a_table_without_rows_says_why_and_what_to_do():
    state = TopState(1.0)
    assert panels.nothing(state, ENDPOINT) == "waiting for the daemon"
    state.take(body(), 0.0)
    state.wanted = "xyz"
    assert "'xyz'" in panels.nothing(state, ENDPOINT)
    state.take(body(jobs=[]), 1.0)
    assert f"GPUMUX_ENDPOINT={ENDPOINT}" in panels.nothing(state, ENDPOINT)
