"""Slices at places that change from step to step: `data[i : i + n]`, `queue[:, ptr : ptr + n] = keys`.

A view of a Program lies at one place. So where a number that changes says where a slice begins, the slice is a
*window*: a copy of what is there (`index_select`), or, written as a whole, a write to that place (`index_copy_`). One
trace serves all places, as long as they are within the tensor and the slice is as long as it was.

To a step that only reads it, a window is what the view would be: memory of the same strides with the same values, at an
address that is as even. What a window can't be, is left to one trace for each place, as numbers are by which Python
decides: a slice through which gradients go, one that is not contiguous and read, one of numbers with fractions that may
begin between multiples of 16 bytes (kernels may round otherwise there), one that is changed in place, or read after the
tensor was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from gpumux.capture.source import user_line
from gpumux.capture.symbols import Expr, Scope, is_symbol

aten = torch.ops.aten

# What writes the whole of its first argument, and reads nothing of it.
_WHOLE = frozenset((aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default))

ALIGNED = 16  # bytes: kernels give the same bits at all multiples of it


class _Place(NamedTuple):
    """`length` values of `source` along `dim`, from `first` on."""

    source: torch.Tensor
    dim: int
    first: Expr
    length: int


class _Window:
    """What was made for a slice. `index`: its places along the dimension; `readable`: what reads it gets memory of the
    strides that the view would have."""

    def __init__(self, place: _Place, index: torch.Tensor, result: torch.Tensor, *, readable: bool, line: str) -> None:
        self.place, self.index, self.result, self.readable, self.line = place, index, result, readable, line
        self.read = False
        self.stale = False  # the tensor was changed since, maybe by the window itself


class Places:
    """The windows of one trace. `known`: in a trace with plain numbers, which slices are windows, by their numbers in
    the order in which they are made; `fixed`: lines of the script where a slice is a view at any place; `fix`: the
    exception that has the step traced anew with one more such line. The rest are methods of the recorder."""

    def __init__(
        self, scope: Scope, known: Collection[int], fixed: Collection[str], fix: Callable[[str], Exception], *,
        operator: Callable[..., Any], number: Callable[[Expr, torch.dtype], torch.Tensor],
        fake: Callable[[torch.Tensor], torch.Tensor], is_host: Callable[[torch.Tensor], bool], device: torch.device,
    ) -> None:  # fmt: skip
        self._scope, self._known, self._fixed, self._fix = scope, known, fixed, fix
        self._operator, self._number, self._fake, self._is_host = operator, number, fake, is_host
        self._device = device
        self._slices = 0  # made so far
        self.found: set[int] = set()  # numbers of those that are windows
        self._windows: dict[int, _Window] = {}  # by storage
        self._making = self._returned = False
        self._over: Exception | None = None  # what ended the trace, though the script may have caught it

    def __bool__(self) -> bool:
        """Whether operators have to be looked at."""
        return bool(self._windows) and not self._making

    def refuse(self) -> None:
        """Raise again what ended the trace."""
        if self._over is not None:
            raise self._over

    # ---- making windows

    def sliced(self, args: Sequence[Any]) -> torch.Tensor | None:
        """The window for a slice (the arguments of `aten.slice.Tensor`) at a place that changes; None for a view."""
        self._slices += 1
        place = self._place(*args)
        if place is None or user_line() in self._fixed:
            return None
        source, dim, first, length = place
        self.met(None, args, [source], [(source, False)])
        self._making = True
        try:
            index = self._operator(aten.arange.default, (length,), {"dtype": torch.int64, "device": self._device})
            index = self._operator(aten.add.Tensor, (index, self._first(first)), {})
            copy: torch.Tensor = self._operator(aten.index_select.default, (source, dim, index), {})
        finally:
            self._making = False
        window = _Window(place, index, copy, readable=dim == 0 and source.is_contiguous(), line=user_line())
        self._windows[_key(copy)] = window
        self.found.add(self._slices)
        return copy

    def _first(self, first: Expr) -> torch.Tensor:
        if not first.constant:
            return self._number(first, torch.int64)
        full: torch.Tensor = self._operator(
            aten.full.default, ([], first.value), {"dtype": torch.int64, "device": self._device}
        )
        return full

    def _place(self, source: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
        numbers = (start, end)
        if step != 1 or not (all(map(is_symbol, numbers)) or self._slices in self._known):
            return None
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled() or self._is_host(source):
            return None
        if (source.requires_grad and torch.is_grad_enabled()) or source.layout is not torch.strided:
            return None
        scope = self._scope
        first, last = map(scope.lift, numbers)
        if type(first.value) is not int or type(last.value) is not int:
            return None
        size = scope.const(source.shape[dim])
        if not 0 <= first.value < last.value <= size.value:
            return None
        conditions = scope.apply("ge", first, scope.const(0)), scope.apply("le", last, size)
        for condition in (*conditions, count := scope.apply("sub", last, first)):
            scope.guard(condition)
        return _Place(self._fake(source), dim % source.dim(), first, int(count.value))

    # ---- what becomes of them

    def met(
        self, func: Any, args: Sequence[Any], fakes: Sequence[Any], given: Sequence[tuple[torch.Tensor, bool]]
    ) -> bool:
        """An operator is about to run on `fakes`, which stand for `args`; `given` are its tensors, and whether it
        changes them. Whether that is done already, as it writes a whole window. Raises what has the step traced
        anew."""
        window = self._windows.get(_key(fakes[0])) if func in _WHOLE else None
        if window is not None:
            # Autograd would look for the gradient of what is written where the window's own memory begins.
            linked = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args[:2])
            value = 0 if func is aten.zero_.default else fakes[1] if isinstance(fakes[1], torch.Tensor) else args[1]
            if not linked and self._takes(window, fakes[0], value):
                self._write(window, value)
                return True
        for tensor, written in given:
            key = _key(tensor)
            window = self._windows.get(key)
            if window is not None and not window.read:
                window.read = window.readable and self._aligned(window.place)
            if window is not None and (written or window.stale or not window.read):
                self._end(window)
            if written:
                self._changed(key)
        return False

    def refuse_stale(self, tensor: torch.Tensor) -> None:
        """Raise what has the step traced anew, if the values of a window are not what the view would have. What the
        step returns and leaves behind is asked for here, too."""
        window = self._windows.get(_key(tensor))
        if window is not None and (window.stale or self._returned):
            self._end(window)

    def refuse_left(self, tensor: torch.Tensor) -> None:
        """Raise the same for a window in a place where the view would share memory from now on."""
        window = self._windows.get(_key(tensor))
        if window is not None:
            self._end(window)

    def returned(self) -> None:
        """The step's results are known: where it leaves a window from now on, the view would share memory."""
        self._returned = True

    def _end(self, window: _Window) -> NoReturn:
        self._over = self._fix(window.line)
        raise self._over

    def _aligned(self, place: _Place) -> bool:
        """Whether all that the view would begin at is as even an address as the copy's. Keeps the condition."""
        source, scope = place.source, self._scope
        row, rest = source.stride(0) * source.element_size(), source.storage_offset() * source.element_size()
        if not (source.dtype.is_floating_point or source.dtype.is_complex):
            return True
        odd = scope.apply("mod", scope.apply("mul", place.first, scope.const(row)), scope.const(ALIGNED))
        if rest % ALIGNED or odd.value:
            return False
        if row % ALIGNED:
            scope.guard(odd)
        return True

    @staticmethod
    def _takes(window: _Window, target: torch.Tensor, value: Any) -> bool:
        """Whether `target.copy_(value)` writes the place of the window, and no more than it from elsewhere."""
        whole = target.shape == window.result.shape and target.stride() == window.result.stride()
        return whole and not (isinstance(value, torch.Tensor) and _key(value) == _key(window.place.source))

    def _write(self, window: _Window, value: Any) -> None:
        source, dim, _, _ = window.place
        if not isinstance(value, torch.Tensor):
            self._operator(aten.index_fill_.int_Scalar, (source, dim, window.index, value), {})
            return
        if value.dtype != source.dtype:
            value = self._operator(aten._to_copy.default, (value,), {"dtype": source.dtype})
        value = self._operator(aten.expand.default, (value, list(window.result.shape)), {})
        self._operator(aten.index_copy_.default, (source, dim, window.index, value), {})

    def _changed(self, storage: int) -> None:
        for window in self._windows.values():
            if _key(window.place.source) == storage:
                window.stale = True


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
