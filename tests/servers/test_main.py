from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from waiting import LONG

from kvstore.job.processes import words

ROOT = Path(__file__).resolve().parents[2]


def test_the_threads_of_a_server_that_was_started_by_hand_do_not_spin(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as root:  # nobody answers there
        env = {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),
            "OMP_DISPLAY_ENV": "VERBOSE",  # OpenMP says how it will work when it is loaded
            "DMLC_ROLE": "server",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(root.getsockname()[1]),
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
        }
        with subprocess.Popen(words(sys.executable, "servers"), env=env, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            spins = next((line for line in server.stderr if "SPINCOUNT" in line or "BLOCKTIME" in line), "nothing said")
            server.kill()
            server.wait(LONG)
    assert "= '0'" in spins
