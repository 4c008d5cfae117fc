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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from kvstore.checkpoint.folders import begin, folder_of, found, listed, prepare, remove
from kvstore.checkpoint.manifest import MANIFEST
from kvstore.checkpoint.schedule import NEVER, CheckpointSchedule
from kvstore.checkpoint.verify import verify
from kvstore.client.captures import Answers, ask
from kvstore.client.meetings import Meetings, MeetingStore, told
from kvstore.client.plans.entries import Entries
from kvstore.client.resuming import Resumed
from kvstore.client.saving import CheckpointInProgress
from kvstore.client.trained import TrainedStore
from kvstore.client.worker_part import Stateful, WorkerPart
from kvstore.errors import CheckpointError, KVStoreError, NodeLost, UsageError
from kvstore.job.valid_values import Interval
from kvstore.member.session import Session
from kvstore.spec import Key, Spec
from kvstore.values.addresses import Column

log = logging.getLogger(__name__)


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
        self._part = WorkerPart(session.rank)
        self._answers: Answers | None = None
        config = session.config
        self._directory = Path(config.checkpoint_dir) if config.checkpoint_dir else None
        self.resumed: Resumed | None = None
        number, resumed = self._begun()
        store = make_store()
        self._number, resumed = told(store, number, resumed)  # the first is that of the newest in the directory
        if resumed and self.resumed is None:
            path = Path(config.checkpoint_resume)
            folder = path if (path / MANIFEST).exists() else folder_of(path, resumed)
            self.resumed = Resumed(folder, self.rank, session.num_workers)
        self._base = 0 if self.resumed is None else self.resumed.rounds
        self._meetings = Meetings(store, self.rank, session.num_workers)
        self._schedule = CheckpointSchedule(config.checkpoint_every, self._base, clock())
        self._meets = self._directory is not None and config.checkpoint_every != Interval()
        self._next = self._schedule.first() if self._meets else NEVER

    @property
    def rank(self) -> int:
        """This worker's."""
        return self._session.rank

    def _begun(self) -> tuple[int, int]:
        """Open and verify the checkpoint to continue from; return the newest number there is, and that one's.

        Raises:
            CheckpointError: that is not possible, or no checkpoint can be written.
        """
        if self.rank != 0:
            return 0, 0
        newest = 0
        if self._directory is not None:
            prepare(self._directory)
            newest = max((folder.number for folder in listed(self._directory)), default=0)
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
        self._part.attach(name, thing, shared)
        state = None if self.resumed is None else self.resumed.part(name, shared)
        if state is not None:
            thing.load_state_dict(state)
        return state is not None

    def values(
        self, store: TrainedStore, keys: Sequence[Key], specs: Sequence[Spec], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the first values of ``keys``: the checkpoint's, where it has them, else those given."""
        if self.resumed is None:
            return list(values)
        return store.first_values(self.resumed, keys, specs, values)

    def give_states(self, store: TrainedStore, entries: Entries) -> None:
        """Give the servers the checkpoint's states of ``entries``, if there is an optimizer already; once."""
        if self.resumed is not None:
            store.give_states(self.resumed, entries)

    # ---- moments

    def before(self, store: TrainedStore, places: Column) -> None:
        """Save if a checkpoint is due, and this push, of the keys at ``places``, begins the next round."""
        if self.resumed is not None and not store.has_residuals:
            store.give_residuals(self.resumed)
        clock = int(store.clocks.pushed[places].max(initial=0)) + 1
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

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint that is under way is complete; return whether it has not failed here."""
        answers = self._answers
        if answers is not None:
            try:
                self._session.client.wait_all([answers], timeout)
            except KVStoreError as exc:
                answers.saving.fail(exc)
            answers.saving.join(timeout or self._session.config.timeout_s)
        written = self._part.join(timeout)
        return written and not (answers is not None and answers.saving.failed)

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
            own = self._part.has_shared
            why = self._copied(number, shared_only=True) if own else ""
            if why:
                self._give_up(number, f"worker 0: {why}")
                return None
            self._part.write(self._folder(number), number)
            self._capture(number, rounds, [0] if own else [])
        return number or None

    def _meet(self, rounds: int, now: bool = False) -> int | None:
        """Hear from worker 0 whether a checkpoint is due; then save what is this worker's own."""
        own = self._part.has_own(self._stores)
        decided = following = 0
        if self.rank == 0:
            decided = self._decided(rounds, now)
            following = self._schedule.next(rounds, self._clock())
        number, following, parts = self._meetings.meet(own, decided, following)
        self._next = following or NEVER  # 0: worker 0 is inside join, whose end is followed by a meeting
        if not number:
            return None
        self._number = max(self._number, number)
        if parts:
            why = self._meetings.failure(self._copied(number) if own else "")
            if why:
                self._give_up(number, why)
                return None
            self._part.write(self._folder(number), number)
        if self.rank == 0:
            self._capture(number, rounds, parts)
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

    def _give_up(self, number: int, why: str) -> None:
        """Note, on every worker, that there is no checkpoint ``number``, of which nothing has been written yet."""
        self.failed += 1
        if self.rank != 0:
            return
        log.error("there is no checkpoint %d, and training goes on: %s", number, why)
        try:
            remove(self._folder(number))
        except OSError as exc:
            log.warning("%s could not be removed: %s", self._folder(number), exc)

    def _copied(self, number: int, shared_only: bool = False) -> str:
        """Copy what is this worker's own; return what keeps it from that, if anything."""
        try:
            self._part.copy(self._folder(number), self._stores, shared_only)
        except CheckpointError as exc:
            return str(exc)
        return ""

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
        try:
            if not stores:
                raise CheckpointError("no store has an optimizer on the servers")
            self._answers = ask(session, saving, stores)
        except NodeLost:
            raise
        except KVStoreError as exc:
            saving.fail(exc)

    def _ended(self, whole: bool) -> None:
        if whole:
            self.made += 1
        else:
            self.failed += 1


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
