"""Runs a training loop twice, plainly and through a daemon, and compares every bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux import client
from tests.threads import with_threads

SEED = 1234
THREADS = 1


@dataclass
class Work:
    """A job as a user would write it. `functions[0]` is submitted, the others are added; `loop` gets
    one callable for each and returns everything it wants compared."""

    models: list[torch.nn.Module]
    optimizers: list[Any]
    functions: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    loop: Callable[..., list[Any]]
    options: dict[str, Any] = field(default_factory=dict)


def batches(
    *shapes: tuple[int, ...], classes: int = 10, count: int = 3, integer: bool = False
) -> list[tuple[torch.Tensor, ...]]:
    """Fixed batches from a generator of their own: one float tensor a shape, then labels."""
    g = torch.Generator().manual_seed(99)
    made = []
    for _ in range(count):
        xs = [torch.randint(0, classes, s, generator=g) if integer else torch.randn(*s, generator=g) for s in shapes]
        made.append((*xs, torch.randint(0, classes, (shapes[0][0],), generator=g)))
    return made


def simple_loop(
    data: list[tuple[torch.Tensor, ...]], steps: int = 20, each: Callable[[], None] | None = None
) -> Callable[..., list[Any]]:
    """`steps` steps over the batches in turn; `each` runs between steps (a scheduler)."""

    def loop(step: Callable[..., Any]) -> list[Any]:
        out = []
        for i in range(steps):
            out.append(step(*data[i % len(data)]))
            if each is not None:
                each()
        return out

    return loop


def values(results: list[Any]) -> list[Any]:
    out = []
    for r in results:
        r = r.result() if isinstance(r, client.StepFuture) else r
        out.append(pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), r))
    return out


def states(work: Work) -> list[Any]:
    return [*(m.state_dict() for m in work.models), *(o.state_dict() for o in work.optimizers), torch.get_rng_state()]


def assert_same(a: Any, b: Any, what: str) -> None:
    """Equal structure, and every tensor equal in type and in every bit."""
    la, sa = pytree.tree_flatten_with_path(a)
    lb, sb = pytree.tree_flatten_with_path(b)
    assert str(sa) == str(sb), f"{what}: another structure"
    for (path, x), (_, y) in zip(la, lb, strict=True):
        where = f"{what}{pytree.keystr(path)}"
        if isinstance(x, torch.Tensor):
            assert isinstance(y, torch.Tensor), where
            assert (x.dtype, x.shape) == (y.dtype, y.shape), where
            same = (
                x.contiguous().view(-1).view(torch.uint8).equal(y.contiguous().view(-1).view(torch.uint8))
                if x.numel()
                else True
            )
            assert same, f"{where} differs"
        else:
            assert repr(x) == repr(y) or (type(x) is type(y) and x == y), f"{where}: {x!r} is not {y!r}"


def plain(make: Callable[[], Work], threads: int = THREADS) -> tuple[list[Any], list[Any]]:
    """(results, final states) of the reference run, with the state of the random generator after it."""
    torch.manual_seed(0)
    work = make()
    torch.manual_seed(SEED)
    with with_threads(threads):
        results = []
        loop_results = work.loop(*[_detached(fn) for fn, _ in work.functions])
        results = values(loop_results)
    return results, states(work)


def _detached(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # values at the time of the call: a returned parameter changes later
        return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), fn(*args, **kwargs))

    return call


def through(
    make: Callable[[], Work], endpoint: str, stats: dict[str, Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """The same through the daemon. `stats` gets the job's stats()."""
    torch.manual_seed(0)
    work = make()
    (step, example), *others = work.functions
    models: Any = work.models if len(work.models) != 1 else work.models[0]
    optimizers: Any = work.optimizers if len(work.optimizers) != 1 else work.optimizers[0]
    torch.manual_seed(SEED)
    with client.submit(
        step,
        example=example,
        model=models or None,
        optimizer=optimizers or None,
        endpoint=endpoint,
        **work.options,
    ) as job:
        added = [job.add(fn, example=e) for fn, e in others]
        results = values(work.loop(job.step, *added))
        if stats is not None:
            stats.update(job.stats())
        job.sync()
    return results, states(work)


def check(make: Callable[[], Work], endpoint: str, threads: int = THREADS) -> list[Any]:
    """Both runs; raises AssertionError at the first bit that differs. `threads`: of the daemon's executors. Returns the
    results."""
    want, want_states = plain(make, threads)
    got, got_states = through(make, endpoint)
    try:
        assert_same(want, got, "results")
        assert_same(want_states, got_states, "state")
    except AssertionError:
        again, again_states = plain(make, threads)
        assert_same(want, again, "the reference run itself does not repeat: results")
        assert_same(want_states, again_states, "the reference run itself does not repeat: state")
        raise
    return got
