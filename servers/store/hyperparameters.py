"""The hyper-parameters of updates: of one push, and of a round, on which its pushes must agree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore import wire
from kvstore.errors import Mismatch, UsageError
from kvstore.optim.hyperparameters import ALIKE
from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule
from kvstore.spec import Key, shorten
from servers.names import workers


class UpdateHyperparameters(NamedTuple):
    """The hyper-parameters of an update. For ``lr`` and ``rescale``, None takes the optimizer's own.

    Attributes:
        changes: others that differ from the optimizer's: ((group, name), value), in order. Group 0 is of all keys.
        own: the optimizer's own values of what is in ``changes``, in the same way.
        alike: what the worker says that all workers of the round must say, too; None says nothing.
        pushed, back: the compression of the contribution and of the answer, on which a round's workers must agree, too:
            else their replicas get other values. None is not compared.
    """

    lr: float | None = None
    rescale: float | None = None
    changes: tuple[tuple[tuple[int, str], Any], ...] = ()
    pushed: str | None = None
    back: str | None = None
    alike: str | None = None
    own: tuple[tuple[tuple[int, str], Any], ...] = ()

    @classmethod
    def of(cls, message: wire.ClosedRounds | wire.ClosedRowRounds | wire.OptimizerCalls) -> UpdateHyperparameters:
        return cls(message.lr, message.rescale, tuple(changed(message.changes).items()))

    @property
    def sets(self) -> bool:
        """Whether the worker sets its hyper-parameters itself, and does not take over what others set."""
        return self.lr is not None or bool(self.changes)

    def listed(self) -> list[list[Any]]:
        return [[*which, list(value) if isinstance(value, tuple) else value] for which, value in self.changes]


def changed(changes: Sequence[Sequence[Any]]) -> dict[tuple[int, str], Any]:
    return {(number, name): tuple(value) if isinstance(value, list) else value for number, name, value in changes}


PLAIN = "none"


def compressions(message: wire.Push) -> tuple[str, str | None]:
    """Return ``pushed`` and ``back`` of a push.

    Of ``pushed`` the type alone: an aggregator encodes sums with other numbers, by how many workers they are of.
    """
    pushed = PLAIN if message.codec is None else str(message.codec[0])
    if not message.want:
        return pushed, None
    if message.back is None:
        return pushed, PLAIN
    kind, numbers = message.back
    return pushed, ", ".join([str(kind), *(f"{name}={number}" for name, number in numbers)])


def asked(message: wire.Push | wire.PushRows, optimizer: Optimizer | None) -> UpdateHyperparameters:
    """Return the hyper-parameters of a push; raise ``UsageError`` if no optimizer takes them."""
    if not message.changes:
        return UpdateHyperparameters(message.lr, message.rescale)
    changes = changed(message.changes)
    alike = changes.pop((0, ALIKE), None)
    if not changes:
        return UpdateHyperparameters(message.lr, message.rescale, alike=alike)
    if optimizer is None:
        raise UsageError("hyper-parameters for a store without an optimizer; call set_optimizer first")
    own = optimizer.require_changes(changes)
    return UpdateHyperparameters(
        message.lr, message.rescale, tuple(sorted(changes.items())), alike=alike, own=tuple(sorted(own.items()))
    )


class Contributed:
    """The push of one worker, or the sum of several workers' pushes, as a contribution to a round."""

    __slots__ = ()
    ranks: Sequence[int]  # of the workers; they rise
    clock: int  # the number of the push among each worker's pushes
    hyper: UpdateHyperparameters

    @property
    def who(self) -> str:
        return workers(self.ranks)


def agreed_by(items: Sequence[Contributed], keys: Iterable[Key], rule: Rule) -> UpdateHyperparameters:
    """Return the hyper-parameters of the round of ``items``; see ``agreed``.

    With a quorum they are those of the first worker that sets any. There a worker that has been late skips rounds, so
    it is behind the others in its schedules.
    """
    hypers = [item.hyper for item in items]
    if hypers.count(hypers[0]) == len(hypers):
        return hypers[0]  # with its compression, for updates of one wave are made together if they have one
    if rule.quorum is not None:
        return next((hyper for hyper in hypers if hyper.sets), hypers[0])
    return agreed({item.who: item.hyper for item in items}, dict.fromkeys(keys))


def strays(items: Sequence[Contributed], newcomers: Sequence[int], keys: Iterable[Key]) -> dict[int, Mismatch]:
    """Return the newcomers that must not count in the round of ``items``, each with its error.

    A newcomer was started again. It is a stray if its hyper-parameters differ from those of workers that have been
    there for longer: its scheduler has lost count, and the others are right. If workers that were never started again
    disagree with each other, nobody is a stray, and the round fails on all.

    ``newcomers``: in the order in which they came back.
    """
    hypers = [item.hyper for item in items]
    if hypers.count(hypers[0]) == len(hypers):
        return {}
    came = {rank: place for place, rank in enumerate(newcomers, 1)}
    named = dict.fromkeys(keys)
    kept: dict[str, UpdateHyperparameters] = {}
    errors: dict[int, Mismatch] = {}
    for item in sorted(items, key=lambda item: max(came.get(rank, 0) for rank in item.ranks)):
        try:
            agreed({**kept, item.who: item.hyper}, named)
        except Mismatch as exc:
            if not came.keys() >= set(item.ranks):
                return {}
            told = f"{exc}. {item.who.capitalize()} was started again, so its push does not count. Attach schedulers"
            errors |= dict.fromkeys(item.ranks, Mismatch(f"{told}: store.attach(name, scheduler, shared=True)"))
        else:
            kept[item.who] = item.hyper
    return errors


def agreed(given: Mapping[str, UpdateHyperparameters], keys: Mapping[Key, None]) -> UpdateHyperparameters:
    """Return the hyper-parameters of a round, on which all workers that give one must agree.

    What a worker that ``sets`` them has not changed is as the optimizer has it.

    ``given``: by the workers that give them, as messages name them. ``keys``: of the round, for messages.
    """

    def common(name: str, values: Mapping[str, Any]) -> Any:
        given = {who: value for who, value in values.items() if value is not None}
        if len(set(given.values())) > 1:
            words = ", ".join(f"{_number(name, value)} on {who}" for who, value in given.items())
            raise Mismatch(f"workers disagree on the {name} for the same round of {shorten(keys)}: {words}")
        return next(iter(given.values()), None)

    if len({hyper.alike for hyper in given.values()}) > 1:
        words = "; ".join(f"{hyper.alike or 'nothing of the kind'} on {who}" for who, hyper in given.items())
        raise Mismatch(
            f"workers do not train alike, as of the round of {shorten(keys)}: {words}. All workers must make the same "
            "changes at the same step"
        )
    common("compression", {who: hyper.pushed for who, hyper in given.items()})
    common("compression of what comes back", {who: hyper.back for who, hyper in given.items()})
    changes_by_who = {who: dict(hyper.changes) for who, hyper in given.items() if hyper.sets}
    own = {which: value for hyper in given.values() for which, value in hyper.own}
    return UpdateHyperparameters(
        common("learning rate", {who: hyper.lr for who, hyper in given.items()}),
        common("rescale_grad", {who: hyper.rescale for who, hyper in given.items()}),
        tuple(
            (
                which,
                common(_words(*which), {who: each.get(which, own.get(which)) for who, each in changes_by_who.items()}),
            )
            for which in sorted({which for changes in changes_by_who.values() for which in changes})
        ),
    )


def _words(number: int, name: str) -> str:
    return ("learning rate" if name == "lr" else name) + (f" of group {number - 1}" if number else "")


def _number(name: str, value: Any) -> str:
    if name == "rescale_grad" and value == 0:  # modules of tables push so when one is frozen; see ``workers.Embedding``
        return "0 (frozen there)"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
