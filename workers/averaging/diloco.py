"""DiLoCo: workers train alone for many steps; an outer optimizer on the servers makes one step of what they have done.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105). Fragments in
turn, overlap and mixing: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free
Lunch" (arXiv:2501.18512).

Workers push outer gradients: their copy of the global weights, less their own weights. The store takes the mean over
workers for the gradient of a step of the outer optimizer, and returns the new global weights. Steps with a least number
of workers, which wait for others for as long as these usually take, and means by weight: Decoupled DiLoCo
(arXiv:2604.21428).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvstore import AlreadyInitialized, KVStore, UnknownName, UsageError
from kvstore.codecs.options import chosen
from kvstore.plain import scalar
from kvstore.ticket import Ticket, explained
from workers.averaging.stepper import Stepper, require_alike
from workers.common.checks import at_least, thawed
from workers.common.gather import Gather
from workers.common.stores import NO_RULE, join_refusal, open_store, updates_each_push
from workers.common.values import everything_of, module_or_dict, parameters_of
from workers.reducer import Reducer

MOST_NAMED = 200  # characters of names in an error
WEIGHTS = (None, "samples")
OUTER_PARAMS = {"learning_rate": 0.7, "momentum": 0.9}  # the paper's, for Nesterov momentum


def require_synchronous(store: KVStore) -> None:
    """Raise ``UsageError`` if ``store`` updates for every push.

    Outer gradients that come one by one, and late, make the outer momentum unstable (Liu et al., "Asynchronous
    Local-SGD Training for Language Modeling", arXiv:2401.09135).
    """
    if updates_each_push(store.type):
        raise UsageError(
            f"DiLoCo needs a synchronous store, 'dist_sync' or 'local', not {store.type!r}: with outer gradients that "
            "come late, the outer momentum makes training unstable"
        )


class GlobalWeights:
    """A worker's side of the global weights. On construction every worker gets rank 0's weights.

    The copy is in the host's memory, so a model on a GPU needs no more memory there. Half-precision weights have a
    float32 copy.

    Args:
        frozen: names of weights that are not trained before they require a gradient. Until then nothing of them is
            sent, and what the program writes into them stays.
    """

    def __init__(
        self,
        store: KVStore,
        params: Mapping[str, torch.Tensor],
        optimizer: Any,
        hyperparameters: Mapping[str, Any],
        frozen: Iterable[str] = (),
    ) -> None:
        if "rescale_grad" in hyperparameters:
            raise UsageError("outer_params must not have rescale_grad: outer gradients are means over workers")
        self._store, self._params = store, dict(params)
        self._frozen = set(frozen)
        self._new: set[str] = set()  # those that have been unfrozen, and not been sent yet
        self._copies = {name: _wide(param).clone() for name, param in params.items()}
        store.set_optimizer(optimizer, rescale_grad=1 / store.num_workers, **hyperparameters)
        try:
            store.broadcast(list(self._copies), list(self._copies.values()), list(self._copies.values()))
        except AlreadyInitialized:
            raise UsageError(
                "this store already has another model's weights; make a second one with kvstore.create"
            ) from None
        self._write(list(params))

    def thaw(self) -> None:
        """Train the parameters from now on that require a gradient now. Every worker calls this after each step."""
        if self._frozen:
            before = self._frozen
            self._frozen = {name for name in before if not self._params[name].requires_grad}
            self._new |= before - self._frozen

    @torch.no_grad()
    def push(self, names: Sequence[str], weight: float | None = None) -> Ticket:
        """Send the outer gradients of these weights; the ticket is done when the copies have the new global weights.

        ``weight``: of the gradients in the mean over workers; None for a store in which nobody gives one.
        """
        gradients = []
        for name in names:
            param, copy = self._params[name], self._copies[name]
            gradient = self._store.empty(copy.shape, copy.dtype)
            # What this worker began with had the precision of its own weights.
            torch.sub(copy.to(param.dtype), _wide(param), out=gradient)
            gradients.append(gradient)
        new, self._new = [name for name in names if name in self._new], self._new.difference(names)
        with (
            nullcontext() if weight is None else self._store.weighted(weight),
            explained(thawed(new)) if new else nullcontext(),
        ):
            return self._store.pushpull(list(names), gradients, [self._copies[name] for name in names], wait=False)

    def take(self, names: Sequence[str], mixing: float = 0.0) -> None:
        """Replace a worker's own weights by ``mixing`` times these, plus 1 - ``mixing`` times the copies."""
        self._write(self.trained(names), mixing)

    @torch.no_grad()
    def _write(self, names: Sequence[str], mixing: float = 0.0) -> None:
        for name in names:
            param, copy = self._params[name], self._copies[name]
            if mixing:
                param.lerp_(copy.to(param.device, param.dtype), 1 - mixing)
            else:
                param.copy_(copy)

    def pull(self) -> None:
        self._store.pull(list(self._copies), list(self._copies.values()))
        self.take(list(self._copies))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block, the copies are in the place of the worker's own weights."""
        own = {name: self._params[name].detach().clone() for name in self.trained(self._params)}
        self.take(list(own))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    self._params[name].copy_(value)

    def state(self) -> dict[str, torch.Tensor]:
        names = self.trained(self._params)
        return {f"local/{name}": self._params[name].detach() for name in names} | {
            f"global/{name}": self._copies[name] for name in names
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._frozen = {name for name in self._frozen if f"local/{name}" not in tensors}
        mine = self.state()
        for name, value in mine.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise UsageError(f"this state of DiLoCo belongs to another model: it has no {name!r} of this shape")
        for name, value in mine.items():
            value.copy_(tensors[name])

    def trained(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._frozen]

    def require_trained(self, names: Collection[str]) -> None:
        """Raise ``UsageError`` unless this worker trains ``names``, as the others do."""
        if set(names) != set(self.trained(self._params)):
            differ = ", ".join(sorted(set(names).symmetric_difference(self.trained(self._params))))
            raise UsageError(
                f"the other workers have changed requires_grad of {differ[:MOST_NAMED]}: change it here, too, before "
                "DiLoCo is made"
            )


def _wide(param: torch.Tensor) -> torch.Tensor:
    """Return ``param`` on the CPU, in float32 if it has half precision."""
    dtype = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    return param.detach().to("cpu", dtype)


@dataclass(frozen=True)
class Schedule:
    """When fragments are sent, and when their new values are taken. Steps count from 1.

    With H inner steps and P fragments, fragment p leaves after step (p + 1) H / P, rounded down, and every H steps from
    then on. So the last fragment leaves at the end of each period, and a single one does.
    """

    inner_steps: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.fragments > self.inner_steps:
            raise UsageError(
                f"fragments={self.fragments} must be at most inner_steps={self.inner_steps}: each needs a step of its "
                "own"
            )
        if self.overlap >= self.inner_steps:
            raise UsageError(
                f"overlap={self.overlap} must be less than inner_steps={self.inner_steps}: a fragment's new values "
                "must be taken before it is sent again"
            )

    def leaving(self, step: int) -> list[int]:
        firsts = [(number + 1) * self.inner_steps // self.fragments for number in range(self.fragments)]
        return [
            number for number, first in enumerate(firsts) if step >= first and (step - first) % self.inner_steps == 0
        ]

    def arriving(self, step: int) -> list[int]:
        """The fragments whose new values are taken after ``step``; sending comes first."""
        return self.leaving(step - self.overlap)


def split(params: Mapping[str, torch.Tensor], fragments: int) -> list[list[str]]:
    """Return the names of the parameters of each fragment, in the order of ``params``.

    Each layer, in turn, goes to the fragment with fewest elements. So layers of equal size are dealt out one by one,
    which is the paper's strided pattern.
    """
    layers: dict[str, list[str]] = {}
    for name, tensor in params.items():
        if tensor.numel():
            layers.setdefault(layer_of(name), []).append(name)
    if len(layers) < fragments:
        raise UsageError(
            f"fragments={fragments} must be at most the number of layers with parameters in the optimizer, which is "
            f"{len(layers)}"
        )
    parts: list[list[str]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for names in layers.values():
        number = sizes.index(min(sizes))
        parts[number] += names
        sizes[number] += sum(params[name].numel() for name in names)
    return parts


def layer_of(name: str) -> str:
    """Return the layer of the parameter ``name``: ``blocks.3`` of ``blocks.3.attention.weight``, ``fc`` of ``fc.bias``.

    That is everything up to the first number. Without a number it is the module that has the parameter.
    """
    words = name.split(".")
    numbers = [position for position, word in enumerate(words[:-1]) if word.isdecimal()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1])


class DiLoCo(Stepper):
    """Every worker trains alone for ``inner_steps`` steps. Then an outer optimizer on the servers updates all weights.

        diloco = DiLoCo(model, torch.optim.AdamW(model.parameters()), "dist_sync", inner_steps=50)
        for batch in batches:
            ...
            loss.backward()
            diloco.step()
        diloco.finish()

    The servers hold the global weights. After ``inner_steps`` steps of the inner optimizer, a worker pushes its *outer
    gradient*: the global weights that it began with, less its own. The mean over workers is the gradient of a step of
    the outer optimizer, by default SGD with Nesterov momentum. Its result replaces the weights of all workers. With
    outer SGD and a learning rate of 1 this is ``PeriodicAveraging``.

    With ``fragments``, the layers are divided among as many fragments, which are synchronized in turn, at equal
    distances. With ``overlap``, workers go on training while a fragment travels: they take its new values so many steps
    after they have sent it, and keep ``mixing`` of what they have learned meanwhile. Both are Streaming DiLoCo's.

    With a ``quorum``, the outer step of a fragment is made when so many workers have sent it, and others have been
    waited for as ``grace`` says. So workers may have different speeds. What comes later counts in the next step of the
    fragment, and its worker goes on from the newest global weights. With ``weight="samples"``, the mean over workers is
    by the number of samples behind each outer gradient: call ``step(samples=len(inputs))``.

    Workers differ until ``finish``. Call it before an evaluation and at the end. To look at the global weights between
    two steps, use ``global_weights``.

    The store's deadline must cover a whole period: a worker may wait for ``inner_steps`` steps of the slowest.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Every worker gets rank 0's parameters,
            frozen ones too, and buffers. Of the frozen parameters of the optimizer nothing is sent before they require
            a gradient. A parameter with several names counts once.
        optimizer: the inner optimizer, an instance of ``torch.optim.Optimizer`` with parameters of ``model``. Its
            states stay the worker's own.
        kvstore: a synchronous store, for this alone, or the type of one to make. ``auto``: ``dist_sync`` in a job,
            ``device`` outside of one.
        inner_steps: the number of steps between two synchronizations of the same weights; the paper's H.
        outer_optimizer: an optimizer by name, class or unused instance; see ``KVStore.set_optimizer``.
        outer_params: its hyper-parameters by torch's names or MXNet's. None: for ``nag``, a learning rate of 0.7 and a
            momentum of 0.9; for others, their own defaults.
        fragments: the number of fragments, at most the number of layers.
        overlap: the number of steps for which a fragment may travel, less than ``inner_steps``; the paper's tau. 0
            waits.
        mixing: with ``overlap``, how much of its own weights a worker keeps when it takes new ones, from 0 to less than
            1; the paper's alpha.
        compression_params: how to compress outer gradients, and with ``pull`` the weights that come back; see
            ``KVStore.set_gradient_compression``.
        buffers: let ``finish`` average the buffers, such as batch-norm statistics; see ``Reducer.average_buffers``.
        quorum: how many workers an outer step needs; None for all. It is for a store that this makes: for one of your
            own, give ``quorum``, ``grace`` and ``late`` to ``kvstore.create``.
        grace: with a ``quorum``, how long an outer step that has it waits for other workers at most, in seconds. Each
            is waited for as long as it usually takes, and not at all if that is longer than ``grace``. Less than
            ``overlap`` steps take, it costs nobody time.
        late: with a ``quorum``, ``keep`` what comes late for the next step of its fragment, or ``drop`` it.
        weight: ``samples`` to weigh outer gradients by the samples behind them; None to count all workers alike.

    Raises:
        UsageError: an argument is invalid; or the store is asynchronous, or serves another model.
        UnknownName: no such outer optimizer, hyper-parameter or compression.
        Unsupported: ``compression_params`` has ``pull`` for a store in one process, which sends nothing back.
        Mismatch: workers disagree on a setting or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "auto",
        inner_steps: int = 50,
        outer_optimizer: Any = "nag",
        outer_params: Mapping[str, Any] | None = None,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float = 0.5,
        compression_params: Mapping[str, object] | None = None,
        buffers: bool = True,
        quorum: int | None = None,
        grace: float = 0.0,
        late: str = "keep",
        weight: str | None = None,
    ) -> None:
        super().__init__(optimizer)
        if weight not in WEIGHTS:
            raise UnknownName(f"unknown weight={weight!r}; choose 'samples' or None")
        if quorum is None and grace:
            raise UsageError(f"grace={grace!r} is how long an outer step that has its quorum waits: give a quorum, too")
        if quorum is not None and not isinstance(kvstore, str):
            raise UsageError(
                "quorum is for a store that DiLoCo makes: give kvstore.create('dist_sync', quorum=..., grace=..., "
                "late='keep') these options, and DiLoCo none of them; or pass kvstore='dist_sync'"
            )
        rule = NO_RULE if quorum is None else {"quorum": quorum, "grace": grace, "late": late}
        mixing = scalar(mixing)
        if isinstance(mixing, bool) or not isinstance(mixing, float | int) or not 0 <= mixing < 1:
            raise UsageError(f"mixing={mixing!r} must be a number from 0 to less than 1")
        self._schedule = Schedule(
            at_least("inner_steps", inner_steps, 1),
            at_least("fragments", fragments, 1),
            at_least("overlap", overlap, 0),
        )
        self._mixing = float(mixing) if overlap else 0.0
        if outer_params is None:
            outer_params = OUTER_PARAMS if outer_optimizer == "nag" else {}
        model = module_or_dict(model)
        params = parameters_of(model, optimizer)
        self._fragments = split(params, self._schedule.fragments)
        self._averaged = model if buffers and isinstance(model, nn.Module) else None
        self._store = open_store(kvstore, "DiLoCo", rule=rule)
        require_synchronous(self._store)
        self._joining = self._store.reserve_join(join_refusal("DiLoCo", "Call DiLoCo's own finish() or join()"))
        # Buffers and settings are sums, and the store has the outer optimizer, which would make steps of them.
        self._sums = self._store.companion()
        settings: dict[str, int | str] = {
            "inner_steps": inner_steps,
            "fragments": fragments,
            "overlap": overlap,
            "mixing": str(self._mixing),
            "compression_params": str(chosen(compression_params)),
            "weight": str(weight),
        }
        values = params if self._averaged is None else everything_of(model)
        require_alike(Gather(self._sums, "/settings"), type(self).__name__, settings, values)
        if compression_params is not None:
            self._store.set_gradient_compression(compression_params)
        kept = {name: params[name] for names in self._fragments for name in names}
        self._reducer = Reducer.over(self._sums)
        rest = {name: value for name, value in everything_of(model).items() if name not in kept}
        self._reducer.broadcast(rest)
        frozen = [name for name, param in kept.items() if not param.requires_grad]
        self._global = GlobalWeights(self._store, kept, outer_optimizer, outer_params, frozen)
        self._position = 0  # in the schedule, which begins anew after ``finish``
        self._unsent = [0] * self._schedule.fragments  # the steps since a fragment was sent
        # The samples of these steps; None where nobody weighs.
        self._samples = None if weight is None else [0] * self._schedule.fragments
        self._in_flight: dict[int, Ticket | None] = {}  # by fragment; None for one that has arrived
        self.marks_steps = True  # whether the program's step ends after ``after_step``; see ``KVStore.end_step``
        if self._store.min_workers:
            self._store.attach(f"diloco of {self._fragments[0][0]}", _TakenOver(self), shared=True)

    def come_back(self) -> bool:
        """Let this worker into a job that has gone on without it, if it was started again; return whether it was.

        ``step`` calls it. A program that calls it before its first batch reads that batch for the right step:

            diloco = DiLoCo(model, optimizer, "dist_sync")
            diloco.come_back()
            for step in range(diloco.steps, 10_000):
                ...

        The worker has the global weights then, and the place of the others in the schedule. The state of its inner
        optimizer, and its buffers, begin anew.

        Raises:
            UsageError: the others train other parameters.
            KVStoreError: as for ``KVStore.boundary``.
        """
        if not self._store.newcomer:
            return False
        self._store.boundary()
        self._global.pull()
        return True

    def step(self, closure: Callable[[], float] | None = None, samples: int | None = None) -> float | None:
        """Make one step of the optimizer, and do what ``after_step`` does. Returns what the optimizer's ``step`` does.

        Args:
            closure: what the optimizer's ``step`` takes: it evaluates the model again and returns the loss.
            samples: how many samples the step's batch has, which ``weight="samples"`` needs.
        """
        self._require(samples)
        self.come_back()
        loss = self._inner_step(closure)
        self.after_step(samples)
        return loss

    def after_step(self, samples: int | None = None) -> None:
        """Count a step that the program has made itself, for example with a ``GradScaler``; send and take what is due.

        Args:
            samples: as for ``step``.

        Raises:
            UsageError: ``weight="samples"``, and ``samples`` is missing or no number of samples.
            KVStoreError: an error of the store.
        """
        count = self._require(samples)
        self.come_back()
        self._store.begin_step()
        self._steps += 1
        self._position += 1
        self._global.thaw()
        self._unsent = [steps + 1 for steps in self._unsent]
        if self._samples is not None:
            self._samples = [samples + count for samples in self._samples]
        for number in self._schedule.leaving(self._position):
            self._in_flight[number] = self._send([number])
            self._rounds += 1
        for number in self._schedule.arriving(self._position):
            # A worker that came back pulled the new values of fragments that had left before.
            if number in self._in_flight:
                self._take(number)
        for ticket in self._in_flight.values():
            if ticket is not None:
                ticket.done()  # receives what has come: only a wait receives, and nothing waits here
        if self.marks_steps:
            self._store.end_step()

    def finish(self, timeout: float | None = None) -> None:
        """Synchronize everything: before an evaluation, and at the end of training. Every worker calls this.

        Workers may have made different numbers of steps. One that has finished is out of the others' rounds, as after
        ``KVStore.join``: it counts as a worker whose weights have not changed. Training may go on afterwards; a new
        period then begins. With a ``quorum``, what came late in the last outer step before this counts in the first
        one after it.

        Args:
            timeout: how long to wait for workers that have more steps to make, in seconds; None for the store's
                deadline.

        Raises:
            DeadlineExceeded: others have more steps to make; the message names them. Call again to wait on.
        """
        self.join(timeout)

    def join(self, timeout: float | None = None) -> int:
        """``finish``, and return the rank that has sent most, of several the highest.

        Args:
            timeout: as for ``finish``.
        """
        self.begin_join()
        last = self._joining.join(timeout)
        self._global.pull()
        if self._averaged is not None:
            self._reducer.average_buffers(self._averaged)
        return last

    def begin_join(self) -> None:
        """Send what has changed, say that this worker has no more batches, and return at once; see ``finish``."""
        for number in list(self._in_flight):
            self._take(number)
        changed = [number for number, steps in enumerate(self._unsent) if steps]
        # Fragments that were sent after different steps have different numbers of samples behind them.
        one_by_one = [[number] for number in changed]
        for numbers in [changed] if changed and self._samples is None else one_by_one:
            self._send(numbers)
            self._rounds += 1
        self._position = 0
        self._joining.begin()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Have the global weights in the model, within the block; for an evaluation between two steps.

        They are those of the last synchronization of each fragment, and the same on all workers that have made the same
        number of steps. This waits for fragments that travel.
        """
        self._arrive()
        with self._global.swapped_in():
            yield

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the state of the outer optimizer, and what this worker's compression has kept back.

        One worker's call suffices without compression.

        Args:
            path: the file to write; see ``KVStore.save_optimizer_states``.
        """
        self._store.save_optimizer_states(path)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Read what ``save_states`` wrote. Every worker calls this.

        Args:
            path: the file to read; rank 0's is the one that counts. See ``KVStore.load_optimizer_states``.
        """
        self._store.load_optimizer_states(path)

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker needs to go on between two steps, beside the states of both optimizers.

        That is its own weights, its copy of the global weights, and its place in the schedule. Right after ``finish``
        none of it is needed. To go on, make the model with the global weights (see ``global_weights``), and then a
        DiLoCo as before.
        """
        self._arrive()
        return {
            "steps": self._steps,
            "position": self._position,
            "unsent": list(self._unsent),
            "in_flight": sorted(self._in_flight),
            "weights": self._global.state(),
            **({} if self._samples is None else {"samples": list(self._samples)}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called.

        Args:
            state: what ``state_dict`` returned on this worker.

        Raises:
            UsageError: the state is damaged, or belongs to another model or schedule.
        """
        try:
            steps, position = at_least("steps", state["steps"], 0), at_least("position", state["position"], 0)
            unsent = [at_least("unsent", number, 0) for number in state["unsent"]]
            in_flight = [at_least("in_flight", n, 0, len(self._fragments) - 1) for n in state["in_flight"]]
            weights = dict(state["weights"])
            samples = None
            if self._samples is not None:
                samples = [at_least("samples", number, 0) for number in state["samples"]]
        except (LookupError, TypeError, ValueError) as exc:
            raise UsageError(f"this state of DiLoCo is damaged: {type(exc).__name__}: {exc}") from None
        if len(unsent) != len(self._fragments):
            raise UsageError(
                f"this state of DiLoCo has {len(unsent)} fragments, but there are {len(self._fragments)}: use the "
                "settings of the run that saved it"
            )
        self._global.load_state(weights)
        self._steps, self._position, self._unsent, self._samples = steps, position, unsent, samples
        self._in_flight = dict.fromkeys(in_flight)

    def close(self) -> None:
        """Close the store that this has made beside ``kvstore``. The latter stays open."""
        self._sums.close()

    @property
    def steps(self) -> int:
        """The number of steps that this worker has made."""
        return self._steps

    @property
    def rounds(self) -> int:
        """How often this worker has sent outer gradients, of a fragment or of everything."""
        return self._rounds

    @property
    def fragments(self) -> list[list[str]]:
        """The names of the parameters in each fragment."""
        return [list(names) for names in self._fragments]

    # ---- helpers

    def _require(self, samples: int | None) -> int:
        """Return ``samples``, 0 where nobody weighs."""
        if self._samples is None:
            return 0
        if samples is None:
            raise UsageError("DiLoCo(weight='samples') needs the number of samples: call step(samples=len(inputs))")
        return at_least("samples", samples, 0)

    def _send(self, numbers: Sequence[int]) -> Ticket | None:
        """Send fragments, with the same weight; return their ticket, None if nothing of them is trained."""
        names = [name for number in numbers for name in self._global.trained(self._fragments[number])]
        weight = None if self._samples is None else float(self._samples[numbers[0]])
        ticket = self._global.push(names, weight) if names else None
        for number in numbers:
            self._unsent[number] = 0
            if self._samples is not None:
                self._samples[number] = 0
        return ticket

    def _take(self, number: int) -> None:
        ticket = self._in_flight[number]
        if ticket is not None:
            ticket.wait()
        self._global.take(self._fragments[number], self._mixing)
        del self._in_flight[number]

    def _arrive(self) -> None:
        """Wait for everything that travels; it is taken when it is due."""
        for number, ticket in self._in_flight.items():
            if ticket is not None:
                ticket.wait()
                self._in_flight[number] = None


class _TakenOver:
    """What a worker that comes back takes over from another: its place in the schedule, and what it trains."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco

    def state_dict(self) -> dict[str, Any]:
        ours = self._diloco
        return {
            "steps": ours._steps,
            "position": ours._position,
            "trained": ours._global.trained(name for names in ours._fragments for name in names),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ours = self._diloco
        ours._global.require_trained(state["trained"])
        ours._steps, ours._position = state["steps"], state["position"]
