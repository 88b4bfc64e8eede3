"""An array of models of one kind that train together, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.client.variants import Choice
from gpumux.errors import ConfigError
from gpumux.fuse import checkpoint
from gpumux.fuse.fuse import Decision, stream_bytes
from gpumux.fuse.member import Member, example_arguments
from gpumux.fuse.memory import STREAM, Memory, key_of
from gpumux.fuse.plan import Plan
from gpumux.fuse.trial import Times, cache_file
from gpumux.fuse.variants import Options, Variant, Variants

Factory = Callable[[Any], "tuple[Callable[..., Any], Any, Any]"]


class Array:
    """`factory(config) -> (step, model, optimizer)` for each of `configs`; `example` is a batch, as submit takes it.

    The steps must be of one kind: the same operators and shapes. Configurations may differ in learning rates and
    all other numbers, seeds and initial values. Results and state of each model are those of training it alone,
    random draws included: each model goes on from where the random generator stood when its factory returned, or
    from its own of `seeds`.

    choose: "measured" times every operator, for all models at once and once a model, and takes what is quicker as a
    whole (`plan()` prints it; times are kept in `times_file`, None: not at all, by default in the user's cache directory).
    "fused" runs all at once wherever there is a way; "per-model" runs each once a model.
    per_model_operators: such as "aten.mm.default", to run once a model in any case.
    max_variants: combinations of batch shapes and Python flags captured for each model.

    Raises NotFusible for configurations that are not of one kind, and what submit raises for a step that can't be
    captured. Not for several threads at once.
    """

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, *, seeds: Sequence[int] | None = None,
        choose: Literal["measured", "fused", "per-model"] = "measured", per_model_operators: Sequence[str] = (),
        times_file: str | Path | None = "", max_variants: int = 4, name: str = "array",
    ) -> None:  # fmt: skip
        if not configs:
            raise ConfigError("configs is empty", "give one configuration for each model")
        if choose not in ("measured", "fused", "per-model"):
            raise ConfigError(f"choose is {choose!r}", 'use "measured", "fused" or "per-model"')
        if seeds is not None and len(seeds) != len(configs):
            raise ConfigError(f"{len(seeds)} seeds for {len(configs)} models", "give one a model")
        self.name = name
        self._factory = factory
        self._max_variants = max_variants
        self._example = example_arguments(example)
        self._members: list[Member] = []
        self._memory = Memory(0)
        times = Times(cache_file() if times_file == "" else None if times_file is None else Path(times_file))
        self._variants = Variants(Options(choose, tuple(per_model_operators), times), self._buffers)
        self._last: list[Variant] = []
        try:
            for index, config in enumerate(configs):
                self._join(config, None if seeds is None else seeds[index])
            choices = self._choices([self._example] * len(self._members))
            self._variants.get(choices, 0, False)  # one run, whatever the kinds: says what differs
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._members)

    def _join(self, config: Any, seed: int | None) -> None:
        made = self._factory(config)
        if not isinstance(made, tuple) or len(made) != 3:
            raise ConfigError(f"factory({config!r}) is no tuple of three", "return (step, model, optimizer)")
        stream = (
            torch.default_generator.get_state() if seed is None else torch.Generator().manual_seed(seed).get_state()
        )
        self._members.append(Member(f"{self.name}[{len(self._members)}]", *made, self._max_variants))
        self._memory = self._memory.with_one()
        self._memory.line(STREAM, stream_bytes())
        model = len(self._members) - 1
        self._memory.part(STREAM, model).copy_(stream)
        self._push(model)

    # ---- steps -------------------------------------------------------------------------------------

    def step(self, *batch: Any, per_model: bool = False, **named: Any) -> Any:
        """One step of every model. The batch is one for all; with `per_model`, every argument is a list of B. Returns
        what the step returns, each tensor with the models in front: a loss has size [B].

        Raises what submit's step raises; no model has changed then, unless an operator failed while it ran."""
        choices = self._choices(self._batches(batch, named, per_model))
        runs = []
        for _, group in groupby(range(len(choices)), key=lambda b: self._variants.kind(choices[b])):
            run = list(group)
            part = choices[run[0] : run[-1] + 1]
            runs.append((self._variants.get(part, run[0], per_model), part))
        results = [variant.run(part) for variant, part in runs]
        for member, choice in zip(self._members, choices, strict=True):
            member.advance(choice)
        self._last = [variant for variant, _ in runs]
        lowered = choices[0].made.lowered
        hosts = [c.values[sum(c.made.lowered.counts) :] for c in choices]
        together = [torch.tensor([h[i] for h in hosts]) for i in range(len(hosts[0]))]
        tensors = results[0] if len(results) == 1 else [torch.cat(parts) for parts in zip(*results, strict=True)]
        return lowered.value(tensors, together)

    def _batches(self, batch: tuple[Any, ...], named: dict[str, Any], per_model: bool) -> list[Any]:
        models = len(self._members)
        if not per_model:
            return [(batch, named)] * models
        if not all(isinstance(v, (list, tuple)) and len(v) == models for v in (*batch, *named.values())):
            raise ConfigError(f"per_model=True takes a list of {models} for every argument", "give one a model")
        return [(tuple(v[b] for v in batch), {k: v[b] for k, v in named.items()}) for b in range(models)]

    def _choices(self, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Choice]:
        return [m.choose(*b) for m, b in zip(self._members, batches, strict=True)]

    def _buffers(self, choices: Sequence[Choice], first: int, streams: bool) -> list[torch.Tensor]:
        """The state of a run of models, by state slot of their fused Program."""
        found = []
        table = self._members[first].table
        for index in choices[0].made.lowered.binding:
            key = key_of(table, index)
            _, new = self._memory.line(key, key[1])
            if new:
                for model, member in enumerate(self._members):
                    for other in range(len(member.table.buffers)):
                        if key_of(member.table, other) == key:
                            self._memory.push(key, model, member.table, other)
            found.append(self._memory.run(key, first, len(choices)))
        return [*found, self._memory.run(STREAM, first, len(choices))] if streams else found

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """How each operator of the step that ran last runs. Empty before the first."""
        return self._last[0].fused.decisions if self._last else ()

    def plan(self) -> Plan:
        """How the step that ran last was run, operator by operator, with what was measured: print it. Raises
        ConfigError before the first step."""
        if not self._last:
            raise ConfigError("no step has run yet", "run one")
        first = self._last[0]
        return Plan(first.fused.models, first.fused.decisions, first.whole_s)

    @property
    def runs(self) -> tuple[int, ...]:
        """How many models ran together in the last step: (B,) when all did. A model that has just joined, or whose
        optimizer takes another path than its neighbours', runs beside them for as long as that is so."""
        return tuple(v.fused.models for v in self._last)

    # ---- state -------------------------------------------------------------------------------------

    def _push(self, model: int) -> None:
        table = self._members[model].table
        for index in range(len(table.buffers)):
            key = key_of(table, index)
            if key in self._memory.lines:
                self._memory.push(key, model, table, index)

    def state_dict(self, model: int) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...} of one model, as its own objects would give it."""
        member = self._members[self._index(model)]
        return member.dictionaries(self._memory.pull(model, member.table))

    def load(self, model: int, state: dict[str, Any]) -> None:
        """Load dictionaries, as state_dict gives them, into one model."""
        member = self._members[self._index(model)]
        member.install(self._memory.pull(model, member.table))
        member.adopt(state)
        self._push(model)

    def random_state(self, model: int) -> torch.Tensor:
        """Where a model's random generator stands, as torch.Generator.get_state gives it."""
        return self._memory.part(STREAM, self._index(model)).clone()

    def set_random_state(self, model: int, state: torch.Tensor) -> None:
        self._memory.part(STREAM, self._index(model)).copy_(state)

    def sync(self) -> None:
        """Bring the trained state into the local models and optimizers that the factory made."""
        for model, member in enumerate(self._members):
            member.install(self._memory.pull(model, member.table))

    def save(self, path: str | Path, model: int | None = None) -> None:
        """Write a checkpoint of all models, or of one: tensors and numbers only, for torch.load(weights_only=True)."""
        checkpoint.save(self, path, range(len(self)) if model is None else [self._index(model)])

    def restore(self, path: str | Path, model: int | None = None) -> None:
        """Read a checkpoint: of all models of an array of this size, or of one into `model`. Raises ConfigError for
        one that does not fit."""
        checkpoint.restore(self, path, None if model is None else self._index(model))

    def _index(self, model: int) -> int:
        if not 0 <= model < len(self._members):
            raise ConfigError(f"there is no model {model} among {len(self._members)}", "count from 0")
        return model

    # ---- who is in it ------------------------------------------------------------------------------

    def add(self, config: Any, seed: int | None = None) -> int:
        """One more model, from its first step on -> its number, the last. The others go on as they are."""
        before, members = self._memory, list(self._members)
        try:
            self._join(config, seed)
            choices = self._choices([self._example] * len(self._members))
            if len({self._variants.kind(c) for c in choices}) > 1:
                self._variants.same_from_the_start(choices[-1])
        except BaseException:
            for member in self._members[len(members) :]:
                member.release()
            self._memory, self._members = before, members
            raise
        self._variants.clear()
        return len(self._members) - 1

    def remove(self, model: int) -> dict[str, Any]:
        """Take a model out -> its state_dict. Those after it move up by one; all go on as they are."""
        index = self._index(model)
        if len(self._members) == 1:
            raise ConfigError("the last model can't be removed", "close() the array")
        state = self.state_dict(index)
        self._members.pop(index).release()
        self._memory = self._memory.without(index)
        self._variants.clear()
        return state

    def close(self) -> None:
        """Take the tripwires off the local models. Idempotent."""
        for member in self._members:
            member.release()
        self._variants.clear()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
