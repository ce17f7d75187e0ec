"""Core. When a recurring schedule is due: a cron expression read by the clock on the wall of a time zone.

The expression has cron's five fields; cronsim reads it, for a calendar without time zone. What the changes to and from
summer time mean is decided here, as Debian's cron does:

    fixed      neither minute nor hour begins with `*` ("30 2 * * *"): once for each wall-clock time that matches. A
               time that the clock skips is due right after the gap; of one that it shows twice, the first counts.
    repeated   minute or hour begins with `*` ("*/10 * * * *"): whenever the clock shows a time that matches. In the
               hour that is skipped there is none; in the hour that comes twice they come twice.

So an occurrence is a moment, the next one does not depend on where one began to look, and moments only ascend.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from qmq.errors import InvalidRequest

EXPRESSION_CHARS_MAX = 200
SKIPPED_MAX = 1000
"""Missed occurrences are counted up to here."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEGIN = datetime(2000, 1, 1)
_DAY, _SECOND, _MS = timedelta(days=1), timedelta(seconds=1), timedelta(milliseconds=1)
_WINDOWS_DAYS = (1 / 24, 1, 8, 32, 366)
_OF_A_MACHINE = ("localtime", "posixrules")
"""Names that are files, yet mean another zone on each machine."""


class Cron:
    """An expression in a time zone; immutable, used on any thread."""

    def __init__(self, expression: str, timezone: str) -> None:
        """Raises InvalidRequest, which says what is wrong with either."""
        self.expression, self.timezone = expression, timezone
        self._zone = zone_of(timezone)
        fields = expression.split()
        if len(expression) > EXPRESSION_CHARS_MAX or len(fields) != 5:
            raise InvalidRequest(
                f"cron expression {expression[:EXPRESSION_CHARS_MAX]!r} has {len(fields)} fields: write five, "
                "minute hour day-of-month month day-of-week, for instance '0 8 * * MON-FRI'"
            )
        try:
            CronSim(expression, _BEGIN)
        except (CronSimError, AssertionError, TypeError, ValueError) as error:
            raise InvalidRequest(f"cron expression {expression!r}: {error or 'it makes no sense'}") from None
        self._is_fixed = not (fields[0].startswith("*") or fields[1].startswith("*"))

    def next_ms(self, after_ms: int) -> int:
        """Return the first occurrence after this moment; raises InvalidRequest if there is none in 50 years."""
        for moment in self._after(after_ms):
            return moment
        raise InvalidRequest(f"cron expression {self.expression!r} is never due: no such day in 50 years")

    def latest(self, due_ms: int, now_ms: int) -> tuple[int, int]:
        """Return the last occurrence until `now_ms`, and how many before it from `due_ms` on, which is one, are missed.

        They are counted up to `SKIPPED_MAX`.
        """
        last, missed = due_ms, 0
        for moment in islice(self._after(due_ms), SKIPPED_MAX):
            if moment > now_ms:
                return last, missed
            last, missed = moment, missed + 1
        return max(last, self._last(now_ms)), missed

    def _last(self, now_ms: int) -> int:
        """Look back, first over an hour, then further: few steps, however long nobody was there."""
        for days in _WINDOWS_DAYS:
            last = 0
            for moment in self._after(now_ms - int(days * 86_400_000)):
                if moment > now_ms:
                    break
                last = moment
            if last:
                return last
        return 0

    def _after(self, after_ms: int) -> Iterator[int]:
        after = _EPOCH + after_ms * _MS
        moments = self._fixed(after) if self._is_fixed else self._repeated(after)
        return ((moment - _EPOCH) // _MS for moment in moments)

    def _fixed(self, after: datetime) -> Iterator[datetime]:
        last = after
        for wall in CronSim(self.expression, self._wall(after)):
            moment = self._moment(wall)
            if moment > last:  # else it is the second showing of an hour, or the end of the same gap
                last = moment
                yield moment

    def _moment(self, wall: datetime) -> datetime:
        """Return when the clock first shows this; of what it never shows, the moment at which it skips it."""
        moment = wall.replace(tzinfo=self._zone, fold=0).astimezone(UTC)
        if self._wall(moment) == wall:
            return moment
        earlier = wall.replace(tzinfo=self._zone, fold=1).astimezone(UTC)
        return self._change(earlier, moment) or moment

    def _repeated(self, after: datetime) -> Iterator[datetime]:
        at, wall, is_over = after, self._wall(after), False
        while not is_over:
            offset, is_over = self._offset(at), True
            for shown in CronSim(self.expression, wall):
                moment, near = shown.replace(tzinfo=UTC) - offset, at + 2 * _DAY
                change = self._change(at, min(moment, near))
                if change is not None:  # the clock shows this itself at the change
                    at, wall, is_over = change, self._wall(change) - _SECOND, False
                    break
                if moment > near:  # the days before it show no such time, whatever their offset is
                    at, is_over = moment - _DAY, False
                    wall = self._wall(at)
                    break
                at = moment
                yield moment

    # The clock on the wall.

    def _wall(self, moment: datetime) -> datetime:
        return moment.astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _offset(self, moment: datetime) -> timedelta:
        return moment.astimezone(self._zone).utcoffset() or timedelta()

    def _change(self, begin: datetime, end: datetime) -> datetime | None:
        """Return the first moment in (begin, end] from which on the offset is not that of `begin`, to the second."""
        offset, low = self._offset(begin), begin
        while low < end:
            high = min(low + _DAY, end)
            if self._offset(high) != offset:
                break
            low = high
        else:
            return None
        while high - low > _SECOND:
            middle = low + (high - low) // 2
            low, high = (low, middle) if self._offset(middle) != offset else (middle, high)
        return high.replace(microsecond=0)


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its name in the IANA database; raises InvalidRequest."""
    try:
        if name in _OF_A_MACHINE:
            raise ValueError
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise InvalidRequest(
            f"time zone {name[:100]!r} is not known here: write 'UTC', or a name such as 'Europe/Berlin'"
        ) from None
