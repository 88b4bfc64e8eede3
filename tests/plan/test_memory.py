"""A step's memory by way, from captured Programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpumux.device.sim.spec import A100
from gpumux.errors import CaptureError, ConfigError
from gpumux.plan.memory import picture, ways
from gpumux.plan.memory.ways import MemoryComparison, StepMemory
from gpumux.plan.models import LoadedModel, find
from gpumux.program.memory import footprint, live_peak, plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Chain(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.start = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x


def chain(blocks: int = 4) -> LoadedModel:
    torch.manual_seed(0)
    return LoadedModel("chain", Chain(blocks), [torch.randn(1, 16)])


@pytest.fixture(scope="module")
def found() -> MemoryComparison:
    return ways.compare(chain(), 256, A100)


def test_every_way_is_there_with_the_state_it_holds(found: MemoryComparison) -> None:
    assert [each.way for each in found.ways] == list(ways.WAYS)
    assert found.left_out == {}
    parameters = sum(each.numel() for each in chain().module.parameters()) * 4
    for each in found.ways:
        copies = 2 if each.way == "waves" else 1
        # Parameters and the two averages of Adam; its step counters are numbers of the step.
        assert each.state_bytes == pytest.approx(3 * copies * parameters, rel=0.02)
        assert each.total_bytes == each.state_bytes + each.batch_bytes + each.temporary_bytes
    assert [each.samples for each in found.ways] == [256, 512, 512, 512, 512]


def test_activations_grow_with_the_batch_and_parts_of_it_need_less(found: MemoryComparison) -> None:
    whole, doubled, parts, again, waves = (found.way(way).temporary_bytes for way in ways.WAYS)
    assert 1.8 < doubled / whole < 2.0  # gradients don't grow
    assert whole < parts < 0.7 * doubled
    assert again < 0.7 * doubled
    assert whole < waves - ways.gradient_bytes(chain().module) <= 2 * whole


def test_times_are_of_the_work_that_a_way_does(found: MemoryComparison) -> None:
    assert found.relative("doubled") == 1.0
    assert found.relative("whole") <= 1.0 < found.relative("checkpointing") < found.relative("waves")
    alone, waves = found.way("whole").seconds, found.way("waves").seconds
    average = 3 * ways.gradient_bytes(chain().module) / A100.bandwidth
    assert waves == pytest.approx(2 * (alone + average))


def test_live_bytes_rise_forward_and_are_planned_for(found: MemoryComparison) -> None:
    for each in found.ways:
        highest = max(live for _, _, live in each.live)
        if each.way != "waves":
            assert 0.98 * each.temporary_bytes <= highest <= each.temporary_bytes
            assert sum(seconds for seconds, _, _ in each.live) == pytest.approx(each.seconds)
        runs = [phase for phase, _, _ in picture.stretches(each)]
        assert (runs[0], runs[-1], set(runs)) == ("forward", "optimizer", set(ways.PHASES))
    assert [phase for phase, _, _ in picture.stretches(found.way("doubled"))] == list(ways.PHASES)
    assert [phase for phase, _, _ in picture.stretches(found.way("microbatches"))].count("backward") == 2


def test_what_a_way_takes_is_what_its_program_takes(found: MemoryComparison) -> None:
    loaded = chain()
    program = ways.captured_step(loaded.module, ways.OPTIMIZERS["adamw"], loaded.example(512))
    planned = plan(program)
    assert found.way("doubled").temporary_bytes == footprint(program, planned).transient_bytes
    assert planned.peak_bytes <= 1.02 * live_peak(planned)


def made(name: str, nbytes: int, seconds: float) -> StepMemory:
    return StepMemory(name, 2, 0, 0, nbytes, seconds, ())


def test_the_advice_is_the_fewest_bytes_within_a_factor_of_the_time() -> None:
    each = (made("whole", 1, 0.5), made("doubled", 10, 1.0), made("microbatches", 6, 1.05),
            made("checkpointing", 4, 1.4), made("waves", 8, 1.0))  # fmt: skip
    found = MemoryComparison("m", 1, "sgd", "a100", each, {}, {})
    assert found.best(1.0).way == "waves"
    assert found.best(1.1).way == "microbatches"
    assert found.best(2.0).way == "checkpointing"
    assert MemoryComparison("m", 1, "sgd", "a100", each[:2], {}, {}).best(9.0).way == "doubled"


def test_a_model_without_a_list_of_blocks_is_not_checkpointed_and_batch_norm_is_said() -> None:
    found = ways.compare(find("clients.models.cnn:cnn", (1, 8, 8), device="cpu"), 4, A100, optimizer="momentum")
    assert [each.way for each in found.ways] == ["whole", "doubled", "microbatches", "waves"]
    assert "no list of blocks" in found.left_out["checkpointing"]
    assert "batch norm (features.1)" in found.notes["microbatches"]


def test_blocks_are_the_outermost_lists_of_one_class_that_is_not_torchs() -> None:
    resnet = find("resnet50").module
    assert [len(each) for each in ways.block_lists(resnet)] == [3, 4, 6, 3]
    assert [len(each) for each in ways.block_lists(find("gpt2").module)] == [12]
    assert ways.block_lists(find("vgg16").module) == []


def test_checkpointed_blocks_are_as_before_afterwards() -> None:
    model = chain(2).module
    blocks = [block for each in ways.block_lists(model) for block in each]
    assert len(blocks) == 2
    x = torch.randn(3, 16)
    wanted = model(x)
    with ways.checkpointed(blocks):
        assert "forward" in vars(blocks[0])
        assert torch.equal(model(x), wanted)
    assert all("forward" not in vars(block) for block in blocks)


def test_losses() -> None:
    scores = torch.randn(2, 3, 5)
    flat = nn.functional.cross_entropy(scores.reshape(6, 5), torch.zeros(6, dtype=torch.int64))
    loss = torch.tensor(2.0)
    assert torch.equal(ways.loss_of(scores), flat)
    assert torch.equal(ways.loss_of((scores, 1)), flat)
    assert torch.equal(ways.loss_of({"logits": scores}), flat)
    assert ways.loss_of({"logits": scores, "loss": loss}) is loss
    assert ways.loss_of(loss) is loss
    for wrong in (torch.zeros(2, dtype=torch.int64), (), "loss"):
        with pytest.raises(CaptureError, match="no tensor of numbers"):
            ways.loss_of(wrong)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="no optimizer is called 'lion'"):
        ways.compare(chain(), 2, A100, optimizer="lion")
    with pytest.raises(ConfigError, match="a batch of 0"):
        ways.compare(chain(), 0, A100)


def test_a_picture_is_drawn(found: MemoryComparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.draw(found, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet50", 25.557), ("vgg19_bn", 143.678), ("bert_base", 109.51), ("gpt2", 124.44)]
)
def test_models_are_of_their_published_size(name: str, millions: float) -> None:
    model = find(name).module
    assert sum(each.numel() for each in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-4)
