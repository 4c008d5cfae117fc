from __future__ import annotations

from kvstore.observing.columns import FEW, MOST_DIFFERENT, Column, member_table

NUMBER: Column[tuple[str, float | None]] = Column("number", lambda row: row[1], lambda number: f"{number:g}", 1.0)


def table(rows: list[tuple[str, float | None]], notable: str = "", everybody: bool = False) -> list[str]:
    lines = member_table(
        rows, [NUMBER], lambda row: row[0], lambda _: "ready", lambda row: row[0] == notable, everybody
    )
    return [line.text for line in lines]


def many(count: int = 64, **others: float) -> list[tuple[str, float | None]]:
    return [(f"w{rank}", others.get(f"w{rank}", 10.0)) for rank in range(count)]


def test_of_few_each_has_a_row() -> None:
    assert table([("w0", 1.0), ("w1", None)]) == ["      state  number", "  w0  ready       1", "  w1  ready       -"]


def test_of_many_what_is_usual_is_shown_and_who_differs() -> None:
    lines = table(many(w7=50.0))
    assert [line.split() for line in lines] == [
        ["state", "number"],
        ["lowest", "of", "64", "10"],
        ["median", "of", "64", "10"],
        ["highest", "of", "64", "50"],
        ["w7", "ready", "50"],
    ]


def test_who_is_notable_is_shown_whatever_the_numbers_say() -> None:
    assert table(many(), notable="w3")[-1].split()[0] == "w3"


def test_if_nobody_differs_that_is_said() -> None:
    assert table(many())[-1] == "  nobody differs from the rest; --all shows everybody"


def test_of_many_that_differ_some_are_shown_and_the_others_counted() -> None:
    odd = {f"w{rank}": 100.0 + rank for rank in range(20)}
    lines = table(many(**odd), notable="w19")
    assert len(lines) == 1 + 3 + MOST_DIFFERENT + 1
    assert "w19" in lines[-2], "who is notable goes first"
    assert lines[-1] == "  12 more differ from the rest; --all shows everybody"


def test_all_are_shown_if_that_is_wanted() -> None:
    assert len(table(many(), everybody=True)) == 1 + 64


def test_where_numbers_spread_nobody_differs() -> None:
    spread = [(f"w{rank}", float(rank)) for rank in range(FEW + 1)]
    assert "nobody differs" in table(spread)[-1]


def test_a_column_in_which_nothing_is_known_is_left_out() -> None:
    assert table([("w0", None), ("w1", 0.0)])[0].split() == ["state"]
    assert table([]) == []


def test_what_differs_has_a_style() -> None:
    lines = member_table(
        [("w0", 1.0), ("w1", 1.0), ("w2", 9.0), ("w3", 1.0)],
        [NUMBER],
        lambda row: row[0],
        lambda _: "ready",
        lambda row: row[0] == "w3",
    )
    assert [line.style for line in lines] == ["faint", "plain", "plain", "odd", "bad"]
