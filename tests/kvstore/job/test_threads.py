from __future__ import annotations

import pytest

from kvstore.job.threads import WAITING, variables


@pytest.mark.parametrize(("role", "more"), [("server", {}), ("worker", {"GOMP_SPINCOUNT": "1000"})])
def test_threads_do_not_keep_cores_while_they_wait_and_members_of_a_role_share_them(
    role: str, more: dict[str, str]
) -> None:
    made = variables({}, role, cores=8, siblings=3)
    assert made == {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", **more}


@pytest.mark.parametrize("siblings", [0, 3, 8])
def test_each_has_a_thread_at_least(siblings: int) -> None:
    assert variables({}, "server", cores=2, siblings=siblings)["OMP_NUM_THREADS"] == ("2" if not siblings else "1")


@pytest.mark.parametrize("cores", [0, 8])
def test_an_aggregator_has_one_thread_unless_a_number_is_set(cores: int) -> None:
    assert variables({}, "aggregator", cores=cores) == {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    assert variables({"OMP_NUM_THREADS": "3"}, "aggregator", cores=cores) == {"OMP_WAIT_POLICY": "passive"}


def test_where_nobody_knows_the_siblings_the_number_is_left_to_torch() -> None:
    assert variables({}, "server") == {"OMP_WAIT_POLICY": "passive"}


def test_the_scheduler_has_no_torch() -> None:
    assert variables({}, "scheduler", cores=8) == {}


@pytest.mark.parametrize("name", WAITING)
def test_whoever_says_how_threads_wait_in_any_runtimes_words_is_obeyed(name: str) -> None:
    assert variables({name: "1000"}, "worker", cores=4) == {"OMP_NUM_THREADS": "4"}


def test_a_number_that_is_set_stays_and_an_empty_value_counts_as_not_set() -> None:
    env = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": ""}
    assert variables(env, "server", cores=4) == {"OMP_WAIT_POLICY": "passive"}
    assert variables({"OMP_NUM_THREADS": ""}, "server", cores=4)["OMP_NUM_THREADS"] == "4"
