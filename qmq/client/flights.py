"""Core. What `flush` waits for: everything that was given before it, and nothing that came later."""

from __future__ import annotations


class Flight:
    """Counts what was given between two flushes: `open` is how many of it have no outcome yet."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = 0


class Flights:
    """The flights of a producer, oldest first; the last one takes what is given now."""

    def __init__(self) -> None:
        self._flights = [Flight()]

    def board(self) -> Flight:
        """Count one more on the flight that it returns."""
        flight = self._flights[-1]
        flight.open += 1
        return flight

    def depart(self) -> list[Flight]:
        """Return all that is under way; what is given from now on is not among it."""
        self._flights = [flight for flight in self._flights if flight.open]
        under_way = list(self._flights)
        self._flights.append(Flight())
        return under_way
