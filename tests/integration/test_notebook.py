"""Jobs that are started from a notebook and from Python's prompt: real kernels, real servers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import called
import pytest
from launched import ROOT
from waiting import LONG

pytestmark = pytest.mark.long

SESSION = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(called.__file__).parent)])}

DOUBLE = "import called, launcher\ncalled.in_haste()\ndef double(x):\n    return 2 * x\n"
DRIVER = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in json.load(sys.stdin)])
NotebookClient(notebook, timeout=120, allow_errors=True).execute()
shown = []
for cell in notebook.cells:
    texts = [output.get("text") or "\\n".join(output.get("traceback", [])) for output in cell.outputs]
    texts += [output["data"]["text/plain"] for output in cell.outputs if "data" in output]
    shown.append("".join(texts))
json.dump(shown, sys.stdout)
"""

# One job has a real server. The others are about what comes from a session, and have a stand-in.
CELLS = [
    "import numpy as np\nimport called, launcher",
    """from dataclasses import dataclass, field
@dataclass
class Net:
    weight: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def __call__(self, x):
        return scaled(x) @ self.weight

x = np.arange(8.0).reshape(4, 2)
""",
    "FACTOR = 0.5\ndef scaled(x):\n    return FACTOR * x",
    """
def train(rate, epochs=2):
    import kvstore
    store = kvstore.create("dist_sync")
    model = Net()
    store.set_optimizer("sgd", learning_rate=rate)
    store.init("weight", model.weight)
    for _ in range(epochs):
        store.pushpull("weight", scaled(x).sum(axis=0), out=model.weight)
    display("trained")
    return store.rank, model

((rank, model),) = launcher.run(train, args=(0.25,))
called.in_haste()
rank, type(model) is Net, float(model(x)[0]), len(launcher.run(scaled, (x,), num_workers=2))
""",
    """
class NoData(Exception):
    pass

def fail():
    raise NoData("nothing to train with")

try:
    launcher.run(fail)
except NoData as error:
    print(error.__cause__.details)
""",
    "store = open('/dev/null')\ndef train(): return store\nlauncher.run(train)",
    "%%writefile training.py\ndef train(rate):\n    return 2 * rate",
    "from training import train\nlauncher.run(train, args=(0.25,))",
    "launcher.run(train, 'dist_sync')",
]


def test_a_notebook(tmp_path: Path) -> None:
    environ = {**SESSION, "NO_COLOR": "1", "IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(CELLS),
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown[0] == shown[1] == shown[2] == ""
    assert shown[3] == "[worker 0] trained\n(0, True, -2.0, 2)"
    assert 'in fail\n    raise NoData("nothing to train with")\nNoData: nothing to train with' in shown[4]
    assert (
        "workers cannot get train from this session: it uses store, a TextIOWrapper that cannot be pickled" in shown[5]
    )
    assert "begin its cell with `%%writefile train.py`, and in the next cell run `from train import train`" in shown[5]
    assert shown[7].endswith("[0.5]")
    assert (
        "args must be a list or tuple of arguments, got 'dist_sync'; for one argument: args=('dist_sync',)" in shown[8]
    )


def test_a_script_of_ipython(tmp_path: Path) -> None:
    text = f"{DOUBLE}%xmode Plain\nprint(launcher.run(double, (4,)))\n"
    (tmp_path / "script.ipy").write_text(text)
    argv = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "script.ipy"]
    environ = {**SESSION, "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LONG)
    assert "[8]" in done.stdout.splitlines(), done.stdout + done.stderr


def test_pythons_prompt(tmp_path: Path) -> None:
    """`python -i`, on a terminal."""
    (tmp_path / "script.py").write_text(DOUBLE)
    terminal, theirs = pty.openpty()
    environ = {**SESSION, "PYTHON_BASIC_REPL": "1", "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-i", "script.py"], cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    typed = (
        "print(launcher.run(double, (4,)))\ndef triple(x): return 3 * x\n\nprint(launcher.run(triple, (4,)))\nexit()\n"
    )
    os.write(terminal, typed.encode())
    shown = b""
    try:
        while data := os.read(terminal, 1 << 16):
            shown += data
    except OSError:  # Linux: the other end is closed
        pass
    assert process.wait(LONG) == 0
    os.close(terminal)
    assert b"[8]" in shown
    assert b"[12]" in shown
