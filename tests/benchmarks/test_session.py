"""A session: contenders take turns, and what becomes of their figures."""

from __future__ import annotations

import json

from benchmarks.figures import Row
from benchmarks.jobs import JobFailed, Unavailable
from benchmarks.session import Case


def test_contenders_take_turns(session, fake):
    log = []
    made = session("pushpull", "--repeats", "3")
    case = Case("work", "Work", [fake("a", [1.0, 2.0, 9.0], log), fake("b", [4.0], log)])
    result = made.measure(case)
    assert log == ["a", "b"] * 3
    assert [(row.name, row.median) for row in result.rows] == [("a", 2.0), ("b", 4.0)]


def test_who_cannot_run_is_excused_and_asked_once(session, fake):
    log = []
    made = session("pushpull", "--repeats", "2")
    contenders = [fake("mxnet", [Unavailable("pip has no network")], log), fake("kvstore", [1.0], log)]
    result = made.measure(Case("work", "Work", contenders))
    assert log == ["mxnet", "kvstore", "kvstore"]
    assert result.rows[0] == Row("mxnet", [], "skipped: pip has no network")
    assert not made.failures


def test_a_failure_is_shown_with_what_the_process_said(session, fake):
    made = session("pushpull")
    made.measure(Case("work", "Work", [fake("kvstore", [JobFailed("launch.py exited with 1:\n    Boom")])]))
    assert made.failures == ["kvstore"]
    assert "Boom" in made.console.file.getvalue()
    assert "failed: launch.py exited with 1" in made.console.file.getvalue()


def test_the_record_and_the_picture(session, fake, tmp_path):
    made = session("pushpull", "--repeats", "1", "--json", str(tmp_path / "deep" / "record.json"))
    names = {"kvstore": 10.0, "mxnet": 100.0, "gloo": 15.0}
    made.measure(Case("resnet50-none", "ResNet-50", [fake(name, [ms]) for name, ms in names.items()]))
    made.finish()
    record = json.loads((tmp_path / "deep" / "record.json").read_text())
    assert record["results"][0]["rows"][0]["ratios"] == {"mxnet": 0.1, "gloo": 0.6667}
    assert [one["reached"] for one in record["targets"]] == [True, False, None, None]
    assert record["options"]["what"] == "pushpull"
    assert record["machine"]["python"]
    assert (tmp_path / "out" / "pushpull.png").exists()


def test_other_options_share_the_record(session, fake):
    made = session("all")
    made.with_options(repeats=1, peers=()).measure(Case("work", "Work", [fake("kvstore")]))
    assert [result.name for result in made.results] == ["work"]
    assert made.options.repeats is None
