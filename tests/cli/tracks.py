"""Support: the rules that a file of Chrome trace events must follow."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

REQUIRED = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "ph", "pid", "tid", "ts", "s", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "C": {"name", "cat", "ph", "pid", "ts", "args"},
    "s": {"name", "cat", "ph", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "ph", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "ph", "id", "pid", "tid", "ts", "bp"},
}
SLACK_US = 2e-3  # of rounding


def check(content: dict) -> dict[str, list[dict]]:
    """The events of each named track, by group and name. Raises AssertionError unless a viewer would show all."""
    events = content["traceEvents"]
    end = content["otherData"]["seconds"] * 1e6
    for event in events:
        assert set(event) == REQUIRED[event["ph"]], event
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans, tracks, arrows = defaultdict(list), defaultdict(list), defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["pid"] in groups
        if event["ph"] == "C":
            assert 0.0 <= event["ts"] <= end + SLACK_US
            assert all(value >= 0 for value in event["args"].values())
            continue
        where = event["pid"], event["tid"]
        assert where in names, "a track without a name"
        assert 0.0 <= event["ts"] <= end + SLACK_US
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
            continue
        tracks[names[where]].append(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
            assert event["ts"] + event["dur"] <= end + SLACK_US
            spans[where].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
    for placed in spans.values():
        steps = {(start, end) for start, end, kind in placed if kind == "step"}
        inner = [(start, end) for start, end, kind in placed if kind == "wait"]
        for start, end in inner:
            assert any(start == began and end <= ended + SLACK_US for began, ended in steps), "a wait outside its step"
        for alike in (sorted(inner), sorted((start, end) for start, end, kind in placed if kind != "wait")):
            for (_, before), (after, _) in pairwise(alike):
                assert before <= after + SLACK_US, "spans of one track overlap, and a viewer would nest them"
    for chain in arrows.values():
        assert [e["ph"] for e in chain] == ["s", *["t"] * (len(chain) - 2), "f"]
        for before, after in pairwise(chain):
            ends = [end for start, end, kind in spans[before["pid"], before["tid"]]
                    if start == before["ts"] and kind != "step"]  # fmt: skip
            assert ends, "an arrow that begins at no span is not shown"
            assert min(ends) <= after["ts"] + SLACK_US, "an arrow leads back in time"
        last = chain[-1]
        assert any(start == last["ts"] for start, _, _ in spans[last["pid"], last["tid"]]), "an arrow that ends nowhere"
    return dict(tracks)
