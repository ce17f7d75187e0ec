"""Core. What a broker did as master, for metrics; goes on from one mastership to the next."""

from __future__ import annotations

from dataclasses import dataclass

from qmq.server.producing import ProduceCounters


@dataclass(slots=True)
class Counters(ProduceCounters):
    pulled_messages: int = 0
    acked_messages: int = 0
    nacked_messages: int = 0
    dead_letters: int = 0
    returned_consumers: int = 0
