"""Shell. Format of a transcript: blocks of commands and effects. Bases of its players."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from tests.simulation.loop import Process, VirtualLoop


class WrongTranscript(Exception):
    """The file is no transcript: it has an unknown command, or an extra word."""


def blocks(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield comments and commands of each block, and the effects below its `----`."""
    for block in text.strip().split("\n\n"):
        head, line, below = block.partition("\n----\n")
        if not line and any(not text.startswith("#") for text in block.splitlines()):
            head, line, below = block.removesuffix("\n----"), "----", ""
        yield head.splitlines(), below.rstrip("\n")


class Story:
    """One run of a story. A command `name a b key=1` calls the method `_do_name("a", "b", key=1)`."""

    def run(self, command: str) -> list[str]:
        """Carry out one command; return its effects, a line each."""
        name, *words = command.split()
        run = getattr(self, f"_do_{name}", None)
        if run is None:
            raise WrongTranscript(f"no command {name!r} in {command!r}")
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        return self._effects(
            run, *plain, **{key: int(value) if value.lstrip("-").isdigit() else value for key, value in named.items()}
        )

    def _effects(self, run: Any, *plain: str, **named: Any) -> list[str]:
        """Carry out the method of a command; return its effects."""
        raise NotImplementedError

    def close(self) -> None:
        """End the run."""


class LoopStory(Story):
    """Story of shells, with coroutines as commands, on a loop in virtual time."""

    settle_s = 0.0
    """Virtual time after each command."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(0)
        self.process = Process(self.loop, "story", "10.0.0.9")
        self.patch = pytest.MonkeyPatch()
        self.happened: list[str] = []

    def close(self) -> None:
        self.loop.abandon()
        self.patch.undo()

    def say(self, what: str, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Add an effect; empty fields are left out."""
        self.happened.append(" ".join([what, *(f"{key}={value}" for key, value in fields.items() if value)]))

    def _effects(self, run: Any, *plain: str, **named: Any) -> list[str]:
        self.run_until(run(*plain, **named))
        self.run_until(asyncio.sleep(self.settle_s))
        happened, self.happened = self.happened, []
        return happened + self.loop.errors

    def run_until(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(self.process.start(work))
