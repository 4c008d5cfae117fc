"""The options of distributed stores: what ``create`` was given, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvstore.errors import UsageError, warn_renamed
from kvstore.optim.hyperparameters import finite
from kvstore.rule import AGGREGATE, LATE, Rule
from kvstore.store.registry import flag, require_options

SSP_STALENESS = 3  # of a 'dist_ssp' store that is not told
_COMMON = ("timeout", "bigarray_bound", "check_finite")
_OWN = {  # those of each type of store, besides
    "dist_sync": ("quorum", "late", "grace"),
    "dist_device_sync": ("quorum", "late", "grace"),
    "dist_async": ("delay_compensation", "aggregate"),
    "dist_ssp": ("staleness", "delay_compensation", "aggregate"),
}

T = TypeVar("T", int, float)


def parse(name: str, canonical: str, options: Mapping[str, Any]) -> tuple[Rule, float | None, int | None]:
    """Return the rule, the deadline of waits in seconds, and the bound of arrays that are cut; None for the job's."""
    if "timeout_s" in options:
        warn_renamed("timeout_s=", "timeout=", stacklevel=5)
        others = {option: value for option, value in options.items() if option != "timeout_s"}
        options = {"timeout": options["timeout_s"], **others}
    require_options(name, options, (*_COMMON, *_OWN[canonical]))
    return _rule(canonical, options), _least(options, "timeout", 0.001), _least(options, "bigarray_bound", 1)


def _rule(canonical: str, options: Mapping[str, Any]) -> Rule:
    check = flag("check_finite", options.get("check_finite"))
    if canonical in ("dist_async", "dist_ssp"):
        given = _least(options, "staleness", 0)
        staleness = None if canonical == "dist_async" else SSP_STALENESS if given is None else given
        factor = options.get("delay_compensation")
        compensation = 0.0 if factor is None else float(finite("delay_compensation", factor))
        given_aggregate = options.get("aggregate")
        aggregate = AGGREGATE[0] if given_aggregate is None else given_aggregate
        return Rule("async", staleness, compensation=compensation, finite=check, aggregate=aggregate)
    late = options.get("late")
    return Rule(
        "sync",
        quorum=_least(options, "quorum", 1),
        late=LATE[0] if late is None else late,
        grace=_least(options, "grace", 0.0) or 0.0,
        finite=check,
    )


def _least(options: Mapping[str, Any], name: str, least: T) -> T | None:
    """Return option ``name``, a number of the kind of ``least`` and no smaller; None if it is not given."""
    value = options.get(name)
    if value is None:
        return None
    number = finite(name, value)
    if number < least or type(least)(number) != number:
        raise UsageError(f"{name}={value!r} must be {'an integer, ' * isinstance(least, int)}at least {least}")
    return type(least)(number)
