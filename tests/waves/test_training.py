"""A job of two waves computes what figure 9 of Wavelet computes, bit for bit, whatever the waves' speed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.client import Job
from gpumux.client.session import Session
from gpumux.wire import messages as m
from microbench.daemon import running_daemon
from tests.waves.reference import WaveReference

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int, samples: int = 16, dtype: torch.dtype = torch.float32) -> list[Batch]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(samples, 1, 8, 8, generator=draw).to(dtype), torch.randint(0, 10, (samples,), generator=draw))
        for _ in range(count)
    ]


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Tied(nn.Module):
    """A Transformer's layer whose output weights are those of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 10)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embed(x[:, 0]))
        mean = hidden.mean(1)
        return self.out(mean) + self.head(hidden[:, 0])


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def training(model: nn.Module, opt: torch.optim.Optimizer, clip: float | None = None) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        return loss

    return step


def submit(
    endpoint: str | None, make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any],
    clip: float | None = None, example: Batch | None = None, **given: Any,
) -> tuple[nn.Module, Any, Job]:  # fmt: skip
    model = make()
    opt = optimizer(model)
    step, example = training(model, opt, clip), example or batches(1)[0]
    return (
        model,
        opt,
        client.submit(step, example=example, model=model, optimizer=opt, endpoint=endpoint, waves=2, **given),
    )


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def equal(model: nn.Module, opt: Any, reference: WaveReference) -> bool:
    """Whether the local model and optimizer have the bits of the reference's newest replica."""
    ours, theirs = model.state_dict(), reference.model.state_dict()
    states = opt.state_dict()["state"], reference.optimizer.state_dict()["state"]
    leaves = [
        [t for entry in state.values() for t in entry.values() if isinstance(t, torch.Tensor)] for state in states
    ]
    pairs = [*zip(ours.values(), theirs.values(), strict=True), *zip(*leaves, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("make", "optimizer", "clip"),
    [(convolutions, momentum, None), (convolutions, adamw, 1.0), (Tied, adamw, 0.5), (Tied, sgd, None)],
    ids=["convolutions, momentum", "convolutions, AdamW, clipped", "tied, AdamW, clipped", "tied, SGD"],
)
@pytest.mark.every(4)
def test_twenty_steps_have_the_bits_of_the_reference(endpoint, make, optimizer, clip):
    data = batches(20)
    reference = WaveReference(make, optimizer, loss_of, clip)
    torch.manual_seed(11)
    expected = [reference.step(batch) for batch in data]
    drawn = torch.rand(3)
    model, opt, job = submit(endpoint, make, optimizer, clip)
    with job:
        torch.manual_seed(11)
        losses = [job.step(*batch) for batch in data]
        assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
        assert job.stats()["waves"] == 2
    assert equal(model, opt, reference)
    assert torch.equal(torch.rand(3), drawn), "the random stream goes on as the plain loop's"


LAUNCHED = re.compile(r"step (\d+): piece (\d+) of (\d+) launched")


def wide() -> nn.Module:
    """Convolutions that take some milliseconds each, so that a step has more pieces than are launched ahead."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), *[nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()] * 10]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, 10))


@pytest.mark.extended
def test_pieces_of_both_waves_run_in_turns_and_the_bits_are_the_same(endpoint):
    data = batches(20, 64)
    model, opt, job = submit(endpoint, wide, adamw)
    with job:
        losses = [loss.item() for loss in [job.step(*batch) for batch in data[:16]]]
        for first, second in (data[16:18], data[18:]):
            job.pause()  # so that both are there when the first begins, however busy the machine is
            pair = job.step(*first), job.step(*second)
            job.resume()
            losses += [loss.item() for loss in pair]
        with Session.connect(endpoint, role="control") as session:
            story = session.call(m.ExplainJob(0, job.id))[0].body["story"]
    reference = WaveReference(wide, adamw, loss_of)
    assert losses == [reference.step(batch).item() for batch in data]
    assert equal(model, opt, reference)
    launched = [tuple(map(int, found.groups())) for line in story if (found := LAUNCHED.search(line))]
    steps = [step for step, _, _ in launched]
    within = [a > b for a, b in pairwise(steps)]  # a piece of the older step behind one of the younger
    assert sum(within) >= 1, launched  # how often depends on when each piece is done
    for step in {step for step, piece, _ in launched if piece == 0}:
        if step + 1 in steps:
            last = max(at for at, one in enumerate(launched) if one[0] == step)
            final = max(at for at, one in enumerate(launched) if one[0] == step + 1)
            assert final > last, "a step ends behind the one before it"


def test_what_is_read_after_each_step_is_the_replica_of_that_step(endpoint):
    reference = WaveReference(convolutions, momentum, loss_of)
    model, opt, job = submit(endpoint, convolutions, momentum)
    with job:
        torch.manual_seed(3)
        for batch in batches(5):
            state = torch.get_rng_state()
            expected = reference.step(batch)
            torch.set_rng_state(state)
            assert job.step(*batch).item() == expected.item()
            assert equal(model, opt, reference)
            named = job.state_dict()["model"]
            assert all(torch.equal(named[key], value) for key, value in reference.model.state_dict().items())


@pytest.mark.every(4)
@pytest.mark.parametrize("after", [1, 2, pytest.param(5, marks=pytest.mark.extended)])
def test_a_checkpoint_holds_both_replicas_in_the_middle_of_a_pair(endpoint, after: int, tmp_path):
    data = batches(9)
    reference = WaveReference(Tied, adamw, loss_of)
    expected = [reference.step(batch).item() for batch in data]
    _, _, job = submit(endpoint, Tied, adamw)
    with job:
        losses = [job.step(*batch).item() for batch in data[:after]]
        torch.save(job.state_dict(), tmp_path / "saved")
    model, opt, job = submit(endpoint, Tied, adamw)
    with job:
        job.load_state(torch.load(tmp_path / "saved"))
        losses += [job.step(*batch).item() for batch in data[after:]]
    assert losses == expected
    assert equal(model, opt, reference)


class Averaged(torch.optim.Optimizer):
    """SGD at the mean of this learning rate and that of its step before, a number in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            before = self.state[p].get("rate", 0.0)
            self.state[p]["rate"] = group["lr"]
            p.add_(p.grad, alpha=-(group["lr"] + before) / 2)


@pytest.mark.every(4)
@pytest.mark.parametrize("after", [2, 3])
def test_numbers_in_an_optimizers_state_belong_to_its_replica(endpoint, after: int):
    def rated(job: Any, opt: Any, number: int) -> float:
        opt.param_groups[0]["lr"] = 0.1 * 0.7**number
        return job.step(*data[number]).item()

    def averaged(model: nn.Module) -> Any:
        return Averaged(model.parameters())

    data = batches(7)
    reference = WaveReference(Tied, averaged, loss_of)
    expected = []
    for number, batch in enumerate(data):
        reference.optimizers[number % 2][0].param_groups[0]["lr"] = 0.1 * 0.7**number
        expected.append(reference.step(batch).item())
    _, opt, job = submit(endpoint, Tied, averaged)
    with job:
        losses = [rated(job, opt, number) for number in range(after)]
        saved = job.state_dict()
    model, opt, job = submit(endpoint, Tied, averaged)
    with job:
        job.load_state(saved)
        losses += [rated(job, opt, number) for number in range(after, len(data))]
    assert losses == expected
    assert equal(model, opt, reference)


@pytest.fixture(scope="module")
def keeping(tmp_path_factory) -> Iterator[str]:
    """A daemon that keeps snapshots."""
    with running_daemon(threads=1, flags=["--state-dir", str(tmp_path_factory.mktemp("state"))]) as daemon:
        yield daemon.endpoint


@pytest.mark.extended
@pytest.mark.parametrize("after", [0, 1, 2, pytest.param(5, marks=pytest.mark.extended)])
def test_a_job_that_was_kept_goes_on_in_the_middle_of_a_pair(keeping, after: int):
    """Both replicas, both optimizers, the last gradients, the generator and statistics come from the snapshot."""
    data = batches(9)
    torch.manual_seed(4)
    reference = WaveReference(convolutions, momentum, loss_of)
    expected = [reference.step(batch).item() for batch in data]
    torch.manual_seed(4)
    _, _, job = submit(keeping, convolutions, momentum, name="kept waves")
    losses = [job.step(*batch).item() for batch in data[:after]]
    job.close(keep=True)
    torch.manual_seed(99)  # the snapshot has the state of the generator
    model, opt, job = submit(keeping, convolutions, momentum, name="kept waves", resume="kept waves")
    with job:
        assert job.resumed_steps == after
        losses += [job.step(*batch).item() for batch in data[after:]]
    assert losses == expected
    assert equal(model, opt, reference)


def test_a_client_that_dies_leaves_both_replicas(keeping):
    data = batches(7)
    reference = WaveReference(Tied, adamw, loss_of)
    expected = [reference.step(batch).item() for batch in data]
    _, _, job = submit(keeping, Tied, adamw, name="left waves")
    losses = [job.step(*batch).item() for batch in data[:3]]
    job._recovery.save()
    job.close(drain=False)
    model, opt, job = submit(keeping, Tied, adamw, name="left waves", resume="left waves")
    with job:
        losses += [job.step(*batch).item() for batch in data[job.resumed_steps :]]
    assert losses == expected
    assert equal(model, opt, reference)


def test_a_kept_job_of_two_waves_is_no_job_of_one(keeping):
    model, _, job = submit(keeping, Tied, sgd, name="two")
    job.step(*batches(1)[0])
    job.close(keep=True)
    with pytest.raises(errors.ConfigError, match="trained two waves"):
        client.submit(
            lambda x, y: loss_of(model, (x, y)), example=batches(1)[0], model=model, endpoint=keeping, resume="two"
        )
    submit(keeping, Tied, sgd, resume="two")[2].close()


def test_a_state_without_waves_begins_anew_on_both_replicas(endpoint):
    data = batches(4)
    model, opt, job = submit(endpoint, Tied, sgd)
    with job:
        job.step(*data[0])
        job.load_state({"model": Tied().state_dict()})
        losses = [job.step(*batch).item() for batch in data]
    reference = WaveReference(Tied, sgd, loss_of)
    assert losses == [reference.step(batch).item() for batch in data]
    assert equal(model, opt, reference)


def test_gradients_of_another_job_are_not_taken(endpoint):
    _, _, job = submit(endpoint, Tied, sgd)
    with job:
        job.step(*batches(1)[0])
        saved = job.state_dict()
        saved["waves"]["gradients"].popitem()
        with pytest.raises(errors.ConfigError, match="has no gradient of"):
            job.load_state(saved)


def test_an_added_evaluation_sees_the_newest_replica(endpoint):
    data = batches(3)
    reference = WaveReference(Tied, sgd, loss_of)
    model, _, job = submit(endpoint, Tied, sgd)

    @torch.no_grad()
    def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    with job:
        measure = job.add(evaluate, example=data[0])
        for batch in data:
            job.step(*batch)
            reference.step(batch)
            with torch.no_grad():
                assert measure(*data[0]).item() == loss_of(reference.model, data[0]).item()


def test_an_added_step_that_trains_is_refused(endpoint):
    model, opt, job = submit(endpoint, Tied, sgd)

    def another(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = 2 * F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    with job, pytest.raises(errors.NotSplittable, match="its submitted step alone"):
        job.add(another, example=batches(1)[0])


def test_a_step_that_only_evaluates_in_a_case_runs_on_the_newest_replica(endpoint):
    data = batches(6)
    model = Tied()
    opt = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if model.training:
            opt.zero_grad()
            loss.backward()
            opt.step()
        return loss

    reference = WaveReference(Tied, adamw, loss_of)
    with client.submit(step, example=data[0], model=model, optimizer=opt, endpoint=endpoint, waves=2) as job:
        for batch in data:
            assert job.step(*batch).item() == reference.step(batch).item()
            model.eval()
            expected = loss_of(reference.model.eval(), data[0]).item()  # with gradients, as in the step
            reference.model.train()
            assert job.step(*data[0]).item() == expected
            assert equal(model, opt, reference)
            model.train()


def test_batches_of_several_shapes_take_turns(endpoint):
    data = [batch if m % 3 else (batch[0][:5], batch[1][:5]) for m, batch in enumerate(batches(8))]
    reference = WaveReference(Tied, momentum, loss_of)
    model, opt, job = submit(endpoint, Tied, momentum)
    with job:
        assert [job.step(*b).item() for b in data] == [reference.step(b).item() for b in data]
    assert equal(model, opt, reference)


def test_a_learning_rate_schedule_goes_by_steps_of_both_waves(endpoint):
    data = batches(6)
    reference = WaveReference(Tied, sgd, loss_of)
    expected = []
    for number, batch in enumerate(data):
        for optimizer in (pair[0] for pair in reference.optimizers):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number
        expected.append(reference.step(batch).item())
    _, opt, job = submit(endpoint, Tied, sgd)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    with job:
        losses = []
        for batch in data:
            losses.append(job.step(*batch).item())
            schedule.step()
    assert losses == expected


# ---- what can't be a wave's step


def refused(endpoint: str, step: Callable[..., Any], model: nn.Module, opt: Any, **given: Any) -> errors.GpumuxError:
    with pytest.raises(errors.GpumuxError) as caught:
        client.submit(
            step, example=batches(1)[0], model=model, optimizer=opt, endpoint=endpoint, waves=2, **given
        ).close()
    return caught.value


def test_steps_that_can_not_be_a_waves_are_refused_by_what_they_do(endpoint):
    model = Tied()
    opt = sgd(model)

    def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    def by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p -= 0.1 * g
        return loss

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        return loss

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (extra,) = torch.autograd.grad(loss, [model.out.bias], retain_graph=True)
        loss.backward()
        with torch.no_grad():
            model.out.bias.grad.add_(extra)
        opt.step()
        return loss

    scaler = torch.amp.GradScaler("cpu")

    def scales(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    def sets_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        model.out.bias.data = 0.5 * model.out.bias.data
        return loss

    def changes_batch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        x.mul_(0.5)
        return loss

    steps = (adds, by_hand, twice, both, scales, sets_data, changes_batch)
    found = {step.__name__: refused(endpoint, step, model, opt) for step in steps}
    assert all(isinstance(error, errors.NotSplittable) for error in found.values()), found
    assert "adds to gradients" in found["adds"].message
    assert "backward()" in found["by_hand"].remedy
    assert "before the step's last backward pass" in found["twice"].message
    assert "besides the gradients" in found["both"].message
    for name in ("scales", "sets_data", "changes_batch"):
        assert "uses a GradScaler, checks values, sets .data, or changes its batch" in found[name].message


def test_a_step_with_gradients_of_other_parameters_than_the_steps_before_is_refused(endpoint):
    """It would take the mean with the gradient that an older step left."""
    data = batches(4)
    reference = WaveReference(Tied, momentum, loss_of)
    model, opt, job = submit(endpoint, Tied, momentum)
    with job:
        losses = [job.step(*batch).item() for batch in data[:3]]
        model.layer.norm2.requires_grad_(False)
        with pytest.raises(errors.NotSplittable, match=r"norm2.weight has a gradient in some steps of the job"):
            job.step(*data[3])
        model.layer.norm2.requires_grad_(True)
        losses.append(job.step(*data[3]).item())
    assert losses == [reference.step(batch).item() for batch in data]
    assert equal(model, opt, reference)


def test_arguments_that_do_not_go_together_are_refused(endpoint):
    model = Tied()
    opt = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    for given in ({"priority": "high"}, {"microbatches": 2}, {"compile": True}, {"memory": "shared"}):
        error = refused(endpoint, step, model, opt, **given)
        assert next(iter(given)) in error.message
    with pytest.raises(errors.ConfigError, match="waves=3"):
        client.submit(step, example=batches(1)[0], model=model, optimizer=opt, endpoint=endpoint, waves=3)


def test_a_seed_of_its_own_with_dropout_is_refused(endpoint):
    model = convolutions()
    opt = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    assert "seed=" in refused(endpoint, step, model, opt, seed=3).remedy


def test_a_submit_says_what_microbatches_would_take(endpoint, caplog):
    with caplog.at_level(logging.WARNING, "gpumux.client"):
        submit(endpoint, wide, adamw)[2].close()
    (line,) = [record.message for record in caplog.records if "two waves take" in record.message]
    waves, microbatches = map(float, re.findall(r"about (\d+) MiB", line))
    assert waves > microbatches > 0


def test_a_job_of_waves_stays_low(endpoint):
    _, _, job = submit(endpoint, Tied, sgd, name="low-waves")
    with (
        job,
        Session.connect(endpoint, role="control") as session,
        pytest.raises(errors.Refused, match="two waves"),
    ):
        session.call(m.ChangeJob(0, job.id, 1, None))


@pytest.mark.extended
def test_an_evaluation_with_batch_norm_is_no_step_of_a_wave(endpoint):
    data = batches(5)
    reference = WaveReference(convolutions, sgd, loss_of)
    torch.manual_seed(6)
    for batch in data[:3]:
        reference.step(batch)
    with torch.no_grad():
        expected = reference.model.eval()(data[4][0])
    model, _, job = submit(endpoint, convolutions, sgd)

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            scores = model(x)
        model.train()
        return scores

    with job:
        look = job.add(evaluate, example=(data[4][0],))
        torch.manual_seed(6)
        for batch in data[:3]:
            job.step(*batch)
        assert torch.equal(look(data[4][0]).result(), expected)
