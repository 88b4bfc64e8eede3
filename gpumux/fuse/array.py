"""Arrays of models that train together: the class `Array`, and its base, shared with arrays that run in a daemon."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.capture.step import Choice
from gpumux.client.arguments import several, whole
from gpumux.client.job import example_arguments
from gpumux.errors import ConfigError, JobClosed
from gpumux.fuse import arguments, zeros
from gpumux.fuse.member import STREAM, ArrayMemory, Member, key_of, keys_of
from gpumux.fuse.proof import ProgramRunner
from gpumux.fuse.template import GPU_STREAM_BYTES, Decision, Fused, stream_bytes
from gpumux.fuse.variants import Options, Variant, Variants
from gpumux.notebook import facts_table
from gpumux.program.ir import Program
from gpumux.wire.codec import MAX_INT

# ---- Checkpoints of an array: tensors, numbers and strings in a file written by torch.save.


_FORM = "gpumux array 1"
_PARTS = {"model", "optimizer", "random"}


def save(array: BaseArray, path: str | Path, models: Iterable[int]) -> None:
    """Write each model's state_dict and random state. The file is replaced atomically."""
    states = [{**array.state_dict(b), "random": array.random_state(b)} for b in models]
    target = Path(path)
    half = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        torch.save({"form": _FORM, "models": states}, half)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def restore(array: BaseArray, path: str | Path, model: int | None) -> None:
    """Load a checkpoint. Raises ConfigError for a file that is no checkpoint, or one of another number of models, or of
    other models or optimizers; nothing is restored then."""
    states = _read(Path(path))
    targets = range(len(array)) if model is None else [model]
    if len(states) != len(targets):
        raise ConfigError(
            f"{path} holds {len(states)} models, and {len(targets)} are to be restored",
            "restore into an array of that size, or a checkpoint of one model into one",
        )
    before = {b: array.state_dict(b) for b in targets}
    for b, state in zip(targets, states, strict=True):
        arguments.check_random_state(state["random"], array.on_gpu)
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
    """Shape of each tensor in a model's state_dict, or in a list of several, by name."""
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


# ---- How an array runs each operator, as a table to print.


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """`rows`: one an operator of the step, in order. `whole_s`: seconds of the step as it runs, and with every operator
    run once a model; None if not measured."""

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


# ---- The base of arrays.


Factory = Callable[[Any], "tuple[Callable[..., Any], Any, Any]"]
_AFTER_CLOSE = "make another array; what save() wrote goes on there with restore()"
_WARM_PHASES = 4  # number of optimizer phases that are captured ahead


@dataclass(frozen=True, slots=True)
class _Made:
    """What the factory made of a configuration, and the state of the model's random generator."""

    config: Any
    objects: tuple[Any, Any, Any]
    stream: torch.Tensor
    optimizers: list[Any]


def _stream(seed: int | None, gpu: bool) -> torch.Tensor:
    """The state of a random generator that begins at `seed`. None: of torch's default one; on a GPU at a seed made of
    its state, which differs between models though they were not seeded."""
    if not gpu:
        return torch.default_generator.get_state() if seed is None else torch.Generator().manual_seed(seed).get_state()
    if seed is None:
        state = torch.default_generator.get_state().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(state).digest()[:8], "little")
    return torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)


class BaseArray(ABC):
    """Base of arrays: the models, their state in `_memory`, and the Programs of all of them."""

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, *, seeds: Sequence[int] | None,
        max_variants: int | None, name: str, options: Options, devices: tuple[str, str] = ("cpu", "cpu"),
    ) -> None:  # fmt: skip
        arguments.check_factory(factory)
        configs = arguments.configurations(configs)
        known = arguments.seeds_of(seeds, len(configs))
        if max_variants is not None:
            max_variants = whole("max_variants", max_variants, 1, MAX_INT, "use 1 or more")
        self.name = name
        self._closed = False
        self._factory = factory
        self._max_variants = max_variants
        self._devices = devices
        self._example = example_arguments(example)
        self._members: list[Member] = []
        self._memory = ArrayMemory(0)
        self._variants = Variants(options, self._attach, self._names)
        self._last: list[Variant] = []
        self._code: Any = None  # code object of the step captured last
        made: list[_Made] = []
        try:
            made += [
                self._make(config, seed, number)
                for number, (config, seed) in enumerate(zip(configs, known, strict=True))
            ]
            zeros.stand_in([each.optimizers for each in made])
            for each in made:
                self._join(each)
        except BaseException:
            self._release()
            for each in made:
                zeros.put(each.optimizers, zeros.places(each.optimizers), 0.0)
            raise

    @abstractmethod
    def _attach(self, fused: Fused, choices: Sequence[Choice], first: int) -> Any:
        """The executor of a fused Program for the models from `first` on."""

    def _capture(self) -> None:
        """Capture the Programs of the next step and of the optimizers' next phases. Raises NotFusible."""
        while not self._walk():  # a later step reads gradients of an earlier one
            self._variants.clear()

    def _walk(self) -> bool:
        """False if more gradients must be kept than before; they are kept from now on."""
        states = [m.state for m in self._members]
        for _ in range(_WARM_PHASES):
            found = [m.choose_from(state, *self._example) for m, state in zip(self._members, states, strict=True)]
            choices = [choice for choice in found if choice is not None]
            if len(choices) < len(found):  # all models were stepped first, so that all keep the same gradients
                return False
            self._variant(choices, False)  # one Program for all: its error names what differs
            after = [c.after(m.state.keep) for c, m in zip(choices, self._members, strict=True)]
            if all(a.structure is s.structure for a, s in zip(after, states, strict=True)):
                break
            states = after
        return True

    def _variant(self, choices: Sequence[Choice], per_model: bool) -> Variant:
        """The Program that runs all models at once."""
        return self._variants.get(choices, 0, per_model)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        models = "1 model" if len(self) == 1 else f"{len(self)} models"
        return f"<{type(self).__name__} {self.name!r} of {models}, {'closed' if self._closed else 'open'}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: how the last step ran, if there was one."""
        facts = {"models": str(len(self)), "state": "closed" if self._closed else "open"}
        if self._last:
            facts["operators"] = str(self.plan()).partition("\n")[0]
        return facts_table(f"gpumux {type(self).__name__} {self.name}", facts)

    def _make(self, config: Any, seed: int | None, number: int) -> _Made:
        """Have the factory make model `number`."""
        try:
            made = self._factory(config)
        except Exception as error:
            meant = arguments.explain(error, self._factory, config)
            if meant is not None:
                raise meant from error
            error.add_note(f"raised by factory({config!r}), for model {number} of {self.name}")
            raise
        if not isinstance(made, tuple) or len(made) != 3:
            raise ConfigError(f"factory({config!r}) is no tuple of three", "return (step, model, optimizer)")
        return _Made(config, made, _stream(seed, self.on_gpu), several(made[2], torch.optim.Optimizer, "optimizer"))

    def _join(self, new: _Made) -> None:
        made, stream = new.objects, new.stream
        arguments.check_own(made[1], made[2], [member.table for member in self._members], new.config)
        code = getattr(made[0], "__code__", None)
        twice = code is None or code is not self._code  # one check of a step's code holds for all models
        self._code = code
        name = f"{self.name}[{len(self._members)}]"
        self._members.append(
            Member(
                name,
                *made,
                max_variants=self._max_variants,
                devices=self._devices,
                twice=twice,
                on_read=self._copy_to_local,
            )
        )
        self._memory = self._memory.with_one()
        self._memory.line(STREAM, stream_bytes())
        model = len(self._members) - 1
        self._stream_of(model).copy_(stream)
        self._push(model)

    def add(self, config: Any, seed: int | None = None) -> int:
        """Add a model, from its first step on, and return its number, the last. The others continue. Raises what
        making the array raises; the array is unchanged then."""
        self._check_open()
        seed = None if seed is None else arguments.seed_of("seed", seed)
        self._fetch()
        before = self._memory, list(self._members)
        try:
            new = self._make(config, seed, len(self._members))
            running = [member.table.optimizers for member in self._members]
            zeros.stand_in([*running, new.optimizers], first=len(running))
            self._join(new)
            choices = self._choices([self._example] * len(self._members))
            if not self._variants.partial and len({self._variants.kind(c) for c in choices}) > 1:
                self._variants.same_from_the_start(choices[-1], len(choices) - 1)
        except BaseException:
            self._back(before)
            raise
        self._change(before)
        return len(self._members) - 1

    def remove(self, model: int) -> dict[str, Any]:
        """Remove a model and return its state_dict. The numbers of later models drop by one; all continue."""
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
        """Called after models were added or removed; all state is in `_memory`."""
        self._variants.clear()

    def _change(self, before: tuple[ArrayMemory, list[Member]]) -> None:
        try:
            self._changed()
        except BaseException:
            self._back(before)
            self._changed()
            raise

    def _back(self, before: tuple[ArrayMemory, list[Member]]) -> None:
        """Restore the models of `before`."""
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
        """The key of a buffer of the models' tables; adds its line to `_memory` if it has none."""
        key = key_of(self._members[first].table, index)
        _, new = self._memory.line(key, key[1])
        if new:
            for model, member in enumerate(self._members):
                for other, named in enumerate(keys_of(member.table)):
                    if named == key:
                        self._memory.push(key, model, member.table, other)
        return key

    def _keys(self, fused: Fused, choices: Sequence[Choice], first: int) -> list[tuple[Any, int, int]]:
        """The state of a run of models, by state slot of their fused Program: (key, first model, count)."""
        found = []
        for slots in fused.slots:
            owners = [b for b, slot in enumerate(slots) if slot is not None]
            model = owners[0]
            key = self._line(first + model, choices[model].program.lowered.binding[slots[model] or 0])
            found.append((key, first + model, len(owners)))
        return [*found, (STREAM, first, len(choices))] if fused.streams else found

    def _names(self, choices: Sequence[Choice], first: int) -> list[list[Any]]:
        """The keys of each model's state slots, for a run of models."""
        tables = [m.table for m in self._members[first : first + len(choices)]]
        return [
            [key_of(table, index) for index in choice.program.lowered.binding]
            for table, choice in zip(tables, choices, strict=True)
        ]

    def _together(self, choices: Sequence[Choice]) -> list[torch.Tensor]:
        """The numbers that the steps return, as tensors [B]."""
        hosts = [c.values[sum(c.program.lowered.counts) :] for c in choices]
        return [torch.tensor([h[i] for h in hosts]) for i in range(len(hosts[0]))]

    @property
    def runs(self) -> tuple[int, ...]:
        """Number of models in each run of the last step: (B,) if all ran together. In this process a model that has
        just joined, or whose optimizer takes another path than its neighbours', runs separately while that lasts."""
        return tuple(v.fused.models for v in self._last)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """How each operator of the last step runs. Empty before the first step."""
        return self._last[0].fused.decisions if self._last else ()

    @property
    def programs(self) -> tuple[Program, ...]:
        """The fused Programs of the last step, one for each run of models; they give its memory use."""
        return tuple(v.fused.program for v in self._last)

    def plan(self) -> ArrayPlan:
        """How the last step ran, operator by operator, with measured times: print it. Raises ConfigError before the
        first step."""
        if not self._last:
            raise ConfigError("no step has run yet", "run one")
        first = self._last[0]
        return ArrayPlan(first.fused.models, first.fused.decisions, first.whole_s)

    # ---- state -------------------------------------------------------------------------------------

    @abstractmethod
    def _fetch(self) -> None:
        """Bring the state into `_memory`, if it is elsewhere."""

    @abstractmethod
    def _send(self) -> None:
        """Called after `_memory` was written."""

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
        """Load dictionaries, as state_dict gives them, into one model. Raises ConfigError for a state with neither, and
        what the model's and the optimizer's load_state_dict raise; the model is unchanged then."""
        self._check_open()
        member = self._members[self._index(model)]
        self._fetch()
        member.install(self._memory.pull(model, member.table))
        try:
            member.adopt(state)
        except BaseException:
            member.install(self._memory.pull(model, member.table))  # what was loaded of it goes
            raise
        self._push(model)
        self._send()

    def random_state(self, model: int) -> torch.Tensor:
        """State of a model's random generator, as torch.Generator.get_state gives it, of a GPU's if the array trains on
        one."""
        index = self._index(model)
        self._fetch()
        return self._stream_of(index).clone()

    def set_random_state(self, model: int, state: torch.Tensor) -> None:
        """Set a model's random generator. Raises ConfigError for an invalid state; nothing is set then."""
        self._check_open()
        index = self._index(model)
        arguments.check_random_state(state, self.on_gpu)
        self._fetch()
        self._stream_of(index).copy_(state)
        self._send()

    @property
    def on_gpu(self) -> bool:
        """Whether the models train on a GPU."""
        return self._devices[1] == "cuda"

    def _stream_of(self, index: int) -> torch.Tensor:
        """The state of a model's random generator, in the array's memory."""
        part = self._memory.part(STREAM, index)
        return part[:GPU_STREAM_BYTES] if self.on_gpu else part

    def _copy_to_local(self, member: Member) -> None:
        """Copy the state to a local model that is about to be read."""
        self._fetch()
        member.install(self._memory.pull(self._members.index(member), member.table))

    def sync(self) -> None:
        """Copy the trained state into the local models and optimizers that the factory made."""
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


# ---- An array that trains in this process.


class Array(BaseArray):
    """Models of one kind that train together, as one Program, in this process.

    `factory(config) -> (step, model, optimizer)` is called for each of `configs`; `example` is a batch, as for submit.

    The steps must be of one kind: the same operators and shapes. Configurations may differ in learning rates and
    all other numbers, seeds and initial values. Results and state of each model are those of training it alone,
    including random draws: each model continues from the state of the random generator when its factory returned, or
    from its own of `seeds`.

    choose: "measured" times every operator, for all models at once and once a model, and takes the fastest
    combination (`plan()` prints it; times are kept in `times_file`, by default in the user's cache directory; None:
    not kept). "fused" runs all at once wherever possible; "per-model" runs each once a model.
    per_model_operators: operators, such as "aten.mm.default", that always run once a model. partial: let models differ
    in some blocks and share the rest; without it, such models raise NotFusible. max_variants: combinations of batch
    shapes and Python flags captured for each model. compile: compile the chosen Program with torch's inductor, in units
    of some operators, which takes seconds each; random draws stay the same. Fused kernels round differently. The choice
    is made by the times of uncompiled operators.

    Raises NotFusible for configurations that are not of one kind, and what submit raises for a step that can't be
    captured; ConfigError for other invalid arguments; with `compile`, ProgramError if there is no C++ compiler. Not
    thread-safe.
    """

    def __init__(
        self, factory: Factory, configs: Sequence[Any], example: Any, *, seeds: Sequence[int] | None = None,
        choose: Literal["measured", "fused", "per-model"] = "measured", per_model_operators: Sequence[str] = (),
        partial: bool = False, times_file: str | Path | None = "", max_variants: int | None = None, name: str = "array",
        compile: bool = False,  # noqa: A002
    ) -> None:  # fmt: skip
        options = Options(choose, per_model_operators, times_file, partial, compile)
        super().__init__(factory, configs, example, seeds=seeds, max_variants=max_variants, name=name, options=options)
        try:
            for member in self._members:
                if member.table.gpu:
                    raise ConfigError(
                        f"the models lie on {member.table.home}, and an Array trains in this process, on the CPU",
                        "train them by client.submit_array on a daemon of that GPU, or keep them on the CPU",
                    )
            self._capture()
            self._variants.check_operators()
        except BaseException:
            self.close(sync=False)
            raise

    def _attach(self, fused: Fused, choices: Sequence[Choice], first: int) -> ProgramRunner:
        return ProgramRunner(fused.program, [self._memory.run(*key) for key in self._keys(fused, choices, first)])

    def _fetch(self) -> None:
        """Do nothing: the state is always in `_memory`."""

    def _send(self) -> None:
        """Do nothing: Programs run on `_memory` itself."""

    # ---- steps -------------------------------------------------------------------------------------

    def step(self, *batch: Any, per_model: bool = False, **named: Any) -> Any:
        """One step of every model. The batch is one for all; with `per_model`, every argument is a list of B. Returns
        what the step returns, each tensor with the model dimension first: a loss has size [B].

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
        tensors = results[0] if len(results) == 1 else [torch.cat(parts) for parts in zip(*results, strict=True)]
        return choices[0].program.value(tensors, self._together(choices))

    def close(self, *, sync: bool = True) -> None:
        """Stop training. The trained state is copied to the local models, or discarded without `sync`. state_dict(),
        save() and sync() still work afterwards. Idempotent."""
        if sync and not self._closed and any(member.guard.stale for member in self._members):
            self.sync()
        self._release()
        self._variants.clear()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
