"""The checkpoints of a job, as one worker takes part in them.

Workers meet at rounds that all of them know: at the first push of the next round, or where the program says that a step
is over. A meeting is a sum over all workers, to which worker 0 contributes what it has decided. So all save what is
their own at the same step. Where workers are not in step (asynchronous stores, quorums), worker 0 decides alone, and
the checkpoint has nothing of the other workers.

Worker 0 asks each server to capture its segments at the rounds that worker 0 has pushed. No later round can be over
before its next push, and that comes after the servers have noted the request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from kvstore.checkpoint.folders import begin, folder_of, found, listed
from kvstore.checkpoint.manifest import MANIFEST
from kvstore.checkpoint.schedule import NEVER, CheckpointSchedule
from kvstore.checkpoint.stateful import packed
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.checkpoint.verify import verify
from kvstore.dist.clocks import PushClocks
from kvstore.dist.optimizer import Optimizing
from kvstore.dist.plans.entries import Entries
from kvstore.dist.plans.plan import Plan
from kvstore.dist.pushes import Pushes
from kvstore.dist.requests import Requests
from kvstore.dist.resuming import Resumed
from kvstore.dist.saving import CheckpointInProgress, SavedStore
from kvstore.errors import CheckpointError, KVStoreError, NodeLost, UsageError
from kvstore.job.valid_values import Interval
from kvstore.member.outstanding import Question, ready
from kvstore.member.session import Session
from kvstore.rule import Rule
from kvstore.spec import Key, Spec
from kvstore.ticket import Operation
from kvstore.values import spec_of, to_buffer
from kvstore.wire import AwaitCapture, Capture

log = logging.getLogger(__name__)

KEY = "checkpoint"
RESIDUALS = "residuals"  # the name, with a store's ordinal, under which a worker saves those of its compression


class Stateful(Protocol):
    """An object with state, as torch's modules, optimizers and schedulers are."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Take the state."""
        ...


class MeetingStore(Protocol):
    """A synchronous store of the job's, for sums of a few numbers."""

    def init(self, key: Any, value: Any) -> None:
        """See ``KVStore``."""
        ...

    def pull(self, key: Any, out: Any) -> Any:
        """See ``KVStore``."""
        ...

    def pushpull(self, key: Any, value: Any) -> Any:
        """See ``KVStore``."""
        ...

    def join(self, timeout: float | None = None) -> int:
        """See ``KVStore``."""
        ...

    def begin_join(self) -> None:
        """Begin ``join``, which another call ends."""
        ...

    def close(self) -> None:
        """See ``KVStore``."""
        ...


class TrainedStore:
    """What the checkpoints need of a store.

    Args:
        ordinal: it is the n-th store that each worker has made.
        rule, requests, entries, clocks, optimizing, pushes: of the store.
    """

    def __init__(
        self,
        ordinal: int,
        rule: Rule,
        requests: Requests,
        entries: Entries,
        clocks: PushClocks,
        optimizing: Optimizing,
        pushes: Pushes,
    ) -> None:
        self.ordinal, self.rule, self.requests = ordinal, rule, requests
        self.entries, self.clocks, self.optimizing = entries, clocks, optimizing
        self.pushes = pushes
        self.begun = 0  # the highest round that this worker has begun
        self.restored: dict[Key, None] = {}  # keys with a checkpoint's values, whose states are not on servers yet
        self.has_residuals = False  # whether the compression has the checkpoint's
        self._trains: bool | None = None

    @property
    def in_step(self) -> bool:
        """Whether all workers make the same rounds."""
        return self.rule.mode == "sync" and self.rule.quorum is None

    @property
    def trains(self) -> bool:
        """Whether the servers update with an optimizer; other stores have nothing to save. Known from a push on."""
        if self._trains is None:
            self._trains = self.optimizing.optimizer is not None or self.requests.optimizer() is not None
        return self._trains

    def optimizer_set(self) -> None:
        """Note that there is an optimizer."""
        self._trains = True

    @property
    def rounds(self) -> int:
        """The highest round that this worker has pushed."""
        return int(self.clocks.pushed[: len(self.entries)].max(initial=0))

    def saved(self) -> SavedStore:
        """Return what a checkpoint of this moment has of the store."""
        entries = Entries()
        entries.add(self.entries)
        clocks = self.clocks.pushed[: len(entries)].tolist()
        return SavedStore(self.requests.store, self.ordinal, self.rule.mode, entries, clocks)


class Checkpointing:
    """See the module. One for each worker process.

    Args:
        session: of the worker.
        make_store: returns a new store for meetings.
        clock: seconds, monotonic.

    Attributes:
        made, failed: how many checkpoints worker 0 has completed, and how many failed.

    Raises:
        CheckpointError: the checkpoint to continue from is damaged.
    """

    def __init__(
        self,
        session: Session,
        make_store: Callable[[], MeetingStore],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.made = self.failed = 0
        self._session = session
        self._clock = clock
        self._stores: list[TrainedStore] = []
        self._attached: dict[str, tuple[Stateful, bool]] = {}
        self._answers: _Answers | None = None
        self._writer: threading.Thread | None = None
        config = session.config
        self._directory = Path(config.checkpoint_dir) if config.checkpoint_dir else None
        self.resumed: Resumed | None = None
        number, resumed = self._begun()
        self._meetings = make_store()
        told = torch.tensor([number, resumed], dtype=torch.int64)
        self._meetings.init(KEY, told)
        self._meetings.pull(KEY, told)
        self._number = int(told[0])  # of the newest checkpoint in the directory
        resumed = int(told[1])
        if resumed and self.resumed is None:
            path = Path(config.checkpoint_resume)
            folder = path if (path / MANIFEST).exists() else folder_of(path, resumed)
            self.resumed = Resumed(folder, self.rank, session.num_workers)
        self._base = 0 if self.resumed is None else self.resumed.rounds
        self._slots = torch.zeros(2 + session.num_workers, dtype=torch.int64)
        self._meetings.init(f"{KEY}s", self._slots)
        self._schedule = CheckpointSchedule(config.checkpoint_every, self._base, clock())
        self._meets = self._directory is not None and config.checkpoint_every != Interval()
        self._next = self._schedule.first() if self._meets else NEVER

    @property
    def rank(self) -> int:
        """This worker's."""
        return self._session.rank

    def _begun(self) -> tuple[int, int]:
        """Open and verify the checkpoint to continue from; return the newest number there is, and that one's."""
        if self.rank != 0:
            return 0, 0
        newest = max((folder.number for folder in listed(self._directory)), default=0) if self._directory else 0
        path = self._session.config.checkpoint_resume
        folder = found(Path(path)) if path else None
        if folder is None:
            if path:
                log.warning("%s has no checkpoint yet: the job begins anew", path)
            return newest, 0
        verify(folder)
        self.resumed = Resumed(folder, 0, self._session.num_workers)
        log.warning("continuing from %s, after %d rounds", folder, self.resumed.rounds)
        return newest, self.resumed.number

    # ---- stores, and what is attached

    def add(self, store: TrainedStore) -> None:
        """Take part with ``store`` from now on."""
        self._stores.append(store)

    def remove(self, store: TrainedStore) -> None:
        """Complete the checkpoint that is under way; leave ``store`` out of later ones."""
        self.finish()
        self._stores = [each for each in self._stores if each is not store]

    def attach(self, name: str, thing: Stateful, shared: bool) -> bool:
        """See ``KVStore.attach``."""
        self._attached[name] = thing, shared
        state = None if self.resumed is None else self.resumed.part(name, shared)
        if state is not None:
            thing.load_state_dict(state)
        return state is not None

    def values(
        self, store: TrainedStore, keys: Sequence[Key], specs: Sequence[Spec], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the first values of ``keys``: the checkpoint's, where it has them, else those given."""
        resumed = self.resumed
        if resumed is None:
            return list(values)
        known = [resumed.has(store.ordinal, key) for key in keys]
        store.restored.update(dict.fromkeys(key for key, has in zip(keys, known, strict=True) if has))
        return [
            resumed.value(store.ordinal, key, spec) if has else value
            for key, spec, value, has in zip(keys, specs, values, known, strict=True)
        ]

    def give_states(self, store: TrainedStore, entries: Entries) -> None:
        """Give the servers the checkpoint's states of ``entries``, if there is an optimizer already; once."""
        keys = [key for key in store.restored if key in entries]
        if self.resumed is None or not keys or store.optimizing.optimizer is None:
            return
        optimizer, states = self.resumed.states(store.ordinal, keys)
        if optimizer is not None:
            store.optimizing.restore(optimizer, states, entries, str(self.resumed))
        for key in keys:
            del store.restored[key]

    def _give_residuals(self, store: TrainedStore) -> None:
        """Give the compression of ``store``, before its first push, the checkpoint's residuals of this worker."""
        how = store.pushes.compressing
        if how is None or self.resumed is None:
            return
        store.has_residuals = True
        state = self.resumed.part(f"{RESIDUALS}.{store.ordinal}", shared=False)
        if state is None:
            return
        tensors, plain = state
        if plain.get("compression") == how.compression.options():
            how.load_state(tensors, plain, self.resumed.shapes(store.ordinal))
        else:
            log.warning("%s: the residuals of another compression are left out", self.resumed)

    # ---- moments

    def before(self, store: TrainedStore, plan: Plan) -> None:
        """Save if a checkpoint is due, and this push begins the next round."""
        if not store.has_residuals:
            self._give_residuals(store)
        clock = int(store.clocks.pushed[plan.places].max(initial=0)) + 1
        if clock <= store.begun:
            return
        if clock > 1 and self._directory is not None and store.trains:
            self._passed(store, self._base + clock - 1)
        store.begun = clock

    def step_over(self, store: TrainedStore) -> int | None:
        """Save if a checkpoint is due; the program says that a step is over. Return the number of the checkpoint."""
        if self._directory is None or not store.rounds or not store.trains:
            return None
        store.begun = max(store.begun, store.rounds)
        return self._passed(store, self._base + store.rounds)

    def save(self, store: TrainedStore) -> int | None:
        """Save now; all workers call this. Return the number, or None if that failed at once."""
        if self._directory is None:
            raise UsageError(
                "this job has no directory for checkpoints: set KVSTORE_CHECKPOINT_DIR for all its processes, or start "
                "it with launch.py --checkpoint-dir DIR"
            )
        self.finish()
        return self._meet(self._base + store.rounds, now=True)

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint that is under way is complete, or has failed."""
        answers = self._answers
        if answers is not None:
            try:
                self._session.client.wait_all([answers], timeout)
            except KVStoreError as exc:
                answers.saving.fail(exc)
            answers.saving.join(timeout or self._session.config.timeout_s)
        if self._writer is not None:
            self._writer.join(timeout)

    def flush(self, timeout: float | None = None) -> None:
        """See ``finish``; before this process leaves the job. Says if there was no checkpoint at all."""
        self.finish(timeout)
        if self.rank == 0 and self._meets and not self.made + self.failed:
            log.warning("there was no checkpoint: none was due, or no store has an optimizer on the servers")

    # ---- join

    def begin_join(self) -> None:
        """This worker has run out of batches: others meet without it."""
        if self._meets:
            self._meetings.begin_join()

    def end_join(self) -> None:
        """All workers are in step again: the next round begins with a meeting, since some have missed others."""
        if self._meets:
            self._meetings.join()
            self._next = 0

    # ---- helpers

    def _passed(self, store: TrainedStore, rounds: int) -> int | None:
        if rounds < self._next:
            return None
        if store.in_step:
            return self._meet(rounds)
        if self.rank != 0 or any(other.in_step and other.trains for other in self._stores if other.begun):
            return None
        number = self._decided(rounds, now=False)
        self._next = self._schedule.next(rounds, self._clock())
        if number:
            own = any(shared for _, shared in self._attached.values())
            if own:
                self._write_own(number, shared_only=True)
            self._capture(number, rounds, [0] if own else [])
        return number or None

    def _meet(self, rounds: int, now: bool = False) -> int | None:
        """Hear from worker 0 whether a checkpoint is due; then save what is this worker's own."""
        own = bool(self._attached_here()) or any(store.pushes.compressing is not None for store in self._stores)
        self._slots.zero_()
        if self.rank == 0:
            self._slots[0] = self._decided(rounds, now)
            self._slots[1] = self._schedule.next(rounds, self._clock())
        self._slots[2 + self.rank] = int(own)
        self._meetings.pushpull(f"{KEY}s", self._slots)
        told: list[int] = self._slots.tolist()
        number, following, *parts = told
        self._next = following or NEVER  # 0: worker 0 is inside join, whose end is followed by a meeting
        if not number:
            return None
        self._number = max(self._number, number)
        if own:
            self._write_own(number)
        if self.rank == 0:
            self._capture(number, rounds, [rank for rank, has in enumerate(parts) if has])
        return number

    def _decided(self, rounds: int, now: bool) -> int:
        """At worker 0: return the number of the checkpoint to make, whose folder is there then; 0 for none."""
        if not now and not self._schedule.due(rounds, self._clock()):
            return 0
        answers = self._answers
        if answers is not None:
            answers.done()
            if answers.saving.open:
                number = answers.saving.number
                log.warning("no checkpoint after %d rounds: checkpoint %d is still being written", rounds, number)
                self.failed += 1
                return 0
        if now:
            self._schedule.made(rounds, self._clock())
        try:
            begin(self._folder(self._number + 1).parent, self._number + 1)
        except OSError as exc:
            self._failed(f"{self._folder(self._number + 1)} could not be made: {exc.strerror}")
            if isinstance(exc, FileExistsError):
                self._number += 1
            return 0
        self._number += 1
        return self._number

    def _folder(self, number: int) -> Path:
        return folder_of(Path(self._session.config.checkpoint_dir), number)

    def _failed(self, reason: str) -> None:
        log.error("there is no checkpoint, and training goes on: %s", reason)
        self.failed += 1

    def _capture(self, number: int, rounds: int, parts: Sequence[int]) -> None:
        """Have all servers capture what this worker has pushed; return when they have noted it."""
        session = self._session
        stores = [store.saved() for store in self._stores if store.entries and store.trains]
        saving = CheckpointInProgress(
            self._folder(number),
            number,
            rounds,
            session.num_workers,
            len(session.servers),
            stores,
            parts,
            session.config.checkpoint_keep,
            session.config.timeout_s,
            self._ended,
        )
        answers = _Answers(saving, session)
        try:
            if not stores:
                raise CheckpointError("no store has an optimizer on the servers")
            asked = Operation("asking for a checkpoint", (), session.client, limits=session.limits)
            questions = [
                Question(
                    session.servers[server],
                    asked,
                    Capture,
                    {"store": store.number, "number": number, "ids": ids, "clocks": clocks},
                )
                for store in stores
                for server, (ids, clocks) in store.captures().items()
            ]
            session.client.exchange(asked, ready, questions)
            waits = [
                Question(
                    session.servers[server],
                    answers,
                    AwaitCapture,
                    {"store": stores[place].number, "number": number},
                    partial(saving.take, (place, server)),
                )
                for place, server in saving.expected
            ]
            session.client.submit(answers, ready, waits)
            self._answers = answers
        except NodeLost:
            raise
        except KVStoreError as exc:
            saving.fail(exc)

    def _ended(self, whole: bool) -> None:
        if whole:
            self.made += 1
        else:
            self.failed += 1

    def _attached_here(self) -> Mapping[str, Stateful]:
        """Return what this worker saves: what is shared, worker 0 alone."""
        return {name: thing for name, (thing, shared) in self._attached.items() if self.rank == 0 or not shared}

    def _own(self, shared_only: bool = False) -> dict[str, Any]:
        """Return what this worker adds to a checkpoint, by name."""
        own = {
            name: thing.state_dict()
            for name, thing in self._attached_here().items()
            if not shared_only or self._attached[name][1]
        }
        for store in self._stores if not shared_only else ():
            if store.pushes.compressing is not None:
                store.pushes.flush()  # what is still to be encoded changes the residuals
                own[f"{RESIDUALS}.{store.ordinal}"] = store.pushes.compressing.state()
        return own

    def _write_own(self, number: int, shared_only: bool = False) -> None:
        """Copy what this worker adds, and write it in a thread."""
        try:
            tensors, text = packed(self._own(shared_only))
        except UsageError as exc:
            self._failed(str(exc))
            return
        if self._writer is not None:
            self._writer.join()
        path = self._folder(number) / f"worker-{self.rank}.safetensors"
        args = path, tensors, text
        self._writer = threading.Thread(target=_write_part, args=args, name=f"kvstore-checkpoint-{number}", daemon=True)
        self._writer.start()


class _Answers(Operation):
    """The wait for the files of all servers. An error gives the checkpoint up, and is nobody else's."""

    def __init__(self, saving: CheckpointInProgress, session: Session) -> None:
        super().__init__(f"checkpoint {saving.number}", (), session.client, limits=session.limits)
        self.saving = saving

    def fail(self, error: KVStoreError) -> None:
        """See ``Operation``."""
        self.saving.fail(error)
        super().fail(error)


def _write_part(path: Path, tensors: Mapping[str, torch.Tensor], text: str) -> None:
    headers = [TensorHeader(name, (spec := spec_of(value)).dtype, spec.shape) for name, value in tensors.items()]
    try:
        write_tensors(path, headers, (to_buffer(value) for value in tensors.values()), {"state": text})
    except OSError as exc:
        log.error("%s: this worker's part of the checkpoint failed: %s", path, exc.strerror)


_OF: WeakKeyDictionary[Session, Checkpointing] = WeakKeyDictionary()


def checkpointing(session: Session, make_store: Callable[[], MeetingStore]) -> Checkpointing | None:
    """Return the checkpoints of this worker process; None if the job has none, and continues from none."""
    config = session.config
    if not config.checkpoint_dir and not config.checkpoint_resume:
        return None
    made = _OF.get(session)
    if made is None:
        made = _OF[session] = Checkpointing(session, make_store)
        session.flushes.append(made.flush)
    return made
