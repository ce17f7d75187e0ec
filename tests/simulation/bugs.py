"""Planted bugs: a simulator that does not find them proves nothing.

The modules of `tests.simulation.planted` register them, one function a bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Patch = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Bug:
    """A fault of the product, as patches of its code."""

    name: str
    scenario: str
    patches: Callable[[], list[Patch]]
    first: int
    """Seed at which the search begins: the last one that showed the bug, or shortly before."""
    favoured: str
    """Fault that half of the strikes are; without it, the search takes too many seeds."""
    kinds: dict[str, Any]
    """Further arguments of the scenario."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield


BUGS: dict[str, Bug] = {}


def bug(scenario: str, *, first: int = 1, favoured: str = "", **kinds: Any) -> Callable[..., Callable[[], list[Patch]]]:
    """Register the decorated function as a bug of this scenario, under its own name."""

    def register(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        name = patches.__name__.replace("_", " ")
        assert name not in BUGS, f"two bugs are called {name}"
        BUGS[name] = Bug(name, scenario, patches, first, favoured, kinds)
        return patches

    return register
