"""Follows the pods of a job. No I/O: descriptions of the pods and the time go in, events come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.job.processes import Exit
from launcher.job.tasks import Task
from launcher.kinds.pods.manifests import ROLE
from launcher.supervision.ending import Say

INDEX = "batch.kubernetes.io/job-completion-index"
PATIENCE_S = 600.0  # for a cluster that adds nodes, and for large images
BROKEN_S = 120.0  # for errors that a registry or the user may still correct
REMIND_S = 30.0
_SHOWN = 3  # names of tasks that are waited for
_LONGEST = 300  # characters of a message of Kubernetes

# Reasons for a container to wait that hardly ever go away.
_BROKEN = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


@dataclass(frozen=True)
class Pod:
    """The state of one pod."""

    name: str
    started: bool = False  # whether its program runs or has run
    why: str = ""  # what it waits for, if it has not started
    broken: bool = False  # whether waiting will hardly help
    exit: Exit | None = None  # how it has ended, if it has
    unwanted: bool = False  # whether it is being deleted, so that its end is not a failure of its own
    finished: str = ""  # the time of its end, in the notation of Kubernetes


@dataclass(frozen=True)
class FollowLog:
    """A task's pod has output to read."""

    index: int
    pod: str


@dataclass(frozen=True)
class TaskEnded:
    """A task has ended. `pod` is the pod with its last output, or None."""

    index: int
    how: Exit
    pod: str | None


Event = FollowLog | TaskEnded | Say


class PodWatch:
    """Follows the pods of one job.

    Args:
        tasks: the tasks of the job, in order.
        now: the time when they were submitted.
    """

    def __init__(self, tasks: Sequence[Task], now: float) -> None:
        self._tasks = tasks
        self._index = {(task.role, task.rank): index for index, task in enumerate(tasks)}
        self._since = dict.fromkeys(range(len(tasks)), now)  # it has been waiting so since then
        self._broken: set[int] = set()
        self._known: dict[int, str] = {}
        self._started: set[int] = set()
        self._ended: set[int] = set()
        self._reminded = now
        self._deleting = False

    def deleting(self) -> None:
        self._deleting = True

    def look(self, pods: Sequence[Mapping[str, Any]], now: float) -> list[Event]:
        """Return the events since the last call. `pods`: the descriptions of all pods of the job."""
        by_task = self._by_task(pods)
        events: list[Event] = []
        ended: list[tuple[bool, str, TaskEnded]] = []
        waiting: list[str] = []
        for index in range(len(self._tasks)):
            if index in self._ended:
                continue
            pod = by_task.get(index)
            if pod is not None and pod.started:
                self._started.add(index)
                events.append(FollowLog(index, pod.name))
            how = self._end_of(index, pod, now)
            if how is not None:
                unwanted, finished = (True, "") if pod is None else (pod.unwanted, pod.finished)
                ended.append((unwanted, finished, TaskEnded(index, how, pod.name if pod and pod.started else None)))
            elif index not in self._started:
                waiting.append(f"{self._tasks[index].name} ({_why(pod)})")
        # The first to fail gets the blame, and not those that were deleted afterwards.
        for _, _, end in sorted(ended, key=lambda entry: entry[:2]):
            self._ended.add(end.index)
            events.append(end)
        return [*events, *self._remind(waiting, now)]

    def _by_task(self, pods: Sequence[Mapping[str, Any]]) -> dict[int, Pod]:
        by_task: dict[int, Pod] = {}
        for description in pods:
            metadata = description["metadata"]
            role = metadata.get("labels", {}).get(ROLE)
            rank = metadata.get("annotations", {}).get(INDEX, "")
            index = self._index.get((role, int(rank))) if rank.isdigit() else None
            if index is None:
                continue
            # A replacement of a pod is not a member: the end of the first pod has failed the job.
            if self._known.setdefault(index, metadata["name"]) == metadata["name"]:
                by_task[index] = read(description)
        return by_task

    def _end_of(self, index: int, pod: Pod | None, now: float) -> Exit | None:
        if pod is None:
            if index in self._known or self._deleting:
                return Exit(code=1, text="lost its pod, which was deleted")
        elif pod.exit is not None or pod.started:
            return pod.exit
        if (pod is not None and pod.broken) != (index in self._broken):
            self._broken ^= {index}
            self._since[index] = now
        patience = BROKEN_S if index in self._broken else PATIENCE_S
        if now - self._since[index] < patience:
            return None
        return Exit(code=1, text=f"has not started in {patience / 60:g} minutes: {_why(pod)}")

    def _remind(self, waiting: Sequence[str], now: float) -> list[Event]:
        if not waiting or self._deleting or now - self._reminded < REMIND_S:
            return []
        self._reminded = now
        more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
        return [Say(f"waiting for {', '.join(waiting[:_SHOWN])}{more}")]


def read(description: Mapping[str, Any]) -> Pod:
    metadata, status = description["metadata"], description.get("status", {})
    name, unwanted = metadata["name"], "deletionTimestamp" in metadata
    conditions = {entry["type"]: entry for entry in status.get("conditions") or () if "type" in entry}
    state: Mapping[str, Any] = next((entry.get("state", {}) for entry in status.get("containerStatuses") or ()), {})
    if (terminated := state.get("terminated")) is not None:
        how = _exit(terminated, conditions.get("DisruptionTarget", {}))
        return Pod(name, True, exit=how, unwanted=unwanted, finished=terminated.get("finishedAt") or "")
    if status.get("phase") == "Failed":
        how = Exit(code=1, text=f"was ended by the cluster: {_said(status)}")
        return Pod(name, exit=how, unwanted=unwanted)
    if "running" in state:
        return Pod(name, started=True, unwanted=unwanted)
    if (scheduled := conditions.get("PodScheduled", {})).get("status") == "False":
        return Pod(name, why=_said(scheduled), unwanted=unwanted)
    reason = state.get("waiting", {})
    return Pod(name, why=_said(reason), broken=reason.get("reason") in _BROKEN, unwanted=unwanted)


def _exit(terminated: Mapping[str, Any], disruption: Mapping[str, Any]) -> Exit:
    code, reason = int(terminated.get("exitCode", 1)), terminated.get("reason", "")
    if code == 0:
        return Exit()
    if reason == "OOMKilled":
        return Exit(code=code, text="was killed: it needed more memory than it may have (OOMKilled)")
    if disruption.get("status") == "True":
        return Exit(code=code, text=f"was ended by the cluster: {_said(disruption)}")
    if reason in ("StartError", "ContainerCannotRun"):
        return Exit(code=code, text=f"could not be started: {_said(terminated)}")
    return Exit(code=code)


def _why(pod: Pod | None) -> str:
    return "it has no pod yet" if pod is None else pod.why or "its pod is new"


def _said(entry: Mapping[str, Any]) -> str:
    text = " ".join(": ".join(filter(None, (entry.get("reason"), entry.get("message")))).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
