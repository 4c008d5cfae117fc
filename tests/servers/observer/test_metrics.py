"""What Prometheus reads, and what Grafana and the alerts ask for."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from job_views import job_view, member, server_report, worker_report
from observed_job import ObservedJob
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from simulated_job import SimulatedJob
from waiting import LONG, until

from kvstore.client import DistStore
from kvstore.errors import UsageError
from kvstore.member.session import Session
from kvstore.observing import quantities as q
from kvstore.observing.advice import KINDS
from kvstore.observing.quantities import OF_SERVERS, OF_WORKERS, Quantity, Series
from kvstore.observing.view import Event, JobView
from servers.observer.metrics import MOST_PAIRS, STALE_S, JobDescription, exposition
from servers.observer.observer_process import PageServing, serve
from workers import fit

FOLDER = Path(__file__).resolve().parents[3] / "servers" / "observer" / "grafana"
BOARD: dict[str, Any] = json.loads((FOLDER / "board.json").read_text(encoding="utf-8"))
ALERTS = FOLDER / "alerts.yml"

_METRIC = re.compile(r"\b(kvstore_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\b(?:by|on|group_left|without) ?\(([^)]*)\)")


@dataclass(frozen=True)
class Query:
    """An expression in PromQL, and the panel or alert that asks it."""

    title: str
    expr: str

    def filled(self, window: str, **variables: str) -> str:
        expr = self.expr.replace("$__rate_interval", window)
        for name, value in variables.items():
            expr = expr.replace(f"${name}", value)
        assert "$" not in expr, f"{self.title} has an unknown variable: {expr}"
        return expr

    def uses(self) -> dict[str, set[str]]:
        return {
            name: {part.partition("=")[0].strip(" !~") for part in (labels or "").split(",") if part}
            for name, labels in _METRIC.findall(self.expr)
        }

    def groups(self) -> set[str]:
        return {label.strip() for labels in _BY.findall(self.expr) for label in labels.split(",") if label.strip()}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    return [Query(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def alerts() -> list[Query]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [Query(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


_CONFIG = """\
global:
  scrape_interval: {interval}
  evaluation_interval: {interval}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvstore
    authorization:
      credentials_file: {token}
    static_configs:
      - targets: ["{target}"]
"""


@dataclass(frozen=True)
class Prometheus:
    """One that runs.

    Attributes:
        url: of its HTTP API.
        target: what it scrapes: host and port.
    """

    url: str
    target: str

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=LONG) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def series(self, expr: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expr)["result"])

    def rules(self) -> set[str]:
        """Return how the rules for alerts are: ``ok``, ``unknown`` before they have been looked at, or ``err``."""
        return {rule["health"] for group in self.ask("rules")["groups"] for rule in group["rules"]}


@contextmanager
def prometheus(folder: Path, target: str, token: Path, rules: Path, interval: str = "1s") -> Iterator[Prometheus]:
    """Have a Prometheus that scrapes ``target`` while the block runs. The test skips where there is no Prometheus."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (.ci/run installs it)")
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(interval=interval, rules=rules, token=token, target=target))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words, "--log.level=warn"], stdout=log, stderr=log)
    try:
        until(lambda: _ready(address), "Prometheus", over=lambda: _ended(process, folder))
        yield Prometheus(f"http://{address}", target)
    finally:
        process.kill()
        process.wait()


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=LONG) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _ended(process: subprocess.Popen[bytes], folder: Path) -> str | None:
    return None if process.poll() is None else (folder / "prometheus.log").read_text()


# ---- what Prometheus reads: read back by prometheus-client's parser


DOCS = Path(__file__).resolve().parents[3] / "docs" / "prometheus.md"


def scraped(view: JobView | None, age_s: float = 0.0, about: JobDescription | None = None) -> dict[str, Metric]:
    """What a scrape finds, by name; no series is there twice."""
    text = exposition(view, age_s, about).decode()
    found = {metric.name: metric for metric in text_string_to_metric_families(text)}
    for metric in found.values():
        series = [(sample.name, *sorted(sample.labels.items())) for sample in metric.samples]
        assert len(series) == len(set(series)), "Prometheus refuses a scrape in which a series is twice"
    return found


def numbers(metric: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in metric.samples}


def test_names_units_and_texts_follow_the_conventions() -> None:
    for name, metric in scraped(job_view()).items():
        assert name.startswith("kvstore_")
        assert name == name.lower()
        assert metric.type in ("counter", "gauge")
        assert metric.documentation.endswith(".")
        assert {sample.name for sample in metric.samples} == {name + ("_total" if metric.type == "counter" else "")}
        assert not name.endswith(("_us", "_ms", "_kb", "_mb", "_count"))


def test_what_members_report_is_there_in_seconds_and_bytes() -> None:
    found = scraped(job_view())
    assert numbers(found["kvstore_rounds"], "role", "rank") == {
        (role, rank): 7 for role in ("worker", "server") for rank in "01"
    }
    assert numbers(found["kvstore_worker_blocked_seconds"], "role", "rank")["worker", "1"] == 2.5
    assert numbers(found["kvstore_worker_input_seconds"], "rank")["0",] == 0.5
    assert numbers(found["kvstore_resident_memory_bytes"], "role", "rank")["server", "0"] == 1 << 29
    assert numbers(found["kvstore_worker_sent_bytes"], "rank", "server")["0", "1"] == 1001
    assert numbers(found["kvstore_worker_received_bytes"], "rank", "server")["1", "0"] == 2000
    assert numbers(found["kvstore_server_busy_seconds"], "rank")["1",] == 1.5
    assert numbers(found["kvstore_server_last_arrivals"], "rank", "worker")["1", "0"] == 5
    assert numbers(found["kvstore_server_alone_awaited_seconds"], "rank", "worker")["0", "0"] == 3.0
    assert numbers(found["kvstore_server_oldest_wait_seconds"], "rank")["0",] == 0.25
    assert numbers(found["kvstore_server_missing_workers"], "rank")["0",] == 1
    assert numbers(found["kvstore_training_value"], "rank", "name")["1", "loss"] == 0.25


def test_the_job_is_there() -> None:
    found = scraped(
        job_view(failure="worker 1 was killed", waits="a barrier"),
        1.0,
        JobDescription('job "1"\n', "python a/train.py"),
    )
    assert numbers(found["kvstore_job_info"], "name", "program") == {('job "1"\n', "train.py"): 1}
    assert numbers(found["kvstore_job_failed"]) == {(): 1}
    assert numbers(found["kvstore_scheduler_waits"]) == {(): 1}
    assert numbers(found["kvstore_job_running_seconds"]) == {(): 60}
    assert numbers(found["kvstore_events"]) == {(): 0}
    assert numbers(found["kvstore_members_expected"], "role") == {("worker",): 2, ("server",): 2}
    assert numbers(found["kvstore_members"], "role", "state")["server", "ready"] == 2


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --key=secret", "train.py"),
        ("/usr/bin/python3 -u '/a b/train.py' x.py", "train.py"),
        ("python -m project.train --key secret", "project.train"),
        ("bash run.sh", "run.sh"),
        ("/opt/train --key secret", "train"),
        ("python 'train.py --key secret", "python"),
        ("python -m", ""),
        ("", ""),
    ],
)
def test_of_a_command_only_the_program_is_told(command: str, program: str) -> None:
    info = scraped(job_view(), 0.0, JobDescription("job", command))["kvstore_job_info"]
    assert numbers(info, "program") == {(program,): 1}
    assert "secret" not in str(info)


def test_events_are_counted_though_only_the_latest_are_kept() -> None:
    found = scraped(job_view(events=[Event(41, 90.0, "worker 1 joined"), Event(42, 91.0, "worker 1 left")]))
    assert numbers(found["kvstore_events"]) == {(): 42}


@pytest.mark.parametrize("state", ["left", "lost"])
def test_a_member_that_is_gone_has_its_state_and_nothing_else(state: str) -> None:
    gone = member("worker", 1, worker_report(), state=state)
    found = scraped(job_view(members=[member("worker", 0, worker_report()), gone]))
    assert numbers(found["kvstore_members"], "role", "state")["worker", state] == 1
    assert numbers(found["kvstore_member_state"], "rank", "state")["1", state] == 1
    with_it = {name for name, metric in found.items() if any(s.labels.get("rank") == "1" for s in metric.samples)}
    assert with_it == {"kvstore_member_state"}


def test_of_two_processes_with_one_rank_the_latest_is_shown() -> None:
    old = member("server", 0, server_report(rounds=90), state="lost", incarnation=1)
    new = member("server", 0, server_report(rounds=2), incarnation=2)
    for members in ([old, new], [new, old]):
        found = scraped(job_view(members=members))
        assert numbers(found["kvstore_rounds"], "role", "rank") == {("server", "0"): 2}
        assert numbers(found["kvstore_members"], "role", "state")["server", "lost"] == 1


def test_members_without_a_rank_are_counted() -> None:
    found = scraped(job_view(members=[member("worker", -1, state="joined"), member("worker", -1, state="joined")]))
    assert numbers(found["kvstore_members"], "role", "state")["worker", "joined"] == 2
    assert "kvstore_member_state" not in found


def test_members_that_have_not_reported_have_a_state() -> None:
    found = scraped(job_view(members=[member("worker", 0)]))
    assert numbers(found["kvstore_member_silence_seconds"], "role", "rank") == {("worker", "0"): 0.5}
    assert "kvstore_rounds" not in found


def test_time_for_input_that_nobody_measures_is_absent() -> None:
    found = scraped(job_view(members=[member("worker", 0, worker_report(input_us=-1))]))
    assert "kvstore_worker_input_seconds" not in found


@pytest.mark.parametrize(("view", "age_s"), [(None, 0.0), (job_view(), STALE_S + 1)])
def test_without_news_of_the_scheduler_no_member_is_shown(view: JobView | None, age_s: float) -> None:
    found = scraped(view, age_s)
    assert numbers(found["kvstore_scheduler_up"]) == {(): 0}
    assert set(found) == {"kvstore_scheduler_up", "kvstore_job_info"}


def test_links_to_an_aggregator_are_called_so() -> None:
    view = job_view(members=[member("worker", 0, worker_report(1)), member("worker", 1, worker_report(2))])
    found = scraped(job_view(members=view.members, num_aggregators=1))
    assert set(numbers(found["kvstore_worker_sent_bytes"], "rank", "server")) == {
        ("0", "aggregator"),
        ("1", "0"),
        ("1", "1"),
    }


def test_in_huge_jobs_pairs_of_workers_and_servers_are_added_up() -> None:
    few = [member("worker", 0, worker_report(2)), *(member("server", rank, server_report(2)) for rank in range(2))]
    found = scraped(job_view(workers=MOST_PAIRS, servers=2, members=few))
    assert numbers(found["kvstore_worker_sent_bytes"], "rank", "server") == {("0", "all"): 2001}
    assert numbers(found["kvstore_server_last_arrivals"], "rank", "worker") == {("all", "0"): 10, ("all", "1"): 2}
    assert numbers(found["kvstore_server_waves"], "role", "rank") == {("server", "all"): 12}
    assert numbers(found["kvstore_server_alone_awaited_seconds"], "worker")["0",] == 6.0


def test_a_name_that_is_logged_twice_is_there_once() -> None:
    twice = worker_report(values=[["loss", 1.0], ["loss", 2.0]])
    found = scraped(job_view(members=[member("worker", 0, twice)]))
    assert numbers(found["kvstore_training_value"], "name") == {("loss",): 2.0}


def test_advice_is_counted_and_a_straggler_named() -> None:
    found = scraped(SimulatedJob(3, 2, straggler=1).view(60))
    assert numbers(found["kvstore_straggler"], "role", "rank") == {
        ("worker", str(rank)): rank == 1 for rank in range(3)
    }
    assert {kind: number for (kind,), number in numbers(found["kvstore_advice"], "kind").items() if number} == {
        "straggler_compute": 1
    }


def test_of_an_even_job_every_kind_of_advice_is_there_as_0() -> None:
    found = scraped(job_view())
    assert numbers(found["kvstore_advice"], "kind") == {(kind,): 0 for kind in KINDS}
    assert numbers(found["kvstore_straggler"], "rank") == {("0",): 0, ("1",): 0}


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(UsageError, match=r"pip install 'torch-kvstore\[dashboard\]'"):
        exposition(job_view())


def test_the_docs_list_every_metric_with_its_labels_and_meaning() -> None:
    listed = re.findall(r"^\| `(kvstore_\w+)` \|(.*?)\| (.*) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    there = {}
    for metric in scraped(job_view()).values():
        labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels)
        there[metric.samples[0].name] = (sorted(labels), metric.documentation.rstrip("."))
    assert {name: (sorted(re.findall(r"`(\w+)`", labels)), text) for name, labels, text in listed} == there


class Batches(torch.utils.data.IterableDataset[Any]):
    """Batches come until the test has what it wants; worker 1 waits for its own longer, so that times are not 0."""

    def __init__(self, rank: int, enough: threading.Event) -> None:
        self._pause_s, self._enough = 0.01 + 0.04 * rank, enough

    def __iter__(self) -> Iterator[Any]:
        while True:
            time.sleep(self._pause_s)
            if self._enough.is_set():
                return
            yield torch.ones(8), torch.tensor(1)


@contextmanager
def trained(listener: socket.socket, token: str) -> Iterator[None]:
    """Have two workers train while the block runs, in a job with a server and a page."""
    enough, over, mine = threading.Event(), threading.Event(), threading.local()

    def work(session: Session) -> None:
        mine.session = session
        store = DistStore(session)
        batches = torch.utils.data.DataLoader(Batches(store.rank, enough), batch_size=1)
        fit(torch.nn.Linear(8, 2), batches, num_epoch=1, kvstore=store)
        store.close()

    with (
        pytest.MonkeyPatch.context() as patch,
        ObservedJob(2, heartbeat_s=0.2) as job,
        ThreadPoolExecutor(2) as threads,
    ):
        patch.setattr("workers.reducer.kv.create", lambda _: DistStore(mine.session))  # for sums of metrics
        page = threads.submit(serve, PageServing(listener, token, over=over), job.observe)
        training = threads.submit(job.run_sessions, work)
        try:
            yield
        finally:
            enough.set()
            training.result(LONG)
            over.set()
            page.result(LONG)


@pytest.mark.long
def test_every_query_of_the_board_returns_data(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 43)
    listener = socket.create_server(("127.0.0.1", 0))
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    with prometheus(tmp_path, target, token, ALERTS) as server, trained(listener, token.read_text()):
        left = {query: query.filled("10s", job="kvstore", instance=server.target) for query in queries()}

        def answered() -> bool:
            for query in [query for query, expr in left.items() if server.series(expr)]:
                del left[query]
            return not left

        until(answered, "an answer to every query", step=0.2)
        both = 'count(rate(kvstore_rounds_total{role="worker"}[10s]) > 0) == 2'
        until(lambda: server.series(both), "rounds of both workers", step=0.2)
        look_at_the_variables(server)
        until(lambda: server.rules() == {"ok"}, "the rules for alerts", step=0.2)


def look_at_the_variables(server: Prometheus) -> None:
    """What a user chooses from at the top of the board."""
    values = {}
    for variable in BOARD["templating"]["list"][1:]:
        selector, _, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rpartition(", ")
        matching = selector.replace("$job", "kvstore")
        values[variable["name"]] = server.ask(f"label/{label}/values", **{"match[]": matching})
    assert values == {"job": ["kvstore"], "instance": [server.target]}


def series_of(table: Iterable[Quantity[Any]]) -> list[Series[Any]]:
    return [each.series for each in table if each.series is not None]


EVERY = series_of(dict.fromkeys((*OF_WORKERS, *OF_SERVERS)))


def test_a_name_is_there_once() -> None:
    names = [series.name for series in EVERY]
    assert len(names) == len(set(names))


def test_times_and_sizes_are_in_base_units_which_their_names_end_in() -> None:
    for series in EVERY:
        assert series.name.endswith("_seconds") == ("econds" in series.meaning or "time" in series.meaning)
        assert series.name.endswith("_bytes") == ("ytes" in series.meaning)


def test_every_report_has_every_number() -> None:
    for series in series_of(OF_WORKERS):
        assert series.read(worker_report()) is not None, series.name
    for series in series_of(OF_SERVERS):
        assert series.read(server_report()) is not None, series.name


def test_microseconds_become_seconds() -> None:
    numbers = {series.name: series.read(server_report(busy_us=1_250_000)) for series in series_of(OF_SERVERS)}
    assert numbers["server_busy_seconds"] == 1.25


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0.0 s"), (0.44, "0.4 s"), (12.9, "12 s"), (192, "3 min 12 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert q.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1234567, "1.2 MB"),
        (999_600, "1.0 MB"),
        (245e6, "245 MB"),
        (3e15, "3.0 PB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert q.nbytes(count) == text


@pytest.mark.parametrize(("number", "text"), [(0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (math.nan, "-")])
def test_rates(number: float, text: str) -> None:
    assert q.rate(number) == text


def test_shares_and_counts() -> None:
    assert (q.share(0.984), q.count(12.0)) == ("98 %", "12")


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([1, 0], "0, 1"), ([0, 2, *range(4, 64)], "0, 2, 4-63"), ([5, 5], "5")]
)
def test_ranks(ranks: list[int], text: str) -> None:
    assert q.ranks(ranks) == text


@given(st.sets(st.integers(0, 200)))
def test_no_rank_is_lost(ranks: set[int]) -> None:
    read: set[int] = set()
    for part in filter(None, q.ranks(ranks).split(", ")):
        first, _, last = part.partition("-")
        read.update(range(int(first), int(last or first) + 1))
    assert read == ranks


def test_members() -> None:
    assert (q.members("worker", [3]), q.members("server", [1, 0])) == ("worker 3", "servers 0, 1")


# ---- the Grafana board and the alerts ask for what is there, of what is played and of a real Prometheus


SCRAPED = {"job", "instance"}  # labels that Prometheus adds
PLAYED = Path(__file__).with_name("alerts_test.yml")
ASKED = [*queries(), *alerts()]


def labels() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for metric in text_string_to_metric_families(exposition(job_view()).decode()):
        for sample in metric.samples:
            found.setdefault(sample.name, set(SCRAPED)).update(sample.labels)
    return found


@pytest.mark.parametrize("query", ASKED, ids=lambda query: query.title)
def test_metrics_and_labels_of_a_query_are_there(query: Query) -> None:
    there = labels()
    uses = query.uses()
    assert uses, "a query asks for something"
    assert set(uses) <= set(there)
    assert {name: chosen - there[name] for name, chosen in uses.items() if chosen - there[name]} == {}
    of_all = set.union(*(there[name] for name in uses))
    assert query.groups() <= of_all


@pytest.mark.parametrize("query", ASKED, ids=lambda query: query.title)
def test_what_grows_is_asked_for_as_a_rate(query: Query) -> None:
    """A counter's number itself says nothing after a restart."""
    bare = re.sub(r"\b(?:rate|increase)\(kvstore_\w+(?:\{[^}]*\})?\[[^]]*\]\)", "", query.expr)
    assert [name for name in Query("", bare).uses() if name.endswith("_total")] == []


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_explains_itself_and_asks_the_chosen_prometheus(panel: dict) -> None:
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert '{job=~"$job", instance=~"$instance"' in target["expr"]
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        there = labels()
        assert legend <= set.union(*(there[name] for name in Query("", target["expr"]).uses()))


def test_panels_have_a_place_of_their_own() -> None:
    assert max(Counter(panel["id"] for panel in BOARD["panels"]).values()) == 1
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        ), f"{one} covers {other}"


def test_the_board_is_of_any_job_at_any_time() -> None:
    assert BOARD["time"] == {"from": "now-30m", "to": "now"}
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "job", "instance"]
    assert BOARD.get("id") is None, "an id is of one Grafana"
    there = labels()
    for variable in BOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"]).groups()
        assert label in there[metric]


def test_a_query_that_is_wrong_is_found() -> None:
    """So that the tests above can fail."""
    query = Query("x", 'max by (nobody) (rate(kvstore_rounds{role="worker", job=~"$job"}[$__rate_interval]))')
    assert query.uses() == {"kvstore_rounds": {"role", "job"}}
    assert query.groups() == {"nobody"}
    assert query.filled("5s", job="a") == 'max by (nobody) (rate(kvstore_rounds{role="worker", job=~"a"}[5s]))'
    assert "kvstore_rounds" not in labels()


@pytest.mark.long
@pytest.mark.parametrize(("command", "file"), [("check", ALERTS), ("test", PLAYED)])
def test_prometheus_own_tool_accepts_the_alerts(command: str, file: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it (.ci/run installs it)")
    done = subprocess.run(["promtool", command, "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
