"""Snapshots of a job's state: the notes stored with one, restoring a job from them, and when the client takes them.

The notes say where in the job's buffers each parameter, buffer, optimizer state and gradient lies. They hold the
numbers that only the client knows (step counters) and the hyperparameters, so that another process can resume the job.
Notes are data that an earlier process of the same user wrote. They are compared with the submitted models and
optimizers before anything is overwritten.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgpack
import torch

from gpumux.capture.generator import ClientGenerator
from gpumux.capture.state import Place, StateTable, raw_bytes
from gpumux.capture.structure import ConstLeaf, DeviceLeaf, HostLeaf, State
from gpumux.client.remote import StateRead
from gpumux.client.replay import ReplayLog
from gpumux.client.session import Asked, Session
from gpumux.errors import ConfigError, GpumuxError, from_code
from gpumux.program.ir import aligned
from gpumux.types import generator_region, generator_state
from gpumux.waves.steps import Waves
from gpumux.wire import messages as m
from gpumux.wire.messages import PrepareSnapshot, ReadSnapshot, SnapshotSaved, SnapshotWanted, TakeSnapshot

log = logging.getLogger("gpumux.client")

VERSION = 1
MAX_INLINE = 8 << 20  # bytes of tensors stored in the notes, because no step uses them and the daemon has none


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of steps that a state is the result of: of the submitted function, and of all functions."""

    main: int
    all: int


def write(
    table: StateTable, state: State, resident: Sequence[int], counts: Counts, generator: ClientGenerator | None = None,
    waves: Waves | None = None,
) -> bytes:  # fmt: skip
    """The notes of a snapshot taken now, packed. `resident`: the job buffers in the daemon, in the daemon's order.
    `generator`: of the client, if the job draws from one. `waves`: of a job of two, which keeps both replicas."""
    there = {buffer: i for i, buffer in enumerate(resident)}
    index = there if waves is None else waves.of_lane(there, waves.newest)
    inline: dict[str, Any] = {}
    room = MAX_INLINE
    described = _describe(table, state, index)
    for name, tensor in table.tensors:
        if name in described["tensors"]:
            continue
        if tensor.nbytes <= room:
            room -= tensor.nbytes
            inline[name] = [_dtype(tensor.dtype), list(tensor.shape), _bytes(tensor)]
        else:
            inline[name] = None
    inline |= {name: [_dtype(t.dtype), list(t.shape), _bytes(t)] for name, t in table.counters}
    body = {
        "version": VERSION,
        "saved_at": time.time(),
        "sizes": [table.buffers[b].nbytes for b in resident],
        "steps": [counts.main, counts.all],
        "inline": inline,
        "groups": [[_hyper(group) for group in o.param_groups] for o in table.optimizers],
        **described,
    }
    if waves is not None and waves.step:
        lane = 1 - waves.newest
        body["waves"] = {
            "step": waves.step,
            "other": _describe(table, waves.state_of(lane), waves.of_lane(there, lane)),
            "gradients": {name: there[buffer] for name, buffer in table.gradients_between_waves.items()},
        }
    if generator is not None:
        body["generator"] = _bytes(generator.state())
        body["own_generator"] = generator.own is not None
    return bytes(msgpack.packb(body))


def _describe(table: StateTable, state: State, index: Mapping[int, int]) -> dict[str, Any]:
    """Where the tensors of a state lie. `index`: of each job buffer, among those of the snapshot."""
    places = ((name, table.place(tensor)) for name, tensor in table.tensors)
    return {
        "tensors": {name: _place(p, index) for name, p in places if p is not None and p.buffer in index},
        "optimizers": [_tree(frozen, state, index) for frozen in state.structure.optimizers],
        "gradients": [[i, _place(place, index)] for i, place in state.structure.kept if place.buffer in index],
    }


def write_of_rank(
    table: StateTable, state: State, resident: Sequence[int], counts: Counts, generator: ClientGenerator | None = None
) -> bytes:
    """The notes of a snapshot of one rank. Its job is recovered, but can't be resumed."""
    return bytes(msgpack.packb({"version": VERSION, "over_ranks": True}))


def _place(place: Place, index: Mapping[int, int]) -> list[Any]:
    return [index[place.buffer], _dtype(place.dtype), list(place.size), list(place.stride), place.offset]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(raw_bytes(flat))


def _tree(frozen: Any, state: State, index: Mapping[int, int]) -> Any:
    """An optimizer's state, its keys and leaves as tagged lists."""
    return [[kind, key, _node(tree, state, index)] for (kind, key), tree in frozen]


def _node(node: Any, state: State, index: Mapping[int, int]) -> Any:
    if isinstance(node, DeviceLeaf):
        if node.place.buffer not in index:
            return ["none"]  # no step uses it
        return ["at", *_place(node.place, index)]
    if isinstance(node, HostLeaf):
        return ["number", state.host[node.var], None if node.dtype is None else _dtype(node.dtype)]
    if isinstance(node, ConstLeaf):
        return ["const", node.value]
    kind, items = node
    if kind == "d":
        return ["d", [[key, _node(value, state, index)] for key, value in items]]
    return [kind, [_node(value, state, index) for value in items]]


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if _plain(v)}
    held = {key: v for key, v in group.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
    found |= {key: {"dtype": _dtype(v.dtype), "value": v.item()} for key, v in held.items()}
    return {key: v for key, v in found.items() if key != "params"}


def _put_hyper(group: dict[str, Any], key: str, value: Any) -> None:
    """Put a kept hyperparameter back, also one that only a step made there, as load_state_dict does."""
    now = group.get(key)
    if isinstance(value, dict):
        kept = torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
        if isinstance(now, torch.Tensor) and now.dtype == kept.dtype and now.dim() == 0:
            now.copy_(kept)
        elif now is None or _plain(now):
            group[key] = kept
    elif key not in group or _plain(now):
        group[key] = tuple(value) if isinstance(now, tuple) else value


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(v) and not isinstance(v, (tuple, list)) for v in value)
    if isinstance(value, Enum):
        return False  # the script's own is there again
    return value is None or isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) < 2**63)


# ---- restoring a job from a snapshot


class SnapshotMetadata:
    """The contents of a snapshot: `body`, its notes, and `buffers`, the bytes (uint8) of each of its buffers.
    `saved_at`: when it was begun, by the clock (time.time()) of the client that did; 0.0 if that is not known."""

    def __init__(self, data: torch.Tensor, notes: int) -> None:
        """`data`: the snapshot's bytes (uint8), whose last `notes` are the packed notes. Raises ConfigError if they are
        no snapshot."""
        try:
            body = msgpack.unpackb(data[data.numel() - notes :].numpy().tobytes(), strict_map_key=False)
            if body["version"] != VERSION:
                raise ValueError(f"version {body['version']}")
            if body.get("over_ranks"):
                raise ValueError("the job ran over several daemons, and each has a part of its state alone")
            sizes = [int(n) for n in body["sizes"]]
            self.counts = Counts(*map(int, body["steps"]))
            self.saved_at = float(body.get("saved_at", 0.0))
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            del data  # the error's traceback would keep it
            raise ConfigError(f"the kept snapshot can't be read: {error}", "start the job anew") from error
        self.body = body
        self.waves: dict[str, Any] | None = body.get("waves")  # what a job of two waves keeps besides
        at, self.buffers = 0, []
        for nbytes in sizes:
            self.buffers.append(data[at : at + nbytes].clone())
            at += aligned(nbytes)
        self.generator = data[at : data.numel() - notes].numpy().tobytes()
        if body.get("own_generator"):
            self.generator = generator_region(body["generator"])
        if any(b.numel() != n for b, n in zip(self.buffers, sizes, strict=True)):
            raise ConfigError("the kept snapshot is shorter than its notes say", "start the job anew")

    def put_back(self, table: StateTable, other: bool = False, generator: ClientGenerator | None = None) -> None:
        """Overwrite the state that `table` describes: parameters and buffers, the optimizers' state and
        hyperparameters, gradients. Also sets torch's default generator if the job drew from that, and `generator` if
        the job had one for itself, and this one is for itself, too. `other`: with the replica that the newest step of a
        job of two waves did not change. Raises ConfigError, and changes nothing, if the job had other models or
        optimizers."""
        body = self.body if self.waves is None or not other else self.body | self.waves["other"]
        try:
            fresh = [(name, tensor, self._of(name, tensor, body)) for name, tensor in table.tensors]
            if len(body["optimizers"]) != len(table.optimizers):
                raise ConfigError(f"the job had {len(body['optimizers'])} optimizers", "submit as many")
            states = [self._state(table, tree) for tree in body["optimizers"]]
            gradients = {int(i): self._view(place).to(table.home) for i, place in body["gradients"]}
            groups = [
                (group, then)
                for optimizer, thens in zip(table.optimizers, body["groups"], strict=True)
                for group, then in zip(optimizer.param_groups, thens, strict=True)
            ]
            shared = None
            if "generator" in body and not body.get("own_generator"):
                shared = torch.Generator().set_state(_state_of(body["generator"]))
            own = None
            if generator is not None and generator.own is not None and (drawn := generator_state(self.generator)):
                own = torch.Generator().set_state(_state_of(drawn))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise _other(f"{type(error).__name__}: {error}") from error
        with torch.no_grad():
            for _, tensor, value in fresh:
                if value is not None:
                    tensor.copy_(value)
        if shared is not None:
            torch.default_generator.set_state(shared.get_state())
        if generator is not None and own is not None:
            generator.set_state(own.get_state())
        for optimizer, state in zip(table.optimizers, states, strict=True):
            optimizer.state = state
        for i, parameter in enumerate(table.params):
            parameter.grad = gradients.get(i)
        for group, then in groups:
            for key, value in then.items():
                with torch.no_grad():
                    _put_hyper(group, key, value)
        missing = [name for name, _, value in fresh if value is None]
        if missing:
            log.warning(
                "%d tensors that no step of the job touches were too large to keep and stay as they are here: %s",
                len(missing), ", ".join(missing[:4]),
            )  # fmt: skip

    def others(self, table: StateTable) -> dict[str, torch.Tensor]:
        """The values of the tensors that steps wrote and that `table` does not describe, by name: they are of no
        model."""
        names = {*self.body["tensors"], *self.body["inline"]} - {name for name, _ in table.tensors}
        return {name: value.clone() for name in sorted(names) if (value := self._value(name, self.body)) is not None}

    def gradients_between_waves(self) -> dict[str, torch.Tensor]:
        """The bytes of the gradients that the newest step of two waves left, by the parameter's name."""
        assert self.waves is not None
        return {name: self.buffers[at] for name, at in self.waves["gradients"].items()}

    def _of(self, name: str, tensor: torch.Tensor, body: Mapping[str, Any]) -> torch.Tensor | None:
        found = self._value(name, body)
        if found is not None and (found.shape != tensor.shape or found.dtype != tensor.dtype):
            raise _other(f"its {name} was {found.dtype} {tuple(found.shape)}, not {tensor.dtype} {tuple(tensor.shape)}")
        return found

    def _value(self, name: str, body: Mapping[str, Any]) -> torch.Tensor | None:
        """None for a tensor that was too large to keep. Raises ConfigError if the job had none of that name."""
        if name in body["tensors"]:
            found = self._view(body["tensors"][name])
        elif name in body["inline"]:
            kept = body["inline"][name]
            if kept is None:
                return None
            dtype, shape, raw = kept
            flat = torch.frombuffer(bytearray(raw), dtype=_type(dtype)) if raw else torch.empty(0, dtype=_type(dtype))
            found = flat.reshape(shape)
        else:
            raise _other(f"it had no {name}")
        return found

    def _view(self, place: Sequence[Any]) -> torch.Tensor:
        buffer, dtype, size, stride, offset = place
        raw = self.buffers[buffer]
        kind = _type(dtype)
        width = torch.empty(0, dtype=kind).element_size()
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else offset - 1
        if min((offset, *size, *stride)) < 0 or (last + 1) * width > raw.numel():
            raise ValueError(f"a tensor beyond the {raw.numel()} bytes of its buffer")
        return torch.empty(0, dtype=kind).set_(raw.untyped_storage(), offset, size, stride)

    def _state(self, table: StateTable, tree: Any) -> Any:
        made: Any = defaultdict(dict)
        for kind, key, node in tree:
            made[table.params[key] if kind == "p" else key] = self._leaf(node, table.home)
        return made

    def _leaf(self, node: Any, home: torch.device | None) -> Any:
        kind = node[0]
        if kind == "at":
            return self._view(node[1:]).to(home)
        if kind == "number":
            return node[1] if node[2] is None else torch.tensor(node[1], dtype=_type(node[2]))
        if kind == "const":
            return node[1]
        if kind == "d":
            return {key: self._leaf(value, home) for key, value in node[1]}
        if kind in ("l", "t"):
            values = [self._leaf(value, home) for value in node[1]]
            return values if kind == "l" else tuple(values)
        raise ValueError(f"optimizer state of kind {kind!r}")


def _type(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no type {name!r}")
    return found


def _state_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _other(why: str) -> ConfigError:
    return ConfigError(f"this is not the job that was kept: {why}", "submit the same models and optimizers as then")


# ---- a copy of the newest snapshot in the client's own memory


class SnapshotCopy:
    """The newest snapshot of a job, in this process: a job that goes on at another daemon finds none of its own there.
    It takes as many bytes as the job's state, and for a moment twice as many, when the next snapshot replaces it.
    `held`: as Remote.held."""

    def __init__(self, held: Callable[[], tuple[tuple[int, ...], ...]]) -> None:
        self._held = held
        self._read: StateRead | None = None

    def take(self, session: Session, number: int, asked: Asked) -> None:
        """Copy what was read of snapshot `number`, and free the memory that it came in. Raises what a daemon refused
        with; the copy before it stays then."""
        parts: list[tuple[m.SnapshotRead, Sequence[bytearray]]] = []
        refused: GpumuxError | None = None
        for each, (reply, frames) in zip(session.each_daemon, asked.answers(), strict=True):
            if isinstance(reply, m.Refusal):
                refused = from_code(reply.code, reply.message, reply.remedy)
            elif reply.segment:
                with each.take_segment(reply.segment, reply.nbytes) as segment:
                    parts.append((replace(reply, segment=0), [bytearray(segment.view())]))
            else:
                parts.append((reply, [bytearray(frames[0])]))
        if refused is not None:
            raise refused
        self._read = StateRead(number, [], list(parts), self._held())

    def read(self, numbers: Sequence[int]) -> StateRead | None:
        """The copy, if it is of one of these snapshots."""
        return self._read if self._read is not None and self._read.snapshot in numbers else None


# ---- when the client takes a snapshot
#
#     idle --(it is time, or the log fills)--> preparing --(there is memory)--> taking --(saved or failed)--> idle
#
# A job of a cluster goes from taking to copying when the snapshot was saved, and then to idle.
#
# The client asks for snapshots, because it knows which steps it can run again. `tick` is called before each step and
# advances this state machine; there is no thread for it. The client waits only for TakeSnapshot, one round trip, which
# fixes the snapshot's place among the steps. If the log is full (replay.py), the step waits for the snapshot; if that
# fails, the log is given up and training goes on without it.


FIRST_S = 1.0  # from a job's first step, or from its recovery, to a snapshot
SHARE = 5  # at most 1/SHARE of the time is spent on writing


class Snapshots:
    """Takes the snapshots of one job. `notes()`: the notes for a snapshot taken now, and the number of steps before it.
    `last`: the number of the newest snapshot, 0 for none. `copy`: gets each snapshot that was saved, and only then the
    log drops what lies before it."""

    def __init__(
        self, job: str, name: str, replay: ReplayLog, *, interval_s: float, last: int,
        news: deque[SnapshotSaved | SnapshotWanted], notes: Callable[[], tuple[bytes, int]],
        copy: SnapshotCopy | None = None,
    ) -> None:  # fmt: skip
        self._job = job
        self._name = name
        self._log = replay
        self._interval_s = interval_s
        self._number = last
        self._news = news
        self._notes = notes
        self._copy = copy
        self._asked: Asked | None = None
        self._taking = False
        self._saved: SnapshotSaved | None = None  # to be copied
        self._copying: Asked | None = None
        self._failing = False
        self._waited = False
        self._not_before = 0.0  # after a failure
        self._due = time.monotonic() + min(interval_s, FIRST_S)

    @property
    def number(self) -> int:
        """The number of the newest snapshot that was asked for."""
        return self._number

    def tick(self, session: Session) -> None:
        """Advance the snapshot under way, or begin one if it is time. Raises DaemonGone."""
        if self._news:
            self._read_news()
        if self._saved is not None:
            self._advance_copy(session)
        if self._asked is not None:
            if self._asked.reply() is not None:
                self._take(session)
        elif not self._taking and self._saved is None:
            now = time.monotonic()
            if (now >= self._due or self._log.wants_point) and now >= self._not_before and self._log.has_news:
                self._asked = session.ask(PrepareSnapshot(0, self._job))
        if self._log.full:
            self._make_room(session)

    def take_now(self, session: Session) -> bool:
        """Save the present state and wait until it is written. Returns whether it was. Raises DaemonGone."""
        while self._busy:
            self._advance(session)
        if not self._log.has_news and not self._failing:
            return True
        self._asked = session.ask(PrepareSnapshot(0, self._job))
        while self._busy:
            self._advance(session)
        return not self._failing

    def restart(self) -> None:
        """Forget the snapshot under way, because the job was recovered in another session."""
        self._asked, self._taking = None, False
        self._saved = self._copying = None
        self._news.clear()
        self._due = time.monotonic() + min(self._interval_s, FIRST_S)
        self._not_before = 0.0

    @property
    def _busy(self) -> bool:
        return self._asked is not None or self._taking or self._saved is not None

    def _advance(self, session: Session) -> None:
        """Wait until the snapshot under way enters its next state."""
        if self._asked is not None:
            session.wait_reply(self._asked)
            self._take(session)
        elif self._saved is not None:
            self._advance_copy(session)
            if self._copying is not None:
                session.wait_reply(self._copying)
        elif self._taking:
            session.wait(lambda: bool(self._news))
            self._read_news()

    def _make_room(self, session: Session) -> None:
        """Wait for a snapshot that empties the full log, or give the log up."""
        failed = False
        while self._log.full and not failed:
            # The steps after the snapshot under way may fill the log alone; then another snapshot is taken here.
            if not self._busy:
                self._asked = session.ask(PrepareSnapshot(0, self._job))
            while self._busy and self._log.full:
                self._advance(session)
            failed = not self._busy and self._failing
        if self._log.full:
            self._log.give_up()
            log.warning(
                "job %r holds all it may keep to run again, and its state can't be saved: it goes on, but can't come"
                " back if the daemon ends before a snapshot succeeds",
                self._name,
            )
        elif not self._waited:
            self._waited = True
            log.warning(
                "job %r waited until its state was saved, as it holds all it may keep to run again: raise replay_bytes"
                " if its steps are to go on meanwhile",
                self._name,
            )

    def _take(self, session: Session) -> None:
        """Take the snapshot if the reply to PrepareSnapshot says that there is memory for it."""
        assert self._asked is not None
        reply, asked = self._asked.reply(), self._asked
        self._asked = None
        asked.forget()
        if isinstance(reply, m.Refusal):
            self._failed(from_code(reply.code, reply.message, reply.remedy))
            return
        notes, steps = self._notes()
        number = self._number = self._number + 1
        self._log.mark(number)
        try:
            session.call(TakeSnapshot(0, self._job, number, steps, 1), [notes], timeout=None)
        except GpumuxError as error:
            if session.dead is not None:
                raise  # the snapshot may be on the disk all the same
            self._log.failed(number)
            self._failed(error)
            return
        self._taking = True

    def _read_news(self) -> None:
        """Handle the daemon's messages about snapshots."""
        while self._news:
            message = self._news.popleft()
            if isinstance(message, SnapshotWanted):
                self._due = 0.0
                continue
            if message.snapshot != self._number:
                continue
            self._taking = False
            if message.code:
                self._log.failed(message.snapshot)
                self._failed(from_code(message.code, message.message, message.remedy))
                continue
            if self._copy is None:
                self._log.saved(message.snapshot)
                self._succeeded(message)
            else:
                self._saved = message

    def _advance_copy(self, session: Session) -> None:
        """Ask for the snapshot that was saved, or copy it if it is here."""
        assert self._saved is not None
        assert self._copy is not None
        if self._copying is None:
            self._copying = session.ask(ReadSnapshot(0, self._job, [self._saved.snapshot]))
        if self._copying.reply() is None:
            return
        saved, asked = self._saved, self._copying
        try:
            self._copy.take(session, saved.snapshot, asked)
        except GpumuxError as error:
            if session.dead is not None:
                raise
            self._log.failed(saved.snapshot)
            self._failed(error)
        else:
            self._log.saved(saved.snapshot, alone=True)
            self._succeeded(saved)
        asked.forget()
        self._saved = self._copying = None

    def _succeeded(self, saved: SnapshotSaved) -> None:
        self._not_before = 0.0
        self._due = time.monotonic() + max(self._interval_s, (SHARE - 1) * saved.seconds)
        if self._failing:
            self._failing = False
            log.warning("job %r: its state is saved again", self._name)

    def _failed(self, error: GpumuxError) -> None:
        now = time.monotonic()
        self._due, self._not_before = now + self._interval_s, now + min(self._interval_s, 5.0)
        if not self._failing:
            log.warning("job %r: its state could not be saved, and will be tried again: %s", self._name, error)
        self._failing = True
