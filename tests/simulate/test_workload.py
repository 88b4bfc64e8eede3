"""Kernels made of profiles take the profile's times, and steps are cut as a device cuts them."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.device.sim.cost import MIN_BLOCK_S, guesses_blocks, kernel_of, solo_seconds
from gpumux.device.sim.device import recut
from gpumux.device.sim.spec import A100, H200
from gpumux.errors import ConfigError
from gpumux.program.profile import OpProfile, StepProfile, dumps, load
from gpumux.simulate import workload
from gpumux.simulate.workload import Workload, cut_workload, from_profile
from gpumux.types import Priority
from tests.simulate.jobs import step


def op(seconds: float = 1e-5, target: str = "aten.relu.default", **rest: Any) -> OpProfile:
    given = {"shapes": ((1024,), (1024,)), "nbytes": 8192, **rest}
    return OpProfile(target, seconds=seconds, **given)


@settings(deadline=None, max_examples=150)
@given(
    seconds=st.floats(1e-6, 1e-2),
    nbytes=st.integers(0, 1 << 34),
    blocks=st.none() | st.integers(1, 100_000),
    per_sm=st.none() | st.integers(1, 32),
    elements=st.integers(0, 1 << 24),
)
def test_a_kernel_alone_takes_what_its_profile_says(
    seconds: float, nbytes: int, blocks: int | None, per_sm: int | None, elements: int
) -> None:
    profiled = op(seconds, shapes=((elements,),), nbytes=nbytes, blocks=blocks, per_sm=per_sm, sensitivity=2.2)
    for spec in (A100, H200):
        made = kernel_of(profiled, spec)
        assert solo_seconds(made, spec) == pytest.approx(seconds, rel=1e-3, abs=1e-7)
        assert made.sensitivity == 2.2
        assert made.nbytes <= nbytes
        if blocks is not None and seconds > 100_000 / spec.sms * MIN_BLOCK_S:
            assert made.blocks == blocks
        assert made.per_sm == (per_sm or made.per_sm)


def test_guessed_blocks_follow_the_output_and_are_said_to_be_guessed() -> None:
    product = kernel_of(op(target="aten.mm.default", shapes=((256, 512), (512, 256), (256, 256))), A100)
    stream = kernel_of(op(shapes=((256, 256), (256, 256))), A100)
    assert (product.blocks, stream.blocks) == (16, 64)
    assert kernel_of(op(target="aten._scaled_dot_product_attention.x", shapes=((64, 64),)), A100).blocks == 1
    assert guesses_blocks(op())
    assert not guesses_blocks(op(blocks=1, per_sm=1))


def test_high_steps_are_cut_longer_than_low_ones_and_whole_if_asked() -> None:
    seconds = [100e-6] * 24
    high, low = (cut_workload(step("s", seconds, priority), A100) for priority in (Priority.HIGH, Priority.LOW))
    assert len(high.seconds) < len(low.seconds)
    assert all(200e-6 <= piece <= 500e-6 for piece in high.seconds)
    assert all(200e-6 <= piece <= 400e-6 for piece in low.seconds)
    assert len(cut_workload(step("s", seconds, target_s=inf), A100).seconds) == 1
    assert sum(len(part) for part in high.kernels) == 24
    assert recut(step("s", seconds).kernels, (0, 4, 24), A100).bounds == (0, 4, 24)


def test_equal_steps_have_equal_hashes() -> None:
    assert step("a", [1e-4]).content_hash == step("b", [1e-4], Priority.LOW).content_hash
    assert step("a", [1e-4]).content_hash != step("a", [2e-4]).content_hash


@pytest.mark.parametrize(
    "wrong",
    [
        {"think_s": -1.0},
        {"rate": 0.0},
        {"rate": 1.0, "think_s": 1.0},
        {"starts_at": inf},
        {"target_s": 0.0},
        {"weight": 0.0},
        {"weight": nan},
        {"max_slowdown": 0.9},
        {"max_inflight": 0},
    ],
)
def test_workloads_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        step("s", [1e-4], **wrong)
    assert caught.value.remedy
    with pytest.raises(ConfigError):
        Workload("s", Priority.LOW, ())


# ---- shipped profiles


@pytest.mark.parametrize("profile", workload.shipped(), ids=lambda profile: profile.name)
def test_shipped_profiles_are_what_the_model_says_and_say_that_they_are_modelled(profile: StepProfile) -> None:
    path = workload.directory() / f"{profile.name}.json"
    assert path.read_text() == dumps(profile), "run python -m gpumux.simulate.workload"
    assert set(load(path).sources()) == {"model"}
    assert "nothing here was measured" in profile.note
    work = from_profile(profile, A100, Priority.HIGH)
    alone = sum(solo_seconds(k, A100) for k in work.kernels)
    assert alone == pytest.approx(profile.seconds, rel=1e-3)


def test_shipped_profiles_are_found_by_name_and_files_by_path() -> None:
    assert set(workload.names()) == {profile.name for profile in workload.shipped()}
    assert workload.find("vgg16-b4").batch == 4
    assert workload.find(str(workload.directory() / "vgg16-b4.json")) == workload.find("vgg16-b4")
    with pytest.raises(ConfigError, match="vgg17") as caught:
        workload.find("vgg17")
    assert "vgg16-b4" in caught.value.remedy


def test_all_reduce_suffers_and_only_the_parallel_profiles_have_it() -> None:
    for name in workload.names():
        reduces = [op for op in workload.find(name).ops if op.target == "nccl.all_reduce"]
        assert bool(reduces) == name.endswith(("ddp", "burst"))
        assert all(op.sensitivity == 2.2 for op in reduces)
