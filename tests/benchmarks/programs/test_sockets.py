"""Plain sockets: shares in pieces, and reading until a buffer is full."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from benchmarks.programs.sockets import PIECE, pieces, raw, receive


@pytest.mark.parametrize("share", [1, PIECE, PIECE + 1, 3 * PIECE])
def test_the_pieces_of_a_share_are_all_of_it_in_order(share):
    cut = pieces(share)
    assert [piece.start for piece in cut] == list(range(0, share, PIECE))
    assert [piece.stop for piece in cut[:-1]] == [piece.start for piece in cut[1:]]
    assert cut[-1].stop == share


def test_reading_goes_on_until_the_buffer_is_full_or_the_other_end_is_gone():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        array = np.zeros(4, np.float32)
        sent = np.arange(4, dtype=np.float32)
        theirs.sendall(raw(sent)[:6])
        theirs.sendall(raw(sent)[6:])
        receive(ours, raw(array))
        assert array.tolist() == [0, 1, 2, 3]
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours, raw(array))
