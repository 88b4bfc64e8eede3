from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from gpumux.errors import AdmissionRefused, ProtocolError
from gpumux.wire import shared_memory as dataplane
from gpumux.wire.shared_memory import SEALS, CopyMeter, Segment


def test_a_segment_is_shared_and_of_its_full_size():
    with Segment.create(100_000) as ours, Segment.adopt(os.dup(ours.fd), 100_000) as theirs:
        assert os.fstat(ours.fd).st_blocks * 512 >= 100_000  # allocated, not merely promised
        ours.view()[99_999] = 7
        assert theirs.view()[99_999] == 7
        assert theirs.view().nbytes == 100_000


def test_an_untouched_segment_is_allocated_and_zero_where_nothing_was_written():
    with Segment.create(3 << 20, touch=False) as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= 3 << 20  # allocated, not merely promised
        segment.write(1 << 20, memoryview(b"abc"))
        segment.write(5, memoryview(b""))
        found = bytes(segment.view())
    assert found[1 << 20 : (1 << 20) + 3] == b"abc"
    assert not any(found[: 1 << 20])
    assert not any(found[(1 << 20) + 3 :])


def test_a_segment_is_filled_in_as_many_writes_as_the_kernel_wants(monkeypatch: pytest.MonkeyPatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:2], offset))
    with Segment.create(4096) as segment:
        segment.write(10, memoryview(b"abcde"))
        assert bytes(segment.view()[9:16]) == b"\0abcde\0"


@pytest.mark.parametrize("size", [0, 50_000, 200_000])
def test_no_process_can_resize_it(size: int):
    with Segment.create(100_000) as segment, pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)


def test_no_process_can_seal_it_further():
    with Segment.create(4096) as segment:
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == SEALS
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_is_no_sealed_segment_is_not_adopted():
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    reader, writer = os.pipe()
    os.close(writer)
    with Segment.create(4096) as good:
        for fd, size in ((unsealed, 4096), (reader, 4096), (os.dup(good.fd), 4095)):
            with pytest.raises(ProtocolError):
                Segment.adopt(fd, size)
            with pytest.raises(OSError):
                os.fstat(fd)  # it was closed: the sender can't fill our descriptor table


@pytest.mark.parametrize("size", [0, -1, 1 << 50])
def test_a_segment_that_can_not_be_held_is_refused(size: int):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AdmissionRefused):
        Segment.create(size)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_reserve_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataplane, "free_host_bytes", lambda: dataplane.RESERVE_BYTES + 4096)
    Segment.create(4096).close()
    with pytest.raises(AdmissionRefused, match="4096 bytes are free"):
        Segment.create(4097)


def test_a_failing_kernel_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(AdmissionRefused, match="No space left"):
        Segment.create(4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_views_outlive_close():
    segment = Segment.create(4096)
    view = segment.view()
    view[:3] = b"abc"
    segment.close()
    segment.close()
    assert bytes(view[:3]) == b"abc"
    with pytest.raises(ValueError, match="closed"):
        segment.view()
    view.release()


def test_the_meter_counts_and_checks():
    meter = CopyMeter()
    target = memoryview(mmap.mmap(-1, 4096))
    meter.copy(target[8:], b"12345678")
    meter.copy(target, memoryview(bytearray(16)).cast("d"))
    assert meter.copied_bytes == 24
    with pytest.raises(ValueError, match="do not fit"):
        meter.copy(target[:4], b"12345")
    assert meter.copied_bytes == 24
