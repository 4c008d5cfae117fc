"""A real browser: Debian's chromium, driven by playwright. Without them, tests that ask for it skip, and fail in CI."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Tab:
    """A page that is open, and what it has asked for and complained about.

    Attributes:
        page: playwright's.
        requests: the addresses that it has asked for.
        complaints: errors and warnings of its console, and exceptions that nothing caught.
        statuses: the status of each answer, by its address.
    """

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def on_console(message: Any) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        self.page.on("console", on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("response", lambda answer: self.statuses.update({answer.url: answer.status}))


class Browser:
    """Opens tabs, each as a new user."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    def tab(self, *, width: int = 1280, height: int = 900, **options: Any) -> Tab:
        """A new tab, of a window of this size; ``options`` are those of playwright's ``new_context``."""
        context = self._chromium.new_context(viewport={"width": width, "height": height}, **options)
        return Tab(context.new_page())


@contextlib.contextmanager
def browser(*words: str) -> Iterator[Browser]:
    """Have a browser, started with these words, while the block runs."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("not installed: chromium (.ci/run installs it)")
    playwright = pytest.importorskip("playwright.sync_api", reason="not installed: playwright (extra test)")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has none
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=[*sandbox, "--disable-dev-shm-usage", *words])
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
