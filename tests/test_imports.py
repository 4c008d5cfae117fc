"""What each kind of process imports: whatever it does not use makes each start slower, and each process larger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ARRAYS = {"torch", "numpy", "safetensors", "pyarrow"}
NETWORK = {"zmq", "ssl", "http", "email", "asyncio"}
PROCESSES = {"multiprocessing", "concurrent"}
MESSAGES = {"msgpack", "kvstore.wire"}

# By kind of process: what it imports in any job, and what it may not bring.
KINDS = {
    "a program, until it makes a store": ("kvstore", ARRAYS | NETWORK | PROCESSES | MESSAGES),
    "launch.py with a local job": ("launcher.launch, launcher.kinds.local", ARRAYS | NETWORK | PROCESSES | MESSAGES),
    "launch.py's keeper": ("launcher.processes.keeper", ARRAYS | NETWORK | PROCESSES | MESSAGES),
    "an agent": ("launcher.agents.main", ARRAYS | NETWORK | PROCESSES),
    "the scheduler": ("servers.__main__, servers.scheduler_process", ARRAYS | NETWORK | PROCESSES),
    "a worker's pulse": ("kvstore.member.pulse", ARRAYS | NETWORK | PROCESSES),
    "the server supervisor of torchrun's job": ("kvstore.bootstrap.server_supervisor", ARRAYS | NETWORK | PROCESSES),
    "an observer": ("servers.observer.observer_process", ARRAYS | PROCESSES | {"zmq", "asyncio"}),
    "kvstore-status": ("kvstore.observing.status_command", ARRAYS | NETWORK | PROCESSES),
    "a server before it imports torch": ("servers.__main__", ARRAYS | NETWORK | PROCESSES),
}


def imported_by(code: str, beyond: str = "") -> set[str]:
    """Return the names of the modules that a process has once it has run ``code``, beyond what that code imports."""
    before = f"{beyond}\nimport sys; before = set(sys.modules) if {bool(beyond)} else set()"
    # Whatever measures coverage brings modules of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    told = subprocess.check_output(
        [sys.executable, "-c", f"{before}\n{code}\nprint(*sys.modules.keys() - before)"], cwd=ROOT, env=env, text=True
    )
    return set(told.split())


@pytest.mark.parametrize("kind", KINDS)
def test_no_process_imports_what_it_does_not_use(kind: str) -> None:
    modules, unused = KINDS[kind]
    assert imported_by(f"import {modules}").isdisjoint(unused)


TRAINS = """
import servers.server, kvstore.transport.shm.shared_memory
import torch, workers, kvstore.client.dist
import kvstore as kv
store = kv.create("local")
store.set_optimizer("adam", learning_rate=0.1)
store.init("w", torch.zeros(300))
store.pushpull("w", torch.ones(300), torch.zeros(300))
plain = kv.create("local")
plain.init("w", torch.zeros(2))
plain.pushpull("w", torch.ones(2), torch.zeros(2))
import kvstore.devices
assert not torch.cuda.is_initialized()
"""


@pytest.mark.long
def test_servers_and_workers_import_no_more_of_torch_than_torch_itself_does() -> None:
    # An optimizer's class brings torch._dynamo and sympy, which take as long as torch; a step without it does not.
    beyond = imported_by(TRAINS, beyond="import torch")
    assert "servers.server" in beyond
    assert not {name for name in beyond if name.startswith(("torch.", "sympy", "zmq"))} - {
        "torch.profiler._cupti_monitor"
    }
