"""`gpumux serve` on a GPU of host memory: python -m tests.device.cuda.fake_daemon FLAGS.
SIGUSR1 breaks the GPU, as a kernel that accesses memory out of bounds would."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from time import sleep
from typing import Any

from gpumux.cli import main as cli
from gpumux.device import registry
from gpumux.device.cuda.device import CudaDevice
from tests.device.cuda.fake import FakeDriver, broken_rules, fake_compute
from tests.device.cuda.kernels import of_a_gpu


class RunningDriver(FakeDriver):
    """Its GPU runs by itself."""

    def __init__(self) -> None:
        super().__init__(auto=False)
        self.own_thread = True
        signal.signal(signal.SIGUSR1, lambda *_: self.break_with("CUDA_ERROR_ILLEGAL_ADDRESS"))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            idle = 0
            while True:
                idle = 0 if self._one() else idle + 1
                if idle:  # one without work for long leaves the processor to others
                    sleep(50e-6 if idle < 200 else 1e-3)
        except BaseException:  # noqa: BLE001  without its GPU the daemon would wait for ever
            traceback.print_exc()
            os._exit(3)


def make(name: str, *, gpu: int = 0, allow_ops: Any = (), **_: Any) -> CudaDevice:
    assert name == "cuda"
    return CudaDevice(gpu, allow_ops=allow_ops, driver=RunningDriver(), compute=fake_compute)


if __name__ == "__main__":
    registry.make = make  # type: ignore[assignment]
    with of_a_gpu():
        status = cli.main(["serve", "--device", "cuda", *sys.argv[1:]])
    if broken_rules:
        print(f"captures that are wrong on a GPU: {broken_rules}", file=sys.stderr)
        status = 3
    sys.exit(status)
