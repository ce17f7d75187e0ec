"""Outcome of one seed of any scenario."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.events import Met, Violation


@dataclass(frozen=True)
class Outcome:
    seed: int
    hash: int
    steps: int
    acknowledged: int
    delivered: int
    counts: Counter[str] = field(default_factory=Counter)
    met: Met = field(default_factory=Counter)
    failure: str = ""
    recent: tuple[str, ...] = ()


def failure_of(run: Callable[[], object]) -> str:
    """Run; return the broken promise, or the error that the product does not name. Empty: no failure."""
    try:
        run()
    except Violation as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-14)}"
    return ""


def print_outcome(outcome: Outcome) -> None:
    print("\n".join(outcome.recent))
    result = outcome.failure or "no failure"
    print(f"seed {outcome.seed}: {result} (trace {outcome.hash:08x}, {outcome.steps} events)", flush=True)


def assert_well(outcome: Outcome) -> None:
    events = "\n".join(outcome.recent)
    assert not outcome.failure, f"{events}\nseed {outcome.seed}: {outcome.failure}"
