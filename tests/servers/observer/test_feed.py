"""Messages go to all readers, and the slow ones miss some."""

from __future__ import annotations

from servers.observer.watcher import Feed


def test_a_reader_gets_the_latest() -> None:
    feed = Feed()
    assert feed.after(0, 0.0) == (0, b"", False)
    feed.publish(b"a")
    feed.publish(b"b")
    assert feed.after(0, 1.0) == (2, b"b", False)
    assert feed.after(2, 0.0) == (2, b"", False)


def test_the_last_message_is_marked() -> None:
    feed = Feed()
    feed.publish(b"a")
    feed.close()
    feed.publish(b"b")
    assert feed.after(0, 1.0) == (1, b"a", True)
    assert feed.after(1, 1.0) == (1, b"", True)
