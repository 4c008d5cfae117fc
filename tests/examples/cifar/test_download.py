from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cifar import cifar10, download
from cifar.download import FOLDER, Source, UnavailableError, find_or_fetch
from small_cifar10 import batch_file


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def make_archive(path, names=cifar10.FILES, extra=()):
    with tarfile.open(path, "w:gz") as tar:
        for name in (*extra, *(f"{FOLDER}/{name}" for name in names)):
            add(tar, name, batch_file(10))
    return hashlib.md5(path.read_bytes()).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves a folder on the loopback interface and counts what it is asked for."""

    def __init__(self, folder):
        self.requests = []
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))

    def source(self, md5, file="small.tar.gz"):
        return Source(f"http://127.0.0.1:{self.server_port}/{file}", md5)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        self.server.requests.append(self.path)

    def do_GET(self):
        time.sleep(0.1)  # long enough for others to come and find the lock taken
        super().do_GET()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "www").mkdir()
    with Server(tmp_path / "www") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def nowhere(file="small.tar.gz") -> Source:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return Source(f"http://127.0.0.1:{port}/{file}", "0" * 32)


def at_once(*calls):
    """What each call returns, or raises, when all are made at the same time."""
    results = []

    def run(call):
        try:
            results.append(call())
        except Exception as exc:
            results.append(exc)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_is_there_is_not_downloaded(cifar10_folder):
    assert find_or_fetch(cifar10_folder.parent, nowhere()) == cifar10_folder
    assert find_or_fetch(cifar10_folder, nowhere()) == cifar10_folder


def test_downloads_checks_and_unpacks(server, tmp_path):
    md5 = make_archive(tmp_path / "www" / "small.tar.gz")
    folder = find_or_fetch(tmp_path / "data", server.source(md5))
    assert len(cifar10.read_dataset(folder).train) == 50
    assert not list(tmp_path.rglob("*.part"))


def test_only_one_of_many_workers_downloads(server, tmp_path):
    source = server.source(make_archive(tmp_path / "www" / "small.tar.gz"))
    folders = at_once(*[lambda: find_or_fetch(tmp_path / "data", source)] * 4)
    assert folders == [tmp_path / "data" / FOLDER] * 4
    assert len(server.requests) == 1


def test_those_who_waited_do_not_try_again_in_vain(server, tmp_path):
    source = server.source("0" * 32, "absent.tar.gz")
    errors = at_once(*[lambda: find_or_fetch(tmp_path / "data", source)] * 4)
    assert all(isinstance(error, UnavailableError) and "404" in str(error) for error in errors)
    assert len(server.requests) < 4
    with pytest.raises(UnavailableError, match="404"):  # but a later run does
        find_or_fetch(tmp_path / "data", source)


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server, tmp_path):
    make_archive(tmp_path / "www" / "small.tar.gz")
    with pytest.raises(UnavailableError, match="not the published 0000"):
        find_or_fetch(tmp_path / "data", server.source("0" * 32))
    assert not list((tmp_path / "data" / FOLDER).iterdir())
    assert not (tmp_path / "data" / "small.tar.gz").exists()


def test_an_archive_that_was_put_there_needs_no_network(tmp_path):
    source = Source(nowhere().url, make_archive(tmp_path / "small.tar.gz"))
    assert len(cifar10.read_dataset(find_or_fetch(tmp_path, source)).validation) == 10


def test_without_network_it_says_what_is_missing_and_why(tmp_path):
    source = nowhere()
    with pytest.raises(UnavailableError, match=rf"not in {tmp_path}, and {source.url} cannot be had: .*refused"):
        find_or_fetch(tmp_path, source)


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "ANSWER_S", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(f"http://127.0.0.1:{silent.getsockname()[1]}/small.tar.gz", "0" * 32)
        with pytest.raises(UnavailableError, match=r"no answer within 0.2 s"):
            find_or_fetch(tmp_path, source)


def test_nothing_but_the_six_files_is_unpacked(server, tmp_path):
    hostile = ("../outside.bin", "/absolute.bin", f"{FOLDER}/../../outside.bin", f"{FOLDER}/other.bin")
    md5 = make_archive(tmp_path / "www" / "small.tar.gz", extra=hostile)
    folder = find_or_fetch(tmp_path / "data", server.source(md5))
    assert {path.name for path in folder.iterdir()} == set(cifar10.FILES)
    assert not list(tmp_path.rglob("outside.bin"))


def test_a_link_in_the_place_of_a_file_is_not_followed(server, tmp_path):
    archive = tmp_path / "www" / "small.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo(f"{FOLDER}/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "../secret"
        tar.addfile(link)
        for name in cifar10.FILES[1:]:
            add(tar, f"{FOLDER}/{name}", batch_file(1))
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    with pytest.raises(UnavailableError, match=r"lacks cifar-10-batches-bin/data_batch_1.bin"):
        find_or_fetch(tmp_path / "data", server.source(md5))


def test_a_file_that_was_lost_is_unpacked_again(tmp_path):
    source = Source(nowhere().url, make_archive(tmp_path / "small.tar.gz"))
    folder = find_or_fetch(tmp_path, source)
    (folder / "test_batch.bin").unlink()
    assert find_or_fetch(tmp_path, source) == folder
    assert (folder / "test_batch.bin").exists()


def test_the_published_sum_is_the_default():
    assert Source().file == "cifar-10-binary.tar.gz"
    assert Source().md5 == "c32a1d4ab5d03f1284b67883e8d13530"
