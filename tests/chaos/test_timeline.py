"""Core. The picture of a run shows what happened, and when."""

from __future__ import annotations

import re

from qmq.deploy.chaos.checker import Finding
from qmq.deploy.chaos.history import REFUSED, STORED, Delivered, Fault, History, Sent
from qmq.deploy.chaos.timeline import COLOURS, LEFT, WIDTH, page


def sent(at, outcome=STORED):
    return Sent(f"m{at}", "s", "one", at, at, outcome, "g1", 0)


def history(*faults, **more):
    return History(sent=[sent(100.0), sent(105.0, REFUSED), sent(110.0)], faults=list(faults), **more)


def bars(text):
    """(x, y, name) of each fault."""
    return re.findall(r'<svg x="([\d.]+)" y="(\d+)".*?<title>(.*?),', text)


def test_faults_stand_where_they_began_and_those_at_once_below_each_other():
    text = page(
        history(Fault("a", "g1", 100.0, 104.0), Fault("b", "", 102.0, 103.0), Fault("c", "", 105.0, 106.0)), [], ""
    )
    middle = LEFT + (WIDTH - LEFT) / 2
    assert bars(text) == [
        (f"{LEFT:.1f}", "0", "a g1"),
        (f"{middle:.1f}", "0", "c"),
        (f"{LEFT + (WIDTH - LEFT) / 5:.1f}", "16", "b"),
    ]


def test_each_outcome_has_its_curve():
    text = page(history(delivered=[Delivered("m", "s", "g1", 0, "c", 0.0, 104.0)]), [], "")
    drawn = {name: text.count(f'height="56.0" fill="{colour}"') for name, colour in COLOURS.items()}
    assert drawn == {"acknowledged": 2, "refused": 1, "unknown": 0, "delivered": 1}


def test_findings_are_named_and_what_they_say_is_text():
    text = page(history(), [Finding("lost-copy", "<b>m1</b>")], "seed 1")
    assert "1 findings" in text and "lost-copy" in text and "&lt;b&gt;m1&lt;/b&gt;" in text


def test_a_run_in_which_nothing_was_sent_has_a_page():
    assert "Nothing was sent" in page(History(), [], "seed 1")
