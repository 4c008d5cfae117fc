"""Runs kubectl: waits for it, or reads its output beside other events."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

from launcher.errors import NOT_FOUND, LaunchError
from launcher.processes.child import OutputPipe

_LIMIT_S = 60.0  # for one command
_EXIT_S = 5.0  # to exit after its last output
_SHOWN = 2000  # characters of its errors


class Kubectl:
    """Runs kubectl, in one namespace."""

    def __init__(self, namespace: str) -> None:
        program = shutil.which("kubectl")
        if program is None:
            raise LaunchError("--launcher kubernetes needs kubectl on PATH", NOT_FOUND)
        self._argv = [program, *(["--namespace", namespace] if namespace else [])]

    def run(self, *words: str, stdin: str = "") -> str:
        """Run kubectl, and wait for its exit. Returns what is wrong; empty if nothing is."""
        try:
            done = subprocess.run(
                [*self._argv, *words],
                input=stdin.encode(),
                capture_output=True,
                timeout=_LIMIT_S,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"kubectl {words[0]} took longer than {_LIMIT_S:g} s"
        except OSError as error:
            return f"cannot start kubectl: {error.strerror}"
        return "" if done.returncode == 0 else _complaint(done.stderr, done.returncode)

    def listen(
        self, words: Sequence[str], on_data: Callable[[bytes], None], on_over: Callable[[], None]
    ) -> KubectlStream:
        return KubectlStream([*self._argv, *words], on_data, on_over)


class KubectlStream(OutputPipe):
    """A running kubectl. Raises OSError if it cannot be started.

    `on_data`: takes its output, while a selector is registered. `on_over`: called at the end of its output, unless it
    was closed. Then `over` is true, and `complaint` is what was wrong, if anything.
    """

    def __init__(self, argv: Sequence[str], on_data: Callable[[bytes], None], on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        source, target = os.pipe()
        os.set_blocking(source, False)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except BaseException:
            os.close(source)
            self._errors.close()
            raise
        finally:
            os.close(target)
        self.over = False
        self.complaint = ""
        super().__init__(source, lambda data: on_data(data) if data else self._end())

    def close(self) -> None:
        with suppress(OSError):
            self._process.kill()
        self._on_over = lambda: None
        self.finish()

    def _end(self) -> None:
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._errors.seek(0)
        self.complaint = "" if code == 0 else _complaint(self._errors.read(), code)
        self._errors.close()
        self.over = True
        self._on_over()


def _complaint(errors: bytes, code: int) -> str:
    text = errors.decode(errors="replace").strip()
    return text[-_SHOWN:] or f"kubectl exited with code {code}"
