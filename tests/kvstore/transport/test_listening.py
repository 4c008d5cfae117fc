from __future__ import annotations

import socket
from pathlib import Path

from kvstore.transport.listening import listening


def test_who_listens_on_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        endpoint = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        assert listening(endpoint) is True
    assert listening(endpoint) is False


def test_who_listens_on_a_unix_socket(tmp_path: Path) -> None:
    assert listening(f"ipc://{tmp_path}/none") is False
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(f"{tmp_path}/there")
        there.listen(1)
        assert listening(f"ipc://{tmp_path}/there") is True
    assert listening(f"ipc://{tmp_path}/there") is False  # the file stays
