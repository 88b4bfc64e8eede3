"""Rows R1 to R9 of docs/plain-loop.md, "Between two steps": random draws of a job are those of the plain script, and
torch's generator has the state that it has in the plain script.

Each script runs twice: with the step itself, and with `job.step`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from gpumux import client
from gpumux.capture import generator
from gpumux.capture.generator import client_generator, skip, with_kept, words_drawn
from gpumux.errors import CaptureError, ConfigError
from gpumux.program.ir import Program, ProgramBuilder
from tests.client.parity import assert_same
from tests.threads import one_thread

Step = Callable[..., Any]
Run = Callable[..., Any]  # (step, example, model, optimizer) -> a context manager for the function that the loop calls


def network(dropout: float = 0.3) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(32, 4),
        torch.nn.Dropout(0.1),
    )


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


X, Y = torch.randn(48, 16, generator=torch.Generator().manual_seed(3)), torch.arange(48) % 4


def same_in_both(script: Callable[[Run], list[Any]], endpoint: str, **options: Any) -> None:
    """Run `script` plainly and through the daemon, and compare its results and the state of the generator after it."""

    @contextmanager
    def plainly(step: Step, example: Any, model: Any = None, optimizer: Any = None) -> Iterator[Step]:
        yield lambda *batch: step(*batch).detach()

    @contextmanager
    def as_job(step: Step, example: Any, model: Any = None, optimizer: Any = None) -> Iterator[Step]:
        with client.submit(
            step, example=example, model=model, optimizer=optimizer, endpoint=endpoint, **options
        ) as job:
            assert job.stats()["rng"] == "client"
            yield job.step
            job.sync()

    with one_thread():
        want = [*_values(script(plainly)), torch.get_rng_state()]
    got = [*_values(script(as_job)), torch.get_rng_state()]
    assert_same(want, got, "script")


def _values(results: list[Any]) -> list[Any]:
    return [r.result().detach() if isinstance(r, client.StepFuture) else r for r in results]


@pytest.fixture(params=["skipped", "waited for"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator is advanced past a step by skipping or by waiting for the answer; the quicker way is chosen."""
    waits = request.param == "waited for"
    monkeypatch.setattr(client_generator, "waits", lambda words, step_s: waits or words is None)


def seeded_script(run: Run) -> list[Any]:
    """Seeds, builds, then three epochs with dropout over a shuffling DataLoader, with noise and draws of its own."""
    torch.manual_seed(7)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    seen: list[Any] = []
    with run(train_step(model, optimizer), (X[:16], Y[:16]), model, optimizer) as step:
        for _ in range(3):
            for x, y in loader:
                seen += [x, step(x + 0.01 * torch.randn_like(x), y)]
            seen += [torch.randperm(5), torch.rand(3), torch.normal(0.0, 1.0, (3,))]
    return [*seen, model.state_dict(), optimizer.state_dict()]


@pytest.mark.usefixtures("either_way")
def test_r1_r3_a_script_that_seeds_builds_and_shuffles_gets_the_plain_bits(endpoint: str) -> None:
    same_in_both(seeded_script, endpoint)


def test_r3_batches_stacked_where_the_device_reads_them_draw_alike(endpoint: str) -> None:
    """With `job.collate`, which lays batches into a slot before the generator's state is known."""

    def script(loader_of: Callable[[Any], DataLoader[Any]], step: Any) -> list[Any]:
        seen: list[Any] = []
        for _ in range(3):
            for x, y in loader_of(step):
                seen.append(step.step(x, y).result() if isinstance(step, client.Job) else step(x, y).detach())
        return [*seen, torch.get_rng_state()]

    def loader(collate: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, collate_fn=collate)

    def made() -> tuple[torch.nn.Module, Step, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, train_step(model, optimizer), optimizer

    with one_thread():
        want = script(lambda _: loader(None), made()[1])
    model, step, optimizer = made()
    with client.submit(step, example=(X[:16], Y[:16]), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        got = script(lambda _: loader(job.collate), job)
        job.sync()
    assert_same(want, got, "script")


@pytest.mark.usefixtures("either_way")
def test_r2_r4_seeding_and_states_between_steps_are_obeyed(endpoint: str) -> None:

    def script(run: Run) -> list[Any]:
        torch.manual_seed(5)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        with run(train_step(model, optimizer), (X[:16], Y[:16]), model, optimizer) as step:
            for epoch in range(2):
                torch.manual_seed(100 + epoch)
                seen += [step(X[:16], Y[:16]), torch.get_rng_state()]
                checkpoint = torch.get_rng_state()
                seen += [step(X[16:32], Y[16:32]), torch.get_rng_state()]
                torch.set_rng_state(checkpoint)
                seen.append(step(X[16:32], Y[16:32]))
                with torch.random.fork_rng():
                    torch.manual_seed(1)
                    seen.append(step(X[:16], Y[:16]))
                seen += [torch.rand(2), step(X[:16], Y[:16]), torch.initial_seed()]
        return [*seen, model.state_dict()]

    same_in_both(script, endpoint)


def test_r5_a_step_with_a_generator_of_its_own_is_refused(endpoint: str) -> None:
    own = torch.Generator().manual_seed(1)
    with pytest.raises(CaptureError, match="generator of its own"):
        client.submit(lambda x: x + torch.rand(4, generator=own), example=(torch.ones(4),), endpoint=endpoint)


def test_r6_python_and_numpy_draw_between_steps_and_are_refused_inside(endpoint: str) -> None:
    def script(run: Run) -> list[Any]:
        torch.manual_seed(5)
        random.seed(1)
        np.random.seed(2)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        with run(train_step(model, optimizer), (X[:16], Y[:16]), model, optimizer) as step:
            for _ in range(3):
                at = random.randrange(32)
                seen += [step(X[at : at + 16].clone(), Y[at : at + 16].clone()), float(np.random.rand())]
        return [*seen, model.state_dict()]

    same_in_both(script, endpoint)
    for draw in (random.random, np.random.rand):
        with pytest.raises(CaptureError):
            client.submit(lambda x, draw=draw: x * draw(), example=(torch.ones(4),), endpoint=endpoint)


def test_r7_two_jobs_in_turn_and_a_local_model_share_the_generator(endpoint: str) -> None:
    def script(run: Run) -> list[Any]:
        torch.manual_seed(11)
        first, second, local = network(), network(0.5), network(0.2)
        one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))
        seen: list[Any] = []
        example = (X[:16], Y[:16])
        with (
            run(train_step(first, one), example, first, one) as step_one,
            run(train_step(second, two), example, second, two) as step_two,
        ):
            for i in range(4):
                x, y = X[i : i + 16].clone(), Y[i : i + 16].clone()
                seen += [step_one(x, y), step_two(x, y), local(x).detach(), torch.rand(1)]
        return [*seen, first.state_dict(), second.state_dict()]

    same_in_both(script, endpoint)


def noisy_draws(x: torch.Tensor) -> torch.Tensor:
    """Numbers of words that depend on data, a normal number kept for the next call, and recomputation."""
    noise = torch.randn(3)  # fewer than 16 are drawn in pairs, and one is left over
    counts = torch.poisson(x.abs() * 3)
    again = torch.utils.checkpoint.checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=False)
    total: torch.Tensor = counts.sum() + noise.sum() + again.sum() + F.rrelu(x, training=True).sum()
    return total


def test_r8_draws_of_unknown_length_are_waited_for(endpoint: str) -> None:
    def script(run: Run) -> list[Any]:
        torch.manual_seed(13)
        seen: list[Any] = []
        with run(noisy_draws, (X[:16],)) as step:
            for i in range(4):
                seen += [step(X[i : i + 16].clone()), torch.randn(1), torch.get_rng_state()]
        return seen

    same_in_both(script, endpoint)


@pytest.mark.usefixtures("either_way")
def test_r1_recomputed_dropout_draws_once(endpoint: str) -> None:
    """With checkpointing, recomputation takes no further words."""

    def script(run: Run) -> list[Any]:
        torch.manual_seed(17)
        model = network(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)
            loss.backward()
            optimizer.step()
            return loss

        seen: list[Any] = []
        with run(step, (X[:16], Y[:16]), model, optimizer) as call:
            for _ in range(4):
                seen += [call(X[:16], Y[:16]), torch.rand(1)]
        return [*seen, model.state_dict()]

    same_in_both(script, endpoint)


def test_r9_steps_in_several_threads_draw_each_number_once(endpoint: str) -> None:
    """The order in which threads draw is undefined, as in the plain run, but no two draw the same numbers."""
    torch.manual_seed(23)
    start = torch.get_rng_state()
    drawn: list[torch.Tensor] = []
    count, per_step = 6, 128

    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(per_step) + x

    def steps(job: client.Job) -> None:
        futures = [job.step(torch.zeros(per_step)) for _ in range(count)]
        drawn.extend(f.result() for f in futures)

    with (
        client.submit(draw, example=(torch.zeros(per_step),), endpoint=endpoint) as one,
        client.submit(draw, example=(torch.zeros(per_step),), endpoint=endpoint) as two,
    ):
        threads = [threading.Thread(target=steps, args=(job,)) for job in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    left = torch.get_rng_state()
    torch.set_rng_state(start)
    plain = sorted(torch.rand(per_step).tolist() for _ in range(2 * count))
    assert sorted(t.tolist() for t in drawn) == plain
    assert torch.equal(left, torch.get_rng_state())


@pytest.mark.parametrize("fusible", [False, True], ids=["in the daemon", "in the client"])
@pytest.mark.parametrize("options", [{"rng": "own"}, {"seed": 29}], ids=lambda options: next(iter(options)))
def test_a_generator_of_the_jobs_own_leaves_the_clients_alone(
    options: dict[str, Any], fusible: bool, endpoint: str
) -> None:
    torch.manual_seed(29)
    want = [torch.randn(7), torch.randn(7), torch.poisson(torch.full((3,), 4.0)), torch.randn(7)]
    torch.manual_seed(29)
    before = torch.get_rng_state()
    with client.submit(lambda: torch.randn(7), example=(), endpoint=endpoint, fusible=fusible, **options) as job:
        counts = job.add(lambda: torch.poisson(torch.full((3,), 4.0)), example=())  # its words depend on the numbers
        got = [job.step().result(), job.step().result(), counts().result(), job.step().result()]
        assert job.stats()["rng"] == "own"
    assert torch.equal(torch.get_rng_state(), before)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs), "it begins at the seed, wherever torch's generator stands"


@pytest.mark.parametrize("options", [{"rng": "mine"}, {"rng": 1}, {"rng": "client", "seed": 3}])
def test_what_rng_may_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rng|seed"):
        client.submit(lambda x: x, example=(torch.ones(1),), endpoint="ipc:///nowhere", **options)


def test_a_job_that_draws_nothing_takes_no_generator_along(endpoint: str) -> None:
    before = torch.get_rng_state()
    dropout = torch.nn.Dropout(0.5).eval()
    with client.submit(lambda x: dropout(x) * 2, example=(torch.ones(4),), model=dropout, endpoint=endpoint) as job:
        assert job._functions[0][0]._cases[0].phases[0].programs  # captured
        (made,) = job._functions[0][0]._cases[0].phases[0].programs.values()
        assert made.lowered.program.generator is None
        job.step(torch.ones(4)).result()
    assert torch.equal(torch.get_rng_state(), before)


# ---- words


def drawing(
    target: str, size: tuple[int, ...], dtype: str, *args: Any, stride: tuple[int, ...] | None = None
) -> Program:
    builder = ProgramBuilder()
    given = builder.input(dtype, size)
    builder.result(builder.call(target, given, *args, size=size, dtype=dtype, random=0))
    program = builder.build()
    views = list(program.views)
    views[given.view] = replace(views[given.view], stride=stride or views[given.view].stride)
    return replace(program, views=tuple(views))


NORMAL = {
    "aten.normal_functional.default": ((), torch.ops.aten.normal_functional.default),
    "aten.normal_.default": ((), lambda t: t.normal_()),
    "aten.randn_like.default": ((), torch.randn_like),
    "aten.log_normal_.default": ((), lambda t: t.log_normal_()),
    "aten.normal.Tensor_float": ((0.5,), lambda t: torch.normal(t, 0.5)),
}
DRAWING = {
    "aten.bernoulli.p": ((0.3,), lambda t: torch.bernoulli(t, 0.3)),
    "aten.uniform.default": ((), lambda t: t.uniform_()),
    "aten.exponential.default": ((), lambda t: t.exponential_()),
    "aten.rand_like.default": ((), torch.rand_like),
    "aten.cauchy.default": ((), lambda t: t.cauchy_()),
    "aten.geometric.default": ((0.25,), lambda t: t.geometric_(0.25)),
    **NORMAL,
}
SIZES = [(1,), (2,), (3,), (6,), (14,), (15,), (16,), (4, 8), (64, 33), (1000,), (3, 1001)]


@pytest.mark.covering
@pytest.mark.parametrize("target", DRAWING)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "not contiguous"])
def test_skipping_the_words_an_operator_takes_is_as_good_as_running_it(
    target: str, dtype: str, contiguous: bool
) -> None:
    """From a state with a normal number kept for the next call, and from one without."""
    args, run = DRAWING[target]
    for size in SIZES:
        wide = (size[0], 2 * size[-1]) if len(size) > 1 else (2 * size[0],)
        given = torch.full(size if contiguous else wide, 0.5, dtype=getattr(torch, dtype))
        given = given if contiguous else given[..., ::2]
        torch.manual_seed(31)
        fresh = torch.get_rng_state()
        words = words_drawn(drawing(target, size, dtype, *args, stride=given.stride()))
        assert torch.equal(torch.get_rng_state(), fresh), "measuring left the generator elsewhere"
        if target not in NORMAL or (contiguous and given.numel() >= 16 and target != "aten.log_normal_.default"):
            assert words, f"not counted: {size}"
        if words is None:
            continue
        torch.randn(1)
        left_over = torch.get_rng_state()
        for before in (fresh, left_over, with_kept(fresh), with_kept(left_over)):
            torch.set_rng_state(before)
            run(given)
            given.fill_(0.5)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            skip(words)
            assert torch.equal(torch.get_rng_state(), after), size


def test_a_state_with_kept_numbers_is_one_that_torch_takes() -> None:
    torch.manual_seed(3)
    state = with_kept(torch.get_rng_state())
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.randn(1) == 0.75, "the kept one is drawn first"
    assert not torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    plain = torch.get_rng_state()
    torch.randn(1)
    assert not torch.equal(torch.get_rng_state()[5016:], plain[5016:]), "torch keeps none any more"


NORMAL_STEPS: dict[str, Step] = {
    **{f"{n} of {dtype}": lambda n=n, dtype=dtype: torch.randn(n, dtype=dtype).float().sum()
       for n in (1, 2, 3, 6, 14, 16) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)},
    "in place": lambda: torch.empty(2).normal_().sum(),
    "mean and deviation": lambda: torch.normal(0.0, 1.0, (2,)).sum(),
    "two tensors": lambda: torch.normal(torch.zeros(2), torch.ones(2)).sum(),
    "logarithmic": lambda: torch.empty(2).log_normal_().sum(),
    "complex": lambda: torch.randn(1, dtype=torch.complex64).real.sum(),
    "many complex": lambda: torch.randn(20, dtype=torch.complex64).real.sum(),
    "like a transposed one": lambda: torch.randn_like(torch.zeros(4, 8).t()).sum(),
    "like one of channels last": lambda: torch.randn_like(
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    ).sum(),
    "every other element": lambda: torch.zeros(4, 8)[:, ::2].normal_().sum(),
}  # fmt: skip


@pytest.mark.parametrize("draw", NORMAL_STEPS)
@pytest.mark.every(3)
def test_r8_a_normal_number_kept_for_the_next_call_goes_through_the_step(draw: str, endpoint: str) -> None:
    def script(run: Run) -> list[Any]:
        seen: list[Any] = []
        with run(lambda x: x.sum() + NORMAL_STEPS[draw](), (X[:2],)) as step:
            for odd in (1, 2, 3):
                torch.manual_seed(13)
                for _ in range(2):
                    seen += [torch.randn(odd), step(X[:2]), torch.get_rng_state()]
                seen += [torch.randn(1), torch.randn(1, dtype=torch.float64), step(X[:2]), torch.randn(1)]
        return seen

    same_in_both(script, endpoint)


def test_words_are_not_counted_where_they_could_be_others_next_time() -> None:
    assert words_drawn(drawing("aten.poisson.default", (64,), "float32")) is None
    for size in ((7,), (8,)):
        small = drawing("aten.normal_functional.default", size, "float32")
        assert words_drawn(small) is None, "one number is kept, or the one that was kept is used"
    builder = ProgramBuilder()
    x, p = builder.input("float32", (64,)), builder.scalar("float")
    builder.result(builder.call("aten.bernoulli.p", x, p, size=(64,), random=0))
    assert words_drawn(builder.build()) is None, "the probability may be 0 or 1 at another step"
    large = drawing("aten.bernoulli.p", (generator._MEASURED_ELEMENTS + 1,), "float32", 0.5)
    assert words_drawn(large) is None


def test_waiting_is_for_steps_that_take_longer_to_skip_than_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = generator.ClientGenerator()
    fresh._s_per_word = 1e-8
    assert fresh.waits(None, 1.0)
    assert not fresh.waits(1000, 1e-3), "10 us are less than a round trip"
    assert fresh.waits(1_000_000, 0.1), "10 ms of a step of 100"
    assert not fresh.waits(1_000_000, 1.0), "10 ms of a step of 1,000"
    assert fresh.waits(1_000_000, None)

    class Open:
        pass

    others = [Open(), Open()]
    monkeypatch.setattr(generator, "open_jobs", {*others})
    assert not fresh.waits(1_000_000, 0.1), "the thread could not send the other job's steps meanwhile"
