"""Some models of one kind: what an array in this process and one in a daemon have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpumux.client.arguments import whole
from gpumux.client.variants import Choice, KeepMore
from gpumux.errors import ConfigError, JobClosed
from gpumux.fuse import checkpoint, given
from gpumux.fuse.fused import Decision, Fused, stream_bytes
from gpumux.fuse.member import Member, example_arguments
from gpumux.fuse.memory import STREAM, Memory, key_of, keys_of
from gpumux.fuse.plan import Plan
from gpumux.fuse.variants import Variant, Variants
from gpumux.program.ir import Program
from gpumux.wire.fields import MAX_INT

Factory = Callable[[Any], "tuple[Callable[..., Any], Any, Any]"]
_AFTER_CLOSE = "make another array; what save() wrote goes on there with restore()"
_WARM_PHASES = 4  # how many phases of the optimizers are captured ahead


class Models:
    """The models, their state in `_memory`, and the Programs of all of them."""

    _variants: Variants

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, seeds: Sequence[int] | None, max_variants: int,
        name: str, devices: tuple[str, str] = ("cpu", "cpu"),
    ) -> None:  # fmt: skip
        given.check_factory(factory)
        configs = given.configurations(configs)
        known = given.seeds_of(seeds, len(configs))
        max_variants = whole("max_variants", max_variants, 1, MAX_INT, "use 1 or more")
        self.name = name
        self._closed = False
        self._factory = factory
        self._max_variants = max_variants
        self._devices = devices
        self._example = example_arguments(example)
        self._members: list[Member] = []
        self._memory = Memory(0)
        self._last: list[Variant] = []
        self._code: Any = None  # of the step that was captured last
        try:
            for config, seed in zip(configs, known, strict=True):
                self._join(config, seed)
        except BaseException:
            self._release()
            raise

    def _capture(self) -> None:
        """The Programs of the next step, and of those that the optimizers' next phases need. Raises NotFusible."""
        while True:
            try:
                self._walk()
                return
            except KeepMore:  # a later step reads gradients of an earlier one
                self._variants.clear()

    def _walk(self) -> None:
        states = [m.state for m in self._members]
        for _ in range(_WARM_PHASES):
            choices, wanting = [], None
            for member, state in zip(self._members, states, strict=True):
                try:
                    choices.append(member.choose(*self._example, state))
                except KeepMore as more:  # all are asked, so that all keep the same
                    wanting = more
            if wanting is not None:
                raise wanting
            self._variant(choices, False)  # one run, whatever the kinds: says what differs
            after = [c.after(m.state.keep) for c, m in zip(choices, self._members, strict=True)]
            if all(a.structure is s.structure for a, s in zip(after, states, strict=True)):
                return
            states = after

    def _variant(self, choices: Sequence[Choice], per_model: bool) -> Variant:
        """What runs all models in one."""
        return self._variants.get(choices, 0, per_model)

    def __len__(self) -> int:
        return len(self._members)

    def _join(self, config: Any, seed: int | None) -> None:
        try:
            made = self._factory(config)
        except Exception as error:
            meant = given.explain(error, self._factory, config)
            if meant is not None:
                raise meant from error
            error.add_note(f"raised by factory({config!r}), for model {len(self._members)} of {self.name}")
            raise
        if not isinstance(made, tuple) or len(made) != 3:
            raise ConfigError(f"factory({config!r}) is no tuple of three", "return (step, model, optimizer)")
        given.check_own(made[1], made[2], [member.table for member in self._members], config)
        stream = (
            torch.default_generator.get_state() if seed is None else torch.Generator().manual_seed(seed).get_state()
        )
        code = getattr(made[0], "__code__", None)
        twice = code is None or code is not self._code  # what does the same again in one model does so in all
        self._code = code
        name = f"{self.name}[{len(self._members)}]"
        self._members.append(Member(name, *made, self._max_variants, self._devices, twice, bring=self._bring))
        self._memory = self._memory.with_one()
        self._memory.line(STREAM, stream_bytes())
        model = len(self._members) - 1
        self._memory.part(STREAM, model).copy_(stream)
        self._push(model)

    def add(self, config: Any, seed: int | None = None) -> int:
        """One more model, from its first step on -> its number, the last. The others go on as they are. Raises what making
        the array does; the array is as it was then."""
        self._check_open()
        seed = None if seed is None else given.seed_of("seed", seed)
        self._fetch()
        before = self._memory, list(self._members)
        try:
            self._join(config, seed)
            choices = self._choices([self._example] * len(self._members))
            if not self._variants.partial and len({self._variants.kind(c) for c in choices}) > 1:
                self._variants.same_from_the_start(choices[-1], len(choices) - 1)
        except BaseException:
            self._back(before)
            raise
        self._change(before)
        return len(self._members) - 1

    def remove(self, model: int) -> dict[str, Any]:
        """Take a model out -> its state_dict. Those after it move up by one; all go on as they are."""
        self._check_open()
        index = self._index(model)
        if len(self._members) == 1:
            raise ConfigError("the last model can't be removed", "close() the array")
        state = self.state_dict(index)
        before = self._memory, list(self._members)
        self._memory, member = self._memory.without(index), self._members.pop(index)
        self._change(before)
        member.release()
        return state

    def _changed(self) -> None:
        """The models are others than before; all state is in `_memory`."""
        self._variants.clear()

    def _change(self, before: tuple[Memory, list[Member]]) -> None:
        try:
            self._changed()
        except BaseException:
            self._back(before)
            self._changed()
            raise

    def _back(self, before: tuple[Memory, list[Member]]) -> None:
        """The models are again what they were."""
        for member in self._members[len(before[1]) :]:
            member.release()
        self._memory, self._members = before

    def _batches(self, batch: tuple[Any, ...], named: dict[str, Any], per_model: bool) -> list[Any]:
        models = len(self._members)
        if not per_model:
            return [(batch, named)] * models
        if not all(isinstance(v, (list, tuple)) and len(v) == models for v in (*batch, *named.values())):
            raise ConfigError(f"per_model=True takes a list of {models} for every argument", "give one a model")
        return [(tuple(v[b] for v in batch), {k: v[b] for k, v in named.items()}) for b in range(models)]

    def _choices(self, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Choice]:
        return [m.choose(*b) for m, b in zip(self._members, batches, strict=True)]

    def _line(self, first: int, index: int) -> Any:
        """The key of a buffer of the models' tables; its line is in `_memory` from now on."""
        key = key_of(self._members[first].table, index)
        _, new = self._memory.line(key, key[1])
        if new:
            for model, member in enumerate(self._members):
                for other, named in enumerate(keys_of(member.table)):
                    if named == key:
                        self._memory.push(key, model, member.table, other)
        return key

    def _keys(self, fused: Fused, choices: Sequence[Choice], first: int) -> list[tuple[Any, int, int]]:
        """The state of a run of models, by state slot of their fused Program: (key, first model, how many)."""
        found = []
        for slots in fused.slots:
            owners = [b for b, slot in enumerate(slots) if slot is not None]
            model = owners[0]
            key = self._line(first + model, choices[model].made.lowered.binding[slots[model] or 0])
            found.append((key, first + model, len(owners)))
        return [*found, (STREAM, first, len(choices))] if fused.streams else found

    def _names(self, choices: Sequence[Choice], first: int) -> list[list[Any]]:
        """Of each model of a run, what its state slots are."""
        tables = [m.table for m in self._members[first : first + len(choices)]]
        return [
            [key_of(table, index) for index in choice.made.lowered.binding]
            for table, choice in zip(tables, choices, strict=True)
        ]

    def _together(self, choices: Sequence[Choice]) -> list[torch.Tensor]:
        """The numbers that the steps return, [B] each."""
        hosts = [c.values[sum(c.made.lowered.counts) :] for c in choices]
        return [torch.tensor([h[i] for h in hosts]) for i in range(len(hosts[0]))]

    @property
    def runs(self) -> tuple[int, ...]:
        """How many models ran together in the last step: (B,) when all did. In this process a model that has just joined,
        or whose optimizer takes another path than its neighbours', runs beside them for as long as that is so."""
        return tuple(v.fused.models for v in self._last)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """How each operator of the step that ran last runs. Empty before the first."""
        return self._last[0].fused.decisions if self._last else ()

    @property
    def programs(self) -> tuple[Program, ...]:
        """The fused Programs of the step that ran last, one for each run of models: what it takes of memory."""
        return tuple(v.fused.program for v in self._last)

    def plan(self) -> Plan:
        """How the step that ran last was run, operator by operator, with what was measured: print it. Raises
        ConfigError before the first step."""
        if not self._last:
            raise ConfigError("no step has run yet", "run one")
        first = self._last[0]
        return Plan(first.fused.models, first.fused.decisions, first.whole_s)

    # ---- state -------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Bring the state into `_memory`, if it is elsewhere."""

    def _send(self) -> None:
        """`_memory` was written."""

    def _push(self, model: int) -> None:
        table = self._members[model].table
        for index in range(len(table.buffers)):
            key = key_of(table, index)
            if key in self._memory.lines:
                self._memory.push(key, model, table, index)

    def state_dict(self, model: int) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...} of one model, as its own objects would give it."""
        member = self._members[self._index(model)]
        self._fetch()
        return member.dictionaries(self._memory.pull(model, member.table))

    def load(self, model: int, state: dict[str, Any]) -> None:
        """Load dictionaries, as state_dict gives them, into one model. Raises ConfigError for what holds neither, and what
        the model's and the optimizer's load_state_dict raise; the model goes on as it was then."""
        self._check_open()
        member = self._members[self._index(model)]
        self._fetch()
        member.install(self._memory.pull(model, member.table))
        member.adopt(state)
        self._push(model)
        self._send()

    def random_state(self, model: int) -> torch.Tensor:
        """Where a model's random generator stands, as torch.Generator.get_state gives it."""
        index = self._index(model)
        self._fetch()
        return self._memory.part(STREAM, index).clone()

    def set_random_state(self, model: int, state: torch.Tensor) -> None:
        """Raises ConfigError for what random_state() does not give; nothing is set then."""
        self._check_open()
        index = self._index(model)
        given.check_random_state(state)
        self._fetch()
        self._memory.part(STREAM, index).copy_(state)
        self._send()

    def _bring(self, member: Member) -> None:
        """A local model is read: bring its state there."""
        self._fetch()
        member.install(self._memory.pull(self._members.index(member), member.table))

    def sync(self) -> None:
        """Bring the trained state into the local models and optimizers that the factory made."""
        self._fetch()
        for model, member in enumerate(self._members):
            member.install(self._memory.pull(model, member.table))

    def save(self, path: str | Path, model: int | None = None) -> None:
        """Write a checkpoint of all models, or of one: tensors and numbers only, for torch.load(weights_only=True)."""
        checkpoint.save(self, path, range(len(self)) if model is None else [self._index(model)])

    def restore(self, path: str | Path, model: int | None = None) -> None:
        """Read a checkpoint: of all models of an array of this size, or of one into `model`. Raises ConfigError for
        one that does not fit."""
        self._check_open()
        checkpoint.restore(self, path, None if model is None else self._index(model))

    def _index(self, model: int) -> int:
        return given.model_of(model, len(self._members))

    def _check_open(self) -> None:
        if self._closed:
            raise JobClosed(f"{self.name} is closed, and its models are trained no more", _AFTER_CLOSE)

    def _release(self) -> None:
        self._closed = True
        for member in self._members:
            member.release()
