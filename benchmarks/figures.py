"""Core. Figures: what was measured how often, what is written down of it, and the table people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Goal:
    """What a figure should reach. `least`: more is better; otherwise less is."""

    value: float
    least: bool
    aim: float | None = None

    def is_met(self, value: float) -> bool:
        return value >= self.value if self.least else value <= self.value


GOALS: dict[str, Goal] = {
    "produce_1k_per_s": Goal(300_000, True, 500_000),
    "produce_100b_per_s": Goal(800_000, True, 1_500_000),
    "send_each_per_s": Goal(60_000, True),
    "send_one_p50_ms": Goal(0.25, False, 0.12),
    "consume_1k_per_s": Goal(300_000, True),
    "listen_1k_per_s": Goal(50_000, True),
    "listen_wide_1k_per_s": Goal(50_000, True),
    "e2e_p50_ms": Goal(0.4, False),
    "e2e_p99_ms": Goal(2.0, False),
    "subjects_p99_ms": Goal(20.0, False),
    "tags_cost_ratio": Goal(0.1, False),
    "stalled_p99_ratio": Goal(1.2, False, 1.1),
    "big_group_p99_ratio": Goal(1.2, False, 1.1),
    "beside_backlog_p99_ratio": Goal(1.2, False, 1.1),
    "beside_drain_p99_ratio": Goal(1.2, False, 1.1),
    "backlog_rss_mb": Goal(100, False),
    "restart_s": Goal(5, False),
    "audit_mb_per_s_core": Goal(150, True),
}
REQUIRED = [
    "produce_1k_per_s",
    "produce_100b_per_s",
    "send_each_per_s",
    "send_one_p50_ms",
    "consume_1k_per_s",
    "e2e_p50_ms",
    "e2e_p99_ms",
    "listen_1k_per_s",
    "subjects_p99_ms",
    "crowd_p99_ms",
    "tags_cost_ratio",
    "stalled_p99_ratio",
    "big_group_p99_ratio",
    "beside_backlog_p99_ratio",
    "beside_drain_p99_ratio",
    "backlog_rss_mb",
    "restart_s",
    "audit_mb_per_s_core",
]
"""Keys that bench.json always has; null for what was not measured."""


@dataclass
class Figure:
    """One figure of the table.

    `values`: one per repetition. `elsewhere`: for each, how many cores other programs of this machine kept busy.
    `cpu_us`: microseconds of CPU per message of each of our processes, user and system, over all repetitions.
    """

    name: str
    values: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)
    cpu_us: dict[str, float] = field(default_factory=dict)
    note: str = ""
    more_is_better: bool = True

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def best(self) -> float:
        return max(self.values) if self.more_is_better else min(self.values)

    @property
    def worst(self) -> float:
        return min(self.values) if self.more_is_better else max(self.values)

    @property
    def cpu_bound(self) -> float | None:
        """Messages per second for each core that the processes together have, if nobody else takes any of it."""
        total_us = sum(self.cpu_us.values())
        return 1e6 / total_us if total_us else None

    def as_json(self) -> dict[str, Any]:
        bound = self.cpu_bound
        return {
            "median": rounded(self.value),
            "best": rounded(self.best),
            "worst": rounded(self.worst),
            "repetitions": len(self.values),
            "elsewhere_cores": [round(cores, 2) for cores in self.elsewhere],
            "cpu_us_per_message": {name: round(us, 3) for name, us in self.cpu_us.items()},
            "cpu_bound_per_s_core": bound and rounded(bound),
            "note": self.note,
        }


def percentile(sorted_values: Sequence[float], part: float) -> float:
    """The value below which `part` (0 to 1) of the values lie; nearest rank."""
    return sorted_values[min(len(sorted_values) - 1, int(part * len(sorted_values)))]


def rounded(value: float) -> float | int:
    """As many digits as a repetition on the same machine would confirm."""
    if abs(value) >= 100:
        return round(value)
    return round(value, 3)


def result(figures: Mapping[str, Figure], about: Mapping[str, Any]) -> dict[str, Any]:
    """The object of bench.json: the medians by name, then how they came about."""
    medians: dict[str, Any] = dict.fromkeys(REQUIRED)
    medians |= {name: rounded(figure.value) for name, figure in figures.items()}
    return {**medians, "details": {name: figure.as_json() for name, figure in figures.items()}, **about}


def table(figures: Mapping[str, Figure]) -> str:
    """One line per figure: median, best and worst repetition, what else ran, goal, CPU per message."""
    lines = [f"{'':<28}{'median':>11}{'best':>11}{'worst':>11}{'others':>8}  {'goal':<18}CPU per message, µs"]
    for figure in figures.values():
        others = f"{max(figure.elsewhere):.1f}" if figure.elsewhere else ""
        cpu = "  ".join(f"{name} {us:.2f}" for name, us in figure.cpu_us.items())
        if (bound := figure.cpu_bound) is not None:
            cpu += f"  = {bound:,.0f}/s per core"
        lines.append(
            f"{figure.name:<28}{_number(figure.value):>11}{_number(figure.best):>11}{_number(figure.worst):>11}"
            f"{others:>8}  {_goal(figure):<18}{cpu}".rstrip()
        )
        if figure.note:
            lines.append(f"    {figure.note}")
    return "\n".join(lines)


def _goal(figure: Figure) -> str:
    goal = GOALS.get(figure.name)
    if goal is None:
        return ""
    sign = "≥" if goal.least else "≤"
    return f"{sign} {_number(goal.value)} {'met' if goal.is_met(figure.value) else 'MISSED'}"


def _number(value: float) -> str:
    return f"{rounded(value):,}"
