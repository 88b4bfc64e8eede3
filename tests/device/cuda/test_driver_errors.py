"""The errors that results of driver calls become."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from gpumux.device.cuda.driver import STICKY, CudaDriver, bindings, check, fault
from gpumux.errors import AdmissionRefused, ConfigError, DeviceLost, JobFailed


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
