"""Core. An array that grows at its end. What was read of it stays as it is while it grows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LEAST = 8


class Growing:
    """Elements are only appended, so a `view` may be read on another thread while more are."""

    __slots__ = ("_room", "_count")

    def __init__(self, elements: NDArray[Any] | None = None, *, dtype: DTypeLike | None = None) -> None:
        self._room = np.empty(0, dtype) if elements is None else elements
        self._count = len(self._room)

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> NDArray[Any]:
        return self._room[: self._count]

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def append(self, more: NDArray[Any]) -> None:
        end = self._count + len(more)
        if end > len(self._room):
            room = np.empty(max(_LEAST, end, min(2 * len(self._room), end + 65_536)), self._room.dtype)
            room[: self._count] = self.view
            self._room = room
        self._room[self._count : end] = more
        self._count = end
