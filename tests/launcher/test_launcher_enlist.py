"""How agents are started and let in: tickets, and the words that start them; and how a job travels as text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LONG

import kvstore
from kvstore.errors import ConfigError
from kvstore.job.curve_keys import pair
from kvstore.wire import decode
from launcher.agents import boot
from launcher.agents.links.framing import Unframer
from launcher.agents.links.protocol import Hello
from launcher.agents.links.ticket import ENLIST, AgentTicket
from launcher.errors import LaunchError
from launcher.job import batch
from launcher.job.cluster import Cluster
from launcher.job.description import RESERVED, Job

KEY = "k" * 40
ROOT_DIRECTORY = Path(__file__).resolve().parents[2]


def test_a_ticket_arrives_and_shows_no_secret() -> None:
    (server, _), (public, secret) = pair(), pair()
    ticket = AgentTicket("tcp://[fd00::1]:5555", server, public, secret)
    assert AgentTicket.parse(ticket.text) == ticket
    assert AgentTicket.parse(f"  {ticket.text}\n") == ticket
    assert secret not in repr(ticket)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2",
        f"tcp://h:1 {KEY} {KEY}",
        f"tcp://h:1 {KEY} {KEY} hunter2",
        f"tcp://h:1 {KEY} {KEY} {KEY} hunter2",
        f"ipc://h {KEY} {KEY} {KEY}",
    ],
)
def test_what_is_no_ticket_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=ENLIST) as caught:
        AgentTicket.parse(text)
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A directory of a user who calls things as we do."""
    for name in ("launcher", "kvstore", "msgpack", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('shadowed')\n")
    return tmp_path


def run(argv: list[str], directory: Path, **environ: str) -> tuple[int, bytes, str]:
    """How it ends, and what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environ
    done = subprocess.run(argv, cwd=directory, env=env, capture_output=True, input=b"", timeout=LONG, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def test_an_agent_is_ours_whatever_the_working_directory_holds(shadowed: Path) -> None:
    code, out, err = run(boot.argv(sys.executable, str(ROOT_DIRECTORY)), shadowed, **{ENLIST: "hunter2"})
    assert (code, out) == (1, b"")
    assert err.startswith(f"the agent cannot start: {ENLIST} is not what launch.py has made")
    assert "hunter2" not in err


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    clone = tmp_path / 'a clone\'s "place" {x}'
    (clone / "ours").mkdir(parents=True)
    (clone / "ours" / "__init__.py").write_text("def main():\n    print('here')\n    return 3\n")
    assert run(boot.run(sys.executable, "ours", str(clone)), tmp_path) == (3, b"here\n", "")
    assert boot.run("py", "ours") == ["py", "-c", boot._CODE.format(more="", module="ours")]


def test_an_agent_over_pipes_ends_with_its_link(tmp_path: Path) -> None:
    code, out, err = run(boot.argv(sys.executable, str(ROOT_DIRECTORY)), tmp_path)
    assert (code, err) == (1, "")
    hello, *rest = [decode(frames) for frames in Unframer().feed(out)]
    assert isinstance(hello, Hello)
    assert (hello.version, hello.rank, rest) == (kvstore.__version__, -1, [])


def test_the_description_of_a_job_is_executed_in_our_module(shadowed: Path) -> None:
    code, _, err = run(boot.run(sys.executable, "launcher.kinds.slurm_inside", str(ROOT_DIRECTORY)), shadowed)
    assert (code, err) == (2, "launch.py: the description of the job is damaged\n")


BYTES = st.binary(max_size=20).filter(lambda value: 0 not in value).map(os.fsdecode)
NAMES = st.from_regex(r"[A-Z_]{1,9}", fullmatch=True).filter(lambda name: name not in RESERVED)
VARIABLES = st.dictionaries(NAMES, BYTES, max_size=3)
WORDS = st.lists(BYTES, max_size=3).map(tuple)


@settings(deadline=None)
@given(VARIABLES, VARIABLES, VARIABLES, WORDS, WORDS)
def test_a_job_of_any_bytes_arrives(
    server: dict[str, str], worker: dict[str, str], environ: dict[str, str], words: Any, options: Any
) -> None:
    cluster = Cluster(
        cluster_option=options, ssh_option=options, sync_exclude=options, time="1:00:00", encryption=False
    )
    job = Job(2, 3, ("python", *words), server, worker, (*environ, "NOT_SET"), cluster, words)
    text = batch.dumps(job, {**environ, "OTHER": "hunter2"}, "/a\udcff/end")
    assert text.isascii()
    assert "\n" not in text
    assert "hunter2" not in text
    assert batch.loads(text) == (job, environ, "/a\udcff/end")


@given(
    st.text(max_size=40)
    | st.sampled_from(["{}", "[]", "[{}, {}, 1]", "[1, 2, 3]", "[{}, 1]", '[{"cluster": {}}, {}, ""]'])
)
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="the description of the job is damaged"):
        batch.loads(text)


def test_a_job_that_makes_no_sense_is_refused() -> None:
    text = batch.dumps(Job(1, 1, ("x",)), {}, "")
    for before, after in (('"num_workers": 1', '"num_workers": 0'), ('"num_workers": 1', '"num_workers": "1"')):
        with pytest.raises(LaunchError):
            batch.loads(text.replace(before, after))
