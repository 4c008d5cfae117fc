"""A job as JSON, for programs: what ``kvstore-status --json`` prints. Pure.

``VERSION`` grows when a name goes or changes its meaning; names may be added at any time. docs/reference/commands.md
describes the format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.job.place import ObservingPlace
from kvstore.observing.advice import advise
from kvstore.observing.figures import job_rounds_per_s, link_rates, logged_values, waits
from kvstore.observing.quantities import figures_of
from kvstore.observing.text import LocatedMember
from kvstore.observing.view import JobView, MemberView

VERSION = 1


def described_job(place: ObservingPlace) -> dict[str, Any]:
    return {
        "name": place.job,
        "command": place.command,
        "launcher": place.launcher,
        "pid": place.pid,
        "started": place.started,
        "workers": place.workers,
        "servers": place.servers,
    }


def described_view(view: JobView) -> dict[str, Any]:
    return {
        "runs_s": max(0.0, view.at - view.started),
        "failure": view.failure,
        "expected": {
            "worker": view.num_workers,
            "server": view.num_servers,
            "standby": view.num_standbys,
            "aggregator": view.num_aggregators,
        },
        "rounds_per_s": job_rounds_per_s(view),
        "members": [_member(member) for member in view.members],
        "waits": [
            {
                "role": wait.role,
                "ranks": list(wait.ranks),
                "waiting": list(wait.waiting),
                "missing": list(wait.missing),
                "seconds": wait.seconds,
                "why": wait.why,
            }
            for wait in waits(view, 0.0)
        ],
        "scheduler_waits": view.waits,
        "scheduler_awaited": list(view.awaited),
        "advice": [dataclasses.asdict(advice) for advice in advise(view)],
        "events": [
            {"number": event.number, "ago_s": max(0.0, view.at - event.at), "text": event.text} for event in view.events
        ],
    }


def described_stacks(located: Iterable[LocatedMember]) -> list[dict[str, Any]]:
    return [
        {
            "role": member.role,
            "rank": member.rank,
            "place": member.place,
            "threads": []
            if member.stacks is None
            else [{"name": name, "frames": list(frames)} for name, frames in member.stacks.threads],
        }
        for member in located
    ]


def finite(value: Any) -> Any:
    """Return ``value`` with None in place of each number that JSON cannot have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(each) for each in value]
    return value


def _member(member: MemberView) -> dict[str, Any]:
    own = figures_of(member)
    figures: dict[str, Any] | None = None if own is None else dict(own)
    if figures is not None and member.worker is not None:
        figures |= {"links": link_rates(member.worker), "values": logged_values(member.worker)}
    return {
        "role": member.role,
        "rank": member.rank,
        "starts": member.incarnation,
        "state": member.state,
        "silent_s": member.silent_s,
        "address": member.address,
        "host": member.host,
        "pid": member.pid or None,
        "figures": figures,
    }
