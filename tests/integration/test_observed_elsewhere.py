"""Jobs that torchrun and mpirun have started get a page and a trace while they run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from endless import UNTIL_OVER
from trace_reader import ReadTrace
from waiting import LONG, PROMPT, until

ROOT = Path(__file__).resolve().parents[2]
STARTERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "mpirun": ["mpirun.openmpi", "-n", "2", sys.executable],
}


@contextlib.contextmanager
def started(words: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a job, or looks at one; of it and the job nothing is left."""
    with log.open("w") as out:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        try:
            yield process
        finally:
            process.terminate()  # mpirun then ends its ranks, which are in groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PROMPT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory for temporary files, whose name is so short that sockets of a job can be in it."""
    with tempfile.TemporaryDirectory(prefix="k") as name:
        yield Path(name)


@pytest.mark.long
@pytest.mark.timeout(3 * LONG)
@pytest.mark.usefixtures("none_ignored")
@pytest.mark.parametrize(
    "starter", [pytest.param("mpirun", marks=pytest.mark.release), pytest.param("torchrun", marks=pytest.mark.faults)]
)
def test_a_job_that_runs_gets_a_page_and_a_trace(starter: str, tmp_path: Path, own: Path) -> None:
    if shutil.which(STARTERS[starter][0]) is None:
        pytest.skip(f"{STARTERS[starter][0]} is not installed (.ci/run installs it)")
    (script := tmp_path / "script.py").write_text(textwrap.dedent(UNTIL_OVER))
    foreign = ("OMPI_", "PMI", "HYDRA_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {"TMPDIR": str(own), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DMLC_NUM_SERVER": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    log, said, trace = tmp_path / "log", tmp_path / "said", tmp_path / "trace.json"
    with started([*STARTERS[starter], str(script)], env, log) as job:

        def of_job() -> list[Path]:
            return [place.parent for place in own.glob("*/observe.json")]

        until(lambda: bool(of_job()), "the job", over=lambda: None if job.poll() is None else log.read_text())
        status = [sys.executable, "-m", "kvstore.observing.status_command", str(of_job()[0])]
        with started([*status, "--page", "--trace", f"{trace}:5"], env, said) as observer:

            def over() -> str | None:
                return None if observer.poll() is None else said.read_text()

            until(lambda: f"{trace} has" in said.read_text(), "the trace", over=over)
            address = re.search(r"http://\S+", said.read_text())
            assert address is not None
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            with browser.open(address[0], timeout=LONG) as page:
                assert b"<title>" in page.read()
            observer.send_signal(signal.SIGINT)
            assert observer.wait(PROMPT) == 130
        (tmp_path / "over").touch()
        assert job.wait(LONG) == 0, log.read_text()
    read = ReadTrace.of(trace)
    first, last = map(int, read.about["rounds"].split("-"))
    assert last == first + 4
    for worker in ("worker 0", "worker 1"):
        rounds = {span["args"]["round"] for span in read.spans(worker, "pushpull")}
        assert rounds == set(range(first, last + 1))
    assert read.about["clocks are consistent"]
