"""A sweep stored in an Optuna study: dashboards can show it, and a killed sweep can be resumed. Optuna is an extra that
only this module imports.

A configuration is one Optuna trial and a rung one intermediate value. A trial that a rung eliminated is PRUNED, one
that diverged FAIL. With the sampler "random", Optuna is given the space's own draws, so that a sweep is the same with
and without storage.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpumux.errors import ConfigError
from gpumux.pictures import WIDE, figure, save
from gpumux.tune.space import Choices, Config, Parameter, Range, Space, Value
from gpumux.tune.sweep import LedgerTrial, State, TrialRecord

if TYPE_CHECKING:
    import optuna


SAMPLERS = ("random", "tpe")
PANEL = 1.9  # inches, for what the axis of a hyper-parameter says
_SETTINGS, _WALL = "gpumux", "gpumux_wall_s"


class StudyLedger:
    """A ledger in an Optuna study. It keeps the database open until close().

    Raises ConfigError if Optuna is not installed, the storage can't be opened, or the study of that name is of another
    sweep (another space, algorithm, seed or task: the difference is named). startup: trials that TPE draws at random
    before it has a model.
    """

    def __init__(
        self, storage: str, name: str, space: Space, settings: Mapping[str, Any], *,
        maximize: bool, sampler: str, seed: int, startup: int = 10,
    ) -> None:  # fmt: skip
        self._optuna = optuna = _import()
        self._space, self._seed, self._sampler, self._startup = space, seed, sampler, startup
        level = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep reports its own progress
        direction = "maximize" if maximize else "minimize"
        try:
            self._study = optuna.create_study(
                storage=storage, study_name=name, direction=direction, load_if_exists=True
            )
        except ImportError as error:  # the database's driver
            raise ConfigError(f"storage {storage} needs a package: {error}", "install it with pip") from None
        except Exception as error:  # SQLAlchemy's own, of many kinds
            raise ConfigError(
                f"can't open storage {storage}: {str(error).splitlines()[0]}", "give one like sqlite:///sweep.db"
            ) from error
        finally:
            optuna.logging.set_verbosity(level)
        self.resumed = len(self._study.get_trials(deepcopy=False))
        try:
            self._check_settings(
                {**settings, "direction": direction, "space": space.describe(), "sampler": sampler, "seed": seed}
            )
            self._kept = dict(self._read())
            self._ids: dict[int, int] = {}
        except BaseException:
            self.close()
            raise

    def _check_settings(self, settings: dict[str, Any]) -> None:
        """Check that the study is of this sweep, or make a new study one of this sweep."""
        settings = json.loads(json.dumps(settings))  # as the database gives it back
        found = self._study.user_attrs.get(_SETTINGS)
        if found is None:
            if self.resumed or self._study.user_attrs:
                raise ConfigError(
                    f"study {self._study.study_name} was not made by gpumux tune", "choose another name with --study"
                )
            self._study.set_user_attr(_SETTINGS, settings)
            return
        for key in sorted(settings.keys() | found.keys()):
            if settings.get(key) != found.get(key):
                raise ConfigError(
                    f"study {self._study.study_name} is of another sweep: its {key} is {_short(found.get(key))}, "
                    f"not {_short(settings.get(key))}",
                    "use the settings it was begun with, or choose another name with --study",
                )

    def config(self, number: int) -> Config:
        if number in self._kept:
            return self._kept[number].config
        trials = self._study.get_trials(deepcopy=False)
        if number > len(trials):
            raise AssertionError(f"trial {number} is asked for before trial {len(trials)}")
        states = self._optuna.trial.TrialState
        if number < len(trials) and trials[number].state != states.WAITING:
            config = self._complete(self._optuna.trial.Trial(self._study, trials[number]._trial_id))
        else:
            config = self._ask(number, waits=number < len(trials))
        self._kept[number] = LedgerTrial(config)
        return config

    def _ask(self, number: int, *, waits: bool) -> dict[str, Value]:
        if self._sampler == "random":
            if not waits:
                self._study.enqueue_trial(self._space.sample(self._seed, number))
        else:  # seeded by the trial, so that a resumed sweep proposes the same
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=self._seed + number, n_startup_trials=self._startup
            )
        always = {p.name: self._distribution(p) for p in self._space.parameters if not p.when}
        return self._complete(self._study.ask(always))

    def _complete(self, trial: optuna.trial.Trial) -> dict[str, Value]:
        """The trial's configuration, with its conditional parameters, some of which a killed sweep may not have set."""
        for p in self._space.parameters:
            if not p.exists(trial.params) or p.name in trial.params:
                continue
            if isinstance(p.domain, Choices):
                trial.suggest_categorical(p.name, list(p.domain.values))
            elif p.domain.whole:
                trial.suggest_int(p.name, *_ends(p.domain), step=int(p.domain.step or 1), log=p.domain.log)  # type: ignore[arg-type]
            else:
                trial.suggest_float(p.name, *_ends(p.domain), step=p.domain.step, log=p.domain.log)
        return dict(trial.params)

    def _distribution(self, p: Parameter) -> Any:
        made = self._optuna.distributions
        if isinstance(p.domain, Choices):
            return made.CategoricalDistribution(p.domain.values)
        low, high = _ends(p.domain)
        if p.domain.whole:
            return made.IntDistribution(int(low), int(high), log=p.domain.log, step=int(p.domain.step or 1))
        return made.FloatDistribution(low, high, log=p.domain.log, step=p.domain.step)

    def score(self, number: int, steps: int) -> float | None:
        return self._kept[number].scores.get(steps)

    def steps(self, number: int) -> list[int]:
        return list(self._kept[number].scores)

    def report(self, number: int, steps: int, score: float, device_s: float) -> None:
        kept = self._kept[number]
        trial = self._optuna.trial.Trial(self._study, self._id(number))
        trial.set_user_attr("device_s", kept.device_s + device_s)
        if steps not in kept.scores:
            trial.report(score, steps)  # last: a reported score marks the rung as done
        kept.device_s += device_s
        kept.scores.setdefault(steps, score)

    def finish(self, number: int, state: State) -> None:
        kept = self._kept[number]
        if kept.state != "running":
            return
        states = self._optuna.trial.TrialState
        if state == "complete":
            self._study.tell(number, kept.scores[max(kept.scores)])
        else:
            self._study.tell(number, state=states.PRUNED if state == "pruned" else states.FAIL)
        kept.state = state

    def entries(self) -> list[TrialRecord]:
        return [kept.entry(number) for number, kept in sorted(self._kept.items())]

    def _read(self) -> Iterator[tuple[int, LedgerTrial]]:
        """Trials of an earlier run, except those that were only proposed. From here on only this process writes the
        study, so that a cached copy suffices."""
        states = self._optuna.trial.TrialState
        named: dict[Any, State] = {states.COMPLETE: "complete", states.PRUNED: "pruned", states.FAIL: "failed"}
        for t in self._study.get_trials(deepcopy=False):
            if t.state in named or t.intermediate_values:
                scores, seconds = dict(t.intermediate_values), float(t.user_attrs.get("device_s", 0.0))
                yield t.number, LedgerTrial(dict(t.params), named.get(t.state, "running"), scores, seconds)

    def _id(self, number: int) -> int:
        if number not in self._ids:
            self._ids |= {t.number: t._trial_id for t in self._study.get_trials(deepcopy=False)}
        return self._ids[number]

    @property
    def wall_s(self) -> float:
        """Seconds that all runs of this sweep took, as far as they recorded it."""
        return float(self._study.user_attrs.get(_WALL, 0.0))

    def add_wall(self, seconds: float) -> None:
        self._study.set_user_attr(_WALL, self.wall_s + seconds)

    def close(self) -> None:
        self._study._storage.remove_session()
        engine = getattr(getattr(self._study._storage, "_backend", None), "engine", None)
        if engine is not None:
            engine.dispose()


def _import() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise ConfigError("a stored sweep needs optuna", "pip install optuna") from None
    return optuna


def _ends(domain: Range) -> tuple[float, float]:
    """The bounds. With a step, the upper one is the last value that exists, as Optuna demands."""
    high = domain.high if domain.step is None else domain.low + domain.step * (domain.count() - 1)
    return (int(domain.low), int(high)) if domain.whole else (float(domain.low), float(high))


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- Optuna's own pictures of a study.


def pictures(storage: str, name: str, path: Path) -> list[Path]:
    """Draw a stored study with optuna.visualization.matplotlib, in files whose names begin like `path`: scores by
    trial, scores over each hyper-parameter. Its plot of scores over steps tells trials by colour alone, which that of
    gpumux.tune.plot does not. Returns the files. Raises ConfigError if one can't be written, and without Optuna or
    matplotlib."""
    optuna = _import()
    figure(1.0, 1.0)  # an error that names matplotlib
    from matplotlib import pyplot, rc_context

    study = optuna.load_study(study_name=name, storage=storage)
    draws = optuna.visualization.matplotlib
    kinds = {"history": draws.plot_optimization_history, "parameters": draws.plot_slice}
    made = []
    for kind, draw in kinds.items():
        before = set(pyplot.get_fignums())
        with rc_context(), warnings.catch_warnings():  # Optuna sets a style, and says that its pictures may change
            warnings.simplefilter("ignore")
            draw(study)
            (number,) = set(pyplot.get_fignums()) - before
            drawn = pyplot.figure(number)
            drawn.set_size_inches(max(WIDE, PANEL * len(drawn.axes)), 4.5)
            drawn.set_layout_engine("constrained")
            for axes in drawn.axes:
                axes.tick_params(axis="x", which="minor", labelbottom=False)  # those of a logarithm overlap
            made.append(path.with_name(f"{path.stem}-{kind}{path.suffix}"))
            save(drawn, made[-1])
            pyplot.close(number)
    return made
