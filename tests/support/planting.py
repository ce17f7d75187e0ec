"""Core. Bugs that are planted on purpose, each to see that a search finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

Patch = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Bug:
    name: str
    patches: Callable[[], list[Patch]]
    first: int = 1
    """Where a search begins: shortly before the seed that found it last, to save time."""
    favoured: str = ""
    """The fault that half of the strikes are: without, it would take too many seeds."""


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in bug.patches():
            stack.enter_context(patch)
        yield


class Outcome(Protocol):
    """What came of a seed; `failure` is empty if nothing failed."""

    @property
    def seed(self) -> int: ...

    @property
    def failure(self) -> str: ...


def assert_found(bug: Bug, seeds: int, simulate: Callable[[int], Outcome]) -> None:
    """Simulate up to so many seeds, from the bug's first one on, until one fails. Raises AssertionError: none does."""
    with planted(bug):
        for seed in range(bug.first, bug.first + seeds):
            outcome = simulate(seed)
            if outcome.failure:
                print(f"{bug.name}: seed {outcome.seed}: {outcome.failure.splitlines()[0]}")
                return
    raise AssertionError(f"nobody notices: {bug.name}")
