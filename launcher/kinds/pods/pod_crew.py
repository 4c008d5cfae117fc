"""The crew of tasks that run as pods, and the output of each, whose log may end before the pod does.

It has never run on a real cluster.
"""

from __future__ import annotations

import json
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from launcher.errors import LaunchError
from launcher.job.tasks import Task
from launcher.kinds.pods.kubectl import Kubectl, KubectlStream
from launcher.kinds.pods.manifests import JOB
from launcher.kinds.pods.watch import FollowLog, PodWatch, TaskEnded
from launcher.supervision.crew import Crew, Sink
from launcher.supervision.ending import Say

POLL_S = 1.0
PODS_PER_S = 200  # whose state is read at most
_SILENCE_S = 60.0  # between two messages that the cluster does not answer
_LAST_WORDS_S = 30.0
_EVERYTHING = "jobs,services,secrets"


_STAMP = re.compile(rb"((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.?(\d*)(?:Z|[+-]\d\d:\d\d)) ?")


class PodLog:
    """Removes timestamps, and lines that have been read before."""

    def __init__(self) -> None:
        self._partial = b""
        self._last = b""  # the stamp of the last whole line
        self._until = b""

    @property
    def since(self) -> str:
        """The timestamp to go on from; empty for the beginning."""
        return self._last.decode()

    def resume(self) -> None:
        """The log is read again from `since`, the timestamp of the last line."""
        self._partial, self._until = b"", self._last

    def feed(self, data: bytes) -> bytes:
        *lines, self._partial = (self._partial + data).split(b"\n")
        new = []
        for line in lines:
            stamp, text = _cut(line)
            if self._before(stamp):
                continue
            self._until = b""
            self._last = stamp or self._last
            new.append(text + b"\n")
        return b"".join(new)

    def finish(self) -> bytes:
        stamp, text = _cut(self._partial)
        self._partial = b""
        return b"" if self._before(stamp) else text

    def _before(self, stamp: bytes) -> bool:
        return bool(stamp and self._until) and _order(stamp) <= _order(self._until)


def _cut(line: bytes) -> tuple[bytes, bytes]:
    match = _STAMP.match(line)
    return (b"", line) if match is None else (match[1], line[match.end() :])


def _order(stamp: bytes) -> tuple[bytes, bytes]:
    """A key that orders the timestamps of a pod, which may lack trailing zeros."""
    match = _STAMP.match(stamp)
    return (b"", b"") if match is None else (match[2], match[3].ljust(9, b"0"))


class PodCrew(Crew):
    """Runs tasks as pods.

    None is started again: what a pod that has failed had is lost. When a pod ends, so do all of its processes.

    Args:
        name: the name of the job.
        objects: the objects to create, in the syntax of kubectl.
    """

    def __init__(self, kubectl: Kubectl, name: str, tasks: Sequence[Task], objects: str) -> None:
        self._kubectl = kubectl
        self._name, self._tasks, self._objects = name, tasks, objects
        self._mine = ("--selector", f"{JOB}={name}")
        self._listing: KubectlStream | None = None
        self._listed = bytearray()
        self._next = 0.0
        self._complain_at = 0.0
        self._complained = False  # that a log cannot be read
        self._logs: dict[int, PodLog] = {}
        self._followers: dict[int, KubectlStream] = {}
        self._last: set[int] = set()  # tasks whose last output is being read, or was
        self._queue: deque[tuple[TaskEnded, float]] = deque()
        self._running = set(range(len(tasks)))
        self._reading = True
        self._created = False
        self._commands: list[KubectlStream] = []

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        self._selector, self._sink = selector, sink
        self._created = True
        # `apply` would copy the Secrets into annotations.
        if problem := self._kubectl.run("create", "--filename", "-", stdin=self._objects):
            raise LaunchError(f"the cluster refused the job: {problem}", 1)
        self._watch = PodWatch(self._tasks, time.monotonic())
        sink.say(f"submitted as {self._name}; if launch.py is killed, remove the job with: {self._undo}")

    def collect(self) -> None:
        for command in [command for command in self._commands if command.over]:
            self._commands.remove(command)
            if command.complaint:
                self._sink.say(command.complaint)
        if self._listing is not None and self._listing.over:
            listing, self._listing = self._listing, None
            self._take_listing(listing)
        now = time.monotonic()
        if self._listing is None and now >= self._next and self._running:
            self._next = now + max(POLL_S, len(self._tasks) / PODS_PER_S)
            self._listed.clear()
            words = ["get", "pods", *self._mine, "--output", "json", "--request-timeout", "30s"]
            self._listing = self._listen(words, self._listed.extend)
        self._deliver(now)

    def reading(self, wanted: bool) -> None:
        if wanted == self._reading:
            return
        self._reading = wanted
        for follower in self._followers.values():
            if wanted:
                follower.register(self._selector)
            else:
                follower.unregister()

    def signal(self, signum: int) -> None:
        self._watch.deleting()
        self._complained = True  # pods may be gone before their logs have been read
        words = ["delete", "jobs", *self._mine, "--ignore-not-found", "--wait=false"]
        if signum == signal.SIGKILL:
            words = ["delete", "pods", *self._mine, "--ignore-not-found", "--wait=false", "--force", "--grace-period=0"]
        command = self._listen(words, lambda _: None)
        if command is not None:
            self._commands.append(command)
        self._next = 0.0

    def close(self) -> None:
        for listening in (*self._commands, *self._followers.values(), *filter(None, [self._listing])):
            listening.close()
        self._commands, self._followers, self._listing = [], {}, None
        if self._created:
            self._created = False
            words = ("delete", _EVERYTHING, *self._mine, "--ignore-not-found", "--wait=false")
            if problem := self._kubectl.run(*words):
                self._sink.say(f"could not delete what is in the cluster: {problem}; remove it with: {self._undo}")

    @property
    def _undo(self) -> str:
        return f"kubectl delete {_EVERYTHING} -l {JOB}={self._name}"

    def _take_listing(self, listing: KubectlStream) -> None:
        now = time.monotonic()
        try:
            pods = [] if listing.complaint else json.loads(self._listed)["items"]
        except (ValueError, KeyError):
            listing.complaint = "kubectl printed something that is not a list of pods"
        if listing.complaint:
            # The network may be down for a while; the job goes on.
            if now >= self._complain_at:
                self._complain_at = now + _SILENCE_S
                self._sink.say(f"cannot ask for the state of the job: {listing.complaint}")
            return
        for event in self._watch.look(pods, now):
            if isinstance(event, Say):
                self._sink.say(event.text)
            elif isinstance(event, FollowLog):
                self._follow(event)
            else:
                self._queue.append((event, now))

    def _follow(self, event: FollowLog) -> None:
        """Follow the log of a pod, again if its connection has ended: quiet connections are cut."""
        before = self._followers.get(event.index)
        if before is None or before.over:
            self._read_log(event.index, event.pod, "--follow")

    def _read_log(self, index: int, pod: str, *words: str) -> None:
        before = self._followers.pop(index, None)
        if before is not None and before.complaint and not self._complained:
            self._complained = True
            self._sink.say(f"cannot read what {self._tasks[index].name} prints: {before.complaint}")
        log = self._logs.setdefault(index, PodLog())
        since = ("--since-time", log.since) if log.since else ()
        log.resume()

        def take(data: bytes) -> None:
            if lines := log.feed(data):
                self._sink.output(index, 1, lines)
            if time.monotonic() >= self._next:
                self.collect()  # endless output must not delay this

        follower = self._listen(["logs", pod, "--timestamps", *words, *since], take, self._reading)
        if follower is not None:
            self._followers[index] = follower

    def _deliver(self, now: float) -> None:
        """Report the exits in their order, each after the last output."""
        patient = [not self._reading or now < since + _LAST_WORDS_S for _, since in self._queue]
        ready = [self._has_spoken(end) or not wait for (end, _), wait in zip(self._queue, patient, strict=True)]
        while ready and ready.pop(0):
            end = self._queue.popleft()[0]
            if end.index in self._followers:
                self._followers.pop(end.index).close()
            if end.index in self._logs and (rest := self._logs[end.index].finish()):
                self._sink.output(end.index, 1, rest)
            self._sink.output(end.index, 1, b"")
            self._running.discard(end.index)
            self._sink.exited(end.index, end.how)

    def _has_spoken(self, end: TaskEnded) -> bool:
        """Whether all output of a task has been read. Its log may have been cut off, so it is read again."""
        follower = self._followers.get(end.index)
        if follower is not None and not follower.over:
            return False
        if end.pod is None or end.index in self._last:
            return True
        self._last.add(end.index)
        self._read_log(end.index, end.pod)
        return end.index not in self._followers

    def _listen(
        self, words: Sequence[str], on_data: Callable[[bytes], None], listen: bool = True
    ) -> KubectlStream | None:
        try:
            listening = self._kubectl.listen(words, on_data, self.collect)
        except OSError as error:
            self._sink.say(f"cannot start kubectl: {error.strerror}")
            return None
        if listen:
            listening.register(self._selector)
        return listening
