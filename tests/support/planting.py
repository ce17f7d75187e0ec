"""Core. Bugs that are planted on purpose, each to see that a search finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Patch = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Bug:
    name: str
    patches: Callable[[], list[Patch]]
    first: int = 1
    """Where a search begins: at the seed that found it last, or shortly before, to save time."""
    favoured: str = ""
    """The fault that half of the strikes are: without, it would take too many seeds."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """What its scenario takes besides."""


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in bug.patches():
            stack.enter_context(patch)
        yield
