"""Core. An array that grows at its end. What was read of it stays as it is while it grows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LEAST = 8
_STEP = 65_536


class Growing:
    """Elements are only appended, so a `view` may be read on another thread while more are.

    Records are copied as bytes: numpy takes ten times as long to copy them field by field.
    """

    __slots__ = ("_dtype", "_room", "_count")

    def __init__(self, elements: NDArray[Any] | None = None, *, dtype: DTypeLike | None = None) -> None:
        room = np.empty(0, dtype) if elements is None else elements
        self._dtype = room.dtype
        self._room, self._count = _plain(room), len(room)

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> NDArray[Any]:
        room = self._room[: self._count]
        return room if room.dtype is self._dtype else room.view(self._dtype)

    def item(self, at: int) -> int:
        """Return one number; much faster than by a view."""
        if at >= self._count:
            raise IndexError(at)
        number: int = self._room.item(at)
        return number

    def put(self, at: int, number: int) -> None:
        """Replace one number, which is there; much faster than by a view."""
        if at >= self._count:
            raise IndexError(at)
        self._room[at] = number

    def append_one(self, number: int) -> None:
        """Append one number; much faster than an array of one."""
        if self._count == len(self._room):
            self.append(np.array([number], self._dtype))
            return
        self._room[self._count] = number
        self._count += 1

    def append(self, more: NDArray[Any]) -> None:
        """`more` has the same type."""
        end = self._count + len(more)
        if end > len(self._room):
            room = np.empty(max(_LEAST, end, min(2 * len(self._room), end + max(_STEP, end // 4))), self._room.dtype)
            room[: self._count] = self._room[: self._count]
            self._room = room
        self._room[self._count : end] = _plain(more)
        self._count = end


def _plain(elements: NDArray[Any]) -> NDArray[Any]:
    return elements if elements.dtype.fields is None else elements.view((np.void, elements.dtype.itemsize))
