"""The current hyper-parameters, as torch's ``param_groups``, and how they reach the store or process that updates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from kvstore import UsageError
from kvstore.dynamo import outside_graphs
from kvstore.optim.algorithms.tensorwise import evaluated
from kvstore.optim.hyperparameters import finite, is_number, plain
from kvstore.optim.optimizer import LAZY, MULTIPLIERS, Optimizer
from kvstore.plain import scalar
from workers.common.checks import at_least
from workers.common.torch_internals import multiply, set_in_group
from workers.trainer.parameters import Collected, Key, Parameter

Schedule: TypeAlias = Callable[[int], float]
Snapshot: TypeAlias = "list[dict[str, Any]]"

STATE = "trainer"  # the only item of the ``state`` of a ``state_dict``


class Loaded(NamedTuple):
    """What a file of states holds."""

    num_update: int
    groups: Snapshot
    tables: list[int]
    trained: list[int]
    more: Mapping[str, Any]


class TrainerRates:
    """The hyper-parameters that schedulers write and updates read.

    Args:
        groups: torch's ``param_groups``, with all hyper-parameters in each. What is written into them is used next.
        optimizer: the description that what updates has; it has as many groups, or none if there is one.
        set_hyperparameters: of the store that updates, or of what updates in this process.
        frozen: the positions of parameters that are not trained; others may take positions out of this set.

    Attributes:
        tables: the positions of parameters whose gradients are sparse, so that the store has states of their rows.
        trained: in a run that goes on, the positions of parameters that the former run trained in the end.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        optimizer: Optimizer,
        set_hyperparameters: Callable[..., None],
        schedule: Schedule | None = None,
        num_update: int = 0,
        keys: Sequence[Key] = (),
        frozen: Collection[int] = (),
    ) -> None:
        self.groups = groups
        self.num_update = num_update
        self.tables: list[int] = []
        self.trained: list[int] = []
        self._frozen, self._number = frozen, sum(len(group["params"]) for group in groups)
        self._first = [position for position in range(self._number) if position not in frozen]
        self._optimizer = optimizer
        self._set_hyperparameters = set_hyperparameters
        self._schedule = schedule
        self._keys = keys
        self._kept = [list(group["params"]) for group in groups]
        self._names = [[name for name in optimizer.defaults(0) if name in group] for group in groups]
        self._sizes = [0 for _ in groups]  # how many entries each group had when ``_names`` was made
        # The groups that follow the optimizer's learning rate.
        own = ["lr" in group.hyper for group in optimizer.groups] or [False]
        self._following = [group for group, has_own in zip(groups, own, strict=True) if not has_own]
        if schedule is not None and len(self._following) < len(groups):
            raise UsageError(
                "an lr_scheduler sets one learning rate, but a parameter group has its own: give the group lr_mult "
                "instead of lr, or use one of torch's schedulers with trainer.optimizer"
            )
        self._scheduled: list[float] | None = None  # what the groups have had since the schedule set them
        # Learning rates are always sent, so that workers which disagree on them get an error.
        self._applied = [{name: value for name, value in group.items() if name != "lr"} for group in self._now()]

    @property
    def learning_rate(self) -> float:
        """The rate of the groups without a rate of their own; if there are none, the first group's."""
        if self._schedule is not None:
            return float(self._schedule(self.num_update))
        return float(finite("learning_rate", (self._following or self.groups)[0]["lr"]))

    def set_learning_rate(self, lr: float) -> None:
        if self._schedule is not None:
            raise UsageError("the lr_scheduler sets the learning rate; leave lr_scheduler out to set it yourself")
        if not self._following:
            raise UsageError(
                "every parameter group has its own learning rate: set trainer.optimizer.param_groups[i]['lr']"
            )
        self._set(finite("learning_rate", lr))

    def rescale(self, batch_size: int | None, parts: int) -> float:
        """The factor for the sum of ``parts`` gradients; each is already a mean if ``batch_size`` is None."""
        samples = parts if batch_size is None else finite("batch_size", batch_size)
        if samples <= 0:
            raise UsageError(f"batch_size={samples} must be positive")
        return self._optimizer.rescale_grad / samples

    def apply(self) -> Snapshot:
        """Send what has changed to what updates; return all hyper-parameters of the next update."""
        if self._schedule is not None:
            if self._scheduled is not None and self._rates() != self._scheduled:
                raise UsageError(
                    "both the lr_scheduler of optimizer_params and something else set the learning rate: keep one of "
                    "them"
                )
            self._set(finite("learning_rate", self._schedule(self.num_update + 1)))
            self._scheduled = self._rates()
        now = self._now()
        if now != self._applied:
            changed = [
                {name: value for name, value in new.items() if name not in old or value != old[name]}
                for new, old in zip(now, self._applied, strict=True)
            ]
            if self._optimizer.groups:
                # Tables of modules are in no group: they follow the optimizer's rate, as the groups without their own.
                rate = self._following[0]["lr"] if self._following else None
                self._set_hyperparameters(learning_rate=rate, groups=changed)
            else:
                self._set_hyperparameters(learning_rate=changed[0].pop("lr", None), **changed[0])
            self._applied = now
        return now

    def save(self, **more: Any) -> str:
        tables = [self._keys[position] for position in self.tables]
        trained = [key for position, key in enumerate(self._keys) if position not in self._frozen]
        return json.dumps(
            {
                "num_update": self.num_update,
                "groups": self._now(),
                "table_keys": tables,
                "trained_keys": trained,
                **more,
            }
        )

    def read(self, text: str, path: str) -> Loaded:
        """Return the hyper-parameters in ``text``, as far as they are numbers; ``path`` is for messages."""
        try:
            saved = json.loads(text)
            num_update, groups = int(saved["num_update"]), [dict(group) for group in saved["groups"]]
            tables = [self._first[int(position)] for position in saved.get("tables", ())]  # all that older files have
            if "table_keys" in saved:
                listed = list(saved["table_keys"])
                tables = [position for position, key in enumerate(self._keys) if key in listed]
            wanted = list(saved.get("trained_keys", ()))
            trained = [position for position, key in enumerate(self._keys) if key in wanted]
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise UsageError(f"the hyper-parameters in {path} are damaged: {exc}") from None
        if not 0 <= num_update < 2**53:
            raise UsageError(f"the hyper-parameters in {path} are damaged: {num_update} updates")
        for positions in (tables, trained):
            if len({*positions}) < len(positions) or not all(0 <= position < self._number for position in positions):
                raise UsageError(f"the hyper-parameters in {path} are damaged: tables of parameters {positions}")
        if len(groups) != len(self.groups):
            raise UsageError(
                f"{path} is from a run with {len(groups)} parameter groups, but this trainer has {len(self.groups)}"
            )
        fresh = [
            {name: _renewed(name, mine[name], theirs.get(name)) for name in names}
            | {name: finite(name, theirs[name]) for name in MULTIPLIERS if name in theirs}
            for names, mine, theirs in zip(self._names, self.groups, groups, strict=True)
        ]
        return Loaded(num_update, fresh, tables, trained, saved)

    def take(self, loaded: Loaded) -> None:
        for mine, theirs in zip(self.groups, loaded.groups, strict=True):
            for name, value in theirs.items():
                set_in_group(mine, name, value)
        self.num_update, self._scheduled = loaded.num_update, None
        self.tables += [position for position in loaded.tables if position not in self.tables]
        self.trained = loaded.trained

    def state_dict(self) -> dict[str, str]:
        return {"rates": self.save()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take(self.read(str(state.get("rates")), "the checkpoint"))

    def _set(self, lr: float) -> None:
        for group in self._following:
            set_in_group(group, "lr", lr)

    def _rates(self) -> list[float]:
        return [finite("learning_rate", group["lr"]) for group in self.groups]

    def _now(self) -> Snapshot:
        """Return what the groups have now, as numbers: a rate that is a tensor would change in the snapshot, too."""
        now: Snapshot = []
        if len(self.groups) != len(self._names):
            raise UsageError(
                f"a Trainer's groups are fixed when it is made: it has {len(self._names)}, and there are "
                f"{len(self.groups)} now; make another Trainer for more parameters"
            )
        for number, group in enumerate(self.groups):  # at each step, so what is plain already is not looked at
            if len(group) != self._sizes[number]:
                self._look(number)
            if not _same_tensors(group["params"], self._kept[number]):
                raise UsageError(
                    f"the tensors of parameter group {number} are other ones than those that its Trainer was made for, "
                    "and trains; make another Trainer for these"
                )
            taken = {
                name: value if type(value := group[name]) in _PLAIN else _taken(name, value)
                for name in self._names[number]
            }
            if type(group["lr"]) is not float:
                taken["lr"] = finite("learning_rate", group["lr"])
            now.append(taken)
        return now

    def _look(self, number: int) -> None:
        """Find the entries of a group that matter, since some have come or gone; others are the program's own.

        Schedulers write ``initial_lr`` and the like.
        """
        group, cls = self.groups[number], self._optimizer.found
        if gone := [name for name in self._names[number] if name not in group]:
            raise UsageError(f"parameter group {number} has no {gone[0]!r} any more: write its value in it again")
        synonyms = cls.aliases | ({"beta1": "betas", "beta2": "betas"} if "betas" in cls.hyperparameters else {})
        for name in group:
            if name in synonyms:
                raise UsageError(
                    f"parameter group {number} has got {name!r}, which no update reads: between updates, write "
                    f"{synonyms[name]!r}"
                )
            if name in _FIXED:
                raise UsageError(
                    f"parameter group {number} has got {name!r}, which cannot change between updates: pass it in the "
                    "optimizer_params of a new Trainer"
                )
        known = self._names[number]
        self._names[number] = [*known, *(name for name in MULTIPLIERS if name in group and name not in known)]
        self._sizes[number] = len(group)


def _same_tensors(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    try:
        return one == two  # a list looks for the same objects first, in a few nanoseconds each
    except RuntimeError:  # tensors, in place of others
        return False


_FIXED = ("rescale_grad", "clip_gradient", LAZY)
_PLAIN = frozenset({float, int, bool, str, type(None)})


def _taken(name: str, value: Any) -> Any:
    """Return a value of ``param_groups`` as a number, or as several."""
    if type(value) is tuple and all(type(each) is float for each in value):
        return value
    taken = plain("learning_rate" if name == "lr" else name, value)
    return tuple(taken) if isinstance(taken, list) else taken


def _renewed(name: str, mine: Any, theirs: Any) -> Any:
    """Return ``theirs``, from a file, if it has the type of ``mine``; else ``mine``."""
    if is_number(theirs) and is_number(scalar(mine)):
        return finite(name, theirs)
    if isinstance(mine, tuple | list) and isinstance(theirs, list):
        return tuple(element if element is None else finite(name, element) for element in theirs)
    return mine


def settings(collected: Collected, given: Mapping[str, Any]) -> tuple[dict[str, Any], Schedule | None, int]:
    """Split ``optimizer_params`` into options for ``set_optimizer``, the schedule, and the updates made before."""
    options = dict(given)
    schedule, begun = options.pop("lr_scheduler", None), options.pop("begin_num_update", 0)
    begun = at_least("begin_num_update", begun, 0)
    for name in ("lr_mult", "wd_mult"):
        if isinstance(options.get(name), Mapping):
            options[name] = collected.by_key(options[name])
    if schedule is not None:
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) or not callable(schedule):
            raise UsageError(
                f"lr_scheduler is a {type(schedule).__name__}, but must be a function of the number of the update, "
                "as in workers.schedules; make one of torch's schedulers with trainer.optimizer instead"
            )
        lr = options.pop("learning_rate", options.pop("lr", None))
        if lr is not None and hasattr(schedule, "base_lr"):
            schedule.base_lr = finite("learning_rate", lr)
        options["learning_rate"] = schedule(begun + 1)
    if collected.groups is not None:
        options["groups"] = [
            {"keys": [param.key for param in collected.everything if param.group == position], **group}
            for position, group in enumerate(collected.groups)
        ]
    return options, schedule, begun


def changed(before: Snapshot | None, after: Snapshot) -> list[tuple[str, Any]]:
    pairs = [] if before is None else zip(before, after, strict=True)
    return [(name, old.get(name)) for old, new in pairs for name, value in new.items() if value != old.get(name)]


def rates_given(optimizer: Any, options: Mapping[str, Any]) -> list[Any]:
    """The learning rate of each group as it was given; None where nothing was."""
    rate = options.get("learning_rate", options.get("lr"))
    if rate is None and isinstance(optimizer, torch.optim.Optimizer):
        rate = (optimizer.defaults if len(optimizer.param_groups) > 1 else optimizer.param_groups[0]).get("lr")
    return [group.get("learning_rate", group.get("lr", rate)) for group in options.get("groups") or [{}]]


def param_groups(
    optimizer: Optimizer,
    params: Sequence[Parameter],
    rates: Sequence[Any] = (),
    given: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return torch's ``param_groups`` for an optimizer: each group's tensors and all its hyper-parameters.

    Args:
        rates: what was given as learning rate of each group. A tensor stays the group's rate, as in torch: the
            program may fill it later.
        given: the groups as they were given, whose multipliers the program may change later.
    """
    groups = [
        {
            "params": [tensor for param in params if param.group == position for tensor in param.tensors],
            **optimizer.defaults(position + 1 if optimizer.groups else 0),
        }
        for position in range(len(optimizer.groups) or 1)
    ]
    for group, rate in zip(groups, rates, strict=False):
        if isinstance(rate, torch.Tensor) and rate.is_floating_point():
            group["lr"] = rate
    for group, own in zip(groups, given, strict=False):
        group |= {name: finite(name, own[name]) for name in MULTIPLIERS if name in own}
    return groups


@outside_graphs
class TrainerOptimizer(torch.optim.Optimizer):
    """A trainer's optimizer, for code that expects a torch optimizer:

        scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, max_lr=0.1, total_steps=1000)
        scaler.step(trainer.optimizer)

    What is written into ``param_groups`` takes effect with the next step, on the servers too. ``Trainer.save_states``
    writes its state.
    """

    # With this, GradScaler leaves skipping to ``step``, where all workers decide together.
    _step_supports_amp_scaling = True

    def __init__(self, trainer: Any, groups: list[dict[str, Any]]) -> None:
        # Defaults become the groups' that have none, and a multiplier is of its group alone.
        first = {name: value for name, value in groups[0].items() if name not in ("params", *MULTIPLIERS)}
        super().__init__(groups, first)
        self.param_groups = groups
        self._trainer = trainer

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        batch_size: int | None = None,
        ignore_stale_grad: bool = False,
    ) -> Any:
        """Make the trainer's step. Called by ``GradScaler.step``, skip it if any worker's gradients have overflowed."""
        loss = evaluated(closure)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            # All workers ask, also a worker without an overflow: it would wait in the step for the others.
            if self._trainer.overflows(bool(found_inf.item())):
                return loss
            scale = getattr(self, "grad_scale", None)
            if scale is not None:
                self._unscale(scale)
        self._trainer.step(batch_size, ignore_stale_grad)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._trainer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``Trainer.save_states`` writes, as ``{"state": {"trainer": bytes}, "param_groups": [...]}``.

        One worker's call suffices, not between backward and step. The state may be on the servers, so it is one tensor
        of bytes, and only a Trainer's optimizer can load it. ``param_groups`` are to look at.
        """
        state = super().state_dict()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "states")
            self._trainer.save_states(path)
            state["state"] = {STATE: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned; see ``Trainer.load_states``. Every worker calls this."""
        saved = state_dict.get("state", {}).get(STATE)
        if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
            raise UsageError(
                "this is no state of a Trainer's optimizer: pass what trainer.optimizer.state_dict() returned. The "
                "states of torch's own optimizers cannot be loaded here"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "states")
            path.write_bytes(saved.cpu().contiguous().numpy().tobytes())
            self._trainer.load_states(path)

    def __reduce__(self) -> Any:
        return self._trainer.__reduce__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``UsageError`` after construction: all parameters of a trainer are in its store."""
        if hasattr(self, "_trainer"):
            raise UsageError(
                "a Trainer's parameters are fixed when it is made; make another Trainer for more parameters"
            )
        super().add_param_group(param_group)

    def _unscale(self, scale: torch.Tensor) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in grads:
            by_device.setdefault(grad.device, []).append(grad)
        for device, on_device in by_device.items():
            # In float64, as GradScaler does: the reciprocal of a scale that is no power of two is rounded once.
            multiply(on_device, scale.double().reciprocal().float().to(device))
