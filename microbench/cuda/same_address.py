"""Can two processes map the same device memory at the same address, and does it outlive the one that dies?"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from microbench.cuda.driver import Driver, Gpu, NoDevice
from microbench.cuda.experiment import Experiment, Row, main

HINTS = (0x6000_0000_0000, 0x2000_0000_0000, 0x1000_0000_0000, 0x0400_0000_0000)
WANTED = 64 << 20  # bytes, rounded up to what the device maps
OURS, THEIRS = 0x600D_0001, 0x600D_0002
CHILD_S = 60.0


class Mapped:
    """`nbytes` of device memory that can be shared by descriptor, mapped at `hint`."""

    def __init__(self, driver: Driver, hint: int, descriptor: int | None = None) -> None:
        api, self._driver = driver.api, driver
        posix = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        wanted = api.CUmemAllocationProp()
        wanted.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = 0
        wanted.requestedHandleTypes = posix
        smallest = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(driver.call("cuMemGetAllocationGranularity", wanted, smallest))
        self.nbytes = -(-WANTED // step) * step
        if descriptor is None:
            self.handle = driver.call("cuMemCreate", self.nbytes, wanted, 0)
        else:
            self.handle = driver.call("cuMemImportFromShareableHandle", descriptor, posix)
        self.address = int(driver.call("cuMemAddressReserve", self.nbytes, 0, hint, 0))
        driver.call("cuMemMap", self.address, self.nbytes, 0, self.handle, 0)
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.call("cuMemSetAccess", self.address, self.nbytes, [access], 1)
        self._posix = posix

    def export(self) -> int:
        return int(self._driver.call("cuMemExportToShareableHandle", self.handle, self._posix, 0))

    def fill(self, word: int) -> None:
        self._driver.call("cuMemsetD32", self.address, word, self.nbytes // 4)
        self._driver.call("cuCtxSynchronize")

    def holds(self, word: int) -> bool:
        """Whether the first and the last word are this one."""
        found = ctypes.c_uint32()
        for offset in (0, self.nbytes - 4):
            self._driver.call("cuMemcpyDtoH", ctypes.addressof(found), self.address + offset, 4)
            if found.value != word:
                return False
        return True

    def release(self) -> None:
        self._driver.call("cuMemUnmap", self.address, self.nbytes)
        self._driver.call("cuMemAddressFree", self.address, self.nbytes)
        self._driver.call("cuMemRelease", self.handle)


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for hint in HINTS:
        at = f"{hint:#x}"
        mapped = Mapped(gpu, hint)
        rows.append(_row(at, "the daemon maps at the hint", mapped.address == hint, f"at {mapped.address:#x}"))
        mapped.fill(OURS)
        descriptor = mapped.export()
        said = _child("import", hint, [descriptor])[0]
        os.close(descriptor)
        rows.append(_row(at, "a client maps the daemon's memory there", said == f"at {hint:#x}, reads ours", said))
        rows.append(_row(at, "what it wrote is there after it was killed", mapped.holds(THEIRS), ""))
        mapped.release()
        said, descriptors = _child("export", hint, [])
        if not descriptors:
            rows.append(_row(at, "the daemon maps a dead client's memory there", False, said))
            continue
        theirs = Mapped(gpu, hint, descriptors[0])
        os.close(descriptors[0])
        ok = theirs.address == hint and theirs.holds(THEIRS)
        rows.append(_row(at, "the daemon maps a dead client's memory there", ok, f"{said}; at {theirs.address:#x}"))
        theirs.release()
    return rows


def _row(hint: str, what: str, ok: bool, detail: str) -> Row:
    return {"hint": hint, "what": what, "ok": "yes" if ok else "NO", "detail": detail}


def _child(role: str, hint: int, send: Sequence[int]) -> tuple[str, list[int]]:
    """What a client said, and the descriptors it sent, before it was killed with everything still mapped."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(CHILD_S)
        command = [
            sys.executable,
            "-m",
            "microbench.cuda.same_address",
            "--child",
            role,
            str(hint),
            str(theirs.fileno()),
        ]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
            theirs.close()
            socket.send_fds(ours, [b"go"], send)
            try:
                said, descriptors, _, _ = socket.recv_fds(ours, 4096, 4)
            finally:
                child.send_signal(signal.SIGKILL)
                child.wait()
    return said.decode() or "the client ended early", list(descriptors)


def be_client(role: str, hint: int, descriptor: int) -> None:
    """Map, report the result, and wait to be killed."""
    with socket.socket(fileno=descriptor) as server:
        _, received, _, _ = socket.recv_fds(server, 16, 4)
        try:
            driver = Driver()
            driver.start()
            driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
            mapped = Mapped(driver, hint, received[0] if role == "import" else None)
            said = f"at {mapped.address:#x}"
            if role == "import":
                said += ", reads ours" if mapped.holds(OURS) else ", reads something else"
            mapped.fill(THEIRS)
            socket.send_fds(server, [said.encode()], [] if role == "import" else [mapped.export()])
        except (RuntimeError, NoDevice) as error:
            server.send(f"{type(error).__name__}: {error}".encode())
        signal.pause()


def answer(rows: Sequence[Row]) -> str:
    good = [
        hint
        for hint in dict.fromkeys(row["hint"] for row in rows)
        if all(r["ok"] == "yes" for r in rows if r["hint"] == hint)
    ]
    if not good:
        return "no: at none of the hints did all of it work"
    return (
        f"yes, at {len(good)} of {len(HINTS)} hints ({', '.join(good)}): same address, both ways, and it outlives a"
        " killed client"
    )


EXPERIMENT = Experiment(
    "same_address",
    "Can two processes map the same device memory at the same address, and does it outlive the one that dies?",
    "Memory made with the driver's virtual memory calls, reserved at a fixed hint, exported as a file descriptor, sent"
    " over a socket, mapped at the same hint in a second process, which writes to it and is killed; and the same with"
    " the memory made by the process that dies.",
    measure,
    answer,
    repeats=1,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        be_client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        sys.exit(0)
    sys.exit(main(EXPERIMENT))
