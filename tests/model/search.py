"""Core. Search through all states of a model, nearest first, up to the first state that breaks a promise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)
Steps = Callable[[S], Iterable[tuple[Any, S]]]
"""State -> its next steps, each with the state after it."""


class Found(NamedTuple):
    """Result of a search. `violation` is empty if every promise held; otherwise `steps` lead to it."""

    states: int
    depth: int
    violation: str
    steps: list[str]
    seconds: float

    def __str__(self) -> str:
        head = f"{self.states:,} states, {self.depth} steps deep, {self.seconds:.1f} s: "
        lines = [f"{number:4}. {step}" for number, step in enumerate(self.steps, 1)]
        return head + ("\n".join([self.violation, *lines]) if self.violation else "no violation")


def search(start: S, steps: Steps[S], broken: Callable[[S], str], describe: Callable[[Any, S, S], str] | None) -> Found:
    """Visit every state.

    Args:
        broken: returns the name of the promise that a state breaks, or an empty string.
        describe: turns a step and the states before and after it into a sentence. None: no path is stored, and of each
            state only its hash, for worlds too large. Two of 20 million states share one of 64 bits with a probability
            of 1 : 90,000.
    """
    began = time.monotonic()
    came_from: dict[S, S] = {}
    seen: set[Hashable] = {start if describe else hash(start)}
    frontier, depth = [start], 0
    while frontier:
        depth += 1
        following = []
        for state in frontier:
            for _, after in steps(state):
                if (key := after if describe else hash(after)) in seen:
                    continue
                seen.add(key)
                following.append(after)
                if describe:
                    came_from[after] = state
                if violation := broken(after):
                    path = _retrace(after, came_from, steps, describe) if describe else []
                    return Found(len(seen), depth, violation, path, time.monotonic() - began)
        frontier = following
        if describe is None:
            print(f"{depth} steps, {len(seen):,} states", file=sys.stderr, flush=True)
    return Found(len(seen), depth - 1, "", [], time.monotonic() - began)


def _retrace(state: S, came_from: dict[S, S], steps: Steps[S], describe: Callable[[Any, S, S], str]) -> list[str]:
    """Return the steps that led to a state."""
    lines: list[str] = []
    while (before := came_from.get(state)) is not None:
        step = next(step for step, after in steps(before) if after == state)
        lines.append(describe(step, before, state))
        state = before
    return lines[::-1]
