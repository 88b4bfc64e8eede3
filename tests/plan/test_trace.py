"""torch models as layers: names, connections, sizes, times."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from clients.models.cnn import cnn
from clients.models.transformer import transformer
from gpumux.device.sim.spec import A100
from gpumux.errors import CaptureError, ConfigError
from gpumux.plan import measure, models
from gpumux.plan.graph import Block, reduce
from gpumux.plan.models import LoadedModel
from gpumux.plan.trace import trace


def loaded(module: nn.Module, *shape: int) -> LoadedModel:
    return LoadedModel("it", module, (torch.randn(1, *shape),))


def test_layers_have_the_users_names_and_take_what_belongs_to_them():
    found = trace(loaded(cnn("tiny"), 1, 8, 8)).layers
    assert [(each.name, each.kind) for each in found] == [
        ("features.0", "Conv2d"), ("features.3", "Conv2d"), ("features.6", "MaxPool2d"), ("classifier.1", "Linear"),
        ("classifier.4", "Linear"),
    ]  # fmt: skip
    model = cnn("tiny")
    assert sum(each.parameter_bytes for each in found) == sum(4 * p.numel() for p in model.parameters())
    assert found[0].output_bytes == 4 * 4 * 64
    assert found[0].flops == 2 * 9 * 4 * 64
    assert found[-1].output_bytes == 4 * 10


def test_attention_and_skip_connections_become_blocks():
    traced = trace(loaded(transformer("tiny"), 1, 8, 8))
    graph = reduce(measure.roofline_profile(traced, A100))
    assert graph.notes == ()
    assert graph.blocks == 2  # around the attention and around the feed-forward
    skip = next(each for each in graph.chain if isinstance(each, Block))
    assert () in skip.branches
    names = [each.name for each in graph.layers]
    assert "blocks.0.attention.1.scaled_dot_product_attention" in names


class Attention(nn.Module):
    """Written as products, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.query, self.key, self.value))
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / 2.0, -1)
        found: Tensor = self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return found


def test_attention_written_as_products_is_a_block_in_a_block():
    traced = trace(loaded(nn.Sequential(nn.Linear(8, 8), Attention()), 6, 8))
    graph = reduce(measure.roofline_profile(traced, A100))
    assert graph.notes == ()
    names = ["0", "0.parting", "1.query", "1.key", "1.value", "1.matmul", "1.matmul:2", "1.out"]
    assert [each.name for each in graph.layers] == names
    assert graph.chain == (0, Block(0, ((1, Block(1, ((2,), (3,))), 5), (4,))), 6, 7)


@pytest.mark.parametrize(
    ("name", "layers", "blocks", "millions"),
    [("vgg16", 21, 0, 138.4), ("inception_v3", 124, 15, 23.8), ("wide_resnet101_2", 140, 33, 126.9),
     ("transformer", 68, 18, 34.9), ("resnet50", 72, 16, 25.6), ("vgg19_bn", 24, 0, 143.7),
     ("bert_base", 87, 24, 109.5), ("gpt2", 110, 24, 124.4)],
)  # fmt: skip
@pytest.mark.every(4)
def test_the_papers_models_are_what_they_should_be(name: str, layers: int, blocks: int, millions: float):
    traced = trace(models.find(name))
    graph = reduce(measure.roofline_profile(traced, A100, (1, 2)))
    assert (len(traced.layers), graph.blocks, graph.notes) == (layers, blocks, ())
    assert sum(each.parameter_bytes for each in traced.layers) / 4e6 == pytest.approx(millions, abs=0.05)


def test_a_class_of_modules_can_be_one_layer_each():
    found = trace(models.find("wide_resnet101_2"), whole=["Bottleneck"]).layers
    assert len(found) == 37
    assert sum(each.kind == "Bottleneck" for each in found) == 33


class Shared(nn.Module):
    """One module used twice, a parameter of its own, several inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = self.dense(x), self.dense(y)
        return {"both": a * b, "scaled": (a * self.scale).chunk(2, 1)[0]}


def test_shared_modules_parameters_and_several_inputs():
    traced = trace(LoadedModel("shared", Shared(), (torch.randn(1, 4), torch.randn(1, 4))))
    assert [each.name for each in traced.layers] == ["dense", "dense:2", "mul", "mul:2"]
    assert [each.parameter_bytes for each in traced.layers] == [80, 0, 0, 16]
    assert traced.layers[2].inputs == ["dense", "dense:2"]
    profile = measure.profile(
        LoadedModel("shared", Shared(), (torch.randn(1, 4), torch.randn(1, 4))), device="cpu", batches=(1, 2), repeats=1
    )
    assert profile.sources() == {"measured": 4}


class Branchy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_model_that_does_not_trace_says_what_to_do():
    with pytest.raises(CaptureError, match="it can't be traced") as caught:
        trace(loaded(Branchy(), 4))
    assert "--whole" in caught.value.remedy
    with pytest.raises(ConfigError, match="is it itself"):
        trace(loaded(Branchy(), 4), whole=["Branchy"])


@pytest.mark.parametrize("make", [lambda: (cnn("tiny"), (1, 8, 8)), lambda: (transformer("tiny"), (1, 8, 8))])
def test_measured_layers_are_all_there_and_leave_the_model_alone(make):
    model, shape = make()
    before = {name: each.clone() for name, each in model.named_parameters()}
    told = []
    found = measure.profile(
        loaded(model, *shape), device="cpu", batches=(1, 4), repeats=2, progress=lambda *each: told.append(each)
    )
    assert [each.name for each in found.layers] == [each.name for each in trace(loaded(model, *shape)).layers]
    assert all([t.samples for t in each.times] == [1, 4] for each in found.layers)
    assert all(t.forward > 0 and t.backward > 0 for each in found.layers for t in each.times)
    assert found.sources() == {"measured": len(found.layers)}
    assert found.recorded_at is not None
    assert "torch" in found.versions
    assert [done for done, _, _ in told] == list(range(2 * len(found.layers)))
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    assert all(each.grad is None for each in model.parameters())
    reduce(found)


def test_measuring_runs_what_the_model_runs():
    """Layer by layer, the result equals the model's own."""
    torch.manual_seed(0)
    model = transformer("tiny").eval()
    it = loaded(model, 1, 8, 8)
    traced = trace(it)
    runner = measure._Runner(traced, it.example(3), "cpu", 1)
    for each in traced.layers:
        runner.layer(each)
    (output,) = [node for node in traced.module.graph.nodes if node.op == "output"]
    with torch.no_grad():
        torch.testing.assert_close(runner.values[output.args[0]], model(*it.example(3)))


def test_batches_and_repeats_make_sense():
    it = loaded(cnn("tiny"), 1, 8, 8)
    for wrong in ({"batches": ()}, {"batches": (2, 1)}, {"batches": (0,)}, {"batches": (1,), "repeats": 0}):
        with pytest.raises(ConfigError):
            measure.profile(it, device="cpu", **({"repeats": 1} | wrong))


def test_a_layer_over_the_whole_batch_is_named():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x.view(1, -1))

    traced = trace(LoadedModel("flat", Flat(), (torch.randn(2, 8),)))
    with pytest.raises(CaptureError, match="layer 'l' makes less than one row for each sample of a batch of 2"):
        measure.roofline_profile(traced, A100)


def test_modelled_times_grow_with_the_batch_and_are_marked():
    found = measure.roofline_profile(trace(models.find("alexnet")), A100)
    assert found.sources() == {"model": 11}
    assert found.device == "a100"
    for each in found.layers:
        seconds = [timing.seconds for timing in each.times]
        assert seconds == sorted(seconds)
        assert seconds[-1] > 0


def bare() -> nn.Module:
    return nn.Linear(4, 2)


def with_example() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2), torch.zeros(3, 4)


def nothing() -> int:
    return 0


NAME = "tests.plan.test_trace"


def test_models_are_found_by_name():
    assert len(models.find(f"{NAME}:with_example").example(5)[0]) == 5
    assert models.find(f"{NAME}:bare", (4,)).example(2)[0].shape == (2, 4)
    for name, says in (
        ("vgg", "no model is called"), (f"{NAME}:bare", "say what one sample looks like|makes a model alone"),
        (f"{NAME}:nothing", "makes a int"), (f"{NAME}:absent", "has no absent"), ("absent.module:f", "can't import"),
        (f"{NAME}:NAME", "no function"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            models.find(name)


class Optional(nn.Module):
    """Arguments with defaults that decide what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, twice: bool = True, *, bias: Tensor | None = None
    ) -> Tensor:
        x = self.dense(x)
        x = x if mask is None else x * mask
        x = x if bias is None else x + bias
        return self.other(x) if twice else x


def test_arguments_that_are_not_given_have_their_defaults():
    it = loaded(Optional(), 4)
    assert [each.name for each in trace(it).layers] == ["dense", "other"]
    assert len(measure.profile(it, device="cpu", batches=(1, 2), repeats=1).layers) == 2


class Keywords(nn.Module):
    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor, by: int = 2) -> Tensor:
        return x * scale + by * y


class Fixed(nn.Module):
    """Eight samples and no others."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(8, 1)


@pytest.mark.parametrize(
    ("module", "examples", "says", "remedy"),
    [
        (Keywords(), 2, "needs scale by keyword", "takes it by position"),
        (Keywords(), 3, "has 3 example arguments, and its forward() takes 2", "as many"),
        (Optional(), 0, "needs x, too", "return model, (x, mask)"),
        (nn.Linear(3, 2), 1, r"fails on a batch of 2 (input [2, 4]) in linear", "--input"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 2)), 1, "in 1: RuntimeError", "--input"),
        (Fixed(), 1, "fails on a batch of 2", "x.view(8, -1)"),
    ],
)
def test_a_model_that_does_not_run_says_where_and_what_to_do(
    module: nn.Module, examples: int, says: str, remedy: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(CaptureError, match=re.escape(says)) as caught:
        trace(LoadedModel("it", module, [torch.zeros(1, 4)] * examples))
    assert remedy in caught.value.remedy
    assert capfd.readouterr().err == ""  # torch's own log of it


def test_the_whole_of_a_nested_class_is_what_lies_inside():
    found = trace(
        loaded(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), 4), whole=["Sequential"]
    )
    assert [(each.name, each.kind) for each in found.layers] == [("0", "Linear"), ("1", "Sequential")]


class Starred(nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return x[0] + x[1]


def test_models_that_compute_nothing_or_take_any_number_of_inputs_are_refused():
    with pytest.raises(CaptureError, match="computes nothing"):
        trace(loaded(nn.Flatten(), 4))
    with pytest.raises(CaptureError, match=r"takes \*args"):
        trace(LoadedModel("it", Starred(), (torch.zeros(1, 4), torch.zeros(1, 4))))


def test_a_batch_a_layer_does_not_take_is_said():
    """A batch norm over one value."""
    it = loaded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 4)
    with pytest.raises(CaptureError, match="0 fails at a batch of 1: ValueError") as caught:
        measure.profile(it, device="cpu", batches=(1, 2), repeats=1)
    assert "larger" in caught.value.remedy
    assert measure.profile(it, device="cpu", batches=(2, 4), repeats=1).sources() == {"measured": 1}


def modelled_seconds(module: nn.Module, *shape: int, whole: tuple[str, ...] = ()) -> float:
    return measure.roofline_profile(trace(loaded(nn.Sequential(module), *shape), whole=whole), A100, (1,)).seconds(1)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def test_modules_that_are_one_layer_move_their_parameters():
    """At a batch of 1 a large dense layer is nothing but its weights."""
    alone, whole = nn.Linear(8192, 8192), Wrapped(nn.Linear(8192, 8192))
    assert modelled_seconds(whole, 8192, whole=("Wrapped",)) > 0.5 * modelled_seconds(alone, 8192)


def test_recurrent_layers_and_attention_are_work():
    """torch counts nothing of recurrent layers, nor of attention if it is one operator (as in eval)."""
    module = nn.LSTM(64, 32, num_layers=2, bidirectional=True, batch_first=True)
    (found,) = trace(loaded(nn.Sequential(module), 10, 64)).layers
    weights = 2 * (4 * 32 * (64 + 32) + 4 * 32 * (64 + 32))
    assert found.flops == 2 * 10 * weights
    attention = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    (training,) = trace(loaded(nn.Sequential(attention), 10, 64)).layers
    (testing,) = trace(loaded(nn.Sequential(attention).eval(), 10, 64)).layers
    products = 2 * 10 * (4 * 64 * 64 + 2 * 64 * 128)
    assert training.flops == testing.flops == products + 2 * 2 * 10 * 10 * 64


def failing() -> nn.Module:
    raise ValueError("no weights here")


def test_a_factory_that_fails_is_wrong_input():
    with pytest.raises(ConfigError, match="fails: ValueError: no weights here"):
        models.find(f"{NAME}:failing")
