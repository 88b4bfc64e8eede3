"""What was learned of interference: kept in the state directory, taken up by the next daemon, shown to each user."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from gpumux.daemon.records import MOST_NAMES, MOST_USERS, ProgramNames
from gpumux.daemon.state import learned
from gpumux.daemon.state.learned import NAME, LearnedFile
from gpumux.scheduler.guard.interference import VERSION, PairSlowdown, RangeSlowdown
from gpumux.wire import messages as msg
from tests.daemon import fakes
from tests.daemon.fakes import Daemon
from tests.scheduler.test_interference import learned as kept_of_simulation


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield LearnedFile(fd, str(tmp_path / NAME))
    os.close(fd)


def daemon(file: LearnedFile | None) -> Daemon:
    return Daemon(learned=file)


def take_up(running: Daemon) -> None:
    for program, kept in kept_of_simulation().items():
        running.loop.scheduler.take_up(program, kept)


def pass_time(running: Daemon, seconds: float) -> None:
    running.now += seconds
    running.loop.turn()


def written(file: LearnedFile, running: Daemon) -> bytes:
    """The file's content once the offloaded write is done."""
    running.loop._offload.close()
    return file.read()


def asked(running: Daemon, session: str, program: str = "") -> dict:
    ((answer, _),) = running.say(session, msg.GetInterference(1, program))
    return answer.body


def test_a_daemon_takes_up_what_an_earlier_one_kept(file, caplog):
    first = daemon(file)
    take_up(first)
    before = first.loop.scheduler.interference()
    first.close()
    assert before
    with caplog.at_level(logging.INFO, "gpumux.daemon"):
        second = daemon(file)
    assert second.loop.scheduler.interference() == before
    assert f"taken up what was learned of interference: 1 of 1 programs, from {file.shown}" in caplog.text
    content = file.read()
    second.close()
    assert file.read() == content, "nothing was learned since"


def test_it_is_written_while_the_daemon_runs_and_only_when_something_was_learned(file):
    running = daemon(file)
    pass_time(running, learned.SAVE_EVERY_S)
    take_up(running)
    assert file.read() == b""
    for _ in range(3):  # one turn packs a program, the next one has the file written
        pass_time(running, learned.SAVE_EVERY_S)
    first = written(file, running)
    version, about, programs, names = msgpack.unpackb(first, strict_map_key=False)
    assert (version, list(programs), names) == (VERSION, list(kept_of_simulation()), [])
    assert about["name"] == fakes.INFO.name
    running.close()


def test_it_is_written_although_more_is_learned_all_the_time(file):
    """One turn for each program, then the file, then nothing for a while, whatever was learned meanwhile."""
    running = daemon(file)
    learned_of = {"aa": 1, "bb": 1, "cc": 1}

    def learned_meanwhile():
        for program in learned_of:
            learned_of[program] += 1
        return dict(learned_of)

    packed = []
    running.loop.scheduler.learned = learned_meanwhile
    running.loop.scheduler.kept = lambda program: packed.append(program) or [program]
    pass_time(running, learned.SAVE_EVERY_S)
    for _ in range(10):
        pass_time(running, 0.001)
    assert sorted(packed) == ["aa", "bb", "cc"]
    assert running.loop._learned.due >= running.now + learned.SAVE_EVERY_S - 1.0
    assert sorted(msgpack.unpackb(written(file, running))[2]) == ["aa", "bb", "cc"]
    running.close()


@pytest.mark.parametrize("planted", ["pipe", "link", "hard link"])
def test_what_lies_under_the_new_files_name_is_replaced_unopened(tmp_path: Path, planted: str):
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "state"
    elsewhere.write_text("precious")
    directory.mkdir()
    new = directory / f"{NAME}.new"
    plant = {
        "pipe": lambda: os.mkfifo(new),
        "link": lambda: new.symlink_to(elsewhere),
        "hard link": lambda: new.hardlink_to(elsewhere),
    }
    plant[planted]()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    reader = os.open(new, os.O_RDONLY | os.O_NONBLOCK)  # with one, opening a pipe to write to it does not wait
    file = LearnedFile(fd, str(directory / NAME))
    file.write(b"learned")
    assert file.read() == b"learned"
    assert elsewhere.read_text() == "precious"
    os.close(reader)
    os.close(fd)


def test_more_programs_than_are_kept_are_packed_once_and_the_newest_stay(file):
    running = daemon(file)
    programs = {f"{at:04}": 1 for at in range(learned.MOST_PROGRAMS + 44)}
    packed = []
    running.loop.scheduler.learned = lambda: programs
    running.loop.scheduler.kept = lambda program: packed.append(program) or [program]
    pass_time(running, learned.SAVE_EVERY_S)
    for _ in range(learned.MOST_PROGRAMS + 60):
        pass_time(running, 0.001)
    pass_time(running, learned.SAVE_EVERY_S)
    assert sorted(packed) == [*programs][-learned.MOST_PROGRAMS :]
    assert sorted(msgpack.unpackb(written(file, running))[2]) == sorted(packed)
    running.close()


def test_no_more_is_written_than_is_read(file, monkeypatch):
    monkeypatch.setattr(learned, "MOST_KEPT_BYTES", 1000)
    running = daemon(file)
    running.loop.scheduler.learned = lambda: {f"{at}": 1 for at in range(9)}
    running.loop.scheduler.kept = lambda program: ["x" * (300 if program != "8" else 5000)]
    running.close()
    kept = msgpack.unpackb(file.read())[2]
    assert set(kept) >= {"6", "7"}
    assert sum(map(len, kept.values())) <= 1000


def test_a_write_that_failed_is_tried_again(file, monkeypatch, caplog):
    running = daemon(file)
    take_up(running)
    real, failed = file.write, []

    def fail(content):
        failed.append(content)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "write", fail)
    pass_time(running, learned.SAVE_EVERY_S)
    while "can't write" not in caplog.text or not running.loop._learned._unwritten:
        pass_time(running, 0.001)
    monkeypatch.setattr(file, "write", real)
    running.close()
    assert failed
    assert list(msgpack.unpackb(file.read(), strict_map_key=False)[2]) == list(kept_of_simulation())


def test_a_daemon_without_a_state_directory_forgets_it():
    running = daemon(None)
    take_up(running)
    running.connect("root", uid=0)
    assert asked(running, "root")["kept_in"] == ""
    assert asked(running, "root")["pairs"]
    running.close()


def about(content: bytes) -> dict:
    return msgpack.unpackb(content, strict_map_key=False)[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"\xc1" + content,
        lambda content: content[: len(content) // 2],
        lambda content: b"text",
        lambda content: msgpack.packb([1, 2]),
        lambda content: msgpack.packb([VERSION, about(content), None, None]),
        lambda content: msgpack.packb([VERSION, about(content), {}, [["aa", float("inf"), "x"]]]),
        lambda content: msgpack.packb([VERSION, about(content), {}, [["aa", 1]]]),
        lambda content: b"\x00" * (learned.MAX_BYTES + 1),
        lambda content: content + b"x",
    ],
)
def test_a_damaged_file_is_named_and_learned_anew(file, caplog, damage):
    first = daemon(file)
    take_up(first)
    first.close()
    file.write(damage(file.read()))
    with caplog.at_level(logging.INFO, "gpumux.daemon"):
        second = daemon(file)
    assert f"can't read {file.shown}" in caplog.text or f"learned of interference ({file.shown})" in caplog.text
    assert second.loop.scheduler.interference() == []
    take_up(second)
    second.close()
    assert list(msgpack.unpackb(file.read(), strict_map_key=False)[2]) == list(kept_of_simulation())


def test_one_damaged_program_costs_no_others(file, caplog):
    program = next(iter(kept_of_simulation()))
    first = daemon(file)
    take_up(first)
    first.close()
    version, about, programs, names = msgpack.unpackb(file.read(), strict_map_key=False)
    whole = programs[program]
    torn = {str(at): whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 101)}
    others = {"short": whole[:-1], "none": b"", "nonsense": learned.sealed(msgpack.packb([["nonsense"]])), **torn}
    file.write(msgpack.packb([version, about, others | programs, names]))
    with caplog.at_level(logging.INFO, "gpumux.daemon"):
        second = daemon(file)
    assert list(second.loop.scheduler.learned()) == [program]
    assert f"1 of {len(others) + 1} programs" in caplog.text
    second.close()


def test_what_was_learned_on_another_device_is_not_taken_up(file, caplog, monkeypatch):
    first = daemon(file)
    take_up(first)
    first.close()
    monkeypatch.setattr(fakes, "INFO", replace(fakes.INFO, name="another"))
    with caplog.at_level(logging.INFO, "gpumux.daemon"):
        second = daemon(file)
    assert second.loop.scheduler.interference() == []
    assert f"another version or device: it is now {file.shown}.other" in caplog.text
    take_up(second)
    second.close()
    assert sorted(path.name for path in Path(file.shown).parent.iterdir()) == [NAME, f"{NAME}.other"]


def test_a_link_or_a_file_that_can_not_be_written_ends_nothing(file, tmp_path, caplog):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{NAME}.new").mkdir()
    running = daemon(file)
    assert "can't read" in caplog.text
    take_up(running)
    running.close()
    assert "can't write what was learned of interference" in caplog.text
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_each_user_sees_the_names_of_its_own_programs_and_operators_see_all(file):
    running = daemon(file)
    pair = PairSlowdown("aa", "bb", 1.0, 1.2, 0.5, 9, 0.1, 2, [RangeSlowdown(0, 4, 0.05, 1.2, 9, False)])
    running.loop.scheduler.interference = lambda: [pair]
    running.loop.context.records.program_names.add("aa", 1001, "mine")
    running.loop.context.records.program_names.add("bb", 1002, "theirs")
    seen = {}
    for name, uid in (("me", 1001), ("they", 1002), ("root", 0)):
        running.connect(name, uid=uid)
        (found,) = asked(running, name)["pairs"]
        seen[name] = found["high"], found["low"]
    assert seen["me"] == ({"program": "aa", "name": "mine"}, {"program": "bb", "name": ""})
    assert seen["they"] == ({"program": "aa", "name": ""}, {"program": "bb", "name": "theirs"})
    assert seen["root"] == ({"program": "aa", "name": "mine"}, {"program": "bb", "name": "theirs"})
    for program, found in (("mine", 1), ("theirs", 0), ("a", 1), ("b", 1), ("c", 0)):
        assert len(asked(running, "me", program)["pairs"]) == found
    body = asked(running, "me")
    assert body["kept_in"] == file.shown
    assert body["left_out"] == 0
    (shown,) = body["pairs"]
    assert shown["ranges"] == [{"first": 0, "end": 4, "solo_s": 0.05, "slowdown": 1.2, "samples": 9, "banned": False}]
    running.close()


def test_an_answer_is_bounded_and_says_what_it_leaves_out():
    running = daemon(None)
    ranges = [RangeSlowdown(at, at + 1, 0.1, 1.0 + at / 1000, 1, False) for at in range(100)]
    pairs = [PairSlowdown(f"{at:03}", "low", 1.0, 2.0 - at / 1000, 0.5, 20, 0.1, 100, ranges) for at in range(300)]
    running.loop.scheduler.interference = lambda: pairs
    running.connect("me", uid=1001)
    body = asked(running, "me")
    assert (len(body["pairs"]), body["left_out"]) == (learned.MOST_PAIRS, 300 - learned.MOST_PAIRS)
    first = body["pairs"][0]
    assert (len(first["ranges"]), first["ranges_left_out"]) == (learned.MOST_RANGES, 100 - learned.MOST_RANGES)
    assert first["ranges"][0]["first"] == 100 - learned.MOST_RANGES, "those that lose most, in their order"
    figures = running.loop.figures()
    assert (len(figures.pairs), figures.pairs_known) == (learned.MOST_FIGURES, 300)
    running.close()


def test_names_are_bounded_and_the_newest_stay():
    names = ProgramNames()
    for at in range(MOST_NAMES + 5):
        names.add(f"p{at}", 1, "x")
    assert names.of("p0", 1) == ""
    assert names.of(f"p{MOST_NAMES + 4}", 1) == "x"
    for uid in range(MOST_USERS + 2):
        names.add("p", uid, f"of {uid}")
    assert names.of("p", 0) == ""
    assert names.of("p", MOST_USERS + 1) == names.of("p", None) == f"of {MOST_USERS + 1}"
