"""Python may read the values of buffers that no step writes, and flags and counters in buffers; buffers that a step
makes at its first call; and objects that a step replaces by copies of themselves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors
from gpumux.capture.side_effects import alike
from tests.client.parity import Work, batches, check, simple_loop

DATA = batches((6, 8), classes=4)


class Gated(nn.Module):
    """As quantizers and flows have it: a flag in a buffer, which says whether the module was set up."""

    ready: Tensor
    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("rates", torch.tensor([0.5, 2.0, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if not self.ready:
            out = out * 2.0
        return out * (self.rates * 2).amax().item()


def training(model: Any, **more: Any) -> tuple[Callable[..., Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


def test_python_decides_by_a_buffer_that_no_step_writes(endpoint: str) -> None:
    def make() -> Work:
        model = Gated()
        step, optimizer = training(model)
        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 5))

    check(make, endpoint)


class Chosen(nn.Module):
    """Trains on the columns that a mask in a buffer names."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)
        self.register_buffer("kept", torch.tensor([True, True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[:, self.kept]
        return out


def test_a_mask_chooses_as_many_columns_as_it_does_now(endpoint: str) -> None:
    def run(submit: bool) -> list[float]:
        torch.manual_seed(3)
        model = Chosen()
        step, optimizer = training(model)
        job = None
        if submit:
            job = client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)
        losses = []
        for i in range(6):
            losses.append(float((job.step if job else step)(*DATA[i % 3])))
            if i == 2:
                if job is not None:
                    job.sync()
                model.kept.copy_(torch.tensor([True, True, True, True, True]))
                if job is not None:
                    job.load_state()
        if job is not None:
            job.close()
        return losses

    assert run(True) == run(False)


def test_another_value_is_another_variant(endpoint: str) -> None:
    def run(submit: bool) -> list[float]:
        torch.manual_seed(3)
        model = Gated()
        step, optimizer = training(model)
        losses = []
        if not submit:
            for i in range(6):
                losses.append(float(step(*DATA[i % 3])))
                if i == 2:
                    model.ready.fill_(False)
                if i == 3:
                    model.load_state_dict({"rates": torch.tensor([3.0, 0.0, 0.0])}, strict=False)
            return losses
        with client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint) as job:
            for i in range(6):
                losses.append(float(job.step(*DATA[i % 3])))
                if i == 2:
                    model.ready.fill_(False)
                    job.load_state()
                if i == 3:
                    model.load_state_dict({"rates": torch.tensor([3.0, 0.0, 0.0])}, strict=False)
                    job.load_state()
        return losses

    assert run(submit=True) == run(submit=False)


class Started(nn.Module):
    """Sets itself up by the first batch."""

    started: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            self.mean.copy_(x.mean(0))
            self.started.fill_(True)
        found: Tensor = self.inner(x - self.mean)
        return found


class StartedByNumber(Started):
    """The flag is a number of one byte, as in Glow's ActNorm."""

    def __init__(self, added: bool = False) -> None:
        super().__init__()
        self.started = torch.tensor(0, dtype=torch.uint8)
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        if self.started.item() == 0:
            self.mean.copy_(x.mean(0))
            self.started.add_(1) if self.added else self.started.fill_(1)
        found: Tensor = self.inner(x - self.mean)
        return found


class Averaged(nn.Module):
    """A module with an average of its weights, which counts its updates in a buffer, as ema_pytorch does."""

    updates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.average = copy.deepcopy(self.inner).requires_grad_(False)
        self.register_buffer("updates", torch.tensor(0))
        self.norm = nn.BatchNorm1d(8, momentum=None)  # reads num_batches_tracked

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.norm(x))
        return found

    @torch.no_grad()
    def update(self) -> None:
        count = self.updates.item()
        self.updates += 1
        if count % 2 == 0:
            decay = 0.0 if count == 0 else 0.9
            for mean, now in zip(self.average.parameters(), self.inner.parameters(), strict=True):
                mean.lerp_(now, 1.0 - decay)


@pytest.mark.parametrize("kind", [Started, StartedByNumber])
def test_a_flag_that_the_step_sets_is_a_number_of_each_step(kind: type[Started], endpoint: str) -> None:
    def make() -> Work:
        model = kind()
        step, optimizer = training(model)
        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 5))

    check(make, endpoint)


def test_a_counter_in_a_buffer_is_a_number_of_each_step(endpoint: str) -> None:
    def make() -> Work:
        model = Averaged()
        train, optimizer = training(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = train(x, y)
            model.update()
            return loss

        def loop(run: Any) -> list[Any]:
            found = [run(*DATA[i % 3]) for i in range(4)]
            found.append({name: tensor.clone() for name, tensor in model.named_buffers()})
            return [*found, *[run(*DATA[i % 3]) for i in range(3)]]

        return Work([model], [optimizer], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_such_a_number_is_saved_and_loaded(endpoint: str) -> None:
    model = Started()
    step, optimizer = training(model)
    with client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint) as job:
        first = job.state_dict()
        assert not first["model"]["started"]
        losses = [float(job.step(*DATA[i])) for i in range(3)]
        assert job.state_dict()["model"]["started"]
        assert model.started
        job.load_state(first)
        assert not model.started
        assert [float(job.step(*DATA[i])) for i in range(3)] == losses
        job.sync()
    assert model.started
    assert model.state_dict()["started"]


def test_a_number_of_one_byte_that_is_counted_is_refused(endpoint: str) -> None:
    model = StartedByNumber(added=True)
    step, optimizer = training(model)
    with pytest.raises(errors.CaptureError):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


class Pointer(nn.Module):
    """A queue whose place lies in a buffer of one element, as MoCo's does."""

    at: Tensor
    queue: Tensor

    def __init__(self, shape: tuple[int, ...], move: Callable[[Pointer, int], None], length: int = 12) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("at", torch.zeros(shape, dtype=torch.long))
        self.register_buffer("queue", torch.randn(length, 4))
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        out = found + self.queue.clone().mean(0)
        place = int(self.at)
        self.queue[place : place + 2] = found.detach()[:2]
        self.move(self, (place + 2) % self.queue.shape[0])
        return out


def set_first(model: Pointer, place: int) -> None:
    model.at[0] = place


def set_only(model: Pointer, place: int) -> None:
    model.at.view(-1)[0] = place


def count_in_a_view(model: Pointer, place: int) -> None:
    at = model.at.view(-1)
    at += 2
    at %= 12


def fill(model: Pointer, place: int) -> None:
    model.at.fill_(place)


def replace(model: Pointer, place: int) -> None:
    model.at = (model.at + 2) % 12


def replace_by_a_copy(model: Pointer, place: int) -> None:
    model.at = (model.at.view(-1)[0] + 2).view(model.at.shape) % 12


def register_anew(model: Pointer, place: int) -> None:
    model.register_buffer("at", (model.at + 2).remainder(12))


MOVES = [set_only, count_in_a_view, fill, replace, replace_by_a_copy, register_anew]


def copies(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def moved(
    shape: tuple[int, ...], move: Callable[[Pointer, int], None], steps: int, endpoint: str | None, most: int = 64
) -> list[Tensor]:
    """The losses of a model with a pointer, and its state after them. `most`: Programs of the job."""
    torch.manual_seed(3)
    model = Pointer(shape, move)
    step, optimizer = training(model)
    if endpoint is None:
        return [*[step(*DATA[i % 3]).clone() for i in range(steps)], *copies(model)]
    with client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint) as job:
        losses = [job.step(*DATA[i % 3]).result().clone() for i in range(steps)]
        assert len(job._remote.programs) <= most
        job.sync()
        return [*losses, *copies(model)]


@pytest.mark.every(5)
@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
@pytest.mark.parametrize("move", [set_first, *MOVES])
def test_a_pointer_in_a_buffer_is_a_number_of_each_step(
    shape: tuple[int, ...], move: Callable[[Pointer, int], None], endpoint: str
) -> None:
    move = set_only if move is set_first and shape != (1,) else move  # at[0] is a row of the others, or none

    most = 3  # Programs: the first, and one for all places; one where the pointer was read
    want, got = moved(shape, move, 14, None), moved(shape, move, 14, endpoint, most)
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_what_was_traced_before_it_was_known_to_count_is_not_confirmed(traces: list[int], endpoint: str) -> None:
    model = Pointer((), fill)
    step, optimizer = training(model)
    with client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint):
        # One in which the pointer is a constant, one that finds int() of it, and one for each phase of the optimizer.
        assert len(traces) <= 4


def test_a_pointer_that_modules_share_is_replaced_in_all_of_them_or_refused(endpoint: str) -> None:
    model = Pointer((1,), replace)
    model.other = nn.Module()
    model.other.register_buffer("at", model.at)
    step, optimizer = training(model)
    with pytest.raises(errors.CaptureError, match=r"replaces the buffer .*at in one place, and modules hold it in"):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


def test_a_pointer_that_the_daemon_computes_is_refused(endpoint: str) -> None:
    def move(model: Pointer, place: int) -> None:
        model.at = model.queue.argmax().view(1) % 4

    model = Pointer((1,), move)
    step, optimizer = training(model)
    with pytest.raises(errors.CaptureError, match="writes into at, by whose value its Python decides"):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


def test_data_of_a_pointer_that_is_set_to_other_memory_is_refused(endpoint: str) -> None:
    def move(model: Pointer, place: int) -> None:
        model.at.data += 2  # its own memory
        model.at.data = model.at % 12

    model = Pointer((1,), move)
    step, optimizer = training(model)
    with pytest.raises(errors.CaptureError, match=r"test_held_values.py:\d+ sets .data of at to other memory"):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


def look_up(model: Pointer, place: int) -> None:
    model.at[0] = {2: 4, 4: 6, 6: 0}[model.at.item() + 2]


def test_a_pointer_that_can_be_no_symbol_has_a_capture_for_each_value(endpoint: str) -> None:
    assert all(map(torch.equal, moved((1,), look_up, 9, None), moved((1,), look_up, 9, endpoint)))


class Two(Pointer):
    """One of two numbers in a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * (int(self.at[0]) + 1)
        self.at[0] = 1
        return found


def test_what_is_no_single_number_and_is_written_is_refused(endpoint: str) -> None:
    model = Two((2,), set_first)
    step, optimizer = training(model)
    with pytest.raises(errors.DataDependent, match=r"test_held_values.py:\d+ reads a tensor's value"):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


@pytest.mark.parametrize("reader_first", [True, False])
def test_nor_is_one_that_another_step_of_the_job_writes(reader_first: bool, endpoint: str) -> None:
    model = Gated()
    step, optimizer = training(model)

    def write(x: Tensor, y: Tensor) -> Tensor:
        model.ready.logical_not_()
        return x.sum()

    first, second = (step, write) if reader_first else (write, step)
    with client.submit(first, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(*DATA[0]).result()
        with pytest.raises(errors.DataDependent, match=r"test_held_values.py:\d+ reads a tensor's value"):
            job.add(second, example=DATA[0])
        job.step(*DATA[0]).result()


def test_a_parameter_that_the_step_trains_is_no_constant(endpoint: str) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * model.bias[0].item()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(errors.DataDependent, match="reads a tensor's value"):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


class Biased(nn.Module):
    """A bias made of a buffer's slopes at the first call, as ALiBi's is, and again for larger inputs."""

    bias: Tensor | None

    def __init__(self, slopes: Tensor | nn.Parameter) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        if isinstance(slopes, nn.Parameter):
            self.slopes = slopes
        else:
            self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or self.bias.shape[0] < x.shape[0]:
            distance = -torch.arange(x.shape[0], dtype=torch.float32).view(-1, 1)
            self.register_buffer("bias", (distance * self.slopes).detach(), persistent=False)
        assert self.bias is not None
        found: Tensor = self.inner(x) + self.slopes + self.bias[: x.shape[0]]
        return found


def test_a_buffer_made_at_the_first_call_is_there_afterwards(endpoint: str) -> None:
    longer = batches((9, 8), classes=4)

    def make() -> Work:
        model = Biased(torch.tensor([0.5, 0.25, 0.125, 0.1]))
        step, optimizer = training(model)

        def loop(run: Any) -> list[Any]:
            found = [run(*DATA[i % 3]) for i in range(3)]
            assert model.bias is not None
            found.append(model.bias.clone())
            found += [run(*longer[0]), run(*DATA[0])]
            return [*found, model.bias.clone(), dict(model.named_buffers())]

        return Work([model], [optimizer], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_buffer_made_of_what_steps_train_is_refused(endpoint: str) -> None:
    model = Biased(nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.1])))
    step, optimizer = training(model)
    with pytest.raises(errors.CaptureError, match=re.escape("the step makes the buffer Biased.bias")):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)
    assert model.bias is None


class Summing(nn.Module):
    """Begins its loss with a buffer that it has require grad, as vector_quantize_pytorch does."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.zero
        if self.training:
            loss.requires_grad_()
        out: Tensor = self.inner(x)
        return out + loss


def test_a_buffer_that_gets_a_gradient_keeps_it(endpoint: str) -> None:
    def make() -> Work:
        model = Summing()
        step, optimizer = training(model)

        def loop(run: Any) -> list[Any]:
            found = [run(*DATA[i % 3]) for i in range(4)]
            assert model.zero.grad is not None
            return [*found, model.zero.grad.clone(), run(*DATA[0])]

        return Work([model], [optimizer], [(step, DATA[0])], loop)

    check(make, endpoint)


class Registry:
    """Of backends, as einx has one: each use puts a copy in its place."""

    def __init__(self, seen: dict[str, Any], names: list[str]) -> None:
        self.seen = seen
        self.names = names


class Holder:
    def __init__(self) -> None:
        self.registry = Registry({}, [])

    def use(self, name: str) -> None:
        self.registry = copy.copy(self.registry)
        self.registry.seen = self.registry.seen | {name: len}
        self.registry.names = [*self.registry.names]


def test_a_copy_in_an_objects_place_changes_nothing(endpoint: str) -> None:
    def make() -> Work:
        model, holder = nn.Linear(8, 4), Holder()
        train, optimizer = training(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            holder.use("torch")
            return train(x, y)

        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 4))

    check(make, endpoint)


def test_what_is_alike() -> None:
    one = Registry({"a": len, "b": (1, 2.0)}, ["x"])
    assert alike(one, copy.deepcopy(one))
    assert not alike(one, Registry({"a": len, "b": (1, 2.5)}, ["x"]))
    assert not alike(one, Registry({"b": (1, 2.0), "a": len}, ["x"]))
    assert not alike(one, Registry({"a": len, "b": (1, 2.0)}, ["x", "y"]))
    assert not alike(Registry({}, []), Holder())
    assert not alike(0.0, -0.0)
    assert not alike(torch.zeros(1), torch.zeros(1))
    assert alike({1, 2}, {2, 1})
    assert not alike(nn.Linear(1, 1), copy.deepcopy(nn.Linear(1, 1)))
    assert not alike([[[[[1]]]]], [[[[[1]]]]])  # too deep to tell


class Masked(nn.Module):
    """A Transformer, which compares its masks with a causal one, with a mask that is no buffer."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 3, 8)
        if self.mask is None:
            self.mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.head(self.transformer(x, x, src_mask=self.mask, tgt_mask=self.mask)).view(6, 4)
        return out


@pytest.mark.parametrize("cached", [True, False])
def test_a_transformer_takes_a_mask_from_an_attribute(cached: bool, endpoint: str) -> None:
    def make() -> Work:
        model = Masked(None if cached else torch.triu(torch.full((3, 3), -1.0), 1))
        step, optimizer = training(model)
        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 5))

    check(make, endpoint)


class Held:
    def __init__(self) -> None:
        self.scales = torch.tensor([0.5, 2.0])


def in_place(held: Held, i: int) -> None:
    held.scales[i % 2] += 0.25


def anew(held: Held, i: int) -> None:
    held.scales = torch.tensor([0.5, i / 4])


def of_another_length(held: Held, i: int) -> None:
    held.scales = torch.full((3,), i / 4)


def not_at_all(held: Held, i: int) -> None:
    pass


@pytest.mark.parametrize("change", [in_place, anew, of_another_length, not_at_all])
def test_python_decides_by_a_tensor_that_only_the_script_writes(
    change: Callable[[Held, int], None], endpoint: str
) -> None:
    def run(submit: bool) -> list[float]:
        torch.manual_seed(3)
        model, held = nn.Linear(8, 4), Held()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * held.scales.sum().item() + held.scales.mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        with (
            client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)
            if submit
            else nullcontext() as job
        ):
            for i in range(6):
                losses.append(float((job.step if job else step)(*DATA[i % 3])))
                if i % 3 == 2:
                    change(held, i)
        return losses

    assert run(True) == run(False)


def test_but_not_by_one_that_a_step_writes(endpoint: str) -> None:
    held = Held()

    def step(x: Tensor) -> Tensor:
        found = x * held.scales.sum().item()
        held.scales.mul_(0.5)
        return found

    with pytest.raises(errors.DataDependent, match=r"test_held_values.py:\d+ reads a tensor's value"):
        client.submit(step, example=DATA[0][:1], endpoint=endpoint)
