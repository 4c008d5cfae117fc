"""The messages of large jobs, as a table; the model of a round."""

from __future__ import annotations

from benchmarks.suites.cluster import cluster


def test_each_size_has_a_table_with_and_without_aggregation(session, capsys):
    made = session("cluster", "--hosts", "2,3", "--workers-per-host", "2", "-s", "2", "--net", "4MB")
    cluster(made)
    names = [result.name for result in made.results]
    sizes = ["cluster-2x2", "cluster-2x2-flat", "cluster-3x2", "cluster-3x2-flat"]
    assert names == [name for size in sizes for name in (size, f"{size}-memory")]
    rows = {row.name for row in made.results[0].rows}
    assert {"scheduler: all join", "an aggregator: a round: pushes", "servers: a round"} <= rows
    assert not any("aggregator" in row.name for row in made.results[2].rows)
    assert all(row.samples for result in made.results for row in result.rows)
