"""The step of an optimizer: gradients change weights, by torch.optim. Local stores and servers use the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from kvstore.errors import UsageError, WeightsInDoubt
from kvstore.optim.algorithms.tensorwise import MxnetSGD
from kvstore.optim.fused import FusedGroup, Kind, alike
from kvstore.optim.optimizer import Changes, Optimizer, require_rule
from kvstore.optim.param_groups import ParamGroups, Rates, build, first_state
from kvstore.optim.row_rules import RowRule, RowState
from kvstore.optim.states import StateStore, aligned
from kvstore.spec import HALVES, Key, shorten, sum_dtype
from kvstore.values import PlacedRows, RowRange, RowWindow, cut, one_thread, split_like


class Updater:
    """Updates weights with torch.optim, many at once, in place.

    Half-precision weights are updated through a float32 copy that is part of the state, as in MXNet's
    ``multi_precision``.

    Args:
        name_of: gives the name by which the optimizer's groups and multipliers know a key; by default the key itself.

    Attributes:
        lr, rescale_grad, changes: what the next updates use instead of the optimizer's own; see
            ``Optimizer.require_changes``.

    Raises:
        ValueError: torch refuses the hyper-parameters (a negative learning rate, say).
    """

    def __init__(self, optimizer: Optimizer, name_of: Callable[[Key], Key] | None = None) -> None:
        groups = ParamGroups(optimizer, name_of)
        self.states = StateStore(groups)  # what the optimizer keeps of each key
        self._use(groups)

    @property
    def optimizer(self) -> Optimizer:
        return self._groups.optimizer

    def configure(self, optimizer: Optimizer) -> None:
        """Go on with other numbers for the same rule, keeping the states."""
        groups = ParamGroups(optimizer, self._groups.name_of)
        self.states.configure(groups)
        self._use(groups)

    def _use(self, groups: ParamGroups) -> None:
        self._groups = groups
        self.lr, self.rescale_grad = groups.optimizer.lr, groups.optimizer.rescale_grad
        self.changes: Changes = {}
        self._torch = build(groups.optimizer, 0, torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
        self._torch.state = self.states.by_param
        self._fused = bool(self._torch.defaults.get("fused"))
        self._reads_only = self._fused and not isinstance(self._torch, MxnetSGD)
        self._of_rows: dict[tuple[Rates, torch.dtype, int], RowUpdater] = {}

    def update(self, items: Sequence[tuple[Key, torch.Tensor, torch.Tensor]]) -> None:
        """Update weights in place.

        Args:
            items: (key, weight, gradient) of one shape and dtype each, floating point; the gradients are overwritten.
        """
        parameters = [self.states.alone(key, weight) for key, weight, _ in items]
        kinds = list(map(self.states.kind, parameters, self._groups.rates([key for key, _, _ in items])))
        group = FusedGroup(parameters, kinds, [weight for _, weight, _ in items], whole=self.optimizer.whole)
        grads = [
            aligned(grad.to(param.dtype).view(param.shape), param)
            for (_, _, grad), param in zip(items, group.params, strict=True)
        ]
        self.step([group], [grads])

    def group(self, keys: Sequence[Key], shapes: Sequence[Sequence[int]], flat: torch.Tensor) -> FusedGroup:
        """Prepare the update of weights that lie back to back, those that are updated alike as one.

        What comes back can be used until another is made with one of ``keys``, or ``configure`` or ``states.load`` is
        called.

        Args:
            flat: the weights, flat and contiguous, of floating point; updated in place.
        """
        states = self.states
        for key in keys:
            states.release(key)
        rates = self._groups.rates(keys)
        sizes = [math.prod(shape) for shape in shapes]
        ranges = [(place, place + 1) for place in range(len(keys))]
        if not self.optimizer.whole:
            ranges = alike(list(map(states.likeness, keys, rates)), sizes)
        parts = split_like(flat, [sum(sizes[start:stop]) for start, stop in ranges])
        weights = [
            part.view(shapes[start]) if stop - start == 1 else part
            for (start, stop), part in zip(ranges, parts, strict=True)
        ]
        parameters = states.fuse([(keys[start:stop], shapes[start:stop]) for start, stop in ranges], weights)
        kinds = [states.kind(parameter, rates[start]) for parameter, (start, _) in zip(parameters, ranges, strict=True)]
        return FusedGroup(parameters, kinds, weights, flat, self.optimizer.whole)

    def reads_only(self) -> bool:
        return self._reads_only and self.rescale_grad == 1.0 and self.optimizer.clip_gradient is None

    def rescale(self, grads: list[torch.Tensor]) -> None:
        """Multiply gradients by ``rescale_grad``, in place, and take them as they are in the next step."""
        if self.rescale_grad != 1.0:
            torch._foreach_mul_(grads, self.rescale_grad)
            self.rescale_grad = 1.0

    def step(
        self,
        groups: Sequence[FusedGroup],
        grads: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        keep: bool = False,
    ) -> None:
        """Update the weights of ``groups``: all, or none if the optimizer fails.

        Args:
            grads: of each group, of the dtype of its params; see ``FusedGroup.take``. They are overwritten.
            keep: whether the gradients, one tensor for each group, must stay as they are.

        Raises:
            WeightsInDoubt: the optimizer failed when it had perhaps updated some of them, those of its ``keys``.
        """
        if keep and not self.reads_only():
            copies = [torch.mul(grad, self.rescale_grad) for grad in grads if isinstance(grad, torch.Tensor)]
            self._clip(copies)
            grads = copies
        else:
            every = [tensor for given in grads for tensor in ([given] if isinstance(given, torch.Tensor) else given)]
            if self.rescale_grad != 1.0:
                torch._foreach_mul_(every, self.rescale_grad)
            self._clip(every)
        by_kind: dict[Kind, list[torch.Tensor]] = {}
        for group in groups:
            for (*same, old), params in group.members.items():
                kind: Kind = (*same, old or group.stepped)  # type: ignore[assignment]
                by_kind[kind] = [*by_kind[kind], *params] if kind in by_kind else params
        touched: list[torch.Tensor] = []
        try:
            for group, given in zip(groups, grads, strict=True):
                group.take(given)
            for (number, lr_mult, wd_mult, _, _, old), params in by_kind.items():
                settings = self._groups.settings(Rates(number, lr_mult, wd_mult), self.lr, self.changes)
                self._call(settings, params, touched, old=old)
            for group in groups:
                group.finish()
        except Exception as exc:
            if not touched:
                raise
            raise self._in_doubt(groups, touched, exc) from exc
        finally:
            for group in groups:
                group.drop()

    # ---- some rows of arrays

    def alone(self, key: Key, weight: torch.Tensor) -> FusedGroup:
        """Return the group of one weight, wherever that is now."""
        parameter = self.states.alone(key, weight)
        kind = self.states.kind(parameter, self._groups.rates([key])[0])
        return FusedGroup([parameter], [kind], [weight], whole=self.optimizer.whole)

    def lazy(self, group: FusedGroup) -> bool:
        """Whether a gradient of some rows changes these alone. If not, it is one with zeros in all other rows."""
        rule = self.optimizer.found.rows
        return rule is not None and all(self.optimizer.lazy(number) for number, *_ in group.members)

    def step_rows(self, group: FusedGroup, grads: Sequence[Sequence[RowRange]], keep: bool = False) -> None:
        """Update some rows of the weights of ``group``, which is ``lazy``: all, or none if the optimizer fails.

        Args:
            grads: of the dtype of the params, in one or several parts. The windows of each are all weights. What the
                last part that has a row makes of it is its new value. They are overwritten.
            keep: whether they must stay as they are.

        Raises:
            WeightsInDoubt: it failed when it had perhaps written some rows.
        """
        kinds = {id(param): kind for kind, params in group.members.items() for param in params}
        written: list[tuple[PlacedRows, torch.Tensor, torch.Tensor]] = []
        counts: list[torch.Tensor] = []
        start = 0
        for place, param in enumerate(group.params):
            first, start = start, start + param.numel()
            if id(param) not in kinds:
                continue
            for ranges in grads:
                for part in cast("list[RowRange]", cut(ranges, first, start)):
                    written += self._stepped_rows(group, place, kinds[id(param)], part, keep)
            if "step" in (state := self.states.by_param.get(param, {})):
                counts.append(state["step"])
        group.stepped = True
        try:
            for places, flat, rows in written:
                places.put(flat, rows)
            for count in counts:
                count.add_(1)
        except Exception as exc:
            raise self._in_doubt([group], group.params, exc) from exc

    def _stepped_rows(
        self, group: FusedGroup, place: int, kind: Kind, part: RowRange, keep: bool
    ) -> list[tuple[PlacedRows, torch.Tensor, torch.Tensor]]:
        """Return what an update of rows writes: where in what, and which rows."""
        param, window = group.params[place], part.window
        updater = self._row_updater(kind, param.dtype, window.width, group.keys[place][0])
        own = self._row_states(param, kind[0], updater.states, window.width)
        places, inside = window.places(part.ids), slice(part.start, part.stop)
        where = [(places, param.view(-1)[inside])]
        for name, state in updater.states.items():
            flat = own[name].view(-1)
            narrow = state.columns is not None  # of each row of an array that is whole
            where.append((RowWindow(0, flat.numel(), 1).places(part.ids), flat) if narrow else (places, flat[inside]))
        rows, *states = (each.gather(flat).cpu() for each, flat in where)
        count = int(own["step"]) + 1 if "step" in own else 1 + (kind[-1] or group.stepped)
        hyper = RowHyperparameters(self.lr, self.rescale_grad, self.changes)
        updater.step(count, rows, part.rows.cpu(), dict(zip(updater.states, states, strict=True)), hyper, keep)
        written = [(each, flat, values) for (each, flat), values in zip(where, [rows, *states], strict=True)]
        if (mirror := group.mirror(place)) is not None:
            written.append((places, mirror[inside], rows))
        return written

    def _row_updater(self, kind: Kind, dtype: torch.dtype, width: int, key: Key) -> RowUpdater:
        which = Rates(*kind[:3]), dtype, width
        if which not in self._of_rows:
            name = str(dtype).removeprefix("torch.")
            self._of_rows[which] = RowUpdater(self.optimizer, self._groups.name_of(key), name, width, False)
        return self._of_rows[which]

    def _row_states(
        self, param: torch.Tensor, number: int, rule: Mapping[str, RowState], width: int
    ) -> Mapping[str, torch.Tensor]:
        """Return the state of ``param``; if it has none, it begins as that of rows does: no step has been made."""
        state = self.states.by_param.get(param)
        if state is None and rule:
            first = first_state(self.optimizer, number, param.device)
            state = {name: torch.zeros_like(value) for name, value in first.items() if torch.is_tensor(value)}
            for name, of_rows in rule.items():
                shape = param.shape if of_rows.columns is None else (param.numel() // width, of_rows.columns)
                # Of an array, the param is the master itself, so no state begins as it.
                state[name] = torch.full(shape, of_rows.initial or 0.0, dtype=param.dtype, device=param.device)
            self.states.by_param[param] = state
        return state or {}

    def _in_doubt(
        self, groups: Sequence[FusedGroup], touched: Sequence[torch.Tensor], exc: Exception
    ) -> WeightsInDoubt:
        which = set(map(id, touched))
        keys = [
            key
            for group in groups
            for param, its_keys in zip(group.params, group.keys, strict=True)
            if id(param) in which
            for key in its_keys
        ]
        names = shorten(dict.fromkeys(map(self._groups.name_of, keys)))
        return WeightsInDoubt(
            f"{self.optimizer.name} failed in the middle of an update of {names}, which may be half made: "
            f"{type(exc).__name__}: {exc}",
            keys,
        )

    def _clip(self, grads: list[torch.Tensor]) -> None:
        if self.optimizer.clip_gradient is not None:
            torch._foreach_clamp_min_(grads, -self.optimizer.clip_gradient)
            torch._foreach_clamp_max_(grads, self.optimizer.clip_gradient)

    def _call(
        self, settings: Mapping[str, Any], params: Sequence[torch.Tensor], touched: list[torch.Tensor], *, old: bool
    ) -> None:
        """Update ``params``, which have one dtype and are on one device, in one call of the optimizer.

        A fused step is one kernel, which runs or does not. What other steps have changed, the tensors' versions tell,
        unless the optimizer's class may go past them.

        Args:
            touched: gets those that have changed, and perhaps only in part if this raises.
            old: whether they have state already, if they have any.
        """
        # torch's step looks at all parameters that it has, so it has those of this call alone.
        self._torch.param_groups[0].update(settings, params=params)
        before = [] if self._fused else self._versions(params)
        try:
            with one_thread() if self.optimizer.found.alone else nullcontext():
                self._torch.step()
        except Exception:
            unseen = self.optimizer.found.unseen
            touched += params if unseen else [param for param, tensor, was in before if tensor._version != was]
            if not old:
                self.states.forget(params)
            raise
        touched += params

    def _versions(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Return ``params`` with each of their states and themselves, and how often torch has changed that in place."""
        by_param = self.states.by_param
        return [
            (param, value, value._version)
            for param in params
            for value in (param, *by_param.get(param, {}).values())
            if value is param or (torch.is_tensor(value) and value.dim())
        ]


@contextmanager
def refusals(optimizer: Optimizer) -> Iterator[None]:
    """Turn torch's refusal of hyper-parameters into the caller's error; for updaters in the caller's process."""
    try:
        yield
    except (ValueError, TypeError) as exc:
        raise UsageError(f"{optimizer.name}: {exc}") from None


BLOCK = 1 << 18  # elements: rows are updated in blocks, so that scratch memory is small and stays in the cache

NO_CHANGES: Changes = MappingProxyType({})


class RowHyperparameters(NamedTuple):
    """What an update uses in place of the optimizer's own; None, or no change: the optimizer's own."""

    lr: float | None = None  # the learning rate of tables whose group has none of its own
    rescale: float | None = None  # what gradients are multiplied by first
    changes: Changes = NO_CHANGES  # see ``Optimizer.changes``


OWN = RowHyperparameters()


MASTER = "master"  # the state of a row of half precision that is the row in float32, as ``FusedParameter`` has it


class RowUpdater:
    """Updates rows of one table. Those of half precision are updated through their ``MASTER``, which is a state.

    Args:
        key: of the table, by which ``optimizer`` knows it.
    """

    def __init__(self, optimizer: Optimizer, key: Key, dtype: str, width: int, grows: bool) -> None:
        require_rule(optimizer, key, grows)
        self._rule: RowRule = optimizer.found.rows  # type: ignore[assignment]
        self._optimizer = optimizer
        self._groups = ParamGroups(optimizer)
        (self._rates,) = self._groups.rates([key])
        self._width = width
        self._half: torch.dtype | None = getattr(torch, dtype) if dtype in HALVES else None
        dtype = sum_dtype(dtype)
        self._dtype: torch.dtype = getattr(torch, dtype)  # of what is computed
        self._scratch = self._kept = torch.empty(0, dtype=self._dtype, device="cpu")
        self._use(OWN)
        self.rule = optimizer.rule  # what states must have in common to be those of this updater
        # what is kept of each row, by name. Updaters of one rule may differ in it: without momentum, there is no
        # ``momentum_buffer``.
        own = {} if self._half is None else {MASTER: RowState(None, dtype, None)}
        self.states: Mapping[str, RowState] = own | self._rule.states(self._settings, dtype)
        # whether rows stay as they are that have no gradient. If not, each step must be given all rows of the table,
        # with gradients of 0 where nothing was pushed.
        self.lazy = optimizer.lazy(self._rates.group)

    def steps_as(self, other: RowUpdater) -> bool:
        """Whether rows of the other's table may be in one step with those of this one's, which are as wide."""
        return self._optimizer is other._optimizer and self._rates == other._rates and self.lazy == other.lazy

    def empty_states(self, count: int) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        return {
            name: np.empty((count, self._width if state.columns is None else state.columns), state.dtype)
            for name, state in self.states.items()
        }

    def step(
        self,
        count: int,
        rows: torch.Tensor,
        grads: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: RowHyperparameters = OWN,
        keep: bool = False,
    ) -> None:
        """Update rows and their states in place.

        Args:
            count: the number of this update of the table, from 1; updates without rows count, too.
            rows: of shape (n, width), contiguous. Those of bfloat16 may be int16 with its bits.
            grads: of the same shape, and the dtype of the table's sums; overwritten.
            states: of these rows, by the names of ``states``, each of shape (n, columns).
            keep: whether the gradients must stay as they are.
        """
        if hyper is not self._hyper and hyper != self._hyper:
            self._use(hyper)
        number = rows.shape[0]
        if not number:
            return
        blocks = max(1, round(number * self._width / BLOCK))  # so that none has only a few rows
        block = -(-number // blocks)
        if self._rule.scratches and self._scratch.numel() < block * self._width:
            self._scratch = torch.empty(block * self._width, dtype=self._dtype, device="cpu")
        keep = keep and not self._reads_only
        if keep and self._kept.numel() < block * self._width:
            self._kept = torch.empty(block * self._width, dtype=self._dtype, device="cpu")
        if blocks == 1:
            self._update(count, rows, grads, states, keep)
            return
        for start in range(0, number, block):
            part = slice(start, min(start + block, number))
            own = {name: states[name][part] for name in self.states}
            self._update(count, rows[part], grads[part], own, keep)

    def _update(
        self,
        count: int,
        rows: torch.Tensor,
        grads: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        keep: bool,
    ) -> None:
        if keep:
            grads = torch.mul(grads, self._rescale, out=self._kept[: grads.numel()].view(grads.shape))
        elif self._rescale != 1.0:
            grads.mul_(self._rescale)
        if (bound := self._optimizer.clip_gradient) is not None:
            grads.clamp_(-bound, bound)
        scratch = self._scratch[: rows.numel()].view(rows.shape) if self._rule.scratches else self._scratch
        if self._half is None:
            self._rule.step(rows, grads, states, self._settings, count, scratch)
        else:
            self._rule.step(states[MASTER], grads, states, self._settings, count, scratch)
            rows.view(self._half).copy_(states[MASTER])

    def _use(self, hyper: RowHyperparameters) -> None:
        lr = self._optimizer.lr if hyper.lr is None else hyper.lr
        self._settings: dict[str, Any] = self._groups.settings(self._rates, lr, hyper.changes)
        self._hyper = hyper
        self._rescale = self._optimizer.rescale_grad if hyper.rescale is None else hyper.rescale
        # Whether gradients are left as they are.
        self._reads_only = (
            self._rescale == 1.0 and self._optimizer.clip_gradient is None and self._rule.reads_only(self._settings)
        )
