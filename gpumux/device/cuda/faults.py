"""What a failed driver call means, and what to do about it. No torch, no driver."""

from __future__ import annotations

from gpumux.errors import AdmissionRefused, ConfigError, DeviceLost, GpumuxError, JobFailed
from gpumux.model import Fault

_LOOK = (
    "look at the kernel's log (dmesg | grep -i xid); `gpumux serve` starts anew, and the jobs can be submitted again"
)

# After one of these every later call in the context fails the same way: nothing but a new process helps.
STICKY: dict[str, str] = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched memory out of its bounds",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used an address that is not aligned",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "a kernel used an address of the wrong kind",
    "CUDA_ERROR_INVALID_PC": "a kernel jumped out of its code",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel ran an instruction the GPU does not know",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "a kernel's stack was corrupted",
    "CUDA_ERROR_ASSERT": "a kernel found a value it can't take (an index out of range, for instance)",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "a kernel ended without giving back the tensor memory it took",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display driver lets it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory has an error that can't be corrected",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "a link between GPUs has an error that can't be corrected",
    "CUDA_ERROR_CONTAINED": "the GPU's memory has an error, contained to this process",
    "CUDA_ERROR_EXTERNAL_DEVICE": "a device beside the GPU failed",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the GPU's context was destroyed",
    "CUDA_ERROR_DEINITIALIZED": "the driver is being shut down",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "the MPS server ended this process's work",
    "CUDA_ERROR_MPS_RPC_FAILURE": "the MPS server went away",
    "CUDA_ERROR_UNKNOWN": "the driver reports an error it has no name for",
}

# Found while the device is opened: the machine or the configuration has to change.
_OPENING: dict[str, tuple[str, str]] = {
    "CUDA_ERROR_NO_DEVICE": ("there is no NVIDIA GPU this process may use", "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
    "CUDA_ERROR_INVALID_DEVICE": ("there is no such GPU", "choose another --gpu; nvidia-smi -L lists them"),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the loaded kernel module and the driver's library are of different versions",
        "restart the machine, or reload the module, after a driver update",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the driver says the system is not ready",
        "start what this machine needs (nvidia-fabricmanager on NVSwitch systems)",
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "the GPU is held by another process in exclusive mode",
        "end that process, or use: nvidia-smi -c DEFAULT",
    ),
    "CUDA_ERROR_DEVICE_NOT_LICENSED": ("the virtual GPU has no licence", "give it one, or use another GPU"),
    "CUDA_ERROR_STUB_LIBRARY": ("the driver's stub library was loaded", "take cuda/lib64/stubs off LD_LIBRARY_PATH"),
    "CUDA_ERROR_NOT_PERMITTED": ("the process may not use the GPU", "check the rights on /dev/nvidia*"),
    "CUDA_ERROR_OPERATING_SYSTEM": ("the operating system refused a call of the driver", "check the rights on /dev/nvidia*"),
    "CUDA_ERROR_MPS_SERVER_NOT_READY": ("the MPS server is not ready", "wait for it, or stop it: gpumux needs none"),
    "CUDA_ERROR_MPS_CONNECTION_FAILED": ("the MPS server can't be reached", "start it, or stop it: gpumux needs none"),
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED": ("the MPS server has no room", "end other clients, or stop it: gpumux needs none"),
}  # fmt: skip


def as_fault(error: BaseException) -> Fault:
    """What a job is told of an error."""
    if isinstance(error, GpumuxError):
        return Fault(error.code, error.message, error.remedy)
    known = JobFailed(
        f"an error inside gpumux: {type(error).__name__}: {error}"[:500], "report it with the daemon's log"
    )
    return Fault(known.code, known.message, known.remedy)


def _failed(name: str, call: str, said: str) -> JobFailed:
    """The context lives on: what asked for the call has failed, nothing else."""
    remedy = "report it with the daemon's log"
    if name.startswith("CUDA_ERROR_STREAM_CAPTURE"):
        remedy = "an operator of the step can't be captured; find it by submitting parts of the step"
    elif name == "CUDA_ERROR_NOT_SUPPORTED":
        remedy = "update the NVIDIA driver, or turn the feature off"
    return JobFailed(f"{call} failed: {name} ({said})", remedy)


def fault(name: str, call: str, said: str, *, opening: bool = False) -> GpumuxError:
    """The error to raise for a CUresult. `opening`: while the device is opened, when every failure is the
    machine's or the configuration's (ConfigError)."""
    if opening:
        message, remedy = _OPENING.get(name, (f"{call} failed: {name} ({said})", "check nvidia-smi"))
        return ConfigError(f"the GPU can't be used: {message}", f"{remedy}, or use --device cpu")
    if name in STICKY:
        return DeviceLost(f"the GPU's context is lost: {STICKY[name]} ({name}, noticed by {call})", _LOOK)
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return AdmissionRefused(f"{call} found no memory", "use smaller batches, or wait for other jobs to end")
    return _failed(name, call, said)
