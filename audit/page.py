"""Core. The morning page: one self-contained HTML file of the audit's ledger, and the same as JSON.

It shows the verified range of each log, the last 30 runs, the equations of consumer groups and delayed messages, and
the findings with advice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from shlex import quote
from typing import Any

from qmq.audit.conservation import STATES
from qmq.audit.delays import DELAY_STATES
from qmq.audit.findings import FindingKind
from qmq.ledger import FINDINGS, NOT_READ, PROVEN, Entry, known_from

NIGHTS = 30
OLD_MS = 36 * 3_600_000
COLOURS = {PROVEN: "#2e9e5b", FINDINGS: "#d43f3a", NOT_READ: "#e0a100", "": "#e4e7eb"}
STATE_COLOURS = dict(
    zip(STATES, ("#2e9e5b", "#d43f3a", "#3b82c4", "#e0a100", "#9aa5b1", "#7a5195", "#c2497e", "#dfe3e8"), strict=True)
)
STATE_NAMES = dict(
    zip(
        STATES,
        ("acked", "dead letters", "in flight", "requeued", "passed over", "expired", "overflowed", "not delivered yet"),
        strict=True,
    )
)
DELAY_COLOURS = dict(zip(DELAY_STATES, ("#2e9e5b", "#3b82c4", "#9aa5b1", "#c3ccd5", "#dfe3e8", "#d43f3a"), strict=True))
_DELAYED = ("sent and stored", "under way", "cancelled", "written again", "not due yet", "unsent")
DELAY_NAMES = dict(zip(DELAY_STATES, _DELAYED, strict=True))

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1040px;padding:24px;color:#1f2933;background:#fff}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:36px 0 8px;border-bottom:1px solid #e4e7eb;padding-bottom:4px}
p.when{color:#616e7c;margin:4px 0 20px}.badge{display:inline-block;border-radius:4px;color:#fff;padding:1px 9px}
table{border-collapse:collapse;width:100%}th{text-align:left;font-weight:600;color:#616e7c;font-size:13px}
td,th{padding:5px 12px 5px 0;vertical-align:top;border-bottom:1px solid #f0f2f5}
td.n{text-align:right;white-space:nowrap}
th.n{text-align:right}td>code:only-child{display:inline-block;min-width:12em}
code{font:13px ui-monospace,monospace;background:#f5f7fa;padding:1px 4px;overflow-wrap:anywhere}
@media(max-width:640px){body{padding:12px}table,tbody,tr,td,td.n{display:block;text-align:left;white-space:normal}th{display:none}
tr{border-bottom:1px solid #c3ccd5;padding:6px 0}td{border:0;padding:1px 0;overflow-wrap:anywhere}td:empty{display:none}
td[data-name]::before{content:attr(data-name)": ";color:#616e7c}}
.why{color:#616e7c}.key span{display:inline-block;width:11px;height:11px;margin:0 5px 0 14px}
svg{display:block;max-width:100%}
"""


def page(groups: dict[str, list[Entry]], now_ms: int, why: str = "") -> str:
    """Return the page. `groups`: ledger entries of each broker group, oldest first. `why`: reason why the ledger is not
    up to date, or empty.
    """
    last = [entries[-1] for entries in groups.values() if entries]
    worst = next(
        (text for text in (NOT_READ, FINDINGS, PROVEN) if any(entry.verdict == text for entry in last)), NOT_READ
    )
    worst = NOT_READ if why else worst
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>qmq audit</title>',
        f"<style>{_STYLE}</style><h1>Audit: {_badge(worst)}</h1>",
        f'<p class="when">{len(last)} broker groups; written {_moment(now_ms)}; {_summary(last)}</p>',
        *([f"<p><b>{escape(why)}</b></p>"] if why else []),
        *_verified(groups, now_ms),
        *_nights(groups),
        *_conserved(last),
        *_delayed(last),
        *_findings(last),
    ]
    return "\n".join(parts) + "\n"


def page_json(groups: dict[str, list[Entry]], now_ms: int, why: str = "") -> dict[str, Any]:
    """Return the contents of the page as JSON, without fields for the next run."""
    shown = {}
    for name, entries in sorted(groups.items()):
        anchor = known_from(entries).anchor
        runs = [
            {key: value for key, value in asdict(entry).items() if key not in _FOR_RUNS} for entry in entries[-NIGHTS:]
        ]
        shown[name] = {
            "verified": anchor.verified if anchor else 0,
            "verifiedMs": anchor.at_ms if anchor else None,
            "runs": runs,
        }
    return {"writtenMs": now_ms, "why": why, "groups": shown}


_FOR_RUNS = frozenset({"pieces", "ends", "chain", "frame"})


def _summary(last: Sequence[Entry]) -> str:
    """Return the number of findings of each kind, the most frequent first."""
    found = sum((Counter(entry.found) for entry in last), Counter[str]()).most_common()
    kinds = ", ".join(f"{number:,} {escape(kind)}" for kind, number in found)
    return f"findings: {kinds}" if kinds else "no findings"


def _key(named: Iterable[tuple[str, str]], before: str = "") -> str:
    """Return the legend of a picture, from (colour, meaning)."""
    marks = "".join(f'<span style="background:{colour}"></span>{text}' for colour, text in named)
    return f'<p class="key">{before}{marks}</p>'


def _badge(verdict: str) -> str:
    return f'<span class="badge" style="background:{COLOURS[verdict]}">{escape(verdict)}</span>'


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _size(number: int) -> str:
    """Return a number of bytes with a unit."""
    size, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _verified(groups: dict[str, list[Entry]], now_ms: int) -> Iterable[str]:
    yield "<h2>Verified up to</h2>"
    yield _key(
        ((COLOURS[PROVEN], "verified"), (COLOURS[NOT_READ], "not verified"), (COLOURS[""], "removed by retention"))
    )
    yield "<table><tr><th>broker group<th>last run<th>log, and its verified part"
    yield '<th class="n">offset<th class="n">verified'
    for name, entries in sorted(groups.items()):
        if not entries:
            continue
        anchor, last = known_from(entries).anchor, entries[-1]
        verified = anchor.verified if anchor else 0
        age = _age(now_ms - anchor.at_ms) if anchor else "never"
        is_old = anchor is None or now_ms - anchor.at_ms > OLD_MS
        gone = ""
        if last.unverified:
            text = f"{_size(last.unverified)} were removed by retention before a run had verified them"
            gone = f'<br><span style="color:{COLOURS[FINDINGS]}">{text}</span>'
        colour = COLOURS[NOT_READ] if is_old else "#1f2933"
        yield (
            f'<tr><td><b>{escape(name)}</b><td>{_badge(last.verdict)} <span class="why">{escape(last.run)}</span>{gone}'
            f'<td>{_bar(last.start, verified, _end_of(entries))}<td class="n" data-name="offset">{verified:,}'
            f'<td class="n" data-name="verified" style="color:{colour}">{age}'
        )
    yield "</table>"


def _end_of(entries: Sequence[Entry]) -> int:
    """Return the furthest offset verified or read by any run."""
    return max(max(entry.verified, entry.begin, entry.start + max(entry.read.values(), default=0)) for entry in entries)


def _age(age_ms: int) -> str:
    hours, minutes = divmod(max(age_ms, 0) // 60_000, 60)
    return f"{hours} h {minutes} min ago" if hours < 72 else f"{hours // 24} days ago"


def _bar(start: int, verified: int, end: int, width: int = 320) -> str:
    """Draw a log from offset 0 to `end`: deleted, verified, not verified."""
    whole = max(end, 1)
    begin, until = (round(width * min(at, whole) / whole) for at in (start, max(verified, start)))
    parts = [(0, begin, COLOURS[""]), (begin, until, COLOURS[PROVEN]), (until, width, COLOURS[NOT_READ])]
    return _boxes(parts, width, f"[{start:,}, {verified:,}) verified of {end:,}")


def _boxes(parts: Iterable[tuple[float, float, str]], width: int, title: str) -> str:
    boxes = "".join(
        f'<rect x="{low:.1f}" y="4" width="{high - low:.1f}" height="12" fill="{colour}"/>'
        for low, high, colour in parts
        if high > low
    )
    return f'<svg width="{width}" height="20" viewBox="0 0 {width} 20"><title>{escape(title)}</title>{boxes}</svg>'


def _nights(groups: dict[str, list[Entry]]) -> Iterable[str]:
    yield f"<h2>The last {NIGHTS} runs</h2>"
    yield _key((COLOURS[verdict], verdict) for verdict in (PROVEN, FINDINGS, NOT_READ))
    yield "<table><tr><th>broker group<th>oldest to newest; height: bytes read"
    yield '<th class="n">last read'
    for name, entries in sorted(groups.items()):
        nights = entries[-NIGHTS:]
        most = max((sum(entry.read.values()) for entry in nights), default=0) or 1
        boxes = []
        for place, entry in enumerate(nights, NIGHTS - len(nights)):
            high = 6 + 30 * sum(entry.read.values()) / most
            title = f"{entry.run}: {entry.verdict}, {_size(sum(entry.read.values()))} read. {_found(entry)}"
            boxes.append(
                f'<rect x="{place * 20}" y="{38 - high:.1f}" width="16" height="{high:.1f}" rx="2" '
                f'fill="{COLOURS[entry.verdict]}"><title>{escape(title)}</title></rect>'
            )
        empty = "".join(
            f'<rect x="{place * 20}" y="36" width="16" height="2" fill="{COLOURS[""]}"/>'
            for place in range(NIGHTS - len(nights))
        )
        read = _size(sum(nights[-1].read.values())) if nights else ""
        picture = f'<svg width="{NIGHTS * 20}" viewBox="0 0 {NIGHTS * 20} 40">{empty}{"".join(boxes)}</svg>'
        yield f'<tr><td><b>{escape(name)}</b><td>{picture}<td class="n" data-name="last read">{read}'
    yield "</table>"


def _found(entry: Entry) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(entry.found.items())) or entry.why


def _conserved(last: Sequence[Entry]) -> Iterable[str]:
    yield "<h2>Outcome of each message</h2>"
    yield _key(((STATE_COLOURS[state], STATE_NAMES[state]) for state in STATES), "stored =")
    # Runs of earlier versions had fewer states.
    rows = [(entry.group, dict.fromkeys(STATES, 0) | row) for entry in last for row in entry.conserved]
    if not rows:
        yield '<p class="why">No consumer group was seen.</p>'
        return
    yield '<table><tr><th>broker group<th>subject<th>consumer group<th class="n">stored<th>became'
    for group, row in rows:
        cell = f"<td data-name='consumer group'>{escape(row['consumer_group'])}"
        yield _equation(group, row, cell, ("stored", row["stored"]), STATE_NAMES, STATE_COLOURS)
    yield "</table>"


def _delayed(last: Sequence[Entry]) -> Iterable[str]:
    """Return the equations of delay groups, if any."""
    rows = [(entry.group, row) for entry in last for row in entry.delayed]
    if not rows:
        return
    yield "<h2>Outcome of each delayed message</h2>"
    yield _key(((DELAY_COLOURS[state], DELAY_NAMES[state]) for state in DELAY_STATES), "taken =")
    yield '<table><tr><th>delay group<th>subject<th class="n">late<th class="n">taken<th>became'
    for group, row in rows:
        late = f'<td class="n" data-name="late">{row["late"]:,}'
        yield _equation(group, row, late, ("taken", row["taken"]), DELAY_NAMES, DELAY_COLOURS)
    yield "</table>"


def _equation(
    group: str, row: dict[str, Any], cell: str, named: tuple[str, int], names: dict[str, str], colours: dict[str, str]
) -> str:
    """Draw a row: the states of this many messages, and whether their sum is right."""
    (name, whole), parts, at = named, [], 0.0
    for state in names:
        wide = 320 * row[state] / max(whole, 1)
        parts.append((at, at + wide, colours[state]))
        at += wide
    sums = " + ".join(f"{row[state]:,} {name}" for state, name in names.items())
    holds = whole == sum(row[state] for state in names)
    text = f"{whole:,} = {sums}" if holds else f"{whole:,} is not {sums}"
    style = "" if holds else f' style="color:{COLOURS[FINDINGS]};font-weight:600"'
    return (
        f"<tr><td>{escape(group)}<td><code>{escape(row['subject'])}</code>{cell}"
        f'<td class="n" data-name="{name}">{whole:,}<td>{_boxes(parts, 320, text)}'
        f'<span class="why"{style}>{text}</span>'
    )


def _findings(last: Sequence[Entry]) -> Iterable[str]:
    yield "<h2>Findings</h2>"
    if not any(entry.findings or entry.why for entry in last):
        yield '<p class="why">None.</p>'
        return
    yield "<table><tr><th>finding<th>place<th>message<th>reason and remedy"
    for entry in last:
        if entry.why:
            yield (
                f"<tr><td>{_badge(entry.verdict)}<td><b>{escape(entry.group)}</b><td><td>{escape(entry.why)}"
                '<br><span class="why">Repair the place that is named, then run the audit again.</span>'
            )
        for row in entry.findings:
            yield _finding(entry, row)
        if (more := sum(entry.found.values()) - len(entry.findings)) > 0:
            yield f"<tr><td><td><b>{escape(entry.group)}</b><td><td>and {more} more"
    yield "</table>"


def _finding(entry: Entry, row: dict[str, Any]) -> str:
    where = [entry.group, "both copies" if row.get("copy") == "both" else f"its {row.get('copy') or '?'}"]
    where += [f"{name} {row[name]}" for name in ("host", "segment", "offset", "epoch") if row.get(name) is not None]
    message = [f"{name} {row[name]}" for name in ("subject", "sequence", "id") if row.get(name) is not None]
    lines = ("<br>".join(escape(line) for line in lines) for lines in (where, message))
    advice, command = advice_for(row), _command(row)
    if not command and advice.endswith(":"):
        advice = f"{advice[:-1]}."
    return (
        f"<tr><td><b>{escape(row['what'])}</b><td>{'<td>'.join(lines)}<td>{escape(row.get('text') or '')}"
        f'<br><span class="why">{escape(advice)}</span> {command}'
    )


_REPAIRED_BY_READING = frozenset({FindingKind.DAMAGED, FindingKind.CHAIN})
_LEDGER_OUTDATED = frozenset({FindingKind.REWOUND, FindingKind.REWRITTEN})
_PROMISED = frozenset({FindingKind.LOST, FindingKind.ALTERED})
_DEAD_LETTERS = frozenset(
    {FindingKind.DEAD_ALTERED, FindingKind.DEAD_UNFOUNDED, FindingKind.DEAD_TWICE, FindingKind.DEAD_MISSING}
)
_SEED = frozenset(
    {
        FindingKind.MISSING,
        FindingKind.EXTRA,
        FindingKind.DIFFERENT,
        FindingKind.REORDERED,
        FindingKind.SHIFTED,
        FindingKind.HISTORY,
    }
)


def advice_for(row: dict[str, Any]) -> str:
    """Return the advice for a finding."""
    what = row["what"]
    if what == FindingKind.REPAIRED:
        return "Done: the broker took the range from the other copy. Check the disk of the repaired one."
    if what in _LEDGER_OUTDATED:
        return "If an operator restored the log, move the group's file of the ledger aside. Otherwise find the cause."
    if what == FindingKind.UNSENT:
        return "Its delay group has no master, or no broker group accepts its due messages."
    if what in _PROMISED:
        return "Ask the producer for the message, and stop retention until you have found when it was lost:"
    if what in _DEAD_LETTERS:
        return "Check how its group handled the message, then redrive its dead letters:"
    if row.get("copy") == "both":
        return "Both copies are wrong alike, so neither can repair the other. Find the version that wrote this."
    if what in _REPAIRED_BY_READING:
        return "A running broker takes the range from the other copy when it reads it: run the audit on its address."
    if what in _SEED:
        return "Make sure which copy is right, set the other one's directory aside, and let it be seeded:"
    return "Compare both copies there."


def _command(row: dict[str, Any]) -> str:
    if row["what"] in _SEED and row.get("copy") != "both" and row.get("group"):
        return f"<code>qmq ListBrokers --brokerGroup={escape(row['group'])}</code>"
    if row["what"] == FindingKind.UNSENT:
        return f"<code>qmq DelayStats --brokerGroup={escape(str(row.get('group') or ''))}</code>"
    if row["what"] in _PROMISED | _DEAD_LETTERS and row.get("id"):
        return f"<code>qmq Trail --id={escape(quote(row['id']))}</code>"
    if row["what"] in _DEAD_LETTERS and row.get("subject") and row.get("sequence") is not None:
        return f"<code>qmq Browse --subject={escape(quote(row['subject']))} --sequence={row['sequence']}</code>"
    return ""
