from __future__ import annotations

from typing import Any

import pytest
from asking import Door, sender

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost
from servers.scheduler.departures import Departures
from servers.scheduler.guests import PAGE, READERS_SILENT_S, Readers
from servers.scheduler.stores import Stores


class Job:
    """A job's readers and stores, without its members."""

    def __init__(self, most: int = 2) -> None:
        self.stores = Stores(range(1), 2, Departures(0.0))
        self.servers: list[str] = []
        self.error: KVStoreError | None = None
        self.readers = Readers(most, "", Door(), self.stores, lambda: self.servers, lambda: self.error)
        self.now = 0.0

    def ask(self, message: wire.Message) -> Any:
        [(_, reply)] = self.readers.handle(b"reader", message, self.now)
        return reply

    def connect(self, nonce: int) -> Any:
        return self.ask(wire.Connect(sender(-1, role="reader", incarnation=nonce)))

    def init(self, *keys: str, store: int = 1, name: str | None = None) -> None:
        self.stores.serve(b"", wire.OpenStore(sender(), store, name=f"{store}" if name is None else name))
        specs = {"kinds": [0] * len(keys), "shapes": [[2000]], "dtypes": ["float32"]}
        self.stores.serve(b"", wire.Declare(sender(), store - 1, list(keys), **specs, bound=1000, longest=1 << 20))
        self.stores.serve(b"", wire.Ready(sender(), store - 1, list(keys)))


READER = sender(0, role="reader", incarnation=7)


def test_readers_are_numbered_and_told_where_the_servers_are() -> None:
    job = Job()
    assert job.connect(7) == wire.Connected(1, 0, [])
    job.servers = ["a", "b"]
    assert job.connect(7) == wire.Connected(1, 0, ["a", "b"])
    assert job.connect(8).rank == 1


def test_one_more_than_there_may_be_is_refused_until_one_leaves() -> None:
    job = Job(most=2)
    job.connect(7), job.connect(8)
    refused = job.connect(9)
    assert isinstance(refused, wire.Failure)
    assert "2 readers already" in refused.text
    assert job.ask(wire.Leave(READER, None)) == wire.Ack(1)
    assert job.connect(9).rank == 0


def test_a_reader_that_is_silent_does_not_count() -> None:
    job = Job(most=1)
    job.connect(7)
    job.now = READERS_SILENT_S + 1
    assert job.connect(8).rank == 0


def test_keys_are_found_with_their_places() -> None:
    job = Job()
    job.init("w", "v")
    found = job.ask(wire.FindKeys(READER, "1", ["v"]))
    assert isinstance(found, wire.KeysFound)
    assert (found.shapes, found.dtypes, found.tables, found.kinds) == ([[2000]], ["float32"], [None], [0])
    assert (found.counts, found.starts, found.stops, found.servers) == ([2], [0, 1024], [1024, 2000], [0, 1])
    assert job.ask(wire.ListKeys(READER, "1", 0)) == wire.KeysListed(1, ["w", "v"], False)


def test_many_keys_are_listed_page_by_page() -> None:
    job = Job()
    job.init(*map(str, range(PAGE + 1)))
    first = job.ask(wire.ListKeys(READER, "1", 0))
    assert (len(first.keys), first.more) == (PAGE, True)
    assert job.ask(wire.ListKeys(READER, "1", PAGE)) == wire.KeysListed(1, [str(PAGE)], False)


@pytest.mark.parametrize("ordinal", [1, 2])
def test_what_is_not_there_is_no_fault_of_the_job(ordinal: int) -> None:
    job = Job()
    job.init("w")
    reply = job.ask(wire.FindKeys(READER, f"{ordinal}", ["x"]))
    assert (reply.kind, "x" in reply.text or "no store 2" in reply.text) == ("KeyNotInitialized", True)


def test_values_are_not_here() -> None:
    assert "to the servers" in Job().ask(wire.ReadValues(READER, 0, [], 0, [], 0)).text


def test_when_the_job_is_over_readers_are_told() -> None:
    job = Job()
    job.error = NodeLost("worker 1 was killed by SIGKILL")
    reply = job.connect(7)
    assert (reply.kind, reply.text) == ("NodeLost", "worker 1 was killed by SIGKILL")
    assert job.ask(wire.Explain(READER, 1)).text == ""


def test_a_greeting_is_not_answered() -> None:
    assert Job().readers.handle(b"reader", wire.Here(wire.Node("reader", 0, 7)), 0.0) == []


def test_a_reader_of_another_store_is_told_which_store_has_the_key() -> None:
    job = Job()
    job.init("ours")
    job.init("weight", store=2)
    job.connect(7)
    said = {
        (store, key): job.ask(wire.FindKeys(READER, f"{store}", [key])).text
        for store in (1, 3)
        for key in ("weight", "x")
    }
    told = "store 2 has key 'weight': pass store=2 to kvstore.connect"
    assert said[1, "weight"] == f"key 'weight' has no value in store 1, which this reader reads; {told}"
    assert said[3, "weight"].endswith(f"or all have closed it; {told}")
    assert said[1, "x"] == "key 'x' has no value in this job yet; no worker has initialized it"
    assert said[3, "x"].endswith("or all have closed it")
    misspelled = job.ask(wire.FindKeys(READER, "2", ["wieght"])).text
    assert misspelled == "key 'wieght' has no value in this job yet; did you mean 'weight'?"
    job.init("weight", store=3)
    assert "stores 2, 3 have key 'weight': pass store=2" in job.ask(wire.FindKeys(READER, "1", ["weight"])).text


def test_stores_are_found_by_their_names_and_a_later_one_of_a_name_counts() -> None:
    job = Job()
    made = [("", 1), ("workers", 2), ("1", 3), ("", 4), ("workers", 5)]  # which store of each worker it is
    for name, ordinal in made:
        job.init("w", store=ordinal, name=name)
    assert [job.ask(wire.FindKeys(READER, name, ["w"])).store for name in ("1", "workers")] == [2, 4]
    assert "stores 1, workers have key 'w': pass store=1" in job.ask(wire.FindKeys(READER, "2", ["w"])).text
    job.stores.close(0, 2)
    assert "store workers has key 'w': pass store='workers'" in job.ask(wire.FindKeys(READER, "1", ["w"])).text
    job.stores.close(0, 4)
    assert job.ask(wire.FindKeys(READER, "workers", ["w"])).kind == "KeyNotInitialized"
