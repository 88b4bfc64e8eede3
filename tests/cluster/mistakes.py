"""Mistakes to put into the placement, each a change of its text: a history has to show every one of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

from gpumux.cluster import jobs, placement, shares

# By name: the module, what stands there, and what is put in its place.
MISTAKES: dict[str, tuple[ModuleType, str, str]] = {
    "a second high job on a device": (
        placement, "fits = device.high is None and evictions(", "fits = None is not evictions("
    ),
    "memory is promised twice": (placement, "fits = device.free_bytes >=", "fits = device.facts.memory_bytes >="),
    "places are promised twice": (placement, "request.memory_bytes and device.free_places > 0", "request.memory_bytes"),
    "what is claimed counts as free": (jobs, "claimed = 0 if self.claimed is None else", "claimed = 0 if True else"),
    "reserves before low jobs have left": (placement, "if job.high else True", "if False else True"),
    "one answer of a gang is enough": (placement, "if job.waits_on:\n            return\n        if phase", "if phase"),
    "answers of other attempts count": (
        placement,
        "job = self.attempts.get(attempt)\n        if job is None or job.phase is not phase",
        "job = next((each for each in self.jobs.values() if device in each.waits_on), None)\n"
        "        if job is None or job.phase is not phase",
    ),
    "the end of a lost node's job is not seen": (
        placement, "job.waits_on -= lost\n            self._stopped_if_gone(job)", "job.waits_on -= lost"
    ),
    "ranks on other nodes are not stopped": (
        placement,
        "JobPhase.STOPPING, {each for each in job.devices if each in self.devices}",
        "JobPhase.STOPPING, set()",
    ),
    "a cancelled job is answered while it runs": (
        placement,
        "job.keep = False\n        elif",
        "job.waits_on.clear()\n            self._stopped_if_gone(job)\n        elif",
    ),
    "reservations are not released": (placement, "if name in devices:", "if name in ():"),
    "attempts are never forgotten": (placement, "self.attempts.pop(job.attempt, None)", "pass"),
    "the high place is never free again": (
        placement, "device.high = None if device.high is job else device.high", "pass"
    ),
    "no devices are kept": (placement, "job.kept, self._to_keep(job)", "job.kept, frozenset()"),
    "no job is ever overdue": (placement, "+ self.config.patience_s <= self.now", "+ inf <= self.now"),
    "kept devices are given to others": (placement, "if device.id in kept or not", "if not"),
    "quotas are not looked at": (placement, "if over := quotas.exceeded(request):", "if over := None:"),
    "what is placed at once is not in the quota": (placement, "quotas.add(request)", "pass"),
    "ranks are asked to stop only once": (
        placement, "self._ask_to_stop(job)\n                continue", "continue"
    ),
    "answers are waited for without end": (placement, "job.due <= self.now", "job.due <= self.now - inf"),
    "users are never forgotten": (shares, "level is None or self.settled[account] <= level", "False"),
    "a node that drains gets jobs": (placement, " and not self.nodes[device.id.node].draining", ""),
    "low jobs begin anew elsewhere": (placement, "job.devices, job.began))", "job.devices, False))"),
    "low jobs are moved without a snapshot": (placement, "reason, outcome, outcome is None", "reason, outcome, False"),
    "jobs that can't move have to leave": (jobs, "if job.request.movable or job.phase is not JobPhase.RUNNING", ""),
    "a job that is asked for twice is there twice": (placement, "if request.id in self.jobs:", "if None in self.jobs:"),
    "nothing is done in time": (placement, "times = [job.due for job in self.jobs.values()]", "times = []"),
    "a gang is made smaller because others have its devices": (
        placement, "min(self._suiting(job), most", "min(len(self.candidates(job)), most"
    ),
    "a gang that may not be made smaller is": (
        placement, "[size for size in job.sizes if size <= most]", "[size for size in range(1, most + 1)]"
    ),
    "a gang gets fewer devices than are left": (placement, "max(fewer) if fewer", "min(fewer) if fewer"),
    "a gang that was made smaller begins small for ever": (
        placement, "if size != job.request.devices:", "if size < job.request.devices:"
    ),
    "classes of devices are not looked at": (placement, "priority in device.facts.classes and", ""),
}  # fmt: skip


@contextmanager
def put_in(name: str) -> Iterator[None]:
    """Change the functions of the module in place, wherever they were imported to, until the end of the block."""
    module, old, new = MISTAKES[name]
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    changed = dict(vars(module))
    exec(compile(source.replace(old, new), module.__file__ or "", "exec"), changed)  # noqa: S102 - our own text
    there = dict(_functions(vars(module), module.__name__))
    right = {key: function.__code__ for key, function in there.items()}
    try:
        for key, function in _functions(changed, module.__name__):
            there[key].__code__ = function.__code__
        yield
    finally:
        for key, function in there.items():
            function.__code__ = right[key]


def _functions(namespace: dict[str, object], module: str) -> Iterator[tuple[str, FunctionType]]:
    for name, each in namespace.items():
        if isinstance(each, FunctionType) and each.__module__ == module:
            yield name, each
        elif isinstance(each, type) and each.__module__ == module:
            for key, member in vars(each).items():
                function = member.fget if isinstance(member, property) else member
                if isinstance(function, FunctionType) and function.__code__.co_filename.endswith(".py"):
                    yield f"{name}.{key}", function
