"""Core. A message as an application sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Value = str | int | float | bool
"""A property's value. QMQ stores text, so it is read back as `str`."""


class Message:
    """What an application sends and receives: a subject, properties, tags.

    Args:
        subject: stream that the message belongs to.
        properties: its content. Values travel as text in QMQ's spelling (`True` is "true"); each at most 32,767 bytes.
        tags: at most 10 words that consumers may filter by.
        id: unique and kept through every retry; made by the producer if it is not given.

    A received message also has `created_ms`, the producer's clock in ms since 1970 UTC.
    """

    __slots__ = ("subject", "properties", "tags", "id", "created_ms")

    def __init__(
        self,
        subject: str,
        properties: Mapping[str, Value] | None = None,
        *,
        tags: Iterable[str] = (),
        id: str | None = None,
    ) -> None:
        self.subject = subject
        self.properties = properties if properties is not None else {}
        self.tags = frozenset(tags) if tags else ()
        self.id = id
        self.created_ms = 0

    subject: str
    properties: Mapping[str, Value]
    tags: frozenset[str] | tuple[()]
    id: str | None
    created_ms: int

    def __getitem__(self, name: str) -> Value:
        return self.properties[name]

    def get(self, name: str, default: Value | None = None) -> Value | None:
        return self.properties.get(name, default)

    def __repr__(self) -> str:
        return f"Message({self.subject!r}, {dict(self.properties)!r}, tags={set(self.tags)!r}, id={self.id!r})"
