"""An array of models of one kind that train together, in this process."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpumux.client.remote import byte_view
from gpumux.client.variants import Choice
from gpumux.errors import ConfigError, NotFusible
from gpumux.fuse.fuse import Decision, Fused, fuse
from gpumux.fuse.member import Member, example_arguments
from gpumux.fuse.runner import Runner
from gpumux.program.ir import ScalarRef

Factory = Callable[[Any], "tuple[Callable[..., Any], Any, Any]"]


@dataclass(slots=True)
class Variant:
    """One fused Program, for one Program of each model. `alike`: scalars that it takes to be equal for all."""

    fused: Fused
    runner: Runner
    alike: tuple[int, ...]


class Array:
    """`factory(config) -> (step, model, optimizer)` for each of `configs`; `example` is a batch, as submit takes it.

    The steps must be of one kind: the same operators and shapes. Configurations may differ in learning rates and
    all other numbers, seeds and initial values. Results and state of each model are those of training it alone.

    choose: "fused" runs every operator for all models at once where there is a way; "per-model" runs each once a
    model (to compare with). per_model_operators: such as "aten.mm.default", to run once a model in any case.

    Raises NotFusible for configurations that are not of one kind, and what submit raises for a step that can't be
    captured.
    """

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, *, choose: Literal["fused", "per-model"] = "fused",
        per_model_operators: Sequence[str] = (), max_variants: int = 4, name: str = "array",
    ) -> None:  # fmt: skip
        if not configs:
            raise ConfigError("configs is empty", "give one configuration for each model")
        self.name = name
        self._factory = factory
        self._choose: Literal["fused", "per-model"] = choose
        self._per_model = tuple(per_model_operators)
        self._max_variants = max_variants
        self._members: list[Member] = []
        self._memory: dict[int, torch.Tensor] = {}  # by buffer of the models' tables: bytes, models one after another
        self._variants: dict[Any, Variant] = {}
        self._last: Variant | None = None
        self._differs: dict[Any, frozenset[int]] = {}
        self._example = example_arguments(example)
        try:
            for index, config in enumerate(configs):
                self._members.append(self._made(config, index))
            self._variant(self._choices([self._example] * len(self._members)), False)
        except BaseException:
            self.close()
            raise

    def _made(self, config: Any, index: int) -> Member:
        made = self._factory(config)
        if not isinstance(made, tuple) or len(made) != 3:
            raise ConfigError(f"factory({config!r}) is no tuple of three", "return (step, model, optimizer)")
        return Member(f"{self.name}[{index}]", *made, self._max_variants)

    def __len__(self) -> int:
        return len(self._members)

    # ---- steps -------------------------------------------------------------------------------------

    def step(self, *batch: Any, per_model: bool = False, **named: Any) -> Any:
        """One step of every model. The batch is one for all; with `per_model`, every argument is a list of B. Returns
        what the step returns, each tensor with the models in front: a loss has size [B]."""
        models = len(self._members)
        if per_model:
            leaves = [*batch, *named.values()]
            if not all(isinstance(v, (list, tuple)) and len(v) == models for v in leaves):
                raise ConfigError(f"per_model=True takes a list of {models} for every argument", "give one a model")
            batches = [(tuple(v[b] for v in batch), {k: v[b] for k, v in named.items()}) for b in range(models)]
        else:
            batches = [(batch, named)] * models
        choices = self._choices(batches)
        variant = self._variant(choices, per_model)
        self._fill(variant, choices, per_model)
        scalars = [choices[model].values[index] for model, index in variant.fused.scalars]
        results = variant.runner.run(scalars)
        for member, choice in zip(self._members, choices, strict=True):
            member.advance(choice)
        self._last = variant
        return self._value(choices, results)

    def _choices(self, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Choice]:
        return [m.choose(*b) for m, b in zip(self._members, batches, strict=True)]

    def _variant(self, choices: Sequence[Choice], per_model: bool) -> Variant:
        key = (per_model, *map(id, (c.made for c in choices)))
        variant = self._variants.get(key)
        first = choices[0].values
        if variant is not None and all(c.values[i] == first[i] for i in variant.alike for c in choices[1:]):
            return variant
        count = choices[0].made.lowered.counts[0]
        differs = {i for i in range(count) if any(_differ(c.values[i], first[i]) for c in choices[1:])}
        differs |= self._differs.get(key, frozenset())
        self._differs[key] = frozenset(differs)
        made = self._fuse(choices, frozenset(differs), per_model)
        self._variants[key] = made
        return made

    def _fuse(self, choices: Sequence[Choice], differs: frozenset[int], per_model: bool) -> Variant:
        lowered = [c.made.lowered for c in choices]
        fused = fuse(
            [low.program for low in lowered], [c.values for c in choices], differs=differs, batch_per_model=per_model,
            choose=self._choose, per_model=self._per_model,
        )  # fmt: skip
        for model, low in enumerate(lowered[1:], 1):
            if (
                low.binding != lowered[0].binding
                or low.counts != lowered[0].counts
                or low.results != lowered[0].results
            ):
                raise NotFusible(
                    f"models 0 and {model} are not of one kind: their steps use other tensors of their state",
                    "give them models and optimizers of one architecture",
                )
        buffers = [self._buffer(b) for b in lowered[0].binding]
        alike = tuple(i for i in range(lowered[0].counts[0]) if i not in differs)
        return Variant(fused, Runner(fused.program, buffers), alike)

    def _fill(self, variant: Variant, choices: Sequence[Choice], per_model: bool) -> None:
        inputs, fused = variant.runner.inputs, variant.fused
        count = len(choices[0].tensors)
        if per_model:
            for model, choice in enumerate(choices):
                for target, source in zip(inputs, choice.tensors, strict=False):
                    target[model].copy_(source.detach())
        else:
            for target, source in zip(inputs, choices[0].tensors, strict=False):
                target.copy_(source.detach())
        for table, target in zip(fused.tables, inputs[count:], strict=True):
            rows = [
                [choices[b].values[s.index] if isinstance(s, ScalarRef) else s for b, s in enumerate(row)]
                for row in table.rows
            ]
            target.copy_(torch.tensor(rows, dtype=torch.float64))

    def _value(self, choices: Sequence[Choice], results: list[torch.Tensor]) -> Any:
        lowered = choices[0].made.lowered
        hosts = [c.values[sum(lowered.counts) :] for c in choices]
        together = [torch.tensor([h[i] for h in hosts]) for i in range(len(hosts[0]))]
        return lowered.value(results, together)  # type: ignore[arg-type]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """How each operator of the step that ran last runs. Empty before the first."""
        return self._last.fused.decisions if self._last is not None else ()

    # ---- state -------------------------------------------------------------------------------------

    def _buffer(self, index: int) -> torch.Tensor:
        """The bytes of one buffer of state, B times; a copy of the models' own when it is first asked for."""
        found = self._memory.get(index)
        if found is None:
            nbytes = self._members[0].table.buffers[index].nbytes
            found = torch.frombuffer(mmap.mmap(-1, max(1, nbytes * len(self._members))), dtype=torch.uint8)
            self._memory[index] = found
            for model in range(len(self._members)):
                self._push(model, index)
        return found

    def _part(self, model: int, index: int) -> torch.Tensor:
        nbytes = self._members[model].table.buffers[index].nbytes
        return self._memory[index][model * nbytes : (model + 1) * nbytes]

    def _push(self, model: int, index: int) -> None:
        buffer = self._members[model].table.buffers[index]
        if buffer.filled:
            part = self._part(model, index)
            for storage, start in buffer.home:
                part[start : start + storage.nbytes()].copy_(byte_view(storage))

    def _pull(self, model: int) -> Callable[[Callable[[int, torch.Tensor], None]], None]:
        def pull(write: Callable[[int, torch.Tensor], None]) -> None:
            for index in self._memory:
                write(index, self._part(model, index))

        return pull

    def state_dict(self, model: int) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...} of one model, as its own objects would give it."""
        member = self._members[self._index(model)]
        return member.dictionaries(self._pull(model))

    def load(self, model: int, state: dict[str, Any]) -> None:
        """Load dictionaries, as state_dict gives them, into one model."""
        member = self._members[self._index(model)]
        member.adopt(state)
        for index in self._memory:
            self._push(model, index)

    def sync(self) -> None:
        """Bring the trained state into the local models and optimizers that the factory made."""
        for model, member in enumerate(self._members):
            member.install(self._pull(model))

    def _index(self, model: int) -> int:
        if not 0 <= model < len(self._members):
            raise ConfigError(f"there is no model {model} among {len(self._members)}", "count from 0")
        return model

    def close(self) -> None:
        """Take the tripwires off the local models. Idempotent."""
        for member in self._members:
            member.release()
        self._variants.clear()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _differ(a: Any, b: Any) -> bool:
    return type(a) is not type(b) or not (a == b or (a != a and b != b))


__all__ = ["Array", "Factory"]
