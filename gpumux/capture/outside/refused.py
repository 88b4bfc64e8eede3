"""What a captured step may not read by Python variables: tensors that its job holds in another place."""

from __future__ import annotations

import numpy

from gpumux.capture.fetching import plain_state, without_fetching
from gpumux.capture.state import StateTable
from gpumux.capture.watch.fingerprint import Fingerprint
from gpumux.errors import CaptureError


def refuse_held(table: StateTable, fingerprint: Fingerprint, anew: set[int], moved: set[int]) -> None:
    """Raises CaptureError for a variable that holds what steps in the daemon would not keep up to date. `anew`: buffers
    of which the step makes the tensors anew; `moved`: those whose .data it sets."""
    _old_tensors(table, fingerprint, anew)
    _views(table, fingerprint, moved)
    _state_dictionaries(table, fingerprint)
    _arrays(table, fingerprint)


def _old_tensors(table: StateTable, fingerprint: Fingerprint, anew: set[int]) -> None:
    """Raises CaptureError if a Python variable holds a tensor that the step replaces as a buffer, a gradient or
    optimizer state: in the plain loop the variable keeps the old tensor, but the job has one place for both."""
    if not anew:
        return
    with without_fetching():
        followed = {id(tensor) for _, tensor in table.written}  # they are replaced where variables hold them
        tensors = ((name, tensor) for name, tensor in fingerprint.tensors() if id(tensor) not in followed)
        found = ((name, table.lookup(tensor)) for name, tensor in tensors)
        old = next(((name, place[0]) for name, place in found if place is not None and place[0] in anew), None)
    if old is not None:
        raise CaptureError(
            f"{old[0]} holds the tensor of {table.buffers[old[1]].name}, which the step replaces by another:"
            " later steps would go on to read there what was replaced",
            "let the step read it where it stands (module.buffer, parameter.grad), write into it in place (copy_),"
            " or keep a copy in a buffer of a module: .clone()",
        )


def _views(table: StateTable, fingerprint: Fingerprint, moved: set[int]) -> None:
    """Raises CaptureError if a Python variable holds a view of a tensor whose .data the step sets: in the plain
    loop the view keeps the old values, but the job has one place for both."""
    if not moved:
        return
    own = {id(tensor) for _, tensor in table.tensors}
    with without_fetching():
        found = [
            (name, place[0])
            for name, tensor in fingerprint.tensors()
            if id(tensor) not in own and (place := table.lookup(tensor)) is not None and place[0] in moved
        ]
    if found:
        name, buffer = found[0]
        raise CaptureError(
            f"{name} shares the memory of {table.buffers[buffer].name}, whose .data the step sets to other"
            " memory: later steps would read the new values there",
            "keep a copy in a buffer of a module: .clone()",
        )


def _arrays(table: StateTable, fingerprint: Fingerprint) -> None:
    """Raises CaptureError if the step reads a numpy array over memory of the job's state, which no step brings up
    to date."""
    arrays = list(fingerprint.holding(lambda value: isinstance(value, numpy.ndarray)))
    for name, array in arrays:
        address = array.__array_interface__["data"][0]
        for of, tensor in table.tensors:
            with without_fetching():
                storage = tensor.untyped_storage()
            if array.nbytes and 0 <= address - storage.data_ptr() < storage.nbytes():
                raise CaptureError(
                    f"the step reads {name}, a numpy array over the memory of {of}, which is a copy of what steps"
                    " in the daemon go on from",
                    "let the step read the tensor itself, or a copy: .clone().numpy()",
                )


def _state_dictionaries(table: StateTable, fingerprint: Fingerprint) -> None:
    """Raises CaptureError if the step reads an optimizer's state, or an entry of it, by a Python variable: the
    daemon's state is in `optimizer.state` alone."""
    names: dict[int, str] = {}
    for optimizer in table.optimizers:
        state = plain_state(optimizer.state)
        names |= {id(entry): "an entry of the optimizer's state" for entry in state.values()}
        names[id(state)] = "the optimizer's state"
    held = next(fingerprint.holding(lambda value: isinstance(value, dict) and id(value) in names), None)
    if held is not None:
        raise CaptureError(
            f"the step reads {held[0]}, which is {names[id(held[1])]}, and steps in the daemon leave that variable"
            " as it is",
            "let the step read optimizer.state itself: optimizer.state[parameter][...]",
        )
