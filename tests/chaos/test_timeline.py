"""Core. The picture of a run: bars, curves, findings."""

from __future__ import annotations

import re
from itertools import pairwise

from qmq.deploy.chaos.checker import Finding
from qmq.deploy.chaos.history import History
from qmq.deploy.chaos.records import REFUSED, STORED, Fault, Got, Sending, Sent, Window
from qmq.deploy.chaos.timeline import COLOURS, LEFT, LETTER, WIDTH, page


def sent(at, outcome=STORED):
    yield Sending(at, "p", "s", f"m{at}", "", [], 0)
    yield Sent(at, f"m{at}", outcome, "g1", 0)


def fault(name, group, begin, end):
    return Fault(begin, end, name, group, False)


def history(*records):
    read = History()
    read.read([*sent(100.0), *sent(105.0, REFUSED), *sent(110.0), *records])
    return read


def bars(text):
    """(x, y, name) of each fault."""
    drawn = re.findall(r'<title>([^<]*), [\d.]+ s</title><rect x="([\d.]+)" y="(\d+)"', text)
    return [(x, y, name) for name, x, y in drawn]


def names(text):
    """(begin, end, y) of each bar's name, by the width that a letter has."""
    drawn = re.findall(r'<text x="([\d.]+)" y="(\d+)" fill="#1f2933">([^<]*)<', text)
    return [(float(x), float(x) + len(name) * LETTER, y) for x, y, name in drawn]


def test_faults_begin_at_their_time_and_overlaps_stack():
    text = page(
        history(fault("a", "g1", 100.0, 104.0), fault("b", "", 102.0, 103.0), fault("c", "", 105.0, 106.0)), [], ""
    )
    middle = LEFT + (WIDTH - LEFT) / 2
    assert bars(text) == [
        (f"{LEFT:.1f}", "0", "a g1"),
        (f"{middle:.1f}", "0", "c"),
        (f"{LEFT + (WIDTH - LEFT) / 5:.1f}", "16", "b"),
    ]


def test_names_of_short_faults_are_readable():
    """No name is cut off, and none overlaps another."""
    faults = [fault("kill metaserver and a broker", "", at, at) for at in (100.0, 101.0, 109.0, 110.0)]
    drawn = sorted(names(page(history(*faults), [], "")), key=lambda name: (name[2], name[0]))
    assert len(drawn) == 4
    assert all(LEFT <= begin and end <= WIDTH for begin, end, _ in drawn)
    assert all(y != next_y or end <= begin for (_, end, y), (begin, _, next_y) in pairwise(drawn))


def test_faults_of_consumers_are_below_those_of_brokers():
    text = page(history(Window(100.0, 101.0, "consumer stands still", ""), fault("a", "g1", 107.0, 108.0)), [], "")
    assert [(y, name) for _, y, name in bars(text)] == [("0", "a g1"), ("16", "stands still")]
    assert '<text x="0" y="11" fill="#616e7c">faults<' in text
    assert '<text x="0" y="27" fill="#616e7c">consumers<' in text


def test_each_outcome_has_its_curve():
    text = page(history(Got(104.0, "c", 0, "s", "g", "g1", 0, 0, 1, "m100.0", 0)), [], "")
    drawn = {name: text.count(f'height="56.0" fill="{colour}"') for name, colour in COLOURS.items()}
    assert drawn == {"acknowledged": 2, "refused": 1, "unknown": 0, "delivered": 1}


def test_findings_are_shown_as_text():
    text = page(history(), [Finding("lost-copy", "<b>m1</b>")], "seed 1")
    assert ">1 finding<" in text and "lost-copy" in text and "&lt;b&gt;m1&lt;/b&gt;" in text


def test_run_without_messages_has_a_page():
    assert "Nothing was sent" in page(History(), [], "seed 1")
