"""Which requests may read the page: with the token, from a browser that asks on behalf of the page itself. Pure.

The page is served at 127.0.0.1. Every user of the machine can connect there, and so can every page that runs in the
user's browser. Against the former there is the token. Against the latter a cookie that the browser sends only for this
page (SameSite=Strict), the check of ``Host``, without which a foreign name that resolves to 127.0.0.1 would pass for
the page's own (DNS rebinding), and the checks of ``Origin`` and ``Sec-Fetch-Site``, which pages of other ports of this
machine do not pass: for browsers they are of the same site.

Browsers also send a cookie to all ports of its host. So the page is in a folder whose name nobody can guess, and the
cookie is for that folder alone: a program that listens at another port does not get it, even if the user goes there.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Refusal:
    """HTTP's number for why, and what the user is told."""

    status: int
    text: str


@dataclass(frozen=True)
class Entrance:
    """The token was in the address. The browser gets a cookie in its place, and goes to the page's folder."""

    cookie: str
    folder: str


@dataclass(frozen=True)
class Access:
    """Judges requests.

    Args:
        token: a request with it may read.
        session: the value of the cookie, so that the token itself is not stored in browsers.
        port: of the page. It is in the cookie's name, so that several pages do not replace each other's.
        folder: the path in which the page is, ``/name/``; the name is random.
    """

    token: str = field(repr=False)
    session: str = field(repr=False)
    port: int = 0
    folder: str = field(default="/", repr=False)

    def inside(self, path: str) -> str:
        return f"/{path.removeprefix(self.folder)}" if path.startswith(self.folder) else path

    def judge(self, path: str, query: str, headers: Mapping[str, str]) -> Entrance | Refusal | None:
        """Return None for a request that is to be answered; ``headers``: by names in small letters."""
        host = headers.get("host", "")
        if not _HOST.fullmatch(host):
            return Refusal(421, "this address is not the page's: open it as 127.0.0.1 or localhost")
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return Refusal(403, "this page does not answer the pages of others")
        token = _token(query)
        # Before the check of Sec-Fetch-Site: a click on the address in another program's page is a cross-site request.
        if path == "/" and token:
            return Entrance(self._cookie, self.folder) if self._same(token, self.token) else self._unknown
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refusal(403, "this page does not answer the pages of others; paste its address into the address bar")
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._same(bearer.strip(), self.token):
            return None
        return None if self._same(self._remembered(headers.get("cookie", "")), self.session) else self._unknown

    @property
    def _name(self) -> str:
        return f"kvstore-{self.port}"

    @property
    def _cookie(self) -> str:
        return f"{self._name}={self.session}; HttpOnly; SameSite=Strict; Path={self.folder}"

    @property
    def _unknown(self) -> Refusal:
        return Refusal(403, "this page needs its token: paste the whole address that launch.py has printed")

    def _remembered(self, header: str) -> str:
        for cookie in header.split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self._name:
                return value
        return ""

    @staticmethod
    def _same(given: str, known: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), known.encode())


def _token(query: str) -> str:
    for part in query[:1024].split("&"):
        name, _, value = part.partition("=")
        if name == "token":
            return value
    return ""
