"""The parts of the CUDA device that are plain logic: places for numbers, turns on streams, cuts, errors."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.device.cuda import launches as ring
from gpumux.device.cuda.cuts import SETTLE_STEPS, Cuts
from gpumux.device.cuda.driver import STICKY, CudaDriver, bindings, check, fault
from gpumux.device.cuda.launches import Ring
from gpumux.device.cuda.streams import Turns
from gpumux.errors import AdmissionRefused, ConfigError, DeviceLost, JobFailed
from gpumux.types import JobId


def gpu_stores(memory: bytearray, places: Ring, number: int) -> None:
    struct.pack_into("I", memory, places.offset(number), number)


def test_a_place_is_reached_when_its_own_number_is_there() -> None:
    memory = bytearray(b"\xff" * 12)  # whatever was there before
    places = Ring(memoryview(memory))
    first, second = places.take(), places.take()
    assert first is not None
    assert second is not None
    assert not places.reached(first)
    gpu_stores(memory, places, second)
    assert places.reached(second)
    assert not places.reached(first)


def test_a_full_ring_says_so_and_goes_on_when_a_place_is_free() -> None:
    memory = bytearray(8)
    places = Ring(memoryview(memory))
    taken = [places.take(), places.take()]
    assert places.take() is None
    assert taken[1] is not None
    gpu_stores(memory, places, taken[1])
    places.give(taken[1])
    again = places.take()
    assert again is not None
    assert places.offset(again) == places.offset(taken[1])
    assert not places.reached(again)  # the old number is still there
    places.give(again)
    with pytest.raises(ValueError, match="not taken"):
        places.give(again)


def test_numbers_wrap_and_never_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "LAST", 3)
    places = Ring(memoryview(bytearray(4)))
    numbers = []
    for _ in range(7):
        number = places.take()
        assert number is not None
        numbers.append(number)
        places.give(number)
    assert numbers == [1, 2, 3, 1, 2, 3, 1]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_no_place_is_given_twice_or_reached_by_another_launch(choices: list[int]) -> None:
    """0 takes a place, n ends the n-th launch still in the air."""
    memory = bytearray(16)
    places, air = Ring(memoryview(memory)), []
    for choice in choices:
        if choice == 0 or not air:
            number = places.take()
            assert (number is None) == (len(air) == 4)
            air += [number] if number else []
        else:
            number = air.pop((choice - 1) % len(air))
            assert not places.reached(number)
            gpu_stores(memory, places, number)
            assert places.reached(number)
            places.give(number)
        assert len(places) == len(air)
        assert len({places.offset(number) for number in air}) == len(air)


def job(number: int) -> JobId:
    return JobId(f"{number:032x}")


def test_active_jobs_take_turns_on_few_streams() -> None:
    turns = Turns({0: [10, 11], 1: [20]})
    assert turns.take(job(1), 0) == 10
    assert turns.take(job(2), 0) == 11
    assert turns.take(job(3), 0) in (10, 11)  # all are held: it shares one
    assert turns.take(job(4), 1) == 20
    assert turns.take(job(1), 0) == 10  # kept while it has work outstanding
    turns.leave(job(2))
    turns.leave(job(2))
    turns.leave(job(3))
    assert turns.take(job(5), 0) == 11


def test_a_class_without_streams_uses_the_one_below() -> None:
    turns = Turns({0: [10], 1: [20]})
    assert turns.take(job(1), 7) == 20
    assert turns.take(job(2), -3) == 10
    with pytest.raises(ValueError, match="every class"):
        Turns({0: []})


def run_cut_0(cuts: Cuts, op_s: list[float]) -> None:
    """In two steps; in each another operator waits for somebody else's kernels."""
    for step in range(2):
        assert (cuts.warming, cuts.timing) == (step == 0, True)
        delayed = [seconds + 80e-3 * (index == step) for index, seconds in enumerate(op_s)]
        cuts.timed(0, delayed[:1])
        cuts.timed(1, delayed[1:])
        assert cuts.wanted() is None
        cuts.stepped(0)


def test_the_first_two_steps_are_timed_and_cut_by() -> None:
    cuts = Cuts(4, 100e-6)
    run_cut_0(cuts, [100e-6] * 4)
    bounds = cuts.wanted()
    assert bounds == (0, 1, 2, 3, 4)
    cuts.cut(bounds)
    assert cuts.newest == 1
    assert cuts.seconds(1) == (100e-6,) * 4
    assert cuts.bounds(0) is not None  # for steps that began under it
    assert not cuts.warming
    assert not cuts.timing


@pytest.mark.parametrize(("real", "again"), [(10e-6, (0, 4)), (100e-6, None), (90e-6, None)])
def test_pieces_far_from_the_target_are_cut_again_once(real: float, again: tuple[int, ...] | None) -> None:
    cuts = Cuts(4, 100e-6)
    run_cut_0(cuts, [100e-6] * 4)
    wanted = cuts.wanted()
    assert wanted is not None
    cuts.cut(wanted)
    for _ in range(SETTLE_STEPS):
        assert cuts.wanted() is None
        for piece in range(4):
            cuts.ran(1, piece, real)
        cuts.stepped(1)
    assert cuts.wanted() == again
    if again is not None:
        cuts.cut(again)
        assert cuts.bounds(0) is None
        assert cuts.seconds(2) == (pytest.approx(4 * real),)
        cuts.stepped(2)
        assert cuts.wanted() is None


def test_steps_of_an_old_cut_count_for_nothing() -> None:
    cuts = Cuts(2, 100e-6)
    run_cut_0(cuts, [100e-6] * 2)
    bounds = cuts.wanted()
    assert bounds is not None
    cuts.cut(bounds)
    for _ in range(3 * SETTLE_STEPS):
        cuts.stepped(0)
    assert cuts.wanted() is None


def test_pieces_are_as_long_as_somebody_wants_them_after_a_step_of_the_newest_cut() -> None:
    cuts = Cuts(4, 400e-6)
    run_cut_0(cuts, [100e-6] * 4)
    cuts.cut(cuts.wanted() or ())
    cuts.aim(100e-6)
    assert cuts.wanted() is None, "one of an older cut may be under way"
    cuts.ran(1, 0, 800e-6)  # twice what was predicted
    cuts.stepped(1)
    assert cuts.wanted() == (0, 1, 2, 3, 4)
    cuts.cut((0, 1, 2, 3, 4))
    assert cuts.seconds(2) == (pytest.approx(200e-6),) * 4
    cuts.stepped(2)
    assert cuts.wanted() is None
    cuts.aim(None)
    assert cuts.wanted() == (0, 2, 4), "by what they were found to take"
    cuts.cut((0, 2, 4))
    cuts.stepped(2)
    cuts.aim(400e-6)
    assert cuts.wanted() is None


# ---- errors


class Status(int):
    name = ""


def api(name: str, number: int) -> tuple[SimpleNamespace, Status]:
    status = Status(number)
    status.name = name
    return SimpleNamespace(cuGetErrorString=lambda _: (0, b"as the driver says")), status


@pytest.mark.parametrize("name", sorted(STICKY))
def test_a_sticky_error_is_the_end_of_the_device(name: str) -> None:
    driver, status = api(name, 700)
    with pytest.raises(DeviceLost, match=name) as raised:
        check(driver, "cuEventQuery", status)
    assert "cuEventQuery" in str(raised.value)
    assert "serve" in raised.value.remedy


def test_no_memory_refuses_and_other_errors_fail_what_asked() -> None:
    driver, status = api("CUDA_ERROR_OUT_OF_MEMORY", 2)
    with pytest.raises(AdmissionRefused):
        check(driver, "cuMemHostAlloc", status)
    driver, status = api("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", 901)
    with pytest.raises(JobFailed, match="as the driver says") as raised:
        check(driver, "cuGraphUpload", status)
    assert "captured" in raised.value.remedy
    check(driver, "cuInit", 0)  # success


def test_while_opening_every_error_is_the_machines() -> None:
    for name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_SYSTEM_NOT_READY"):
        error = fault(name, "cuInit", "x", opening=True)
        assert isinstance(error, ConfigError)
        assert "--device cpu" in error.remedy


def test_without_bindings_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # a driver is there
    with pytest.raises(ConfigError, match="cuda-bindings") as raised:
        bindings()
    assert "cuda-bindings" in raised.value.remedy
    with pytest.raises(ConfigError):
        CudaDriver().open(0)


def test_without_a_driver_the_error_does_not_send_for_the_bindings_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(__import__("sys").modules, "cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match="no NVIDIA driver") as raised:
        CudaDriver().open(0)
    assert "[cuda]" not in raised.value.remedy
