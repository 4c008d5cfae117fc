"""What an aggregator does for its workers: it compresses their sum, and reads gradients from their devices."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from played_session import AGGREGATOR, SCHEDULER, PlayedSession
from simulation.job import SimulatedJob
from threaded import ThreadedJob, shared_job

from kvstore import wire
from kvstore.client import DistStore
from kvstore.client.compression import Compressing, Delegated
from kvstore.codecs import Compressor, decode, parse
from kvstore.codecs.compressor import EncodedSum
from kvstore.codecs.options import described, travelling
from kvstore.devices import CannotLend, HostMemory, Lent
from kvstore.errors import Mismatch, UsageError
from kvstore.optim import states_file
from kvstore.rule import Rule
from kvstore.spec import Key
from kvstore.values import from_buffer, to_buffer
from servers.aggregator.encoding import Encoding

ARRAYS = {"w": torch.zeros(5), "cut": torch.zeros(3, 4), "counts": torch.zeros(2, dtype=torch.int64)}
ASYNC = Rule("async")
HOST = Rule("async", aggregate="host")


def compressed(encoded: EncodedSum, seq: int = 1) -> wire.Values:
    """Values, encoded."""
    return wire.Values(seq, lengths=encoded.lengths, segment_counts=encoded.segment_counts, buffers=encoded.buffers)


class Host:
    """A store of one worker, with a scheduler, two servers and an aggregator, whose values are the last push.

    Args:
        rule: of the store.
    """

    def __init__(self, rule: Rule | None = None, keeper: int = 0) -> None:
        self.encoding = Encoding(lambda number: self.of[number][0], lambda number: self.of[number][1], keeper)
        self.of: dict[int, tuple[Key, int, str]] = {}  # by segment: key, size and dtype
        self.value: dict[int, torch.Tensor] = {}
        self.session = PlayedSession(answer=self._answer, aggregator=True)
        self.store = DistStore(self.session, "dist", rule)  # type: ignore[arg-type]
        self.session.asked.clear()
        self.session.client.made.clear()

    def asked(self, kind: type) -> list[Any]:
        """The messages of a class that were sent to the aggregator; to others there must be none."""
        listed = [(peer, message) for peer, message in self.session.asked if isinstance(message, kind)]
        assert {peer for peer, _ in listed} <= {AGGREGATOR}
        return [message for _, message in listed]

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Declare):
            assert peer == SCHEDULER
            return self._place(request)
        if isinstance(request, wire.GetStates) and peer != AGGREGATOR:
            return wire.OptimizerStates(request.seq, "sgd", [], [], [], [], [])
        if isinstance(request, wire.GetStates):
            return self.encoding.get_states(request)
        if isinstance(request, wire.PutStates):
            self.encoding.put_states(request)
        if isinstance(request, wire.Push | wire.Pull):
            assert peer == AGGREGATOR
            return self._values(request)
        return wire.Ack(request.seq)

    def _place(self, request: wire.Declare) -> wire.Placed:
        placed = wire.Placed(request.seq, [], [], [], [], [])
        for key, kind in zip(request.keys, request.kinds, strict=True):
            size = torch.Size(request.shapes[kind]).numel()
            edges = [0, 7, size] if key == "cut" else [0, size]
            placed.counts.append(len(edges) - 1)
            for server, (start, stop) in enumerate(itertools.pairwise(edges)):
                number = len(self.of) + 1
                self.of[number] = key, stop - start, request.dtypes[kind]
                columns = placed.ids, placed.servers, placed.starts, placed.stops
                for column, item in zip(columns, (number, server, start, stop), strict=True):
                    column.append(item)
        return placed

    def _values(self, request: wire.Push | wire.Pull) -> wire.Reply:
        sizes = [self.of[number][1] for number in request.ids]
        if isinstance(request, wire.Push):
            flat = self._arrived(request, sizes, self.of[request.ids[0]][2])
            self.value |= dict(zip(request.ids, flat.split(sizes), strict=True))
            if not request.want:
                return wire.Ack(request.seq)
        flat = torch.cat([self.value[number] for number in request.ids])
        if self.store.rule.merges or request.back is None:
            return wire.Values(request.seq, buffers=[to_buffer(flat)])
        return compressed(Encoding(str, sizes.__getitem__).encode(request.back, request.ids, sizes, flat), request.seq)

    def _arrived(self, request: wire.Push, sizes: list[int], dtype: str) -> torch.Tensor:
        """What a server makes of a push."""
        if request.codec is None:
            flat = from_buffer(bytearray(b"".join(map(bytes, request.buffers))), dtype)
            if request.encode is None:
                return flat
            encoded = self.encoding.encode(request.encode, request.ids, sizes, flat)
        else:
            encoded = EncodedSum(request.codec, request.lengths, request.segment_counts, list(request.buffers))
        out = torch.empty(sum(sizes))
        self.encoding.decode(encoded.codec, compressed(encoded), sizes, out)
        return out

    def init(self) -> None:
        self.store.init(list(ARRAYS), list(ARRAYS.values()))
        self.session.asked.clear()
        self.session.client.made.clear()


def gradient(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(9, like.shape, generator=made)
        if key == "counts"
        else torch.randn(like.shape, generator=made)
        for key, like in ARRAYS.items()
    }


def round_of(host: Host, seed: int = 0, **how: Any) -> dict[str, torch.Tensor]:
    """What a push of all keys gives."""
    outs = {key: torch.empty_like(like) for key, like in ARRAYS.items()}
    host.store.pushpull(list(ARRAYS), list(gradient(seed).values()), out=list(outs.values()), **how)
    return outs


def arrives(compressor: Compressor, key: str, values: torch.Tensor) -> torch.Tensor:
    """What is made of an array that a worker encodes."""
    encoded = compressor.encode(key, values)
    return decode(compressor.compression, encoded.payload(0, encoded.size), encoded.size).view(values.shape)


@pytest.mark.parametrize("options", [{"type": "2bit"}, {"type": "fp16", "pull": "bf16"}, {"type": "int8"}], ids=str)
def test_gradients_go_to_the_aggregator_as_they_are(options: dict[str, object]) -> None:
    host, compression = Host(), parse(options)
    host.store.set_gradient_compression(options)
    host.init()
    compressor = Compressor(compression)
    for step in range(3):
        outs = round_of(host, step)
        for key, value in gradient(step).items():
            expected = arrives(compressor, key, value) if key == "w" else None if key == "cut" else value
            assert expected is None or torch.equal(outs[key], expected)
    host.store.pull(list(ARRAYS), out=list(outs.values()))
    for message in host.asked(wire.Push):
        floats = host.of[message.ids[0]][2] == "float32"
        assert (message.codec, message.lengths, message.segment_counts) == (None, [], [])
        assert message.encode == (travelling(compression) if floats else None)
    for message in [*host.asked(wire.Push), *host.asked(wire.Pull)]:
        floats = host.of[message.ids[0]][2] == "float32"
        assert described(message.back) == (compression.pull if floats else None)
    sizes = sum(like.numel() * like.itemsize for like in ARRAYS.values())
    statistics = host.store.statistics()
    assert (statistics.bytes_pushed, statistics.bytes_pulled) == (3 * sizes, 4 * sizes), "plain, between them"


def test_without_compression_they_say_nothing_of_it() -> None:
    host = Host()
    host.init()
    outs = round_of(host)
    assert all(torch.equal(outs[key], value) for key, value in gradient().items())
    assert {(message.codec, message.encode, message.back) for message in host.asked(wire.Push)} == {(None, None, None)}


@pytest.mark.parametrize("wait", [True, False])
def test_pushes_wait_for_their_turn_if_their_caller_does_and_say_how_urgent_they_are(wait: bool) -> None:
    host = Host()
    host.init()
    round_of(host, priority=3, wait=wait)
    host.store.pull("w", out=torch.empty(5), priority=2, wait=wait)
    *pushes, pull = host.session.client.made
    assert [request.turn and request.turn.priority for request in pushes] == [3 if wait else None] * 3
    assert [request.priority for request in pushes] == [None if wait else 3] * 3
    assert (pull.turn, pull.priority) == (None, None), "it is small, and the aggregator decides what goes next"
    assert {message.priority for message in host.asked(wire.Push)} == {3}


def test_values_that_are_not_finite_are_refused_before_anything_is_sent() -> None:
    host = Host()
    host.store.set_gradient_compression({"type": "2bit"})
    host.init()
    with pytest.raises(UsageError, match="'w' has infinite or NaN elements"):
        host.store.push("w", torch.full((5,), torch.nan))
    assert host.asked(wire.Push) == []


@pytest.mark.parametrize("kind", ["1bit", "powersgd"])
def test_what_an_aggregator_cannot_do_a_worker_does_and_gets_plain_values(kind: str) -> None:
    host, options = Host(), {"type": kind, "pull": "fp16"}
    host.store.set_gradient_compression(options)
    host.init()
    outs, compressor = round_of(host), Compressor(parse(options))
    for key, value in gradient().items():
        assert torch.equal(outs[key], value if key == "counts" else arrives(compressor, key, value))
    floats = [message for message in host.asked(wire.Push) if host.of[message.ids[0]][2] == "float32"]
    assert {message.codec[0] for message in floats} == {kind}
    assert {(message.encode, message.back[0]) for message in floats} == {(None, "fp16")}


@pytest.mark.parametrize(("rule", "kind"), [(ASYNC, Compressing), (HOST, Delegated)])
def test_where_pushes_are_not_summed_the_worker_compresses(rule: Rule, kind: type) -> None:
    host, options = Host(rule), {"type": "2bit", "threshold": 0.5, "pull": "fp16"}
    host.store.set_gradient_compression(options)
    host.init()
    outs = round_of(host)
    assert torch.equal(outs["w"], arrives(Compressor(parse(options)), "w", gradient()["w"]))
    floats = [message for message in host.asked(wire.Push) if host.of[message.ids[0]][2] == "float32"]
    assert {(message.codec is None, message.encode is None) for message in floats} == {
        (kind is Delegated, kind is Compressing)
    }


OPTIONS = {"type": "topk", "k": 1, "momentum": 0.5}


def test_what_was_left_out_is_saved_by_one_worker_of_the_host_and_is_good_for_any_job(tmp_path: Path) -> None:
    """With an aggregator and without: the files are the same."""
    host = Host()
    host.store.set_gradient_compression(OPTIONS)
    host.init()
    for step in range(3):
        round_of(host, step)
    host.store.save_optimizer_states(tmp_path / "one")
    saved = states_file.read_residuals(tmp_path / "one")
    assert saved is not None
    flat = Compressor(parse(OPTIONS))
    flat.load_state(saved.tensors, saved.plain, {key: like.shape for key, like in ARRAYS.items()})
    assert [memo.step for memo in flat.memos] == [3, 3]
    for key in ("w", "cut"):
        memos = [host.encoding.kept(number) for number, of in host.of.items() if of[0] == key]
        assert torch.equal(flat.kept(key).residual, torch.cat([memo.residual for memo in memos]))
    again = Host()
    again.store.set_gradient_compression(OPTIONS)
    again.init()
    again.store.load_optimizer_states(tmp_path / "one")
    for step in range(3, 5):
        outs, others = round_of(host, step), round_of(again, step)
        assert all(torch.equal(outs[key], others[key]) for key in ARRAYS)


def test_the_other_workers_of_the_host_save_none(tmp_path: Path) -> None:
    host = Host(keeper=1)
    host.store.set_gradient_compression(OPTIONS)
    host.init()
    round_of(host)
    host.store.save_optimizer_states(tmp_path / "other")
    saved = states_file.read_residuals(tmp_path / "other")
    assert saved is not None
    assert (dict(saved.tensors), saved.plain["steps"]) == ({}, [])


def test_states_of_another_compression_are_refused(tmp_path: Path) -> None:
    host = Host()
    host.store.set_gradient_compression({"type": "fp16"})
    host.init()
    round_of(host)
    host.store.save_optimizer_states(tmp_path / "one")
    host.store.set_gradient_compression({"type": "int8"})
    with pytest.raises(Mismatch, match="fp16"):
        host.store.load_optimizer_states(tmp_path / "one")
    assert host.asked(wire.PutStates) == []


def test_an_array_that_is_cut_may_have_been_encoded_in_part(tmp_path: Path) -> None:
    host = Host()
    host.store.set_gradient_compression(OPTIONS)
    host.init()
    number, (_, size, _) = next((number, of) for number, of in host.of.items() if of[0] == "cut")
    host.encoding.encode(travelling(parse(OPTIONS)), [number], [size], torch.arange(1.0, size + 1))
    host.store.save_optimizer_states(tmp_path / "one")
    saved = states_file.read_residuals(tmp_path / "one")
    assert saved is not None
    assert saved.tensors["residual.0"].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]


HOSTS = ((0, 1), (2, 3))


def grad(rank: int, step: int) -> torch.Tensor:
    return torch.randn(300, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(
    "options", [{"type": "2bit", "threshold": 0.5, "pull": "fp16"}, {"type": "topk", "momentum": 0.5}], ids=str
)
def test_a_round_of_a_whole_job_is_what_the_encodings_of_the_hosts_sums_say(options: dict[str, Any]) -> None:
    def work(store: DistStore) -> list[torch.Tensor]:
        store.set_gradient_compression(options)
        store.init("w", torch.zeros(300))
        return [store.pushpull("w", grad(store.rank, step), out := torch.empty(300)).wait() or out for step in range(3)]

    outcome = SimulatedJob(1, workers=4, hosts=HOSTS).run(work)
    assert outcome.errors == {}
    compression = parse(options)
    hosts = [Compressor(compression.of_sum(2)) for _ in HOSTS]
    server = None if compression.pull is None else Compressor(compression.pull)
    for step in range(3):
        sums = [grad(ranks[0], step) + grad(ranks[1], step) for ranks in HOSTS]
        expected = sum(arrives(host, "w", total) for host, total in zip(hosts, sums, strict=True))
        expected = expected if server is None else arrives(server, "w", expected)
        assert all(torch.equal(results[step], expected) for results in outcome.results)


def test_what_is_left_out_goes_from_job_to_job_with_aggregators_and_without(tmp_path: Path) -> None:
    """Nothing reaches the threshold, so all that was pushed is in the files, one for each worker."""

    def work(store: DistStore) -> None:
        store.set_gradient_compression({"type": "2bit", "threshold": 1000.0})
        store.set_optimizer("sgd")
        store.init(["w", "cut"], [torch.zeros(300), torch.zeros(40, 50)])
        path = tmp_path / str(store.rank)
        if path.exists():
            store.load_optimizer_states(path)
        store.push(["w", "cut"], [torch.full((300,), 1.0), torch.full((40, 50), 2.0 * (store.rank + 1))])
        store.save_optimizer_states(path)

    for number, hosts in enumerate([HOSTS, (), ((1, 2, 3),), HOSTS], 1):
        outcome = SimulatedJob(1, workers=4, hosts=hosts, bigarray_bound=1000).run(work)
        assert outcome.errors == {}
        files = [states_file.read_residuals(tmp_path / str(rank)) for rank in range(4)]
        assert [bool(file and file.tensors) for file in files] == [
            rank in {ranks[0] for ranks in hosts} or not any(rank in ranks for ranks in hosts) for rank in range(4)
        ]
        total = {"w": torch.zeros(300), "cut": torch.zeros(2000)}
        for file in files:
            assert file is not None
            for i, (key, _) in enumerate(file.plain["steps"]):  # type: ignore[call-overload]
                total[key] += file.tensors[f"residual.{i}"]
        assert set(total["w"].tolist()) == {4.0 * number}
        assert set(total["cut"].tolist()) == {20.0 * number}


@pytest.mark.parametrize(("kind", "first"), [("topk", 60), ("fp16", 66), ("int8", 72), ("1bit", 78)])
def test_workers_encode_for_an_aggregator_that_is_lost_whenever_that_is(kind: str, first: int) -> None:
    """Also what they had pushed before. All values are such that nothing is left out."""
    ones = {"w": torch.ones(300), "cut": torch.ones(40, 50)}
    options = {"type": kind, **({"ratio": 1.0} if kind == "topk" else {}), "pull": {"type": "fp16"}}

    def work(store: DistStore) -> list[float]:
        store.set_gradient_compression(options)
        store.init(list(ones), [torch.zeros_like(value) for value in ones.values()])
        outs = [[torch.empty_like(value) for value in ones.values()] for _ in range(6)]
        tickets = [store.pushpull(list(ones), list(ones.values()), out, wait=i > 3) for i, out in enumerate(outs)]
        for ticket in tickets:
            ticket.wait()
        store.pull("w", last := torch.empty(300))
        return sorted({value for out in (*outs, [last]) for each in out for value in each.reshape(-1).tolist()})

    for at in range(first, 190, 32):
        job = SimulatedJob(1, workers=4, hosts=HOSTS, bigarray_bound=1000, reaped=True, min_workers=1)
        network = job.network

        def happen(job: SimulatedJob = job, at: int = at) -> None:
            if job.network.deliveries == at:
                job.world.after(0.0, lambda: job.kill("aggregator 0"))

        network.on_delivery = happen
        outcome = job.run(work)
        assert (outcome.errors, outcome.results) == ({}, [[4.0]] * 4), at
        assert outcome.exit_codes["aggregator 0"] is None, at


SIZES = {"a": 3000, "b": 7, "c": 500}


cluster = shared_job(workers=3, servers=2, aggregators=1, bigarray_bound=1000, piece_bytes=4096, device_sum="host")


def gradients(rank: int, number: int) -> list[torch.Tensor]:
    """What a worker pushes: sums of these depend on their order."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(size, generator=generator) * 10.0 ** (rank * 3) for size in SIZES.values()]


def rounds(store: DistStore, count: int = 4) -> list[list[torch.Tensor]]:
    """Push and pull some rounds; return the values after each."""
    store.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
    values = []
    for number in range(count):
        outs = [torch.empty(size) for size in SIZES.values()]
        store.pushpull(list(SIZES), gradients(store.rank, number), out=outs)
        values.append(outs)
    return values


def counted(store: DistStore) -> tuple[Any, Any]:
    return rounds(store), store.statistics()


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def test_sums_have_the_bits_of_those_in_shared_memory(cluster: ThreadedJob):
    usual = cluster.run(rounds)
    lent = cluster.run(counted, on_device=True)
    total = sum(4 * size for size in SIZES.values())
    for rank, (values, statistics) in enumerate(lent):
        assert same(values, usual[rank])
        assert statistics.not_lent == ""
        assert 2 * total <= statistics.bytes_lent <= 3 * total, "the first round comes before the memory is open"
        assert statistics.bytes_pushed == 4 * total


def test_keys_that_are_pushed_one_by_one_are_lent(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[int, str]:
        store.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
        for _ in range(4):
            for key, size in SIZES.items():
                store.pushpull(key, torch.ones(size), out=torch.empty(size))
        return store.statistics().bytes_lent, store.statistics().not_lent

    total = sum(4 * size for size in SIZES.values())
    for lent, refusal in cluster.run(work, on_device=True):
        assert 2 * total <= lent <= 3 * total
        assert refusal == ""


def test_pushes_under_way_do_not_share_memory(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[list[float], int]:
        store.init("w", torch.zeros(600))
        outs = [torch.empty(600) for _ in range(12)]
        value = torch.empty(600)
        tickets = []
        for number, out in enumerate(outs):
            value.fill_(number + 1.0)
            tickets.append(store.pushpull("w", value, out=out, wait=False))
            if number % 2:  # two are under way, and the caller changes its array meanwhile
                tickets[-2].wait()
                tickets[-1].wait()
        return [float(out.unique().item()) for out in outs[1::2]], store.statistics().bytes_lent

    for values, lent in cluster.run(work, on_device=True):
        assert values == [3.0 * number for number in range(2, 13, 2)]
        assert lent >= 600 * 4 * 2


def test_what_is_compressed_and_what_is_empty_goes_the_usual_way(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[float, int, str]:
        store.init(["w", "none"], [torch.zeros(8), torch.zeros(0)])
        out = torch.empty(8)
        for _ in range(3):
            store.pushpull(["w", "none"], [torch.ones(8), torch.ones(0)], out=[out, torch.empty(0)])
        store.set_gradient_compression({"type": "fp16"})
        for _ in range(3):
            store.pushpull("w", torch.ones(8), out=out)
        return float(out[0]), store.statistics().bytes_lent, store.statistics().not_lent

    assert cluster.run(work, on_device=True) == [(3.0, 0, "what is pushed is compressed")] * 3


def test_other_stores_lend_nothing(cluster: ThreadedJob):
    for _, statistics in cluster.run(counted):
        assert (statistics.bytes_lent, statistics.not_lent) == (0, "")


def test_a_push_that_is_not_finite_is_refused_by_name(cluster: ThreadedJob):
    def work(store: DistStore) -> str:
        store.init("w", torch.zeros(4))
        out = torch.empty(4)
        for _ in range(3):
            store.pushpull("w", torch.ones(4), out=out)
        try:
            store.pushpull("w", torch.full((4,), float("nan") if store.rank == 1 else 1.0), out=out)
        except ArithmeticError as exc:
            return str(exc)
        return "no error"

    for text in cluster.run(work, rule=Rule(finite=True), on_device=True):
        assert "worker 1" in text


def test_a_late_worker_holds_up_nobody(cluster: ThreadedJob):
    def work(store: DistStore) -> int:
        store.init("w", torch.zeros(4))
        for _ in range(3):
            store.pushpull("w", torch.ones(4), out=torch.empty(4))
        return store.statistics().bytes_lent

    assert all(cluster.run(work, rule=Rule(quorum=2), on_device=True))


@pytest.mark.parametrize("where", ["lend", "open"])
def test_without_lent_memory_pushes_go_the_usual_way(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch, where: str):
    def refuse(*_: Any) -> None:
        raise CannotLend("there is no peer access")

    usual = cluster.run(rounds)
    monkeypatch.setattr(HostMemory, where, refuse)
    for rank, (values, statistics) in enumerate(cluster.run(counted, on_device=True)):
        assert same(values, usual[rank])
        assert (statistics.bytes_lent, statistics.not_lent) == (0, "there is no peer access")


def test_one_worker_that_cannot_lend_is_summed_with_the_others(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch):
    usual, lend = cluster.run(rounds), HostMemory.lend

    def lends(memory: HostMemory, nbytes: int, device: torch.device) -> Lent:
        if threading.current_thread().name == "worker 1":
            raise CannotLend("this one cannot")
        return lend(memory, nbytes, device)

    monkeypatch.setattr(HostMemory, "lend", lends)
    found = cluster.run(counted, on_device=True)
    assert [bool(statistics.bytes_lent) for _, statistics in found] == [True, False, True]
    assert all(same(values, usual[rank]) for rank, (values, _) in enumerate(found))


def test_sums_over_devices_of_half_precision_are_lent_in_float32(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[list[float], int]:
        store.set_optimizer("sgd", learning_rate=2.0**-17, rescale_grad=1 / 3)
        store.init(["h", "i"], [torch.zeros(1500, dtype=torch.float16), torch.zeros(9, dtype=torch.float16)])
        for _ in range(4):  # the first ones have no lent memory yet
            values = [[torch.full((size,), 40_000.0).half()] * 2 for size in (1500, 9)]
            outs = [torch.empty(size, dtype=torch.float16) for size in (1500, 9)]
            store.pushpull(["h", "i"], values, outs)
        lent = store.statistics().bytes_lent
        return [*outs[0].unique().tolist(), *outs[1].unique().tolist()], lent

    expected = torch.tensor(-4 * 80_000 * 2.0**-17).half().item()
    for values, lent in cluster.run(work, on_device=True):
        assert values == [expected, expected]
        assert lent
        assert lent % (4 * 1509) == 0
