"""The user's code: the line or tensor that an error is about, the layer of an operator, and the functions that ran.

Tracebacks end at the user's line, too: frames of gpumux and torch after it, and the error of torch's that caused one of
gpumux's, are left out (`fold`). With the environment variable GPUMUX_TRACEBACK=full everything is shown.

The layer of an operator in the forward pass is the innermost module whose call is on Python's stack. In the backward
pass autograd knows which node it evaluates; nodes are numbered when they are made, so the operator belongs to the layer
that ran then. The loss, the optimizer and steps without modules have no layer. Nothing is hooked.
"""

from __future__ import annotations

import contextlib
import dis
import io
import linecache
import opcode
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from gpumux.errors import DataDependent, GpumuxError
from gpumux.program.ir import ROOT, Label
from gpumux.wording import listed

_CONTEXTS = contextlib.__file__


@cache
def _between(path: str) -> bool:
    """Whether a file is a library's that may stand on the stack between the user's line and the operator."""
    if path.startswith("<frozen "):
        return True
    here, torch_home = (
        os.path.join(os.path.dirname(p), "") for p in (os.path.dirname(os.path.abspath(__file__)), _torch_file())
    )
    return path.startswith((here, torch_home)) or path == _CONTEXTS


@cache
def _package() -> str:
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def is_user_code(code: types.CodeType) -> bool:
    """Whether code belongs neither to torch nor to any part of gpumux."""
    return not _between(code.co_filename) and not code.co_filename.startswith(_package())


def _torch_file() -> str:
    import torch

    return str(torch.__file__)


def user_frame(start: types.FrameType | None = None) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame that belongs neither to torch nor to gpumux."""
    frame = _frame_of_user(start or sys._getframe(1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _frame_of_user(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and _between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """ "FILE:LINE" for messages; "an unknown line" when no user frame is on the stack."""
    found = user_frame(sys._getframe(1))
    return f"{found[0]}:{found[1]}" if found else "an unknown line"


_STEP: types.CodeType = next(
    const for const in torch.optim.Optimizer.profile_hook_step.__code__.co_consts if isinstance(const, types.CodeType)
)  # of the function that torch.optim puts around step()


def origin() -> tuple[str, bool]:
    """`user_line()` of the operator that is being dispatched, and whether an optimizer's step() of torch's own runs
    it."""
    by_optimizer = False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _STEP:
            by_optimizer = True
        elif not _between(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}", by_optimizer
        frame = frame.f_back
    return "an unknown line", by_optimizer


def definition(fn: Any) -> str:
    """ "FILE:LINE" where a step is defined."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(fn).__name__


def optimizer_inside() -> Any:
    """The outermost optimizer whose step() is on the stack; None if there is none."""
    import torch

    frame: types.FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            found = owner
        frame = frame.f_back
    return found


def value_check() -> tuple[str, bool] | None:
    """What torch.distributions or a loss checks by the boolean that is being read, as the start of a sentence, and what
    it is where all is well; None if nothing is checked."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _between(frame.f_code.co_filename):
        if frame.f_code in _CHECKS:
            found = frame.f_locals
            name, kind = type(found["self"]).__name__, found.get("constraint", found.get("support"))
            what = f"parameter {found['param']} of" if "param" in found else "a sample given to"
            return f"{what} a {name} distribution is outside of {type(kind).__name__.lstrip('_')}", True
        if frame.f_code is torch.nn.functional.gaussian_nll_loss.__code__:
            return "gaussian_nll_loss was given a negative variance", False
        frame = frame.f_back
    return None


_CHECKS = {
    torch.distributions.Distribution.__init__.__code__,
    torch.distributions.Distribution._validate_sample.__code__,
}


def calling() -> tuple[int, int]:
    """Which call of a function in C++ dispatches the present operator: the frame that makes it, and the place in the
    frame's code. Two operators have the same only if one such call runs both."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _dispatches(frame.f_code.co_filename):
        frame = frame.f_back
    return id(frame), frame.f_lasti if frame is not None else -1


@cache
def _dispatches(path: str) -> bool:
    """Whether a file's frames stand between a call in C++ and a mode's code for its operators."""
    torch_home = os.path.dirname(os.path.abspath(_torch_file()))
    places = ["_dynamo", "_compile.py", "_ops.py", os.path.join("utils", "_python_dispatch.py")]
    here = os.path.dirname(os.path.abspath(__file__))
    return path.startswith((here, *[os.path.join(torch_home, place) for place in places]))


def by_numbers() -> bool:
    """Whether an optimizer is on the stack that keeps numbers as tensors in its state and reads their values in Python
    at each step."""
    import torch

    return isinstance(optimizer_inside(), torch.optim.ASGD)


def counting() -> bool:
    """Whether an optimizer is on the stack that may read in Python what it counts in tensors. One whose kernels take
    the counts (fused, capturable) keeps them on the device."""
    found = optimizer_inside()
    return found is not None and not any(group.get("fused") or group.get("capturable") for group in found.param_groups)


def traceback_line(error: BaseException) -> str:
    """ "FILE:LINE" of the innermost user frame an exception passed through."""
    best = "an unknown line"
    tb = error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if not _between(name):
            best = f"{name}:{tb.tb_lineno}"
        tb = tb.tb_next
    return best


def reachable(fn: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the closure variables and globals that a function's code names."""
    fn = getattr(fn, "__wrapped__", fn)
    if isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        fn = fn.__func__
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    seen = set()
    for name in code_names(code):
        if name in fn.__globals__ and name not in seen:
            seen.add(name)
            yield name, fn.__globals__[name]


_MATCH = opcode.opmap["MATCH_CLASS"]
_BY_STRING = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller", "vars", "__dict__", "globals"))


def code_names(code: types.CodeType) -> Iterator[str]:
    """Every name that a function's code uses, nested functions included. For code that looks names up by strings
    (getattr), also its strings; for a `match` over attributes of a class, `__match_args__` and those in it."""
    for one in codes_in(code):
        yield from one.co_names
        if _MATCH in one.co_code[::2]:
            yield "__match_args__"
            yield from (name for c in one.co_consts if isinstance(c, tuple) for name in c if isinstance(name, str))
        if not _BY_STRING.isdisjoint(one.co_names):
            yield from (c for c in one.co_consts if isinstance(c, str) and c.isidentifier())


_OF_GLOBALS = frozenset(name for name in opcode.opmap if name.endswith(("_GLOBAL", "_GLOBALS", "_NAME")))


@lru_cache(maxsize=16384)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The names of `code_names` that the code may look up among its globals: not those that it uses for attributes
    alone, such as `data` in `p.data`, which may be a global of the same name by chance. Texts that are names stay:
    globals()["data"]."""
    kept = {each.argval for one in codes_in(code) for each in dis.get_instructions(one) if each.opname in _OF_GLOBALS}
    kept |= {c for one in codes_in(code) for c in one.co_consts if isinstance(c, str)}
    attributes = {name for one in codes_in(code) for name in one.co_names} - kept
    return frozenset(code_names(code)) - attributes


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def name_of(tensor: Any, fn: Any) -> str:
    """A name that the user knows the tensor by: a closure or global variable, or an item or attribute of one. Without a
    name, its shape and type."""
    import torch

    def memory(one: torch.Tensor) -> int | None:
        return one.untyped_storage()._cdata if one.layout is torch.strided else None

    def same(value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value is tensor:
            return value is tensor
        return memory(value) is not None and memory(value) == memory(tensor)

    for name, value in reachable(fn):
        if same(value):
            return f"`{name}`"
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if same(item):
                    return f"`{name}[{i}]`"
        elif isinstance(value, dict):
            for key, item in value.items():
                if same(item):
                    return f"`{name}[{key!r}]`"
        elif isinstance(value, torch.nn.Module):
            for path, item in [*value.named_parameters(), *value.named_buffers()]:
                if same(item):
                    return f"`{name}.{path}`"
            for path, module in value.named_modules():
                for attr, item in vars(module).items():
                    if same(item):
                        return f"`{name}.{path + '.' if path else ''}{attr}`"
        else:
            for attr, item in getattr(value, "__dict__", {}).items() if not callable(value) else ():
                if same(item):
                    return f"`{name}.{attr}`"
    return f"a tensor of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"


# ---- the user's layer of an operator, while a step is recorded
#
# In the forward pass the layer is the innermost module whose call is on Python's stack. In the backward pass no call is
# on the stack. There the sequence number of the node that autograd evaluates tells the layer: the node got its number
# while that layer ran. Nothing is hooked, and no object of the user's is held or changed.


_CALL = nn.Module._call_impl.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class Layers:
    """The names of the modules of `models`, as named_modules gives them, with a prefix "model0." and so on if there are
    several models. Code that runs in a model itself, outside of its modules, belongs to the layer ROOT."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        for i, model in enumerate(models):
            prefix = f"model{i}." if len(models) > 1 else ""
            for name, module in model.named_modules():
                self._names.setdefault(id(module), f"{prefix}{name or ROOT}")
        self._thread = threading.get_ident()
        self._next = torch._C._autograd._get_sequence_nr()
        self._nodes: dict[int, str | None] = {}  # sequence number -> layer

    def here(self) -> Label | None:
        """The layer of the operator that is being dispatched. Must be called once for each operator, also for views,
        because their nodes are numbered as well."""
        if not self._names:
            return None
        node: Any = torch._C._current_autograd_node()
        layer = self._on_stack(sys._getframe(1))
        if layer is None and node is not None:
            layer = self._nodes.get(node._sequence_nr())
        if threading.get_ident() == self._thread:  # each thread has its own sequence numbers
            following = torch._C._autograd._get_sequence_nr()
            for number in range(self._next, following):  # a node is made before its operator runs
                self._nodes[number] = layer
            self._next = following
        return None if layer is None else Label(layer, node is not None)

    def _on_stack(self, frame: types.FrameType | None) -> str | None:
        while frame is not None and frame.f_code is not _ENGINE:
            if frame.f_code is _CALL:
                name = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return None


# ---- the functions that run while a step is traced
#
# The step's code tells which functions it may call by name. Functions that Python and torch call by themselves
# (`__getitem__`, a context manager, a metaclass's property, `Function.backward`, a hook) and functions called by a
# computed name are known only when they run.


Executed = dict[int, tuple[types.CodeType, dict[str, Any]]]  # by id, which is not reused while the code object is held


_OF_BARS = frozenset(("update", "set_description", "set_description_str", "set_postfix", "set_postfix_str"))
_WRITES = frozenset(("write", "writelines"))
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")


class Observer:
    """Inside `with observer:`, notes every code object that starts in this thread, with its globals. Excepted is code
    that starts between `pause` and `resume` (torch's own, which is most of it), and code that an import runs: modules,
    which are made once, and import finders. A profiler that the user has set is suspended meanwhile."""

    def __init__(self) -> None:
        self.found: Executed = {}
        self.outputs: list[tuple[str, str]] = []  # what the step wrote, and where: "prints", at "FILE:LINE"
        self._before: Any = None
        self._around: types.FrameType | None = None  # the frame that entered the context

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in self.found and not self._importing(frame):
                self.found[id(code)] = (code, frame.f_globals)
            if code.co_name in _OF_BARS and frame.f_globals.get("__name__") == "tqdm.std":
                self._wrote("updates a progress bar", frame)
        elif event == "c_call" and getattr(called, "__name__", "") in _WRITES and is_user_code(frame.f_code):
            stream = getattr(called, "__self__", None)
            if isinstance(stream, io.IOBase) and stream not in (sys.stdout, sys.stderr):
                self._wrote("writes to a file", frame)

    def _wrote(self, what: str, frame: types.FrameType) -> None:
        found = user_frame(frame.f_back if what != "writes to a file" else frame)
        if found is not None and not found[0].startswith(_STANDARD_LIBRARY):
            self.outputs.append((what, f"{found[0]}:{found[1]}"))

    def _importing(self, frame: types.FrameType | None) -> bool:
        """Whether a frame runs for an `import` inside the context. The code around it may be run by an import
        itself."""
        while frame is not None and frame is not self._around:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Observer:
        self._around = sys._getframe(1)
        self._before = sys.getprofile()
        self.resume()
        return self

    def pause(self) -> None:
        sys.setprofile(None)

    def resume(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        self._around = None
        sys.setprofile(self._before if callable(self._before) else None)
        if self._before is not None and not callable(self._before):
            self._before.enable()  # a cProfile.Profile, which is no function


# ---- remedies for single operators that can't be captured


_BAG = "use torch.nn.Embedding and reduce what it gives, with .sum(1), .mean(1) or .amax(1)"
_CTC = (
    "its kernels read the lengths in Python: train this model without gpumux, or write the loss's recursion "
    "with torch.logaddexp over padded targets and masks"
)
_PACKED = "give the padded batch to the recurrent layer as it is, and mask its results beyond each sequence's length"
_FORWARD_MODE = (
    "forward-mode differentiation (torch.func.jvp, jacfwd, hessian, dual tensors) can't be captured: use reverse mode,"
    " jacrev(jacrev(f)) for hessian(f), or torch.autograd.grad(..., create_graph=True)"
)

_MASK = (
    "a mask as an index gives as many rows as it has values that are true: multiply by it, (loss * mask).sum() /"
    " mask.sum(), let cross_entropy leave labels out: ignore_index=, write with one mask, x[mask] = y[mask] or"
    " x[mask] += 1, or return both from the step and index outside"
)
_OF_GRAPHS = (
    "add the self-loops before the step, edge_index, _ = add_remaining_self_loops(edge_index), and make the layers"
    " (GCNConv, GATConv) with add_self_loops=False; give a loss of some nodes weights in place of a mask"
)
_INSTEAD = {
    **dict.fromkeys(("index", "masked_select"), _MASK),
    "nonzero": f"{_MASK}; the first place of each row that is true is mask.int().argmax(1)",
    "linalg_lstsq": "use torch.linalg.solve(a.mT @ a, a.mT @ b), or torch.linalg.pinv(a) @ b",
    "bincount": "count with torch.zeros(n, dtype=torch.int64).index_add_(0, index, torch.ones_like(index))",
    "_efficientzerotensor": _FORWARD_MODE,
    "to": _FORWARD_MODE,  # dispatched as such only by what forward mode does to find strides
    "_embedding_bag_backward": _BAG,
    "_ctc_loss": _CTC,
    "_pack_padded_sequence": _PACKED,
}


def instead_of(target: str, general: str) -> str:
    """The remedy for an operator ("aten.NAME.OVERLOAD"); `general` if there is no special one."""
    name = target.split(".")[1]
    of_graphs = "torch_geometric" in user_line() or _EDGES.search(_text_of_line()) is not None
    if name in ("index", "nonzero", "masked_select") and of_graphs:
        return _OF_GRAPHS
    return _INSTEAD.get(name, general)


def value_read(*, whole_number: bool = False, of_batch: bool = False) -> DataDependent:
    """The error for code that reads a tensor's value in Python. Its remedy differs for an optimizer of torch's own,
    which a user can't change, for a tensor `of_batch`, and for a `whole_number`, which may be a counter."""
    optimizer = optimizer_inside()
    name = type(optimizer).__name__
    where = reader() if optimizer is None else f"{user_line()} (inside {name}.step)"
    remedy = _ON_DEVICE.format("read")
    if where.endswith("GradScaler.get_scale"):
        remedy = (
            "compare in the loop, around the step: before = scaler.get_scale(); job.step(x, y); if scaler.get_scale()"
            " >= before: scheduler.step()"
        )
    elif _in_loader():
        remedy = "submit what is done with one batch, and run the loop over the DataLoader around it: job.step(x, y)"
    elif whole_number and _SIZE.search(_text_of_line()) is not None:
        remedy = (
            "a size can't depend on values: give the step the number as an argument, and pass it on (num_nodes=,"
            " num_classes=)"
        )
    elif whole_number and _ACTS.search(_text_of_line()) is not None:
        remedy = (
            "act in the loop, with the local model, and give the step what it learns from: job.step(states, actions,"
            " returns)"
        )
    elif _FACTOR.search(_text_of_line()) is not None:
        remedy = (
            "alpha= and value= are Python's numbers, and torch reads one from a tensor: multiply by the tensor,"
            " p.add_(rate * update) for p.add_(update, alpha=rate)"
        )
    elif of_batch:
        remedy = (
            "read the batch before the step, and give the step what is made of it as an argument (a mask, numbers, a"
            " list of them), or keep the decision on the device (torch.where, masks)"
        )
    elif whole_number:
        remedy += (
            "; keep a counter or a queue's pointer as a Python number, self.ptr = (self.ptr + n) % size, or as a"
            " tensor: queue.index_copy_(1, (ptr + torch.arange(n)) % size, new)"
        )
    if type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]:
        remedy = (
            f"{name} decides so at every step, and gpumux runs a step's Python only when it captures it: use another of"
            " torch.optim (Adam, AdamW, SGD, ...), or train this model without gpumux"
        )
    further = _further_reads() if optimizer is None else ""
    return DataDependent(
        f"{where} reads a tensor's value in Python (.item(), float(), bool() or a branch on it){further}", remedy
    )


_LOADS, _READS = ("LOAD_METHOD", "LOAD_ATTR"), ("item", "tolist")


def _further_reads() -> str:
    """Names the later lines of the running function that read values, too. They can't be found by going on: there is no
    value to go on with."""
    frame = _frame_of_user(sys._getframe(1))
    if frame is None:
        return ""
    reads = [each for each in dis.get_instructions(frame.f_code) if each.opname in _LOADS and each.argval in _READS]
    lines = {each.positions.lineno or 0 for each in reads if each.positions is not None}
    later = [str(line) for line in sorted(lines) if line > frame.f_lineno]
    return f"; line{'s' * (len(later) > 1)} {listed(later, 5)} there may, too" if later else ""


_ACTS = re.compile(
    r"\.step\(.*(\.item\(\)|\bint\()|\bactions?\.(item|tolist)\(|sample\(.*\.item\("
)  # env.step(a.item())
_EDGES = re.compile(r"\bedge_(index|attr|weight)\b")
_SIZE = re.compile(r"\bmax\(|\bone_hot\(")
_FACTOR = re.compile(r"\b(add|sub|addcmul|addcdiv|addmm|baddbmm)_?\(.*\b(alpha|value)=")


def _text_of_line() -> str:
    found = user_frame(sys._getframe(1))
    return "" if found is None else linecache.getline(found[0], found[1])


def _in_loader() -> bool:
    """Whether a DataLoader of torch's reads the value."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _between(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back
    return False


def values_checked() -> DataDependent:
    """The error for code that asks whether all or any values of a tensor are true."""
    if torch.is_anomaly_check_nan_enabled() and _in_backward():
        return DataDependent(
            f"{user_line()} runs a backward pass in anomaly mode, which looks for NaN in every gradient, in Python",
            "use detect_anomaly(check_nan=False), or none; to find where a NaN comes from, run the step without gpumux",
        )
    return DataDependent(f"{reader()} checks the values of a tensor in Python", _ON_DEVICE.format("check"))


_ON_DEVICE = (
    "keep the decision on the device (torch.where, masks), or return the tensor from the step and {} it outside"
)


def _in_backward() -> bool:
    """Whether autograd itself runs what is being dispatched, and no function of the user's in the backward pass."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE and _between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def reader() -> str:
    """The user's line, with the function of torch's that is called there, if that does what is being dispatched."""
    frame: types.FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None and _between(frame.f_code.co_filename):
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname
        if module.startswith("torch.") and not _PLUMBING.search(f"{module}.{name}"):
            called = f": {module}.{name}"
        frame = frame.f_back
    return f"{user_line()}{called}"


# Modules and functions between a public function of torch's and its operators, and decorators.
_PLUMBING = re.compile(r"\._|\.(overrides|fx)\b|<locals>")


# ---- tracebacks


VARIABLE = "GPUMUX_TRACEBACK"

P = ParamSpec("P")
T = TypeVar("T")


def fold(error: BaseException) -> None:
    """Leave only frames of the user's code in the traceback of an error of gpumux's that is about to be raised again.
    Those of its cause stand for them where it has none. Other errors stay as they are."""
    if not isinstance(error, GpumuxError) or os.environ.get(VARIABLE) == "full":
        return
    kept = list(_frames_of_user(error.__traceback__))
    if not kept and error.__cause__ is not None:
        kept = list(_frames_of_user(error.__cause__.__traceback__))
    made: types.TracebackType | None = None
    for found in reversed(kept):
        made = types.TracebackType(made, found.tb_frame, found.tb_lasti, found.tb_lineno)
    error.__traceback__ = made
    error.__cause__ = None
    error.__suppress_context__ = True


def folded(function: Callable[P, T]) -> Callable[P, T]:
    """The function with its errors folded."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except GpumuxError as error:
            fold(error)
            raise

    return call


def _frames_of_user(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        if is_user_code(traceback.tb_frame.f_code):
            yield traceback
        traceback = traceback.tb_next
