"""Core. Tables: alignment, dropped columns, no control characters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qmq.tools import terminal
from qmq.tools.table import Cell, Column, Table, good_or_bad, lay, plain, printable, size, span, to_cell, utc

TABLE = Table(
    (Column("NAME", "name"), Column("WHERE", "where", drop=1), Column("END", "end"), Column("NOTE", "note", drop=2)),
    [
        {"name": "a", "where": "10.0.0.1:20881", "end": 4096, "note": "first"},
        {"name": "longer", "where": "10.0.0.12:20881", "end": 7, "note": None},
    ],
)


def test_table_aligns_columns_and_marks_missing_values():
    assert plain([TABLE]).splitlines() == [
        "NAME    WHERE            END   NOTE",
        "a       10.0.0.1:20881   4096  first",
        "longer  10.0.0.12:20881     7  -",
    ]


def test_empty_table_shows_its_text():
    assert plain([Table(TABLE.columns, [], empty="nobody is here", title="people")]) == "people\nnobody is here"


@pytest.mark.parametrize(
    "width, titles",
    [
        (None, ("NAME", "WHERE", "END", "NOTE")),
        (36, ("NAME", "WHERE", "END", "NOTE")),
        (35, ("NAME", "WHERE", "END")),
        (28, ("NAME", "END")),
        (3, ("NAME", "END")),
    ],
)
def test_columns_are_dropped_until_the_rest_fits(width, titles):
    laid = lay(TABLE, width)
    assert laid.titles == titles
    assert {*laid.titles, *laid.left_out} == {"NAME", "WHERE", "END", "NOTE"}


def test_a_column_without_values_takes_no_room():
    table = Table(TABLE.columns, [{"name": "a", "end": 1}])
    assert lay(table, None).titles == ("NAME", "END")


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        ("", "-"),
        ([], "-"),
        (0, "0"),
        (True, "yes"),
        (False, "no"),
        (["a", "b"], "a,b"),
        ({"g1": 3, "g2": None}, "g1=3 g2=-"),
    ],
)
def test_every_json_value_can_be_shown(value, text):
    assert to_cell(value).text == text


@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "a\nb", "\x9b31m", "a\u202eb"])
def test_control_characters_are_replaced(text):
    assert to_cell(text).text.isprintable() and printable(text).isprintable()


def test_good_or_bad_leaves_the_unknown_open():
    cell = good_or_bad("up")
    assert (cell({"up": True}).text, cell({"up": False}).text, cell({}).text) == ("yes", "no", "-")


def test_times_spans_and_sizes_are_readable():
    assert utc(1769860800000) == "2026-01-31 12:00:00Z" and utc(0) == "" and utc(10**18) == str(10**18)
    assert [span(ms) for ms in (0, 4200, 720_000, 7_200_000, 400_000_000)] == [
        "0.0 s",
        "4.2 s",
        "12 min",
        "2.0 h",
        "4.6 d",
    ]
    assert [size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [30, 80, 120])
@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_line_is_wider_than_the_terminal(monkeypatch, width, no_color):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    terminal.show([TABLE, Cell("done")], screen)
    shown = screen.getvalue()
    assert ("\x1b[" in shown) == (not no_color)
    lines = Console(file=io.StringIO(), width=1000).render_str(shown).plain.splitlines()
    assert max(map(len, (_without_colours(line) for line in lines))) <= width
    assert "longer" in shown and "4096" in shown


def test_markup_in_a_value_is_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    terminal.show([Table((Column("NAME", "name"),), [{"name": "[bold]x[/bold]"}])], screen)
    assert "[bold]x[/bold]" in screen.getvalue()


def _without_colours(line):
    return "".join(part.partition("m")[2] if at else part for at, part in enumerate(line.split("\x1b[")))
