"""Core. The picture of a run: faults as bars, beside them what was acknowledged, refused and delivered in each moment.

One HTML file that needs nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from qmq.deploy.chaos.checker import Finding
from qmq.deploy.chaos.history import REFUSED, STORED, UNKNOWN, Fault, History

WIDTH, LEFT, ROW, CURVE = 1000, 70, 16, 70
"""Pixels: of the whole, of the names in front of the rows, of a row of bars, of a curve."""
MOMENTS = 240
"""Of a whole run; what falls into one of them is counted together."""
COLOURS = {"acknowledged": "#2e9e5b", "refused": "#e0a100", "unknown": "#d43f3a", "delivered": "#3b82c4"}
BROKERS, CONSUMERS = "#7b8794", "#c9b6d8"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1040px;padding:24px;color:#1f2933;background:#fff}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:32px 0 8px}svg{display:block}text{font:11px system-ui,sans-serif}
.kept{color:#2e7d4f}.broken{color:#c0322d}table{border-collapse:collapse}td{padding:3px 14px 3px 0;vertical-align:top}
"""


def page(history: History, findings: Sequence[Finding], said: str) -> str:
    """Write the page. `said`: a line about the run."""
    is_kept = not findings
    verdict = "every promise was kept" if is_kept else f"{len(findings)} findings"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>qmq chaos</title>',
        f'<style>{_STYLE}</style><h1 class="{"kept" if is_kept else "broken"}">{verdict}</h1><p>{escape(said)}</p>',
        *(_picture(history) if history.sent else ["<p>Nothing was sent.</p>"]),
        *_table("Findings", ((one.rule, one.text) for one in findings)),
        *_table("Faults", _told(history)),
    ]
    return "\n".join(parts) + "\n"


def _table(title: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows]
    if lines:
        yield from (f"<h2>{title}</h2><table>", *lines, "</table>")


def _told(history: History) -> Iterator[Sequence[str]]:
    begin = min((one.begun for one in history.sent), default=0.0)
    for fault in sorted(history.faults, key=lambda one: one.begin):
        yield f"{fault.begin - begin:.1f} s", fault.name, fault.group, f"well after {fault.end - fault.begin:.1f} s"


def _picture(history: History) -> Iterator[str]:
    begin = min(one.begun for one in history.sent)
    last = max([one.done for one in history.sent] + [one.at for one in history.delivered])
    scale = _Scale(begin, max(last, begin + 1.0))
    rows = _rows(history.faults)
    height = len(rows) * ROW + len(COLOURS) * CURVE + 30
    yield f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="faults and messages over time">'
    for number, faults in enumerate(rows):
        yield from _bars(faults, number * ROW, scale)
    for number, (name, times) in enumerate(_curves(history).items()):
        yield from _curve(name, times, len(rows) * ROW + (number + 1) * CURVE, scale)
    for second in _marks(scale):
        yield f'<text x="{scale.x(begin + second):.1f}" y="{height - 8}" fill="#616e7c">{second:g} s</text>'
    yield "</svg>"


class _Scale:
    """Seconds to pixels."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT) * (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin)


def _rows(faults: Iterable[Fault]) -> list[list[Fault]]:
    """Put faults into as few rows as there are at once; a bar has room for its name."""
    rows: list[list[Fault]] = []
    for fault in sorted(faults, key=lambda one: one.begin):
        free = next((row for row in rows if row[-1].end < fault.begin), None)
        if free is None:
            rows.append([fault])
        else:
            free.append(fault)
    return rows


def _bars(faults: Iterable[Fault], y: int, scale: _Scale) -> Iterator[str]:
    for fault in faults:
        x, end = scale.x(fault.begin), scale.x(fault.end)
        name = escape(f"{fault.name} {fault.group}".strip())
        colour = CONSUMERS if fault.name.startswith("consumer ") else BROKERS
        width = max(end - x, 2)
        yield (
            f'<svg x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}"><title>{name}, '
            f'{fault.end - fault.begin:.1f} s</title><rect width="100%" height="100%" fill="{colour}"/>'
            f'<text x="3" y="11" fill="#fff">{name}</text></svg>'
        )


def _curves(history: History) -> dict[str, list[float]]:
    done: dict[str, list[float]] = {STORED: [], REFUSED: [], UNKNOWN: []}
    for one in history.sent:
        done[one.outcome].append(one.done)
    times = [*done.values(), [one.at for one in history.delivered]]
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
