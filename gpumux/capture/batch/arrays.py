"""numpy arrays in a batch: tensors over their memory, and what a traced step gets in their place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from gpumux.capture.source import user_line
from gpumux.capture.swapping import here, swapped
from gpumux.errors import CaptureError, DataDependent


def tensor_over(array: numpy.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the memory of an array. Raises CaptureError for a type or layout that torch does not have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about arrays that can't be written
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"the batch holds a numpy array that can be no tensor: {error}",
            "convert it before the step: numpy.ascontiguousarray(array), array.astype(...)",
        ) from error


def _read(name: str) -> DataDependent:
    return DataDependent(
        f"{user_line()} computes with a numpy array of the batch in Python ({name})",
        "begin the step with torch.from_numpy(array) and compute with the tensor, or compute with the array before the"
        " step",
    )


class BatchArray:
    """Stands for a numpy array of the batch in a traced step. torch makes tensors of it, and what describes it is
    known; reading its values raises DataDependent."""

    __slots__ = ("tensor",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return numpy.ndarray

    @property
    def dtype(self) -> numpy.dtype[Any]:
        return numpy.dtype(str(self.tensor.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.dim()

    @property
    def size(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def astype(self, dtype: Any) -> BatchArray:
        """A copy of another type. Raises DataDependent from floating point to whole numbers, where numpy and torch
        differ in numbers out of range."""
        kind = numpy.dtype(dtype)
        if self.dtype.kind in "fc" and kind.kind != self.dtype.kind:
            raise _read(f".astype({kind})")
        return BatchArray(self.tensor.detach().to(getattr(torch, kind.name), copy=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _read(f".{name}")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: BatchArray, *_: Any, **__: Any) -> Any:
        raise _read(name)

    return method


_COMPUTES = (
    "array", "array_ufunc", "array_function", "getitem", "setitem", "iter", "contains", "bool", "int", "float",
    "complex", "index", "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
    "itruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs",
    "invert", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge",
    "str", "repr", "format", "divmod", "copy", "deepcopy", "reduce_ex",
)  # fmt: skip
for _name in _COMPUTES:
    setattr(BatchArray, f"__{_name}__", _refused(f"__{_name}__"))


def _not_by_this_class(self: BatchArray, *_: Any, **__: Any) -> Any:
    raise DataDependent(
        f"{user_line()} gives a numpy array of the batch to a function that reads its values, as torch.FloatTensor and"
        " torch.LongTensor do",
        "torch.as_tensor(array, dtype=torch.float32), or torch.long, makes the same tensor; or give the step tensors",
    )


for _name in ("dlpack", "dlpack_device"):
    setattr(BatchArray, f"__{_name}__", _not_by_this_class)


@contextmanager
def arrays_as_tensors() -> Iterator[None]:
    """Inside, torch makes tensors of `BatchArray`s as of arrays."""

    def sharing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            return _over(data, *args, **kwargs) if type(data) is BatchArray else plain(data, *args, **kwargs)

        return make

    def copying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            return _copy(data, *args, **kwargs) if type(data) is BatchArray else plain(data, *args, **kwargs)

        return make

    made = {"from_numpy": sharing, "as_tensor": sharing, "asarray": sharing, "tensor": copying}
    plain = {name: getattr(torch, name) for name in made}
    with swapped([(torch, name, here(plain[name], new(plain[name]))) for name, new in made.items()]):
        yield


def _over(array: BatchArray, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
    return array.tensor.detach().to(device=device, dtype=dtype)


def _copy(
    array: BatchArray, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> torch.Tensor:
    found = array.tensor.detach().to(
        device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format
    )  # fmt: skip
    return found.requires_grad_(requires_grad)


def layable(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """The tensor itself. Raises CaptureError if its bytes can't lie in shared memory with its own strides, which
    matter because kernels may choose their order of summation by strides."""
    if tensor.is_contiguous():
        return tensor
    span, expected = 1, 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride < expected:  # overlapping windows (unfold)
                raise _unlayable(position, "its elements overlap in memory")
            expected = stride * size
            span += (size - 1) * stride
    if span > 8 * max(1, tensor.numel()) and span > 1 << 20:
        raise _unlayable(position, f"it is spread over {span * tensor.element_size()} bytes")
    return tensor


def _unlayable(position: int, why: str) -> CaptureError:
    return CaptureError(
        f"tensor {position} of the batch can't be laid into shared memory as it is: {why}",
        "pass .contiguous() (and do so in runs you compare with)",
    )
