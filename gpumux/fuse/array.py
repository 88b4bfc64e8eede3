"""Some models of one kind: what an array in this process and one in a daemon have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.capture.step import Choice, KeepMore
from gpumux.client.arguments import whole
from gpumux.client.job import example_arguments
from gpumux.errors import ConfigError, JobClosed
from gpumux.fuse import arguments
from gpumux.fuse.member import STREAM, Member, Memory, key_of, keys_of
from gpumux.fuse.proof import Runner
from gpumux.fuse.template import Decision, Fused, stream_bytes
from gpumux.fuse.variants import Options, Variant, Variants
from gpumux.program.ir import Program
from gpumux.wire.codec import MAX_INT

# ---- Checkpoints of an array: tensors, numbers and strings in a file of torch.save.


_FORM = "gpumux array 1"
_PARTS = {"model", "optimizer", "random"}


def save(array: Models, path: str | Path, models: Iterable[int]) -> None:
    """Each model's state_dict and random state. The file appears whole or not at all."""
    states = [{**array.state_dict(b), "random": array.random_state(b)} for b in models]
    target = Path(path)
    half = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        torch.save({"form": _FORM, "models": states}, half)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def restore(array: Models, path: str | Path, model: int | None) -> None:
    """Raises ConfigError for a file that is no checkpoint, of another number of models, or of models or optimizers that
    differ from those here; nothing is restored then."""
    states = _read(Path(path))
    targets = range(len(array)) if model is None else [model]
    if len(states) != len(targets):
        raise ConfigError(
            f"{path} holds {len(states)} models, and {len(targets)} are to be restored",
            "restore into an array of that size, or a checkpoint of one model into one",
        )
    before = {b: array.state_dict(b) for b in targets}
    for b, state in zip(targets, states, strict=True):
        arguments.check_random_state(state["random"])
        here, there = (_shapes(found["model"]) for found in (before[b], state))
        if here != there:
            name = next(iter(dict(here.items() ^ there.items())))
            raise ConfigError(
                f"{path} does not fit model {b}: {name} is {there.get(name, 'not there')}, and here"
                f" {here.get(name, 'there is none')}",
                "restore into an array whose factory makes the models that were saved",
            )
    for b, state in zip(targets, states, strict=True):
        try:
            array.load(b, {k: v for k, v in state.items() if k != "random"})
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # torch's, of another kind of optimizer
            for loaded in targets[: list(targets).index(b)]:
                array.load(loaded, before[loaded])
            raise ConfigError(
                f"{path} does not fit model {b}: {type(error).__name__}: {str(error).splitlines()[0]}",
                "restore into an array whose factory makes the models and optimizers that were saved",
            ) from error
    for b, state in zip(targets, states, strict=True):
        array.set_random_state(b, state["random"])


def _shapes(found: Any) -> dict[str, Any]:
    """Of each tensor of a model's dictionary, or of several models', by name."""
    several = enumerate(found) if isinstance(found, list) else [(None, found)]
    return {
        name if number is None else f"{number}.{name}": tuple(value.shape)
        for number, part in several
        for name, value in part.items()
        if isinstance(value, torch.Tensor)
    }


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path} is no checkpoint: {str(error).splitlines()[0]}", "give a file of Array.save"
        ) from error
    if not isinstance(found, dict) or found.get("form") != _FORM:
        raise ConfigError(f"{path} is no checkpoint of an array", "give a file of Array.save")
    models = found.get("models")
    if not isinstance(models, list) or not all(isinstance(m, dict) and m.keys() >= _PARTS for m in models):
        raise ConfigError(f"{path} is damaged: it lacks a part of a model", "give another checkpoint")
    return models


# ---- What an array does with each operator, as a table to print.


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows`: one an operator of the step, in order. `whole_s`: seconds of the step as it runs, and with every operator
    run once a model; None where it was not measured."""

    models: int
    rows: tuple[Decision, ...]
    whole_s: tuple[float, float] | None = None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        counts = {how: sum(r.how == how for r in self.rows) for how in ("alike", "fused", "per-model")}
        yield (
            f"{len(self.rows)} operators for {self.models} models: {counts['fused']} run for all at once, "
            f"{counts['per-model']} once a model, {counts['alike']} once for all alike"
        )
        if self.whole_s is not None:
            yield f"a step takes {_time(self.whole_s[0])}, and {_time(self.whole_s[1])} one model after another"
        table = [("operator", "sizes", "layer", "choice", "fused", "per model")]
        table += [(_name(r), r.sizes, r.layer, _choice(r), _time(r.fused_s), _time(r.each_s)) for r in self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(6)]
        for row in table:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _name(row: Decision) -> str:
    return row.target.removeprefix("aten.").removesuffix(".default")


def _choice(row: Decision) -> str:
    return f"{row.how} ({row.why})" if row.why else row.how


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


# ----


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
        arguments.check_factory(factory)
        configs = arguments.configurations(configs)
        known = arguments.seeds_of(seeds, len(configs))
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
            meant = arguments.explain(error, self._factory, config)
            if meant is not None:
                raise meant from error
            error.add_note(f"raised by factory({config!r}), for model {len(self._members)} of {self.name}")
            raise
        if not isinstance(made, tuple) or len(made) != 3:
            raise ConfigError(f"factory({config!r}) is no tuple of three", "return (step, model, optimizer)")
        arguments.check_own(made[1], made[2], [member.table for member in self._members], config)
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
        """One more model, from its first step on -> its number, the last. The others go on as they are. Raises what
        making the array does; the array is as it was then."""
        self._check_open()
        seed = None if seed is None else arguments.seed_of("seed", seed)
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
        """How many models ran together in the last step: (B,) when all did. In this process a model that has just
        joined, or whose optimizer takes another path than its neighbours', runs beside them for as long as that is
        so."""
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
        """Load dictionaries, as state_dict gives them, into one model. Raises ConfigError for what holds neither, and
        what the model's and the optimizer's load_state_dict raise; the model goes on as it was then."""
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
        arguments.check_random_state(state)
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
        save(self, path, range(len(self)) if model is None else [self._index(model)])

    def restore(self, path: str | Path, model: int | None = None) -> None:
        """Read a checkpoint: of all models of an array of this size, or of one into `model`. Raises ConfigError for
        one that does not fit."""
        self._check_open()
        restore(self, path, None if model is None else self._index(model))

    def _index(self, model: int) -> int:
        return arguments.model_of(model, len(self._members))

    def _check_open(self) -> None:
        if self._closed:
            raise JobClosed(f"{self.name} is closed, and its models are trained no more", _AFTER_CLOSE)

    def _release(self) -> None:
        self._closed = True
        for member in self._members:
            member.release()


# ---- An array of models of one kind that train together, in this process.


class Array(Models):
    """`factory(config) -> (step, model, optimizer)` for each of `configs`; `example` is a batch, as submit takes it.

    The steps must be of one kind: the same operators and shapes. Configurations may differ in learning rates and
    all other numbers, seeds and initial values. Results and state of each model are those of training it alone,
    random draws included: each model goes on from where the random generator stood when its factory returned, or
    from its own of `seeds`.

    choose: "measured" times every operator, for all models at once and once a model, and takes what is quicker as a
    whole (`plan()` prints it; times are kept in `times_file`, None: not at all, by default in the user's cache
    directory). "fused" runs all at once wherever there is a way; "per-model" runs each once a model.
    per_model_operators: such as "aten.mm.default", to run once a model in any case. partial: let models differ in some
    blocks and share the rest; without it, that is NotFusible. max_variants: combinations of batch shapes and Python
    flags captured for each model. compile: what was chosen is compiled with torch's inductor, in units of some
    operators, which takes seconds each; draws stay as they are. Kernels that are fused round otherwise. The times by
    which was chosen are those of operators as they are.

    Raises NotFusible for configurations that are not of one kind, and what submit raises for a step that can't be
    captured; ConfigError for other arguments that make no sense; with `compile`, ProgramError where there is no C++
    compiler. Not for several threads at once.
    """

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, *, seeds: Sequence[int] | None = None,
        choose: Literal["measured", "fused", "per-model"] = "measured", per_model_operators: Sequence[str] = (),
        partial: bool = False, times_file: str | Path | None = "", max_variants: int = 4, name: str = "array",
        compile: bool = False,  # noqa: A002
    ) -> None:  # fmt: skip
        options = Options(choose, per_model_operators, times_file, partial, compile)
        super().__init__(factory, configs, example, seeds, max_variants, name)
        self._variants = Variants(options, self._attach, self._names)
        try:
            self._capture()
            self._variants.check_operators()
        except BaseException:
            self.close(sync=False)
            raise

    def _attach(self, fused: Fused, choices: Sequence[Choice], first: int) -> Runner:
        return Runner(fused.program, [self._memory.run(*key) for key in self._keys(fused, choices, first)])

    # ---- steps -------------------------------------------------------------------------------------

    def step(self, *batch: Any, per_model: bool = False, **named: Any) -> Any:
        """One step of every model. The batch is one for all; with `per_model`, every argument is a list of B. Returns
        what the step returns, each tensor with the models in front: a loss has size [B].

        Raises what submit's step raises; no model has changed then, unless an operator failed while it ran. Raises
        JobClosed after close()."""
        self._check_open()
        choices = self._choices(self._batches(batch, named, per_model))
        partial = self._variants.partial
        runs = []
        for _, group in groupby(range(len(choices)), key=lambda b: 0 if partial else self._variants.kind(choices[b])):
            run = list(group)
            part = choices[run[0] : run[-1] + 1]
            runs.append((self._variants.get(part, run[0], per_model), part))
        results = [variant.run(part) for variant, part in runs]
        for member, choice in zip(self._members, choices, strict=True):
            member.advance(choice)
        self._last = [variant for variant, _ in runs]
        lowered = choices[0].made.lowered
        tensors = results[0] if len(results) == 1 else [torch.cat(parts) for parts in zip(*results, strict=True)]
        return lowered.value(tensors, self._together(choices))

    def close(self, *, sync: bool = True) -> None:
        """Train no more; what was trained is in the local models, or thrown away without `sync`. It can be read still:
        state_dict(), save(), sync(). Idempotent."""
        if sync and not self._closed and any(member.guard.stale for member in self._members):
            self.sync()
        self._release()
        self._variants.clear()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
