"""Core. The picture of a run: faults as bars, and below them curves of acknowledged, refused and delivered messages.

One HTML file without references to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from qmq.deploy.chaos.checker import Finding
from qmq.deploy.chaos.history import History
from qmq.deploy.chaos.records import OF_CONSUMERS, REFUSED, STORED, UNKNOWN, Fault

WIDTH, LEFT, ROW, CURVE = 1000, 84, 16, 70
"""Pixels: of the whole, of the names in front of the rows, of a row of bars, of a curve."""
LETTER, INDENT = 6, 3
"""Pixels: of a letter, about, and of the space in front of a bar's name."""
MOMENTS = 240
"""Intervals of a run; events of an interval are counted together."""
COLOURS = {"acknowledged": "#2e9e5b", "refused": "#e0a100", "unknown": "#d43f3a", "delivered": "#3b82c4"}
BROKERS, CONSUMERS = "#b8c4d0", "#dccbe8"
"""Colours of bars, so light that a black name can be read on them; it may continue beside a short bar."""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1040px;padding:24px;color:#1f2933;background:#fff}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:32px 0 8px}svg{display:block}text{font:11px system-ui,sans-serif}
.kept{color:#2e7d4f}.broken{color:#c0322d}table{border-collapse:collapse}td{padding:3px 14px 3px 0;vertical-align:top}
"""


def page(history: History, findings: Sequence[Finding], summary: str) -> str:
    """Return the page. `summary` is a line about the run."""
    is_kept = not findings
    verdict = "every promise was kept" if is_kept else f"{len(findings)} finding{'s' * (len(findings) > 1)}"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>qmq chaos</title>',
        f'<style>{_STYLE}</style><h1 class="{"kept" if is_kept else "broken"}">{verdict}</h1><p>{escape(summary)}</p>',
        *(_picture(history) if history.messages else ["<p>Nothing was sent.</p>"]),
        *_table("Findings", ((finding.rule, finding.text) for finding in findings)),
        *_table("Faults", _described(history)),
    ]
    return "\n".join(parts) + "\n"


def _table(title: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows]
    if lines:
        yield from (f"<h2>{title}</h2><table>", *lines, "</table>")


def _described(history: History) -> Iterator[Sequence[str]]:
    begin = min((message.sending.at for message in history.messages.values()), default=0.0)
    for fault in _faults(history):
        took_s = fault.end - fault.begin
        yield f"{fault.begin - begin:.1f} s", fault.name, fault.broker_group, f"recovered after {took_s:.1f} s"


def _faults(history: History) -> list[Fault]:
    """Return faults of brokers, and those of consumers, by their begin."""
    consumers = [window for window in history.windows if window.kind.startswith(OF_CONSUMERS)]
    faults = [
        *history.faults,
        *(Fault(consumer.begin, consumer.end, consumer.kind, consumer.broker_group, False) for consumer in consumers),
    ]
    return sorted(faults, key=lambda fault: fault.begin)


def _picture(history: History) -> Iterator[str]:
    curves = _curves(history)
    begin = min(message.sending.at for message in history.messages.values())
    last = max((at for times in curves.values() for at in times), default=begin)
    scale = _Scale(begin, max(last, begin + 1.0))
    brokers, consumers = _rows(_faults(history), scale)
    rows = brokers + consumers
    height = len(rows) * ROW + len(COLOURS) * CURVE + 30
    yield f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="faults and messages over time">'
    for title, number in (("faults", 0), ("consumers", len(brokers))):
        if number < len(rows):
            yield f'<text x="0" y="{number * ROW + 11}" fill="#616e7c">{title}</text>'
    for number, bars in enumerate(rows):
        yield from (_drawn(bar, number * ROW) for bar in bars)
    for number, (name, times) in enumerate(curves.items()):
        yield from _curve(name, times, len(rows) * ROW + (number + 1) * CURVE, scale)
    for second in _marks(scale):
        yield f'<text x="{scale.x(begin + second):.1f}" y="{height - 8}" fill="#616e7c">{second:g} s</text>'
    yield "</svg>"


class _Scale:
    """Seconds to pixels."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin = begin
        self.end = end

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT) * (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin)


class _Bar(NamedTuple):
    """A fault in pixels: its begin and end, and the begin of its name."""

    x: float
    end: float
    name_x: float
    name: str
    fault: Fault

    @property
    def left(self) -> float:
        return min(self.x, self.name_x)

    @property
    def right(self) -> float:
        return max(self.end, self.name_x + len(self.name) * LETTER + INDENT)


def _rows(faults: Iterable[Fault], scale: _Scale) -> tuple[list[list[_Bar]], list[list[_Bar]]]:
    """Put faults of brokers, and those of consumers, into as few rows as leave each bar room for its name."""
    brokers: list[list[_Bar]] = []
    consumers: list[list[_Bar]] = []
    for fault in faults:
        rows, bar = consumers if fault.name.startswith(OF_CONSUMERS) else brokers, _bar(fault, scale)
        free = next((row for row in rows if row[-1].right < bar.left), None)
        if free is None:
            rows.append([bar])
        else:
            free.append(bar)
    return brokers, consumers


def _bar(fault: Fault, scale: _Scale) -> _Bar:
    name = f"{fault.name.removeprefix(OF_CONSUMERS)} {fault.broker_group}".strip()
    x = scale.x(fault.begin)
    name_x = min(x + INDENT, WIDTH - len(name) * LETTER)
    return _Bar(x, max(scale.x(fault.end), x + 2), name_x, name, fault)


def _drawn(bar: _Bar, y: int) -> str:
    is_consumers = bar.fault.name.startswith(OF_CONSUMERS)
    lasted_s, name = bar.fault.end - bar.fault.begin, escape(bar.name)
    place = f'x="{bar.x:.1f}" y="{y}" width="{bar.end - bar.x:.1f}" height="{ROW - 2}"'
    return (
        f'<g><title>{name}, {lasted_s:.1f} s</title><rect {place} fill="{CONSUMERS if is_consumers else BROKERS}"/>'
        f'<text x="{bar.name_x:.1f}" y="{y + 11}" fill="#1f2933">{name}</text></g>'
    )


def _curves(history: History) -> dict[str, list[float]]:
    done: dict[str, list[float]] = {STORED: [], REFUSED: [], UNKNOWN: []}
    for message in history.messages.values():
        done[message.outcome].append(message.sent.at if message.sent else message.sending.at)
    times = [*done.values(), [delivery.got.at for delivery in history.got]]
    return dict(zip(COLOURS, times, strict=True))


def _curve(name: str, times: Sequence[float], bottom: int, scale: _Scale) -> Iterator[str]:
    moment_s = (scale.end - scale.begin) / MOMENTS
    counted = Counter(int((at - scale.begin) / moment_s) for at in times)
    most = max(counted.values(), default=0)
    height = CURVE - 14
    yield f'<text x="0" y="{bottom - height + 10}" fill="{COLOURS[name]}">{name}</text>'
    yield f'<text x="0" y="{bottom - height + 24}" fill="#616e7c">{most / moment_s:,.0f}/s</text>'
    for moment, count in sorted(counted.items()):
        x, tall = scale.x(scale.begin + moment * moment_s), height * count / most
        place = f'x="{x:.1f}" y="{bottom - tall:.1f}" width="{(WIDTH - LEFT) / MOMENTS:.2f}" height="{tall:.1f}"'
        yield f'<rect {place} fill="{COLOURS[name]}"/>'


def _marks(scale: _Scale) -> list[float]:
    """Return round numbers of seconds, six to twelve of them."""
    length = scale.end - scale.begin
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1e9) if length / step <= 12)
    return [step * number for number in range(int(length / step))]
