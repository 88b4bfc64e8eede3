"""An array of models of one kind that train together, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.client.variants import Choice
from gpumux.fuse.fused import Fused
from gpumux.fuse.models import Factory, Models
from gpumux.fuse.runner import Runner
from gpumux.fuse.variants import Options, Variants


class Array(Models):
    """`factory(config) -> (step, model, optimizer)` for each of `configs`; `example` is a batch, as submit takes it.

    The steps must be of one kind: the same operators and shapes. Configurations may differ in learning rates and
    all other numbers, seeds and initial values. Results and state of each model are those of training it alone,
    random draws included: each model goes on from where the random generator stood when its factory returned, or
    from its own of `seeds`.

    choose: "measured" times every operator, for all models at once and once a model, and takes what is quicker as a
    whole (`plan()` prints it; times are kept in `times_file`, None: not at all, by default in the user's cache directory).
    "fused" runs all at once wherever there is a way; "per-model" runs each once a model.
    per_model_operators: such as "aten.mm.default", to run once a model in any case.
    partial: let models differ in some blocks and share the rest; without it, that is NotFusible.
    max_variants: combinations of batch shapes and Python flags captured for each model.
    compile: what was chosen is compiled with torch's inductor, in units of some operators, which takes seconds each; draws stay
    as they are. Kernels that are fused round otherwise. The times by which was chosen are those of operators as they are.

    Raises NotFusible for configurations that are not of one kind, and what submit raises for a step that can't be
    captured; ConfigError for other arguments that make no sense; with `compile`, ProgramError where there is no C++ compiler. Not for several threads at once.
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
