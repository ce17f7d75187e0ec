"""Core. A rate that several readers share: whoever comes next begins when what was given before is paid for."""

from __future__ import annotations


class Pace:
    """Made by whom they all ask."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, size: int, now_s: float) -> float:
        """Return how long to wait before `size` bytes are given; they count from then on."""
        begin_s = max(self._free_s, now_s)
        self._free_s = begin_s + size / self._bytes_per_s
        return begin_s - now_s
