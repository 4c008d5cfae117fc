"""The Grafana board and the alerts ask for what is there. tests/servers/observer/test_metrics.py asks a real one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from board import ALERTS, BOARD, Query, alerts, panels, queries
from job_views import job_view
from prometheus_client.parser import text_string_to_metric_families

from servers.observer.metrics import exposition

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
