"""Core. The audit's report: Markdown for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qmq.audit.conservation import STATES
from qmq.audit.delays import DELAY_STATES
from qmq.audit.results import Result

NAMED_MAX = 100
"""Findings in the Markdown; the JSON has up to a thousand of each kind."""
VERDICTS = {0: "proven equal", 1: "findings", 2: "could not read"}


def status_of(results: Iterable[Result]) -> int:
    """Return the worst exit status: one unread group leaves the whole unproven."""
    return max((result.status for result in results), default=2)


def as_json(results: list[Result], seconds: float) -> dict[str, Any]:
    """Return the result for programs."""
    status = status_of(results)
    return {
        "status": status,
        "verdict": VERDICTS[status],
        "seconds": round(seconds, 3),
        "findings": sum(sum(result.found.values()) for result in results),
        "groups": [_group(result) for result in results],
    }


def _group(result: Result) -> dict[str, Any]:
    return {
        "group": result.group,
        "status": result.status,
        "verdict": VERDICTS[result.status],
        "places": result.places,
        "start": result.start,
        "high_watermark": result.watermark,
        "ends": {name: log.end for name, log in result.logs.items()},
        "read": result.read,
        "found": result.found,
        "findings": result.findings,
        "notes": result.notes,
        "epochs": result.epochs,
        "journal": result.journal,
        "unreadable": result.unreadable,
        "hours": result.hours,
        "begin": result.begin,
        "wrong_before": result.wrong_before,
        "conserved": result.conserved,
        "delayed": result.delayed,
    }


def as_markdown(results: list[Result], seconds: float) -> str:
    """Return the report for people."""
    lines = [f"# Audit: {VERDICTS[status_of(results)]}", "", f"{len(results)} broker groups in {seconds:.1f} s.", ""]
    for result in results:
        lines += _section(result)
    return "\n".join(lines)


def _section(result: Result) -> list[str]:
    lines = [f"## {result.group}: {VERDICTS[result.status]}", ""]
    lines += [f"- {name}: `{place}`" for name, place in result.places.items()]
    if result.unreadable:
        lines += ["", f"Nothing is proven: {result.unreadable}", ""]
    else:
        lines += ["", *_proven(result), "", *_table_of_copies(result), ""]
    if result.findings:
        lines += ["### Findings", "", *_table_of_findings(result), ""]
    if result.unreadable:
        return lines
    if result.notes:
        lines += ["### Notes", "", *(f"- {note}" for note in result.notes), ""]
    if result.conserved:
        lines += ["### Outcome of the messages", "", *_table_of_states(result), ""]
    if result.delayed:
        lines += ["### Outcome of the delayed messages", "", *_table_of_delays(result), ""]
    return [*lines, "### Messages per subject and hour", "", *_table_of_hours(result), ""]


def _proven(result: Result) -> list[str]:
    if result.status == 0:
        behind = [
            f"{name} as far as it goes, to {log.end}" for name, log in result.logs.items() if result.is_behind(name)
        ]
        all_copies = ", ".join(["all copies", *behind])
        new = f"[{result.begin}, {result.watermark})"
        yes = (
            f"Every byte of {new} was read on {all_copies}, and they are the same bytes; each frame's CRCs and chain "
            "were computed again from them. Every message decodes, belongs to its frame's subject and has the labels "
            "of its tags; no batch and no id was stored twice; sequences are dense, epochs only grow, pulls and acks "
            "follow from the log; no delayed message went early, twice, or after it was cancelled."
        )
        lines = [yes]
        if result.begin > result.start:
            again = sum(piece.bytes for piece in result.again)
            lines.append(
                f"Earlier runs verified the bytes before it, from {result.start} on. Their last frame, and the {again} "
                "bytes that were read again, are unchanged."
            )
        if result.wrong_before:
            named = ", ".join(f"{row['what']} at {row['offset']}" for row in result.wrong_before[:NAMED_MAX])
            more = ", …" if len(result.wrong_before) > NAMED_MAX else ""
            lines.append(f"Findings of earlier runs on both copies alike, not repeated here: {named}{more}.")
    else:
        span = f"[{result.start}, {result.watermark})"
        lines = [f"{sum(result.found.values())} findings in {span}, which both copies must have."]
    if result.journal is not None:
        lost = result.found.get("lost", 0)
        lines.append(f"Acknowledged messages in the journal: {result.journal}; absent from a copy: {lost}.")
    lines.append(f"Epochs seen: {', '.join(result.epochs) or 'none'}.")
    return lines


def _table_of_copies(result: Result) -> list[str]:
    rows = []
    for name in result.logs:
        log, read = result.logs[name], result.read.get(name, {})
        counts = (read.get(key, 0) for key in ("bytes", "frames", "messages"))
        rows.append([name, log.start, log.end, *counts])
    return _table(["copy", "start", "end", "bytes read", "frames", "messages"], rows)


def _table_of_findings(result: Result) -> list[str]:
    rows = [
        [row["what"], row["copy"], row["offset"], row["subject"], row["sequence"], row["id"], row["text"]]
        for row in result.findings[:NAMED_MAX]
    ]
    table = _table(["what", "copy", "offset", "subject", "sequence", "message id", "text"], rows)
    more = sum(result.found.values()) - len(rows)
    return [*table, "", f"and {more} more"] if more > 0 else table


def _table_of_states(result: Result) -> list[str]:
    names = ("subject", "consumer_group", "stored", *STATES, "nacked")
    titles = [
        "subject",
        "consumer group",
        "stored =",
        "acked +",
        "dead +",
        "in flight +",
        "requeued +",
        "passed +",
        "expired +",
        "overflowed +",
        "never",
        "nacked",
    ]
    return _table(titles, [[row[name] for name in names] for row in result.conserved])


def _table_of_delays(result: Result) -> list[str]:
    titles = [
        "subject",
        "taken =",
        "stored +",
        "under way +",
        "cancelled +",
        "replaced +",
        "pending +",
        "unsent",
        "late",
        "latest, ms",
    ]
    names = ("subject", "taken", *DELAY_STATES, "late", "late_ms_max")
    return _table(titles, [[row[name] for name in names] for row in result.delayed])


def _table_of_hours(result: Result) -> list[str]:
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for row in result.hours:
        key = (row["subject"], row["hour"])
        counts.setdefault(key, {})[row["copy"]] = row["messages"]
    names = list(result.places)
    rows = [[subject, hour, *(found.get(name, 0) for name in names)] for (subject, hour), found in counts.items()]
    return _table(["subject", "hour (UTC)", *names], rows)


def _table(names: list[str], rows: list[list[Any]]) -> list[str]:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join("" if cell is None else _cell(str(cell)) for cell in cells) + " |"

    return [line(names), line("---" for _ in names), *(line(row) for row in rows)]


def _cell(text: str) -> str:
    """Keep a text within its cell: ids of applications may contain any character."""
    return " ".join(text.split()).replace("|", "\\|")
