"""Core. What a broker did as master, for metrics; goes on from one mastership to the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from qmq.server.producing import ProduceCounters


@dataclass(slots=True)
class Counters(ProduceCounters):
    pulled_messages: int = 0
    acked_messages: int = 0
    nacked_messages: int = 0
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of each real subject and consumer group, wherever they go."""
    returned_consumers: int = 0
