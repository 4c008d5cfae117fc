"""A call's arguments, checked: what its keys mean, which values go out, and where those that come back are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvstore.dist.incoming import Writer
from kvstore.dist.plans.plan import Plan, Plans
from kvstore.spec import Key, require_same
from kvstore.store.arguments import group, one_kind
from kvstore.values import Arrays, as_output, as_tensors, reduce_to, spec_of, tensors_of

ABSENT: Any = object()  # for an argument that a call does not have
CPU = torch.device("cpu")


class StoreCall(NamedTuple):
    """A push, a pull, or both at once.

    Attributes:
        plan: of the keys.
        values: what to push, for each key an array, contiguous; None to push nothing.
        writer: writes the new values; None if they are not wanted.
    """

    plan: Plan
    values: Arrays | Sequence[torch.Tensor] | None
    writer: Writer | None


class Arguments:
    """Checks the arguments of one store's calls.

    Args:
        plans: of the store.
        on_device: sum the values of several devices on the first one's device, not on the CPU.
    """

    def __init__(self, plans: Plans, on_device: bool) -> None:
        self._plans = plans
        self._on_device = on_device

    def check(self, key: Any, value: Any = ABSENT, out: Any = ABSENT, copy: bool = True) -> StoreCall:
        """Return the call that pushes ``value`` and pulls into ``out``, as ``KVStore`` takes them.

        Raises:
            KeyNotInitialized, Mismatch, UsageError: there can be no such call.
        """
        known = self._plans.known(key)
        if out is ABSENT:
            plan, values = self._values(known, key, value)
            return StoreCall(plan, values, None)
        if value is ABSENT:
            plan, writer = self._writer(known, key, out, copy)
            return StoreCall(plan, None, writer)
        plan, values = self._values(known, key, value)
        _, writer = self._writer(known, key, out, copy)
        if not (isinstance(values, Arrays) and values.own) and writer.disturbs(tensors_of(values)):
            values = [tensor.clone() for tensor in tensors_of(values)]
        return StoreCall(plan, values, writer)

    def _values(self, known: Plan | None, key: Any, value: Any) -> tuple[Plan, Arrays | Sequence[torch.Tensor]]:
        """Return the plan of ``key``, and the sum over devices of each key's values, contiguous.

        A sum is on the first value's device or on the CPU.
        """
        arrays = None if known is None else known.values(value if isinstance(key, list | tuple) else [value])
        if known is not None and arrays is not None:
            return known, arrays
        grouped = self._grouped(key, value)
        plan = self._plans.of(grouped)
        by_key = [self._checked(key, as_tensors(values)) for key, values in grouped.items()]
        return plan, [
            reduce_to(tensors, tensors[0].device if self._on_device or len(tensors) == 1 else CPU).contiguous()
            for tensors in by_key
        ]

    def _writer(self, known: Plan | None, key: Any, out: Any, copy: bool) -> tuple[Plan, Writer]:
        """Return the plan of ``key``, and what writes its values into ``out``."""
        arrays = None if known is None else known.outputs(out if isinstance(key, list | tuple) else [out])
        if known is not None and arrays is not None:
            return known, Writer(known, arrays, copy)
        grouped = self._grouped(key, out)
        plan = self._plans.of(grouped)
        outs = [self._checked(key, [as_output(array) for array in arrays]) for key, arrays in grouped.items()]
        return plan, Writer(plan, outs, copy)

    def _grouped(self, key: Any, value: Any) -> dict[Key, list[Any]]:
        grouped = group(key, value)
        one_kind(grouped, self._plans.entries.kind)
        return grouped

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        entry = self._plans.entries[key]
        for tensor in tensors:
            require_same(key, entry.spec, spec_of(tensor), "this call has")
        return tensors
