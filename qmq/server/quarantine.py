"""Shell. Keeps a copy's quarantine within its bound, and knows how large it is."""

from __future__ import annotations

import logging

from qmq.log import quarantine
from qmq.log.disk import RealDisk

log = logging.getLogger(__name__)


class QuarantineKeeper:
    """Made by the service, which calls `look` on a thread every ten seconds, and lives as long as the process.

    Args:
        bytes_max: of the settings; 0: as much as the log has.
    """

    def __init__(self, disk: RealDisk, bytes_max: int, segment_bytes: int) -> None:
        self._disk, self._bytes_max, self._segment_bytes = disk, bytes_max, segment_bytes
        self._seen: tuple[list[str], int] | None = None
        self.bytes = self.limit = 0

    def look(self, log_bytes: int, *, is_disk_short: bool) -> None:
        """Delete what is over the bound and no evidence; with a short disk, all that is no evidence."""
        self.limit = self._bytes_max or max(log_bytes, self._segment_bytes)
        bound = 0 if is_disk_short else self.limit
        names = quarantine.labels(self._disk)
        if self._seen is not None and self._seen[0] == names and (self._seen[1] <= bound or self.bytes <= bound):
            return
        before = self.bytes
        left = quarantine.bound(self._disk, bound)
        self.bytes = sum(kept.bytes for kept in left)
        self._seen = quarantine.labels(self._disk), bound
        if self.bytes > self.limit >= before:
            log.error(
                "quarantine over its bound bytes=%d bound=%d: what is left may be the last copy of messages; see "
                "ListQuarantine, then ClearQuarantine",
                self.bytes,
                self.limit,
            )

    @property
    def is_full(self) -> bool:
        return self.bytes > self.limit

    def clear(self, names: list[str]) -> list[quarantine.Kept]:
        """Delete parts, whatever they are. Blocks."""
        gone = quarantine.clear(self._disk, names)
        self.bytes = sum(kept.bytes for kept in quarantine.all_kept(self._disk))
        self._seen = None
        return gone

    def all(self) -> list[quarantine.Kept]:
        """Return what is there, that of the oldest part of the log first. Blocks."""
        return quarantine.all_kept(self._disk)
