"""TensorBoard's event files, read back record by record with their checksums."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore as kv
from workers.callbacks import TensorBoard


def masked_crc(data: bytes) -> int:
    """The checksum of TFRecord: CRC-32C (Castagnoli), rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        header, (length,) = data[at : at + 8], struct.unpack_from("<Q", data, at)
        content = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 8) == (masked_crc(header),)
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc(content),)
        yield content
        at += 16 + length


def events(path: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    return [Event.FromString(record) for record in records(path.read_bytes())]


def shown(folder: Path) -> list[tuple[str, int, float]]:
    """The scalars that TensorBoard shows: of an earlier file, none from where a later one begins anew."""
    from tensorboardX.proto.event_pb2 import SessionLog

    scalars: list[tuple[str, int, float]] = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in events(path):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                scalars = [scalar for scalar in scalars if scalar[1] < event.step]
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return scalars


def write(folder: Path, *losses: float, start: int = 0) -> None:
    tracker = TensorBoard(folder)
    for step, loss in enumerate(losses, start):
        tracker.log({"batch/loss": loss, "epoch": 1}, step)
    tracker.close()


@pytest.fixture(autouse=True)
def _tensorboardx() -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")


def test_scalars_come_back(tmp_path: Path) -> None:
    write(tmp_path / "runs", 0.5, 0.25)
    (path,) = (tmp_path / "runs").iterdir()
    assert events(path)[0].file_version == "brain.Event:2"
    assert shown(tmp_path / "runs") == [
        ("batch/loss", 0, 0.5),
        ("epoch", 0, 1.0),
        ("batch/loss", 1, 0.25),
        ("epoch", 1, 1.0),
    ]


def test_a_tracker_without_values_makes_no_file(tmp_path: Path) -> None:
    write(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_what_a_resumed_run_makes_again_is_hidden(tmp_path: Path) -> None:
    write(tmp_path / "first", 0.5, 0.25, 0.125)
    (tmp_path / "first").rename(tmp_path / "second")  # as if another process had written it
    write(tmp_path / "second", 0.75, start=1)
    losses = [scalar for scalar in shown(tmp_path / "second") if scalar[0] == "batch/loss"]
    assert losses == [("batch/loss", 0, 0.5), ("batch/loss", 1, 0.75)]


def test_a_tracker_that_is_opened_again_in_the_same_second_hides_and_replaces_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0.5, 0.25)
    write(tmp_path, 0.125, start=1)
    assert [value for name, _, value in shown(tmp_path) if name == "batch/loss"] == [0.5, 0.25, 0.125]


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(kv.UsageError, match=r"pip install 'torch-kvstore\[tensorboard\]'"):
        TensorBoard(tmp_path)
