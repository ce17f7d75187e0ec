"""Core. The morning page: it shows the state of every broker group, needs no other file, and escapes every name."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from qmq.audit.delays import DELAY_STATES
from qmq.audit.findings import FindingKind
from qmq.audit.page import advice_for, page, page_json
from qmq.ledger import FINDINGS, NOT_READ, PROVEN, Entry

DAY_MS = 86_400_000
NOW_MS = 1_795_000_000_000
STATES = {"acked": 7, "dead": 0, "in_flight": 1, "requeued": 0, "passed": 2, "expired": 0, "overflowed": 0, "never": 0}
GOOD = Entry(
    "2026-11-21T01:00:00Z",
    NOW_MS - DAY_MS,
    "g1",
    PROVEN,
    verified=5_000,
    chain="0f",
    read={"master": 900},
    conserved=[{"subject": "order.changed", "consumer_group": "billing", "stored": 10, "nacked": 3, **STATES}],
)
ROW = {
    "what": "damaged",
    "copy": "slave",
    "group": "g1",
    "host": "10.0.0.2:20883",
    "offset": 77,
    "segment": 0,
    "epoch": "1.2",
    "subject": "<b>",
    "sequence": 5,
    "id": "m-5",
    "text": "wrong body CRC",
}
BAD = replace(GOOD, at_ms=NOW_MS, verdict=FINDINGS, verified=0, found={"damaged": 1}, findings=[ROW])


class _Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_run_with_fewer_states_is_shown() -> None:
    row = {name: value for name, value in GOOD.conserved[0].items() if name not in ("expired", "overflowed")}
    assert "10 = 7 acked" in page({"g1": [replace(GOOD, conserved=[row])]}, NOW_MS)


def test_page_is_self_contained_and_shows_verified_offsets() -> None:
    read = _Reader(page({"g1": [GOOD, BAD]}, NOW_MS))
    assert read.addresses == [] and "script" not in read.tags
    assert "Audit: findings" in read.text and "5,000" in read.text and "24 h 0 min ago" in read.text
    for part in (
        "host 10.0.0.2:20883",
        "segment 0",
        "offset 77",
        "epoch 1.2",
        "sequence 5",
        "id m-5",
        "wrong body CRC",
    ):
        assert part in read.text
    assert "subject <b>" in read.text and "b" in read.tags, "names are text, never markup"


def test_numbers_have_names_on_narrow_screens() -> None:
    """Rows are stacked there, without the heads of the columns, and pictures shrink."""
    delayed = [{"subject": "a", "taken": 1, "late": 0} | dict.fromkeys(DELAY_STATES, 0) | {"stored": 1}]
    text = page({"g1": [GOOD, replace(BAD, delayed=delayed)]}, NOW_MS)
    assert '<meta name="viewport" content="width=device-width">' in text
    assert text.count('<td class="n"') == text.count('<td class="n" data-name="') == 6
    assert text.count("<svg ") == text.count(" viewBox=") == 4


@pytest.mark.parametrize(
    "row, end",
    [
        ({"id": "m-5"}, "dead letters:</span> <code>qmq Trail --id=m-5</code>"),
        ({"id": None}, "dead letters:</span> <code>qmq Browse --subject=a --sequence=121</code>"),
        ({"id": None, "sequence": None}, "dead letters.</span> \n"),
    ],
)
def test_advice_has_a_command_or_a_full_stop(row: dict[str, str | None], end: str) -> None:
    about = {"what": "dead_missing", "copy": "both", "subject": "a", "sequence": 121}
    text = page({"g1": [replace(BAD, findings=[ROW | about | row])]}, NOW_MS)
    assert f"redrive its {end}" in text and "both copies" in text


def test_findings_are_counted_at_the_top() -> None:
    text = page({"g1": [replace(BAD, found={"damaged": 1, "extra": 2_000})], "g2": [GOOD]}, NOW_MS)
    assert "; findings: 2,000 extra, 1 damaged</p>" in text
    assert "; no findings</p>" in page({"g2": [GOOD]}, NOW_MS)


def test_bytes_removed_unverified_are_shown() -> None:
    sentence = "were removed by retention before a run had verified them"
    assert f"7.0 kB {sentence}" in page({"g1": [replace(GOOD, unverified=7_000)]}, NOW_MS)
    assert sentence not in page({"g1": [GOOD]}, NOW_MS)


def test_newest_thirty_runs_have_boxes() -> None:
    entries = [replace(GOOD, run=f"run {number}") for number in range(35)]
    text = page({"g1": entries}, NOW_MS)
    assert "run 34:" in text and "run 5:" in text and "run 4:" not in text


def test_broken_equation_is_marked() -> None:
    assert "10 = 7 acked + 0 dead letters + 1 in flight" in page({"g1": [GOOD]}, NOW_MS)
    broken = replace(GOOD, conserved=[GOOD.conserved[0] | {"acked": 6}])
    assert "10 is not 6 acked" in page({"g1": [broken]}, NOW_MS)


def test_unverified_group_is_shown_as_never() -> None:
    text = page({"g1": [replace(GOOD, verdict=NOT_READ, why="broker gone", verified=0)]}, NOW_MS)
    assert "never" in text and "broker gone" in text and "Audit: <span" in text


@pytest.mark.parametrize("kind", FindingKind)
@pytest.mark.parametrize("copy", ["slave", "both"])
def test_every_finding_has_advice(kind: FindingKind, copy: str) -> None:
    assert advice_for({"what": kind, "copy": copy}).endswith((".", ":"))


DELAYED = {
    "subject": "order.unpaid",
    "taken": 12,
    "stored": 5,
    "under_way": 0,
    "cancelled": 2,
    "replaced": 1,
    "pending": 3,
    "unsent": 1,
    "late": 2,
    "late_ms_max": 70_000,
}
UNSENT = {
    "what": "unsent",
    "copy": "both",
    "group": "d1",
    "subject": "order.unpaid",
    "sequence": 900,
    "offset": 840,
    "text": "due at 2026-11-21 01:00:00, and neither sent nor cancelled",
}


def test_delayed_messages_have_equation_and_command() -> None:
    late = replace(BAD, group="d1", delayed=[DELAYED], findings=[UNSENT], found={"unsent": 1})
    shown = _Reader(page({"d1": [late]}, NOW_MS)).text
    assert "12 = 5 sent and stored + 0 under way + 2 cancelled + 1 written again + 3 not due yet + 1 unsent" in shown
    assert "qmq DelayStats" in shown
    assert "delayed message" not in _Reader(page({"g1": [GOOD]}, NOW_MS)).text
    wrong = replace(late, delayed=[DELAYED | {"pending": 2}])
    assert "12 is not 5 sent" in _Reader(page({"d1": [wrong]}, NOW_MS)).text


@pytest.mark.parametrize("what", ["lost", "dead_altered"])
def test_wrong_message_has_a_trail_command(what: str) -> None:
    lost = ROW | {"what": what, "copy": "both", "id": "m 5"}
    assert "qmq Trail --id='m 5'" in _Reader(page({"g1": [replace(BAD, findings=[lost])]}, NOW_MS)).text


def test_json_equals_the_page() -> None:
    shown = page_json({"g1": [GOOD, BAD], "g2": []}, NOW_MS)
    assert shown["groups"]["g2"] == {"verified": 0, "verifiedMs": None, "runs": []}
    group = shown["groups"]["g1"]
    assert (group["verified"], group["verifiedMs"]) == (5_000, NOW_MS - DAY_MS)
    assert [(run["verdict"], run["found"]) for run in group["runs"]] == [(PROVEN, {}), (FINDINGS, {"damaged": 1})]
    assert not {"pieces", "ends"} & group["runs"][0].keys()
