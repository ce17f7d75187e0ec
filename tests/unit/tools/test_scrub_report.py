"""Core. ScrubReport's judgement of a copy's metrics, and its display."""

from __future__ import annotations

import io

import pytest

from qmq.tools.commands.audit import show_scrubs
from qmq.tools.findings import parse_metrics
from qmq.tools.terminal import show
from qmq.tools.verification import NIGHT_S, judge

HOUR_S = 3600


def page(oldest_s=5 * HOUR_S, *, kind="broker", found_s=None, findings=0):
    lines = [
        f'qmq_{kind}_scrub_oldest_seconds{{broker_group="g"}} {oldest_s}',
        f'qmq_{kind}_scrub_every_seconds{{broker_group="g"}} {168 * HOUR_S}',
        f'qmq_{kind}_scrub_findings_total{{broker_group="g"}} {findings}',
        f'qmq_{kind}_scrubbed_bytes_total{{broker_group="g"}} 4096',
    ]
    if found_s is not None:
        lines.append(f'qmq_{kind}_scrub_last_finding_seconds{{broker_group="g"}} {found_s}')
    return parse_metrics("\n".join(lines))


@pytest.mark.parametrize(
    ("metrics", "late", "damaged"),
    [
        pytest.param(page(), False, False, id="whole"),
        pytest.param(page(kind="delayserver"), False, False, id="of a delay server"),
        pytest.param(page(2 * 168 * HOUR_S), False, False, id="just in time"),
        pytest.param(page(2 * 168 * HOUR_S + 1), True, False, id="late"),
        pytest.param(page(found_s=NIGHT_S - 1, findings=1), False, True, id="damaged tonight"),
        pytest.param(page(found_s=NIGHT_S, findings=1), False, False, id="damaged the night before"),
    ],
)
def test_scrub_findings_count_since_the_last_report(metrics, late, damaged):
    judged = judge(metrics)
    assert (judged["late"], judged["damaged"], judged["readBytes"]) == (late, damaged, 4096)


def test_copy_without_scrub_metrics_is_unknown():
    assert judge({})["everyS"] == 0 and not judge({})["late"]


def text_of(blocks):
    stream = io.StringIO()
    show(blocks, stream)
    return stream.getvalue()


def row(copy, metrics, why=""):
    return {"group": "g1", "role": "MASTER", "copy": copy, **judge(metrics), "why": why}


def test_report_counts_damaged_and_silent_copies():
    rows = [row("a:1", page()), row("b:1", page(found_s=60.0, findings=1)), row("c:1", {}, "c:1 does not answer")]
    text = text_of(show_scrubs(rows))
    assert "5.0 h ago, due every 168 h" in text and "not known: c:1 does not answer" in text
    assert "1 of 3 copies were damaged" in text and "1 of 3 copies did not answer" in text
    assert "all copies are scrubbed in time" in text_of(show_scrubs(rows[:1]))
