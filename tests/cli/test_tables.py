"""Tables: whole lines in a file, lines that fit in a terminal."""

import pytest

from bitdial.cli.tables import show_table, table_lines

COLUMNS = ["plan", "layer average bits", "activation bytes"]
ROWS = [["3.0 bits", "2.75", "12,345"], ["a longer name", "3", "1"]]


def test_columns_stand_under_each_other() -> None:
    assert table_lines(COLUMNS, ROWS, None) == [
        "plan            layer average bits   activation bytes",
        "3.0 bits                      2.75             12,345",
        "a longer name                    3                  1",
    ]


def test_heads_are_broken_where_a_terminal_is_narrow() -> None:
    assert table_lines(COLUMNS, ROWS, 40) == [
        "                  layer",
        "                average   activation",
        "plan               bits        bytes",
        "3.0 bits           2.75       12,345",
        "a longer name         3            1",
    ]
    assert table_lines(COLUMNS, ROWS, 53) == table_lines(COLUMNS, ROWS, None)


def test_facts_are_broken_into_lines() -> None:
    rows = [["file", "1,000 bytes of codes and some of scales"], ["plans", "none"], ["empty", ""]]
    assert table_lines(["", ""], rows, 30) == [
        "file    1,000 bytes of codes",
        "        and some of scales",
        "plans   none",
        "empty",
    ]
    assert table_lines(["", ""], rows, None)[0] == "file    1,000 bytes of codes and some of scales"


def test_a_terminal_has_a_width_and_a_file_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show_table("title", COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines()[1] == "plan            layer average bits   activation bytes"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_table("title", COLUMNS, ROWS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert out.startswith("title\n")


def test_a_table_without_rows() -> None:
    assert table_lines(["layer", "bits"], [], None) == ["layer   bits"]
