"""Reads a trace as viewers do, and checks what they need: the tests' own reader of the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class ReadTrace:
    """A trace that has passed all checks.

    Attributes:
        about: what the file says of itself.
        events: all events but names.
        names: of the processes, by pid.
    """

    def __init__(self, read: dict[str, Any]) -> None:
        self.about = read.get("otherData", {})
        events: list[Event] = read["traceEvents"]
        self.names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        self.events = [event for event in events if event["ph"] != "M"]
        _check_fields(self.events, self.names)
        _check_nesting(self.spans())
        _check_pairs(self.events)
        self._check_arrows()

    @classmethod
    def of(cls, path: Path) -> ReadTrace:
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def spans(self, process: str = "", name: str = "") -> list[Event]:
        return [
            event
            for event in self.events
            if event["ph"] == "X" and event["name"].startswith(name) and process in ("", self.names[event["pid"]])
        ]

    def requests(self, process: str = "") -> list[tuple[Event, Event]]:
        ends = {_id(event): event for event in self.events if event["ph"] == "e"}
        return [
            (event, ends[_id(event)])
            for event in self.events
            if event["ph"] == "b" and process in ("", self.names[event["pid"]])
        ]

    def arrows(self) -> list[list[Event]]:
        arrows: defaultdict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "stf":
                assert isinstance(event["id"], int), "Perfetto takes integers alone"
                arrows[event["id"]].append(event)
        return list(arrows.values())

    def round_trips(self) -> int:
        """Return how many requests were handled within the time from their asking to their answers, all others fail."""
        begun = {_id(begin): (begin, end) for begin, end in self.requests()}
        seen = 0
        for arrow in self.arrows():
            begin, end = begun[arrow[0]["args"]["id"]]
            inside = [event["ts"] for event in arrow if event["pid"] != begin["pid"]]
            assert all(begin["ts"] <= at for at in inside), f"handled before it was asked: {begin} {arrow} {self.about}"
            if "answered" not in begin["args"]:
                assert all(at <= end["ts"] for at in inside), "answered before it was handled"
                seen += bool(inside)
        return seen

    def _check_arrows(self) -> None:
        spans: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
        for span in self.spans():
            spans[span["pid"], span["tid"]].append(span)
        for arrow in self.arrows():
            phases = "".join(event["ph"] for event in arrow)
            assert phases[0] == "s", phases
            assert phases[-1] == "f", phases
            assert set(phases[1:-1]) <= {"t"}, phases
            assert [event["ts"] for event in arrow] == sorted(event["ts"] for event in arrow)
            for event in arrow:
                around = spans[event["pid"], event["tid"]]
                assert any(span["ts"] - 0.001 <= event["ts"] <= span["ts"] + span["dur"] + 0.001 for span in around)


def _check_fields(events: list[Event], names: dict[int, str]) -> None:
    for event in events:
        assert event["ph"] in "Xbestfi", event
        assert event["pid"] in names, event
        assert event["ts"] >= 0, event
        assert event.get("dur", 0) >= 0, event
        assert isinstance(event["tid"], int), event


def _check_nesting(spans: list[Event]) -> None:
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in spans:
        tracks[span["pid"], span["tid"]].append(span)
    for track in tracks.values():
        open_: list[float] = []
        for span in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            start, end = span["ts"], span["ts"] + span["dur"]
            while open_ and open_[-1] <= start + 0.0015:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.0015, f"{span} overlaps another"
            open_.append(end)


def _check_pairs(events: list[Event]) -> None:
    begun: dict[str, Event] = {}
    ended: set[str] = set()
    for event in events:
        if event["ph"] == "b":
            assert _id(event) not in begun, event
            begun[_id(event)] = event
        elif event["ph"] == "e":
            begin = begun[_id(event)]
            assert _id(event) not in ended, event
            ended.add(_id(event))
            assert (begin["cat"], begin["name"], begin["pid"]) == (event["cat"], event["name"], event["pid"])
            assert begin["ts"] <= event["ts"], event
    assert ended == set(begun), "requests without an end"


def _id(event: Event) -> str:
    return str(event["id2"]["local"])
