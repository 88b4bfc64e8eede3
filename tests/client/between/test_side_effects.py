"""Row M19 of docs/plain-loop.md, "Between two steps": tensors that the step leaves in Python variables."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors
from gpumux.capture.state import Unreturned
from tests.client.between.support import DATA, Script, X, Y, made, same


class Aux(nn.Module):
    """Keeps its auxiliary loss in an attribute."""

    shared: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.aux: Any = torch.zeros(())
        self.outs: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        self.aux = y.square().mean()
        return y


def with_aux(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.1 * model.aux
        loss.backward()
        optimizer.step()
        return loss

    return step


Leave = Callable[[Any, Any, Tensor], None]
LAST: Any = None


def leave_global(model: Any, optimizer: Any, loss: Tensor) -> None:
    global LAST
    LAST = loss.detach()


def leave_slot(model: Any, optimizer: Any, loss: Tensor) -> None:
    SLOTS.last = loss.detach()


def leave_class(model: Any, optimizer: Any, loss: Tensor) -> None:
    Aux.shared = loss.detach()


# How a step leaves its loss, where the script reads it, and what that is called.
STORE: dict[str, Any] = {}
FIRST: list[Any] = [torch.zeros(())]
WINDOW: Any = collections.deque([None], maxlen=1)


class Slots:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = None


SLOTS = Slots()
SPACE = types.SimpleNamespace(last=None)
PLACES: dict[str, tuple[Leave, Callable[[Any, Any], Any], str]] = {
    "attribute": (lambda m, o, loss: None, lambda m, o: m.aux, r"model\.aux"),
    "new attribute": (lambda m, o, loss: setattr(m, "fresh", loss.detach()), lambda m, o: m.fresh, r"model\.fresh"),
    "of a submodule": (lambda m, o, loss: setattr(m.lin, "seen", loss), lambda m, o: m.lin.seen, r"model\.lin\.seen"),
    "optimizer's": (
        lambda m, o, loss: setattr(o, "last_norm", nn.utils.clip_grad_norm_(m.parameters(), 1.0)),
        lambda m, o: o.last_norm, r"optimizer\.last_norm",
    ),
    "global": (leave_global, lambda m, o: LAST, "LAST"),
    "dictionary": (
        lambda m, o, loss: STORE.__setitem__("last", loss.detach()), lambda m, o: STORE["last"], r"STORE\['last'\]",
    ),
    "list": (lambda m, o, loss: FIRST.__setitem__(0, loss.detach()), lambda m, o: FIRST[0], r"FIRST\[0\]"),
    "deque": (lambda m, o, loss: WINDOW.append(loss.detach()), lambda m, o: WINDOW[0], r"WINDOW\[0\]"),
    "slot": (leave_slot, lambda m, o: SLOTS.last, r"SLOTS\.last"),
    "class": (leave_class, lambda m, o: Aux.shared, r"Aux\.shared"),
    "namespace": (lambda m, o, loss: setattr(SPACE, "last", loss.detach()), lambda m, o: SPACE.last, r"SPACE\.last"),
}  # fmt: skip
READS: dict[str, Callable[[Any], Any]] = {
    "float": float, "item": lambda t: t.item(), "add": lambda t: t + 1, "in a list": lambda t: torch.stack([t, t]),
    "bool": bool, "format": lambda t: f"{t:.3f}", "compare": lambda t: t == 0, "tensor": lambda t: torch.tensor([t, t]),
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float64), "array": numpy.asarray,
    "numpy": lambda t: t.numpy(), "detach": lambda t: t.detach(), "backward": lambda t: t.backward(),
    "data": lambda t: t.data, "copy_": lambda t: X[0, 0].copy_(t), "tolist": lambda t: t.tolist(),
    "data_ptr": lambda t: t.data_ptr(), "clone": lambda t: t.clone(), "grad": lambda t: t.grad,
}  # fmt: skip


def leaving(leave: Leave) -> Callable[[Any, Any], Callable[..., Any]]:
    def bodies(model: Any, optimizer: Any) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + 0.1 * model.aux
            loss.backward()
            optimizer.step()
            leave(model, optimizer, loss)
            return loss

        return step

    return bodies


@pytest.mark.every(3)
@pytest.mark.parametrize("place", PLACES)
def test_m19_reading_it_names_it_and_the_remedy(place: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, read, name = PLACES[place]
    monkeypatch.setitem(globals(), "LAST", None)
    STORE.clear()
    FIRST[:] = [torch.zeros(())]
    WINDOW.append(None)
    SPACE.last = SLOTS.last = Aux.shared = None
    with made(endpoint, make=Aux, step=leaving(leave)) as s:
        with torch.no_grad():
            s.model.aux = torch.zeros(())
        for i in range(3):
            s.step(*DATA[i])
            with pytest.raises(errors.StaleState, match=f"{name} was set .*return it from the step"):
                float(read(s.model, s.optimizer))
        assert len(s.job._functions[0][0]._cases) == 1  # type: ignore[union-attr]
    with pytest.raises(errors.StaleState, match=name):
        float(read(s.model, s.optimizer))


@pytest.mark.every(3)
@pytest.mark.parametrize("read", READS)
def test_m19_by_whatever_function(read: str, endpoint: str) -> None:
    with made(endpoint, make=Aux, step=with_aux) as s:
        s.step(X, Y)
        with pytest.raises(errors.StaleState, match=r"model\.aux"):
            READS[read](s.model.aux)
        assert s.model.aux.shape == ()
        assert s.model.aux.dtype == torch.float32
        assert s.model.aux is not None
        assert isinstance(s.model.aux, Tensor)
        assert "model.aux" in repr(s.model.aux)


def test_m19_until_a_step_ran_it_is_what_it_was(endpoint: str) -> None:
    with made(endpoint, make=Aux, step=with_aux) as s:
        assert type(s.model.aux) is Tensor
        assert s.model.aux == 0


def test_m19_a_step_that_uses_what_it_wrote_is_the_plain_one_and_so_is_what_the_script_does_with_the_place(
    endpoint: str,
) -> None:
    """An evaluation writes and reads it, and the next step makes it unknown again; other batch sizes are other
    cases."""

    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(6):
            rows = 4 if i % 3 else 3
            x, y = DATA[i]
            out.append(s.step(x[:rows], y[:rows]))
            if s.job is not None:
                with pytest.raises(errors.StaleState, match=r"model\.aux"):
                    s.model.aux + 1
            if i % 2:
                s.model.eval()
                with torch.no_grad():
                    out += [s.model(X), s.model.aux]
                s.model.train()
            if i == 4:
                s.model.aux = None
        if s.job is not None:
            assert len(s.job._functions[0][0]._cases) <= 5
        return out

    same(script, endpoint, make=Aux, step=with_aux, max_variants=8)


def test_m19_a_variable_of_the_closure(endpoint: str) -> None:
    last, pair = torch.zeros(()), (torch.zeros(()), torch.zeros(()))
    model = nn.Linear(6, 3)

    def step(x: Tensor) -> Tensor:
        nonlocal last, pair
        last = model(x).sum()
        pair = (last, last + 1)
        return last * 2

    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        job.step(X)
        with pytest.raises(errors.StaleState, match="last was set"):
            last.item()
        with pytest.raises(errors.StaleState, match=r"pair\[1\] was set"):
            pair[1].item()
        last = torch.ones(())
        assert job.step(X).result().shape == ()
        with pytest.raises(errors.StaleState, match="last was set"):
            last.item()


def test_a_later_step_that_reads_what_one_set_is_told_to_write_in_place(endpoint: str) -> None:
    """It is captured after the value is gone: the first one only set the variable."""
    model, held = nn.Linear(6, 3), SimpleNamespace(last=torch.zeros(()))

    def step(x: Tensor, regularize: bool) -> Tensor:
        if regularize:
            held.last = model(x).sum().detach()
        return held.last * 1

    with client.submit(step, example=(X, True), model=model, endpoint=endpoint) as job:
        job.step(X, True)
        with pytest.raises(errors.StaleState, match=r"test_side_effects\.py:\d+ reads held\.last") as caught:
            job.step(X, False)
        assert "held.last.copy_(value.detach())" in caught.value.remedy


def test_m19_the_model_is_copied_pickled_and_saved_all_the_same(endpoint: str) -> None:
    with made(endpoint, make=Aux, step=with_aux) as s:
        s.step(X, Y)
        weight = s.model.lin.weight.detach().clone()
        assert list(s.model.state_dict()) == ["lin.weight", "lin.bias"]
        file = io.BytesIO()
        torch.save(s.model, file)
        file.seek(0)
        copies = [
            copy.deepcopy(s.model),
            pickle.loads(pickle.dumps(s.model)),  # noqa: S301 - our own bytes
            torch.load(file, weights_only=False),
        ]
        for other in copies:
            assert torch.equal(other.lin.weight, weight)
            assert type(other.aux) is Unreturned
            with pytest.raises(errors.StaleState, match=r"model\.aux"):
                float(other.aux)
            other(X)
            other.aux.item()
    s.model(X)
    assert type(s.model.aux) is Tensor, "a run here writes it"


@pytest.mark.parametrize(
    "read", [lambda o: o.param_groups[0]["lr"], lambda o: o.state[next(iter(o.state))]["step"] + 0]
)
def test_m19_a_number_of_the_step(read: Any, endpoint: str) -> None:
    """A hyperparameter, or a count of steps: a number of the trace would be that of the first step."""

    def bodies(model: Any, optimizer: Any) -> Callable[..., Any]:
        optimizer.last = torch.zeros(())
        plain = with_aux(model, optimizer)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = plain(x, y)
            optimizer.last = read(optimizer)
            return loss

        return step

    with made(endpoint, make=Aux, step=bodies) as s:
        s.step(*DATA[0])  # the first count of steps is the same at each first step
        for i in range(1, 3):
            s.step(*DATA[i])
            with pytest.raises(errors.StaleState, match=r"optimizer\.last"):
                s.optimizer.last + 1


def test_m19_a_second_job_after_the_first_goes_on(endpoint: str) -> None:
    torch.manual_seed(7)
    model = Aux()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    body = with_aux(model, optimizer)
    for _ in range(2):
        with client.submit(body, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
            job.step(X, Y)
    ours = model.lin.weight.detach().clone()
    torch.manual_seed(7)
    model = Aux()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    body = with_aux(model, optimizer)
    for _ in range(2):
        body(X, Y)
    assert torch.equal(ours, model.lin.weight)


def test_m19_a_step_goes_on_from_it(endpoint: str) -> None:
    model, last = nn.Linear(6, 3), torch.zeros(())

    def step(x: Tensor) -> Tensor:
        nonlocal last
        last = last * 0.9 + model(x).sum().detach()
        return last * 2

    with torch.no_grad():
        wanted = [step(X), step(X), last]
    last = torch.zeros(())
    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        found = [job.step(X).result(), job.step(X).result(), last]
    assert all(map(torch.equal, found, wanted))
    assert type(last) is Tensor
    assert torch.equal(last, wanted[2])


def test_m19_a_number_may_give_way_to_it_where_the_step_does_not_read_it_first(endpoint: str) -> None:
    held = SimpleNamespace(last=0.0)

    def leaves(x: Tensor) -> Tensor:
        held.last = x.sum()
        return x + held.last

    def adds(x: Tensor) -> Tensor:
        held.last = held.last + x.sum()
        return x * 2

    with client.submit(leaves, example=(X,), endpoint=endpoint, max_variants=1) as job:
        assert held.last == 0.0
        for last in (None, 0.0, 0.0):
            if last is not None:
                held.last = last
            assert torch.equal(job.step(X).result(), X + X.sum())
            with pytest.raises(errors.StaleState, match="last"):
                print(held.last + 1)
    held.last = 0.0
    with pytest.raises(errors.GpumuxError):
        client.submit(adds, example=(X,), endpoint=endpoint)
    assert held.last == 0.0


def test_m19_a_list_in_which_the_step_moves_what_is_there_is_refused(endpoint: str) -> None:
    window: collections.deque[Any] = collections.deque([torch.zeros(()), torch.ones(())], maxlen=2)
    before = list(window)

    def step(x: Tensor) -> Tensor:
        window.append(x.sum())
        return x * 2

    with pytest.raises(errors.CaptureError, match="moves what window holds"):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert all(a is b for a, b in zip(window, before, strict=True))
