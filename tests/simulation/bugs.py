"""Planted bugs: a simulator that does not find them proves nothing.

The modules of `tests.simulation.planted` register them, one function a bug.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

Patch = contextlib.AbstractContextManager[Any]
F = TypeVar("F", bound=Callable[..., Any])


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


def plant(scenario: str, name: str, *patches: Patch, first: int = 1, favoured: str = "", **kinds: Any) -> None:
    """Register a bug that consists of these patches."""
    _register(name, scenario, lambda: list(patches), first, favoured, kinds)


def bug(
    scenario: str, owner: Any = None, attribute: str = "", *, first: int = 1, favoured: str = "", **kinds: Any
) -> Callable[[F], F]:
    """Register the decorated function as a bug of this scenario, under its own name.

    The function replaces `attribute` of `owner`, which it gets as its first argument if that is called `real`. Without
    an `owner`, it returns the patches.
    """

    def register(function: F) -> F:
        def patches() -> list[Patch]:
            return [mock.patch.object(owner, attribute, _replacement(function, getattr(owner, attribute)))]

        name = function.__name__.replace("_", " ")
        _register(name, scenario, function if owner is None else patches, first, favoured, kinds)
        return function

    return register


def _replacement(function: Callable[..., Any], real: Any) -> Callable[..., Any]:
    if next(iter(inspect.signature(function).parameters), "") != "real":
        return function
    return lambda *args, **named: function(real, *args, **named)


def _register(name: str, *fields: Any) -> None:
    assert name not in BUGS, f"two bugs are called {name}"
    BUGS[name] = Bug(name, *fields)
