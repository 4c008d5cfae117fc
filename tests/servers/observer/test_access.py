"""Who may read the page."""

from __future__ import annotations

import pytest

from servers.observer.access import Access, Entrance, Refusal

TOKEN, SESSION = "t" * 43, "s" * 43
FOLDER = "/f4lder/"
ACCESS = Access(TOKEN, SESSION, 8080, FOLDER)
HOST = {"host": "127.0.0.1:8080"}
COOKIE = {**HOST, "cookie": f"other=1; kvstore-8080={SESSION}"}


def status(verdict: Entrance | Refusal | None) -> int:
    return verdict.status if isinstance(verdict, Refusal) else 303 if verdict else 200


def test_the_token_becomes_a_cookie_that_only_this_page_gets() -> None:
    verdict = ACCESS.judge("/", f"token={TOKEN}", HOST)
    assert isinstance(verdict, Entrance)
    assert verdict.cookie == f"kvstore-8080={SESSION}; HttpOnly; SameSite=Strict; Path={FOLDER}"
    assert verdict.folder == FOLDER
    assert TOKEN not in verdict.cookie


def test_repr_has_no_secret() -> None:
    assert TOKEN not in repr(ACCESS)
    assert SESSION not in repr(ACCESS)
    assert FOLDER not in repr(ACCESS)


def test_addresses_in_the_folder_are_those_of_the_page() -> None:
    assert [ACCESS.inside(path) for path in (FOLDER, f"{FOLDER}events", "/events", "/", "/f4lder")] == [
        "/",
        "/events",
        "/events",
        "/",
        "/f4lder",
    ]


@pytest.mark.parametrize(
    "headers",
    [
        COOKIE,
        {**COOKIE, "host": "localhost:9999"},  # by ssh -L from another port
        {**COOKIE, "origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"},
        {**HOST, "authorization": f"Bearer {TOKEN}"},
    ],
)
def test_who_may_read(headers: dict[str, str]) -> None:
    assert ACCESS.judge("/events", "", headers) is None


@pytest.mark.parametrize(
    ("path", "query", "headers", "why"),
    [
        ("/", "", HOST, 403),
        ("/", "token=", HOST, 403),
        ("/", f"token={TOKEN[1:]}", HOST, 403),
        ("/", "token=%C3%A4", HOST, 403),
        ("/", f"token={TOKEN}", {"host": "evil.example:8080"}, 421),
        ("/", f"token={TOKEN}", {"host": "127.0.0.1.evil.example"}, 421),
        ("/", f"token={TOKEN}", {}, 421),
        ("/", f"token={TOKEN}", {**HOST, "origin": "http://evil.example"}, 403),
        ("/events", f"token={TOKEN}", HOST, 403),  # the token in an address is for the page alone
        ("/events", "", {**HOST, "cookie": f"kvstore-8081={SESSION}"}, 403),
        ("/events", "", {**HOST, "cookie": f"kvstore-8080={TOKEN}"}, 403),
        ("/events", "", {**COOKIE, "host": "evil.example"}, 421),
        ("/events", "", {**COOKIE, "origin": "http://127.0.0.1:9999"}, 403),
        ("/events", "", {**COOKIE, "origin": "null"}, 403),
        ("/events", "", {**COOKIE, "sec-fetch-site": "same-site"}, 403),  # a page of another port of this machine
        ("/events", "", {**COOKIE, "sec-fetch-site": "cross-site"}, 403),
        ("/events", "", {**HOST, "authorization": f"Bearer {SESSION}"}, 403),
        ("/events", "", {**HOST, "authorization": f"Basic {TOKEN}"}, 403),
    ],
)
def test_who_may_not(path: str, query: str, headers: dict[str, str], why: int) -> None:
    assert status(ACCESS.judge(path, query, headers)) == why
