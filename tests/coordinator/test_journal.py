"""What a coordinator keeps: one uses it at a time, and it is refused where it can't be read."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gpumux.cluster.events import DeviceFacts, PairMeasured
from gpumux.coordinator.core import Coordinator, CoordinatorConfig, DaemonAway, DaemonFound
from gpumux.coordinator.journal import LEARNED, NAME, Journal
from gpumux.coordinator.main import names_of
from gpumux.daemon.main import EX_TEMPFAIL, served
from gpumux.errors import ConfigError, EndpointBusy, StateNotKept
from gpumux.types import Peer, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.router import Incoming, Opened

HELLO = msg.Hello(msg.PROTOCOL_VERSION, "0", "control", 1, "", False)
ME = Peer(os.getuid(), os.getgid(), 1)
CONFIG = CoordinatorConfig()


def filled() -> Coordinator:
    """A daemon, a job that waits and one that was refused."""
    made = Coordinator(CONFIG, names_of)
    made.handle(DaemonFound("n", "h", ("ipc:///n",), DeviceFacts(1 << 30)), 1.0)
    made.handle(Opened(SessionId("s"), ME, HELLO, False), 2.0)
    for at, name in enumerate(("a", "b")):
        place = msg.PlaceJob(1, f"{at:032x}", name, 0, 1, 1 << 40, ["p"], 2, True, 0)
        made.handle(Incoming(SessionId("s"), ME, place, []), 3.0 + at)
    made.handle(Incoming(SessionId("s"), ME, msg.PlacedJobEnded(2, f"{0:032x}", ""), []), 5.0)
    return made


def rows(directory: Path) -> dict[tuple[str, str], bytes]:
    with closing(sqlite3.connect(directory / NAME)) as file:
        return {(section, key): value for section, key, value in file.execute("SELECT * FROM kept")}


def open_and_load(directory: Path) -> Coordinator:
    with closing(Journal(directory)) as opened:
        return opened.load(CONFIG, names_of)


def test_a_gang_that_was_made_smaller_is_so_still_and_what_was_kept_before_there_were_any_is_read(tmp_path: Path):
    made = filled()
    (job,) = made.placement.jobs.values()
    job.request, job.asked, job.sizes = replace(job.request, devices=2), 3, (1, 2)
    with closing(Journal(tmp_path)) as journal:
        journal.keep(made)
    (again,) = open_and_load(tmp_path).placement.jobs.values()
    assert (again.request.devices, again.asked, again.sizes) == (2, 3, (1, 2))
    (key,) = [key for key in rows(tmp_path) if key[0] == "jobs"]
    about, kept = msgpack.unpackb(rows(tmp_path)[key])
    del kept["asked"], kept["sizes"]
    with closing(sqlite3.connect(tmp_path / NAME)) as file, file:
        file.execute("UPDATE kept SET value = ? WHERE section = 'jobs'", [msgpack.packb([about, kept])])
    (old,) = open_and_load(tmp_path).placement.jobs.values()
    assert (old.request.devices, old.asked, old.sizes) == (2, 2, ())


def test_what_was_kept_is_there_again(tmp_path: Path):
    made = filled()
    journal = Journal(tmp_path)
    journal.keep(made)
    journal.close()
    again = Journal(tmp_path)
    found = again.load(CONFIG, names_of)
    assert list(found.jobs) == list(made.jobs) == [f"{1:032x}"]
    (job,) = found.placement.jobs.values()
    assert (job.request, job.number, job.submitted_at) == (made.placement.jobs[job.id].request, 2, 4.0)
    assert found.answers == made.answers
    assert list(found.daemons) == ["n"]
    assert found.placement.now == made.placement.now
    again.keep(found)
    again.close()
    kept = rows(tmp_path)
    made.handle(None, 6.0)
    journal = Journal(tmp_path)
    journal.load(CONFIG, names_of)
    journal.keep(made)  # the clock alone has changed, so nothing is written
    journal.close()
    assert rows(tmp_path) == kept


def test_what_is_over_is_no_longer_kept(tmp_path: Path):
    made = filled()
    journal = Journal(tmp_path)
    journal.keep(made)
    made.handle(Incoming(SessionId("s"), ME, msg.PlacedJobEnded(2, f"{1:032x}", ""), []), 6.0)
    journal.keep(made)
    journal.close()
    assert not [key for key in rows(tmp_path) if key[0] == "jobs"]


def test_another_coordinator_can_not_use_it(tmp_path: Path):
    journal = Journal(tmp_path)
    with pytest.raises(EndpointBusy, match="another coordinator uses"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


@pytest.mark.parametrize("damage", ["rubbish", "version", "row", "section"])
def test_a_file_that_can_not_be_read_is_refused(tmp_path: Path, damage: str):
    journal = Journal(tmp_path)
    journal.keep(filled())
    journal.close()
    if damage == "rubbish":
        for path in tmp_path.glob(f"{NAME}*"):
            path.write_bytes(b"rubbish" * 1000)
    else:
        with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as file:
            if damage == "version":
                file.execute("PRAGMA user_version = 99")
            elif damage == "row":
                file.execute("UPDATE kept SET value = ? WHERE section = 'jobs'", (msgpack.packb([{}, {"number": 1}]),))
            else:
                file.execute("UPDATE kept SET section = 'others' WHERE section = 'jobs'")
    with pytest.raises(ConfigError) as caught:
        open_and_load(tmp_path)
    assert NAME in str(caught.value)
    assert ("another --state-dir" if damage == "version" else "move it away") in caught.value.remedy


def test_it_belongs_to_its_user_alone(tmp_path: Path):
    Journal(tmp_path / "state").close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / NAME).stat().st_mode & 0o777 == 0o600


def test_a_link_in_its_place_is_not_followed(tmp_path: Path):
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        Journal(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path):
    """SQLite would write to what a planted link beside its file leads to."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(ConfigError, match=f"others may write to {state}") as refused:
        Journal(state)
    assert refused.value.remedy == f"chmod go-w {state}"
    assert list(state.iterdir()) == []


def test_a_disk_that_is_full_stops_the_coordinator(tmp_path: Path):
    journal = Journal(tmp_path)
    made = filled()
    journal._file.execute("PRAGMA max_page_count = 3")
    for at in range(2, 200):
        place = msg.PlaceJob(1, f"{at:032x}", "x" * 300, 0, 1, 1 << 40, ["p"], 2, True, 0)
        made.handle(Incoming(SessionId("s"), ME, place, []), 10.0 + at)
    with pytest.raises(StateNotKept, match="can't be written") as caught:
        journal.keep(made)
    journal.close()

    def fail(stack: ExitStack) -> None:
        raise caught.value

    assert served(fail, logging.getLogger("test"), "") == EX_TEMPFAIL  # which systemd answers by a new start


def test_an_answer_is_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There are thousands of them, and each happening looks at all that is kept."""
    journal, made = Journal(tmp_path), filled()
    journal.keep(made)
    packed: list[Any] = []
    monkeypatch.setattr(msgpack, "packb", lambda value: packed.append(value) or b"")
    made.handle(None, 6.0)
    with suppress(StateNotKept):
        journal.keep(made)
    journal.close()
    assert len(made.answers) == 1
    assert packed
    assert not [value for value in packed if isinstance(value, dict) and "outcome" in value]


def test_nodes_that_drain_are_known_again(tmp_path: Path):
    made = filled()
    made.handle(Incoming(SessionId("s"), Peer(0, 0, 1), msg.DrainNode(3, "n", True), []), 6.0)
    made.handle(DaemonAway("n", "gone"), 7.0)
    made.handle(None, 100.0)
    assert "n" not in made.placement.nodes
    with closing(Journal(tmp_path, wall=lambda: 5000.0)) as journal:
        journal.keep(made)
    with closing(Journal(tmp_path, wall=lambda: 5900.0)) as journal:  # of which the coordinator was away for 900 s
        found = journal.load(CONFIG, names_of)
        assert found.drained == {"n": 6.0 - 900.0}
        journal.keep(found)
    with closing(Journal(tmp_path, wall=lambda: 6000.0)) as journal:
        found = journal.load(CONFIG, names_of)
        assert found.drained == {"n": 6.0 - 1000.0}
    found.handle(DaemonFound("n", "h", ("ipc:///n",), DeviceFacts(1 << 30)), 101.0)
    assert found.placement.nodes["n"].draining


def test_what_was_learned_is_known_again(tmp_path: Path):
    """In the order in which it was learned, so that the oldest is forgotten first; written now and then, and at the
    end."""
    made = filled()
    made.handle(PairMeasured("h", "l", 1.25, 0.5, 7), 6.0)
    made.learn_programs(1000, "a job", ("ab", "cd"))
    with closing(Journal(tmp_path)) as journal:
        journal.keep(made)
        for number in range(3):
            made.handle(PairMeasured("h", f"l{number}", 2.0, 0.1), 7.0 + number)
        made.handle(PairMeasured("h", "l", 1.5, 0.5), 10.0)
        journal.keep(made)
    assert [key for key in rows(tmp_path) if key[0] == "pairs"] == [("pairs", "h l")]
    made.learn_programs(1000, "another job", ("ef",))
    with closing(Journal(tmp_path)) as journal:
        journal.keep(made, last=True)
    found = open_and_load(tmp_path)
    costs = found.placement.costs
    assert [pair.low for pair in costs.newest(9)] == ["l0", "l1", "l2", "l"]
    assert (costs.between(("h",), ("l",)), len(costs)) == ((1.5, 0.5), 4)
    assert found.newest_programs(9) == [(1000, "a job", ("ab", "cd")), (1000, "another job", ("ef",))]
    before = rows(tmp_path)
    with closing(Journal(tmp_path)) as journal:
        again = journal.load(CONFIG, names_of)
        again.handle(PairMeasured("h", "l1", 1.1, 0.9), 51.0)
        journal.keep(again)
    changed = {key for key, value in rows(tmp_path).items() if before.get(key) != value}
    assert {key for key in changed if key[0] in LEARNED} == {("pairs", "h l1")}


def test_no_more_is_learned_than_the_coordinator_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LEARNED, "pairs", 3)
    made = filled()
    with closing(Journal(tmp_path)) as journal:
        for number in range(9):
            made.handle(PairMeasured("h", f"l{number}", 2.0, 0.1), 7.0 + 40.0 * number)
            journal.keep(made)
    assert [key[1] for key in rows(tmp_path) if key[0] == "pairs"] == ["h l6", "h l7", "h l8"]


def test_a_file_of_before_anything_learned_was_kept_is_read(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        journal.keep(filled())
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as file:
        file.execute("INSERT INTO kept VALUES ('drained', 'n', ?)", [msgpack.packb(None)])
        file.execute("PRAGMA user_version = 1")
    assert open_and_load(tmp_path).drained == {"n": None}
