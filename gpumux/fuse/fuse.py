"""Fuses B steps of one kind into one Program over stacked state (HFTA, section 3, without its layouts)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from gpumux.capture.recorder import leaves
from gpumux.capture.tracer import suppress_fake_tensor_logs
from gpumux.errors import NotFusible
from gpumux.fuse import rules
from gpumux.fuse.call import Call, Operand, batched, is_default
from gpumux.fuse.emit import Declined, FusionEmitter
from gpumux.fuse.layout import Placements
from gpumux.fuse.rules.elementwise import is_pointwise, pointwise
from gpumux.fuse.template import (
    Choose,
    Decision,
    Fused,
    How,
    ScalarTable,
    Template,
    Varying,
    align,
    layer_name,
    stream_bytes,
)
from gpumux.program import onednn_lstm
from gpumux.program.ir import ITEM_BYTES, Program, ScalarRef, View, contiguous_strides

# Operators that read only the shape and layout of their operand.
_BY_SHAPE = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))


def fuse(
    programs: Sequence[Program], values: Sequence[Sequence[float | int]], *, differs: frozenset[int] = frozenset(),
    batch_per_model: bool = False, choose: Choose = "fused", per_model: Collection[str] = (),
) -> Fused:  # fmt: skip
    """One Program that does what `programs` do, each on its own state.

    values: the present host scalars of each Program; only their types and equality matter.
    differs: indices of scalars that may differ between models at some step.
    choose: "fused" wherever possible, "per-model", or the numbers of the operators that run once a model.
    per_model: operators ("aten.mm.default") that always run once a model.

    Raises NotFusible, naming operator and layer, for steps that are not of one kind, and for operators that
    can't be run for all models at once and are not allowed to run once a model.
    """
    return fuse_template(
        align(programs, differs), values, batch_per_model=batch_per_model, choose=choose, per_model=per_model
    )


def fuse_template(
    template: Template, values: Sequence[Sequence[float | int]], *, batch_per_model: bool = False,
    choose: Choose = "fused", per_model: Collection[str] = (),
) -> Fused:  # fmt: skip
    """As `fuse`, for programs that are aligned already."""
    rules.load()
    emitter = FusionEmitter(template.program.device)
    return Fuser(template, emitter, values, choose=choose, per_model=per_model).run(batch_per_model)


class Fuser:
    """Writes the fused Program of a template, operator by operator."""

    def __init__(
        self, template: Template, emitter: FusionEmitter, values: Sequence[Sequence[float | int]], *, choose: Choose,
        per_model: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.template = template
        self.emitter = emitter
        self.placements = Placements(template, emitter, values)
        self.models = template.models
        self._choose = choose
        self._per_model = per_model
        self.decisions: list[Decision] = []
        self.slices: list[tuple[int, int]] = []  # for each operator of the template: the range of its operators here
        self.makers: dict[int, int] = {}  # storage of the template -> the operator that makes it
        self.reads: list[tuple[int, int]] = []  # (operator, the operator that makes one of its operands)
        self._streams: int | None = None  # storage of the models' random generators
        self._slots: dict[tuple[int, int], int] = {}

    def run(self, batch_per_model: bool) -> Fused:
        program = self.template.program
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, program.numerics.default_dtype))
        try:
            with torch.no_grad(), suppress_fake_tensor_logs():
                inputs = self._place(batch_per_model)
                for index in range(len(self.template.ops)):
                    self.emitter.label = self.template.labels[index]
                    self.add_op(index)
                self.emitter.label = None
                results = [self._result(program.views[v]) for v in program.results]
                tables, more = self._tables(len(inputs))
        finally:
            torch.set_default_dtype(before)
        return Fused(
            self.emitter.build([*inputs, *more], results, program.numerics), self.models,
            tuple(self.placements.scalar_sources), tables, tuple(self.decisions), batch_per_model,
            self.template.slots, self._streams is not None,
        )  # fmt: skip

    # ---- state, inputs and results -----------------------------------------------------------------

    def _place(self, batch_per_model: bool) -> list[int]:
        program, models = self.template.program, self.models
        dtypes: dict[int, str] = {}
        for view in program.views:
            dtypes.setdefault(view.storage, view.dtype)
        inputs: dict[int, int] = {}
        for index, storage in enumerate(program.storages):
            dtype = dtypes.get(index, "uint8")
            alone = self.template.storage_owners[index] is not None
            if storage.kind == "state":
                at = self.emitter.add_storage("state", storage.nbytes * (1 if alone else models), storage.slot)
                self.placements.place(index, at, not alone, dtype)
            elif storage.kind == "const":
                data = self.template.consts[storage.slot]
                alike = all(d == data[0] for d in data)
                at = self.emitter.add_const(data[0] if alike else b"".join(data))
                self.placements.place(index, at, not alike, dtype)
            elif storage.kind == "input":
                nbytes = storage.nbytes * (models if batch_per_model else 1)
                inputs[index] = self.emitter.add_storage("input", nbytes, storage.slot)
                self.placements.place(index, inputs[index], batch_per_model, dtype)
        made = []
        for position in program.inputs:
            view = program.views[position]
            tensor = self.placements.all(view) if batch_per_model else self.placements.one(view)
            made.append(self.emitter.view_of(tensor))
        return made

    def _result(self, view: View) -> int:
        return self.emitter.view_of(self.placements.all(view))

    def _tables(self, first: int) -> tuple[tuple[ScalarTable, ...], list[int]]:
        tables, views = [], []
        for slot, (dtype, (storage, rows)) in enumerate(self.placements.tables.items(), first):
            self.emitter.resize(storage, len(rows) * self.models * ITEM_BYTES[dtype], slot)
            size = (len(rows), self.models)
            views.append(self.emitter.view_of(self.emitter.window(storage, dtype, size, contiguous_strides(size))))
            tables.append(ScalarTable(dtype, tuple(rows)))
        return tuple(tables), views

    # ---- operators -----------------------------------------------------------------------------------

    def add_op(self, index: int) -> None:
        owner = self.template.owners[index]
        call = Call(self.placements, self.template.ops[index], owner or 0)
        start = len(self.emitter.ops)
        try:
            with onednn_lstm.as_captured(call.op):
                how, why = self._run_for_all(call, index) if owner is None else self._run_owned(call, index, owner)
        except Declined as reason:
            raise NotFusible(
                f"{call.target}, {layer_name(self.emitter.label)}, can't run once a model either: {reason}",
                "report this as a bug with the step's code",
            ) from reason
        self.slices.append((start, len(self.emitter.ops)))
        used = {o.view.storage for o in call.operands()}
        self.reads += [(index, self.makers[s]) for s in sorted(used) if s in self.makers]
        for view in call.outputs():
            if view is not None and self.template.program.storages[view.storage].kind == "temp":
                self.makers.setdefault(view.storage, index)
        sizes = " ".join("x".join(map(str, o.size)) or "1" for o in call.operands())
        layer = layer_name(self.template.labels[index])
        self.decisions.append(Decision(index, call.target, layer, how, why, sizes))

    def _run_for_all(self, call: Call, index: int) -> tuple[How, str]:
        if call.op.random is not None:
            self._draw(call, index)
            return "per-model", "it draws random numbers, each model from its own stream"
        if self.is_alike(call) and self.run_once(call):
            return "alike", ""
        if call.target in self._per_model:
            self._run_apart(call)
            return "per-model", "asked for"
        if self._choose == "per-model" or (self._choose != "fused" and index in self._choose):
            self._run_apart(call)
            return "per-model", "chosen"
        way, reason = self.run_fused(call)
        if way:
            return "fused", way
        if call.target in rules.PER_MODEL:
            reason = rules.PER_MODEL[call.target]
        elif not call.varies:
            raise NotFusible(
                f"{call.target}, {layer_name(self.emitter.label)}, can't run for all models at once: {reason}",
                f"allow it to run once a model: per_model_operators=[{call.target!r}]",
            )
        self._run_apart(call)
        return "per-model", reason

    def _run_apart(self, call: Call) -> None:
        """Run an operator once a model, on tensors of the template's layout where the kernel needs that: some read
        tensors as they lie in memory, and those of a fused operator are parts of a larger one."""
        if call.target not in rules.PER_MODEL:
            saved = self.placements.save()
            try:
                self.run_per_model(call)
                return
            except Declined:
                self.placements.restore(saved)
        for operand in call.operands():
            self.placements.use_template_layout(operand.view)
        self.run_per_model(call)

    def is_alike(self, call: Call) -> bool:
        """Whether the operator does exactly the same for all models, so that it runs once."""
        if call.varies:
            return False
        return call.name in _BY_SHAPE or all(o.alike for o in call.operands())

    def run_once(self, call: Call) -> bool:
        """Run it once. False if the result would have another layout than the template's."""
        saved = self.placements.save()
        for operand in call.written:
            self.placements.of(operand.view).only_shared()
        try:
            made = call.invoke(call.filled(lambda o: o.one() if o.alike else o.of(0)))
            self._bind(call, made, self.placements.put_one)
        except Declined:
            self.placements.restore(saved)
            return False
        return True

    def run_fused(self, call: Call) -> tuple[str, str]:
        """Run it for all models at once. Returns (the means, ""), or ("", the reason why it is not possible)."""
        reasons: list[str] = []
        for name, way in _ways(call):
            saved = self.placements.save()
            try:
                for operand in call.written:
                    self.placements.write_all(operand.view)
                with self.emitter:
                    made = way(call)
                self._bind(call, made, self.placements.put_all)
            except Declined as reason:
                self.placements.restore(saved)
                reasons.append(str(reason))
                continue
            return name, ""
        return "", "; ".join(dict.fromkeys(reasons))

    def _draw(self, call: Call, index: int) -> None:
        for operand in call.operands():
            self.placements.use_template_layout(operand.view)
        self.run_per_model(call, self.template.randoms[index])

    def _stream(self, model: int, slot: int | None) -> tuple[int | None, int | None]:
        """(random slot in the fused Program, view of the model's generator state)."""
        if slot is None:
            return None, None
        if self._streams is None:
            slots = sum(s.kind == "state" for s in self.template.program.storages)
            self._streams = self.emitter.add_storage("state", self.models * stream_bytes(), slots)
        nbytes = stream_bytes()
        view = self.emitter.window(self._streams, "uint8", (nbytes,), (1,), model * nbytes)
        return self._slots.setdefault((model, slot), len(self._slots)), self.emitter.view_of(view)

    def run_per_model(self, call: Call, randoms: Sequence[int | None] = ()) -> None:
        """Run it once a model."""
        for operand in call.written:
            self.placements.write_each(operand.view)
        if randoms:
            every = [self._run_for(call, model, randoms[model]) for model in range(self.models)]
        else:
            every = self._run_for_each(call)
        for position, view in enumerate(call.outputs()):
            if view is not None and not self.placements.of(view).known:
                self.placements.put_each(view, [made[position] for made in every])

    def _run_for_each(self, call: Call) -> list[list[Any]]:
        """Run it for each model, in the form of `_returned`. What the operator makes is found out for the first model;
        for the others it is written down again with their operands, where they are laid out alike."""
        first = leaves(self._arguments(call, 0))  # may copy operands into another form
        mark = self.emitter.mark()
        every = [self._run_for(call, 0, None)]
        # Of numbers that differ, some may be the default, which is not written down.
        numbers = any(not isinstance(v, ScalarRef) for _, varying in call.varying() for v in varying.values)
        repeatable = not numbers and len(self.emitter.ops) == mark.ops + 1
        for model in range(1, self.models):
            again = self.emitter.repeat(mark, first, leaves(self._arguments(call, model))) if repeatable else None
            every.append(self._run_for(call, model, None) if again is None else again)
        return every

    def _arguments(self, call: Call, model: int) -> dict[str, Any]:
        """One model's arguments, by name."""

        def put(value: Any) -> Any:
            if isinstance(value, Operand):
                return value.of(model)
            if isinstance(value, Varying):
                return self.placements.source(value.values[model], model)
            return [put(v) for v in value] if isinstance(value, list) else value

        return {name: put(value) for name, value in call.args.items()}

    def _run_for(self, call: Call, model: int, random: int | None) -> list[Any]:
        """Run it for one model; returns its results in the form of `_returned`."""
        args = self._arguments(call, model)
        # The generator is not an argument in a Program: the device passes each op the stream it draws from.
        arguments = [a for a in call.func._schema.arguments if a.name != "generator"]
        positional = tuple(args[a.name] for a in arguments if not a.kwarg_only)
        named = {a.name: args[a.name] for a in arguments if a.kwarg_only and not is_default(args[a.name], a)}
        slot, stream = self._stream(model, random)
        made = self.emitter.emit(call.func, positional, named, self.placements.scalar_values, slot, stream)
        return self._returned(call, made)

    def _run_owned(self, call: Call, index: int, model: int) -> tuple[How, str]:
        """Run an operator that only one model has."""
        owners = self.template.storage_owners
        for operand in call.operands():
            if call.op.random is not None and owners[operand.view.storage] is None:
                self.placements.use_template_layout(operand.view)
        for operand in call.written:
            if owners[operand.view.storage] is None:
                self.placements.write_each(operand.view)
        returned = self._run_for(call, model, self.template.randoms[index][0])
        for view, made in zip(call.outputs(), returned, strict=True):
            if view is None or self.placements.of(view).known:
                continue
            if owners[view.storage] is not None:
                self.placements.put_one(view, made)
            elif model not in self.placements.of(view).parts:
                self.placements.put_part(view, model, made)
        return "per-model", f"only model {model} has it"

    def _returned(self, call: Call, made: Any) -> list[Any]:
        """The results, one entry an output, lists flattened as in `call.outputs()`."""
        values = (made,) if len(call.func._schema.returns) == 1 else tuple(made or ())
        found: list[Any] = []
        for out, value in zip(call.op.outs, values, strict=True):
            found += list(value) if isinstance(out, tuple) else [value]
        return found

    def _bind(self, call: Call, made: Any, put: Any) -> None:
        for view, value in zip(call.outputs(), self._returned(call, made), strict=True):
            if view is not None and not self.placements.of(view).known:
                if not isinstance(value, torch.Tensor):
                    raise Declined("a result is missing")
                put(view, value)


def _ways(call: Call) -> Iterator[tuple[str, rules.Rule]]:
    known = rules.RULES.get(call.target)
    if known is not None:
        yield "rule", known
    if is_pointwise(call.func):
        yield "pointwise", pointwise
    yield "batched", batched
