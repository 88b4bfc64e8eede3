"""Capture as a job does it: from where it will stand, through the phases its optimizer goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumux.client.hyper import Steady
from gpumux.client.remote import Remote
from gpumux.client.stale import StaleGuard
from gpumux.client.state import StateTable
from gpumux.client.structure import Structure
from gpumux.client.trace import Tracer
from gpumux.client.variants import Choice, KeepMore, State, StepFunction

_WARM_PHASES = 4  # how many phases of the optimizer submit() captures ahead


class Capturing:
    """The part of a Job that makes Programs of functions and sends them."""

    _functions: list[tuple[StepFunction, tuple[Any, ...], dict[str, Any]]]
    _clients_generator: bool
    _guard: StaleGuard
    _max_variants: int
    _next_step: int
    _remote: Remote
    _state: State
    _steady: Steady | None
    _structures: dict[Structure, Structure]
    _table: StateTable
    _tracer: Tracer
    _warm_state: State

    def _intern(self, structure: Structure) -> Structure:
        return self._structures.setdefault(structure, structure)

    def _capture(
        self, fn: Callable[..., Any], example: Any, phases: int, microbatches: int, compiled: bool
    ) -> StepFunction:
        args, kwargs = example_arguments(example)
        function = StepFunction(
            fn, self._table, self._tracer, self._guard, self._intern, self._max_variants, microbatches, compiled,
            clients_generator=self._clients_generator, steady=self._steady,
        )  # fmt: skip
        entry = (function, args, kwargs)
        self._functions.append(entry)
        try:
            choices = self._warm(entry, phases)
            for choice in choices:
                self._upload(choice)
        except BaseException:
            self._functions.remove(entry)
            raise
        return function

    def _warm(self, entry: tuple[StepFunction, tuple[Any, ...], dict[str, Any]], phases: int) -> list[Choice]:
        """Capture a function from where the job will stand when it is first called, and on through
        the phases its optimizer goes through. Starts over when that shows that gradients must be kept."""
        while True:
            try:
                if self._next_step == 0 and self._functions[0] is not entry:
                    main, args, kwargs = self._functions[0]
                    self._warm_state = self._walk(main, args, kwargs, self._state, _WARM_PHASES)[1]
                start = self._state if self._next_step or self._functions[0] is entry else self._warm_state
                choices, self._warm_state = self._walk(entry[0], entry[1], entry[2], start, phases)
                return choices
            except KeepMore as more:
                self._state.keep = more.keep
                if self._next_step:
                    return []  # captured at its first call, from a state that has them

    def _walk(
        self, function: StepFunction, args: Any, kwargs: Any, state: State, phases: int
    ) -> tuple[list[Choice], State]:
        choices: list[Choice] = []
        state = State(state.structure, state.host, self._state.keep)
        for _ in range(phases):
            choice = function.choose(args, kwargs, state)
            choices.append(choice)
            after = choice.after(state.keep)
            if after.structure is state.structure:
                break
            state = after
        return choices, state

    def _upload(self, choice: Choice) -> int:
        if choice.made.number is None:
            choice.made.number = self._remote.upload(choice.made.lowered)
        return choice.made.number


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example` is the step's arguments as a tuple or list, a dict of named ones, or one tensor."""
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, dict):
        return (), dict(example)
    return (example,), {}
