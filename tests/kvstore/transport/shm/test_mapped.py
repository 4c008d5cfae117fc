"""A reader's side of an arena: what references it takes, and how long it has their memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from shared_memory import Make, Pair, files

from kvstore.errors import WireError
from kvstore.transport.shm import presence
from kvstore.transport.shm.presence import CELLS, FREE, HELD, SENT, PeerPresence, Presence
from kvstore.transport.shm.shared_memory import Mapped

pytestmark = pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here")


def test_cells_say_where_a_reference_is(pair: Pair):
    reference = pair.owner.refer(pair.owner.allocate(100), pair.reader)
    cells, cell = pair.owner.presence.cells, reference[1]
    assert cells[cell] == SENT
    view = pair.mapped.view(*reference)
    assert cells[cell] == HELD
    with pytest.raises(WireError, match="received before"):
        pair.mapped.view(*reference)
    del view
    assert cells[cell] == FREE


@pytest.mark.parametrize(
    ("number", "cell", "offset", "length", "error"),
    [
        (0, 0, 0, 0, "a reference to 0 bytes"),
        (0, 0, 0, (1 << 16) + 1, "a reference to 65537 bytes"),
        (0, 0, 1 << 16, 1, "at 65536 of"),
        (0, 0, 2**64 - 1, 2**64 - 1, "a reference to"),
        (0, 1, 0, 64, "not sent"),
        (0, CELLS, 0, 64, "not sent"),
        (0, 2**32 - 1, 0, 64, "not sent"),
        (1, 0, 0, 64, "cannot be opened"),
        (2**16 - 1, 0, 0, 64, "cannot be opened"),
    ],
)
def test_a_forged_reference_is_refused(pair: Pair, number: int, cell: int, offset: int, length: int, error: str):
    assert pair.owner.refer(pair.owner.allocate(64), pair.reader) == (0, 0, 0, 64)
    with pytest.raises(WireError, match=error):
        pair.mapped.view(number, cell, offset, length)
    assert len(pair.mapped.view(0, 0, 0, 64)) == 64


def test_a_reader_counts_as_alive_while_it_holds_a_view(make: Make, directory: Path):
    owner, mine = make(), Presence("job")
    reader = PeerPresence(mine.name, mine.nonce)
    mapped = Mapped(owner.presence.name, owner.presence.nonce, mine)
    view = mapped.view(*owner.refer(owner.allocate(100), reader))
    mine.unlink()
    del mine, mapped
    gc.collect()
    assert reader.lives(), "although its transport is closed and its file is gone"
    assert files(directory) == [f"{owner.presence.name}.{number}" for number in range(2)]
    del view
    assert not reader.lives()


def test_an_empty_chunk_cannot_be_mapped(pair: Pair, directory: Path):
    (directory / f"{pair.owner.presence.name}.1").touch(0o600)
    (directory / f"{pair.owner.presence.name}.1").chmod(0o600)
    with pytest.raises(WireError, match="cannot be mapped"):
        pair.mapped.view(0, 0, 0, 1)
