"""What every kind of device memory does alike, between two processes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import LONG

from kvstore.devices import CannotLend, DeviceMemory, Handle, Lent, device_memory
from kvstore.values import sum_in_order


class Reader:
    """Another process of this host; see ``reader``."""

    def __init__(self, kind: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(Path(__file__).parent / "reader.py"), kind]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, what: str, *of: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, *of]) + "\n")
        self.process.stdin.flush()
        return str(json.loads(self.process.stdout.readline()))

    def close(self) -> int:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        return self.process.wait(LONG)

    def open(self, handle: Handle) -> str:
        name = secrets.token_hex(4)
        assert self.refusal(handle, name) == ""
        return name

    def refusal(self, handle: Handle, name: str = "refused") -> str:
        device, opaque, offset, nbytes = handle
        return self.ask("open", name, [device.hex(), opaque.hex(), offset, nbytes])

    def read(self, name: str) -> torch.Tensor:
        return torch.tensor(list(bytes.fromhex(self.ask("read", name))), dtype=torch.uint8)


class Place:
    """A kind of device memory, one device that has it, and another process that reads it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.memory: DeviceMemory = device_memory(kind)
        self.device = torch.device("cpu" if kind == "host" else "cuda:0")
        self.reader = Reader(kind)

    def lend(self, values: torch.Tensor) -> tuple[Lent, torch.Tensor]:
        """Lend memory that has ``values``; return a view of it, too."""
        lent = self.memory.lend(values.numel() * values.itemsize, self.device)
        view = lent.memory.view(values.dtype)
        self.memory.fill(view, [values.to(self.device)])()
        return lent, view


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    place = Place(request.param)
    yield place
    assert place.reader.close() in (0, -signal.SIGKILL)


def test_another_process_reads_what_is_written(place: Place):
    values = torch.arange(1000, dtype=torch.int64)
    lent, view = place.lend(values)
    name = place.reader.open(lent.handle)
    assert torch.equal(place.reader.read(name).view(torch.int64), values)
    place.memory.fill(view, [values[:400].to(place.device) * 3, values[400:].to(place.device) * 5])()
    assert torch.equal(place.reader.read(name).view(torch.int64), torch.cat([values[:400] * 3, values[400:] * 5]))


def test_many_small_pieces_are_told_apart(place: Place):
    kept = [place.lend(torch.full((size,), size, dtype=torch.uint8)) for size in (1, 2, 63, 64, 65, 200)]
    for lent, view in kept:
        name = place.reader.open(lent.handle)
        assert torch.equal(place.reader.read(name), view.cpu())
        place.reader.ask("close", name)


def test_memory_is_opened_again_after_it_was_closed(place: Place):
    lent, view = place.lend(torch.arange(100, dtype=torch.uint8))
    for number in range(3):
        view.fill_(number)
        place.memory.fill(view, [torch.full((100,), number, dtype=torch.uint8, device=place.device)])()
        name = place.reader.open(lent.handle)
        assert place.reader.read(name).unique().tolist() == [number]
        place.reader.ask("close", name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_sums_have_the_bits_that_the_cpu_gives(place: Place, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    parts = [(torch.randn(4097, generator=generator) * 10.0**rank).to(dtype) for rank in range(4)]
    lents = [place.lend(part) for part in parts]
    names = [place.reader.open(lent.handle) for lent, _ in lents]
    total = bytes.fromhex(place.reader.ask("sum", names, str(dtype).removeprefix("torch.")))
    assert total == bytes(sum_in_order(parts).view(torch.uint8).tolist())


def test_what_is_not_in_the_allocation_is_refused(place: Place):
    lent, _ = place.lend(torch.arange(64, dtype=torch.uint8))
    assert "are not in an allocation" in place.reader.refusal(lent.handle._replace(nbytes=1 << 39))
    assert "are not in an allocation" in place.reader.refusal(lent.handle._replace(offset=1 << 39))


@pytest.mark.parametrize(
    "changes", [{"nbytes": 0}, {"offset": -64}, {"offset": 3}, {"opaque": b"short"}, {"device": b"long" * 5}]
)
def test_malformed_handles_are_refused(place: Place, changes: dict[str, Any]):
    lent, _ = place.lend(torch.arange(64, dtype=torch.uint8))
    assert place.reader.refusal(lent.handle._replace(**changes)).startswith("expected ")


def test_handles_of_nothing_are_refused(place: Place):
    lent, _ = place.lend(torch.arange(64, dtype=torch.uint8))
    assert place.reader.refusal(lent.handle._replace(opaque=bytes(64)))
    assert place.reader.refusal(lent.handle._replace(opaque=secrets.token_bytes(64)))
    assert place.reader.refusal(lent.handle._replace(device=secrets.token_bytes(16)))
    name = place.reader.open(lent.handle)  # the process is as good as before
    assert torch.equal(place.reader.read(name), torch.arange(64, dtype=torch.uint8))


def test_a_tensor_of_another_device_is_not_lent(place: Place):
    other = torch.device("meta")
    with pytest.raises(CannotLend, match="got one on meta"):
        place.memory.lend(64, other)


def test_memory_whose_owner_was_killed_can_still_be_read(place: Place):  # the last: each process imports torch
    device, opaque, offset, nbytes = json.loads(place.reader.ask("lend", 100, 7))
    memory = place.memory.open(Handle(bytes.fromhex(device), bytes.fromhex(opaque), offset, nbytes))
    place.reader.process.kill()
    place.reader.process.wait(LONG)
    assert memory.unique().tolist() == [7]
