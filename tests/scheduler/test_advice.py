"""What `gpumux jobs explain` says first: verdict, causes and remedies."""

from __future__ import annotations

import re

import pytest

from gpumux.device.sim.cost import Kernel
from gpumux.scheduler import events as ev
from gpumux.scheduler.advice import MOST_CULPRITS, Advice
from gpumux.simulate.run import Simulation
from gpumux.types import JobId

from .scenarios import high, ident, low, world
from .world import World

FULL = (Kernel("full", 432, 50e-6, 4, 0),) * 12
HOG = (Kernel("hog", 108, 2e-3, 1, 0),)


def advised(simulation: Simulation, name: str) -> Advice:
    return simulation.scheduler.advise(ident(simulation, name))


def break_promise(simulation: Simulation, name: str) -> None:
    """The job's newest steps were twice as slow as alone."""
    state = simulation.scheduler._state  # type: ignore[attr-defined]
    job = state.guard.high_jobs[ident(simulation, name)]
    for _ in range(256):
        job.judge(2.0, simulation.now)


def commands(advice: Advice) -> list[str]:
    return [remedy.command for remedy in advice.remedies if remedy.command]


def test_a_promise_that_is_kept_has_a_verdict_and_nothing_to_do():
    simulation = world(high(FULL, "important"), low(FULL, "same"))
    simulation.run(steps=1500)
    advice = advised(simulation, "important")
    assert re.fullmatch(r"mean 1\.0\d of 1\.05, tail 1\.0\d of 1\.10 in 256 steps: kept", advice.verdict)
    assert (advice.causes, advice.remedies) == ([], [])


def test_a_broken_promise_names_its_neighbour_and_how_to_hold_it_back():
    simulation = world(high(FULL, "important"), low(FULL, "same"))
    simulation.run(steps=300)
    break_promise(simulation, "important")
    advice = advised(simulation, "important")
    assert advice.verdict.startswith("mean 2.00 of 1.05, tail 2.00 of 1.10 in 256 steps: BROKEN for ")
    assert advice.causes[0].startswith("Beside 'same' it loses")
    assert f"gpumux jobs pause {ident(simulation, 'same')}" in commands(advice)
    assert any("microbatches=" in remedy.text for remedy in advice.remedies)


def test_at_most_three_culprits_are_named():
    many = [low((Kernel(f"full{n}", 432, (50 + n) * 1e-6, 4, 0),) * 12, f"low{n}") for n in range(6)]
    simulation = world(high(FULL, "important"), *many)
    simulation.run(steps=600)
    break_promise(simulation, "important")
    advice = advised(simulation, "important")
    culprits = [cause for cause in advice.causes if "it loses" in cause]
    assert len(culprits) == MOST_CULPRITS
    assert sum("jobs pause" in command for command in commands(advice)) == MOST_CULPRITS


def test_a_broken_promise_without_a_neighbour_sends_to_the_trace():
    simulation = world(high(FULL, "important"))
    simulation.run(steps=100)
    break_promise(simulation, "important")
    advice = advised(simulation, "important")
    assert advice.causes[0] == "No low job is known to cost it anything."
    assert commands(advice) == ["gpumux trace -o trace.json", "gpumux doctor"]


def test_a_low_job_that_costs_next_to_nothing_is_not_blamed():
    """The machine may be busy with something else."""
    simulation = world(high(FULL, "important"), low(FULL, "same"))
    simulation.run(steps=300)
    break_promise(simulation, "important")
    state = simulation.scheduler._state  # type: ignore[attr-defined]
    job = state.guard.high_jobs[ident(simulation, "important")]
    for low_costs in job.costs.by_low.values():
        low_costs.typical.mean = 0.05 * job.budget.rate_limit
    advice = advised(simulation, "important")
    assert advice.causes[0] == (
        "No low job is known to cost it more than 0.002 s a second, of the 0.048 that it may lose:"
        " the cause lies elsewhere."
    )
    assert commands(advice) == ["gpumux trace -o trace.json", "gpumux doctor"]
    for low_costs in job.costs.by_low.values():
        low_costs.typical.mean = 0.0001
    assert advised(simulation, "important").causes[0] == "No low job is known to cost it anything."


def test_another_users_job_is_not_offered_to_be_paused():
    simulation = world(high(FULL, "important"), low(FULL, "same"))
    simulation.run(steps=300)
    break_promise(simulation, "important")
    theirs = ident(simulation, "same")

    def hidden(job: JobId) -> str | None:
        return "j7" if job == theirs else None

    advice = simulation.scheduler.advise(ident(simulation, "important"), hidden)
    assert not any("pause" in command for command in commands(advice))
    assert any("the owner of j7" in remedy.text for remedy in advice.remedies)


def test_however_many_jobs_run_what_costs_most_three_are_offered_and_the_others_counted():
    names = [f"same-{i}" for i in range(6)]
    simulation = world(high(FULL, "important"), *(low(FULL, name) for name in names))
    simulation.run(steps=300)
    break_promise(simulation, "important")
    mine = advised(simulation, "important")
    assert sum("gpumux jobs pause" in command for command in commands(mine)) == MOST_CULPRITS
    assert any(remedy.text.endswith("'same-3', 'same-4' and 'same-5'") for remedy in mine.remedies)
    shorts = {ident(simulation, name): f"j{i}" for i, name in enumerate(["important", *names], 1)}
    (text,) = (
        each.text
        for each in simulation.scheduler.advise(ident(simulation, "important"), shorts.__getitem__).remedies
        if "the owners of" in each.text
    )
    assert text == "have the owners of j2, j3, j4 and 3 more, or an operator, hold them back"


def test_a_reader_who_may_know_no_job_learns_figures_and_neither_names_operators_nor_programs():
    simulation = world(high(FULL, "important"), low(FULL, "same"))
    simulation.run(steps=300)
    break_promise(simulation, "important")
    shorts = {ident(simulation, name): short for name, short in (("important", "j1"), ("same", "j2"))}
    advice = simulation.scheduler.advise(ident(simulation, "important"), shorts.__getitem__)
    assert advice.causes[0].startswith("Beside j2 it loses")
    assert not any("interference" in command for command in commands(advice))
    said = " ".join([advice.verdict, *advice.causes, *(remedy.text for remedy in advice.remedies)])
    known = advised(simulation, "important")
    assert any("gpumux interference" in command for command in commands(known)), "there is something to hide"
    assert FULL[0].name in " ".join(known.causes)
    assert not any(word in said for word in ("important", "same", FULL[0].name))


def test_a_low_job_that_is_held_says_for_whom_why_and_what_gives_it_room():
    simulation = world(high((Kernel("big", 108, 100e-6, 1, 0),) * 12, "important"), low(HOG, "hog"))
    important, seen, of_others = ident(simulation, "important"), [], []
    for steps in range(100, 900, 50):
        simulation.run(steps=steps)
        advice = advised(simulation, "hog")
        if advice.verdict.startswith("held for ") and any("too long" in cause for cause in advice.causes):
            seen.append(advice)
            of_others.append(
                simulation.scheduler.advise(ident(simulation, "hog"), lambda job: "j7" if job == important else None)
            )
    assert seen
    for advice in of_others:  # a job that is not the reader's can't be changed by the reader
        assert advice.verdict.endswith(", for job j7")
        assert commands(advice) == []
        assert any("ask the owner of j7" in remedy.text for remedy in advice.remedies)
    for advice in seen:
        assert advice.verdict.endswith(", for job 'important'")
        assert "smaller batch" in advice.remedies[0].text
        assert f"gpumux jobs explain {ident(simulation, 'important')}" in commands(advice)


def test_a_low_job_that_was_held_for_most_of_its_life_says_so_in_a_moment_in_which_it_is_not():
    simulation = world(high((Kernel("big", 108, 100e-6, 1, 0),) * 12, "important"), low(FULL, "lesser"))
    seen = set()
    for look in range(50, 250):
        simulation.run(seconds=0.00137 * look)
        advice = advised(simulation, "lesser")
        (so_far,) = [cause for cause in advice.causes if cause.startswith("Since it opened ")]
        part = re.search(r"it was held for (\d+)% of the time: (\w+) (\d+)%", so_far)
        assert part is not None
        assert 10 <= int(part[3]) <= int(part[1]) <= 100
        held = advice.verdict.startswith("held for ")
        assert advice.remedies
        assert held or commands(advice) == []
        seen.add(held)
    assert seen == {True, False}
    alone = world(low(FULL, "lesser"))
    alone.run(seconds=0.1)
    assert advised(alone, "lesser").causes == []


@pytest.mark.parametrize("name", ["high", "low"])
def test_no_sentence_has_a_value_of_the_schedulers_clock(name: str):
    """Such as 2102.361533: ages are for people."""
    simulation = world(high((Kernel("big", 108, 100e-6, 1, 0),) * 12), low(HOG))
    for steps in range(100, 900, 50):
        simulation.run(steps=steps)
        advice = advised(simulation, name)
        said = [advice.verdict, *advice.causes, *simulation.scheduler.explain(ident(simulation, name))]
        assert not re.search(r"\d\.\d{6}", "\n".join(said)), said


def test_a_paused_job_is_told_how_to_go_on():
    simulation = world(high(FULL, "important"), low(FULL, "same"))
    simulation.run(steps=50)
    job = ident(simulation, "same")
    simulation.scheduler.handle(ev.PauseRequested(job), simulation.now)
    advice = advised(simulation, "same")
    assert (advice.verdict, commands(advice)) == ("paused", [f"gpumux jobs resume {job}"])


def test_without_a_guard_nothing_is_known_and_that_is_said():
    world = World(policy="paced")
    world.job("a", "high")
    advice = world.scheduler.advise("a")
    assert "Policy paced has no guard" in advice.causes[0]
    assert commands(advice) == ["gpumux serve --policy guarded"]
    assert "restart the daemon" in advice.remedies[0].text, "it runs already, under another policy"
