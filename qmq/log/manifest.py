"""Core. Manifest: the list of the segments that a copy must have. A missing file is damage, never retention.

    log/manifest   JSON {"crc": CRC-32 of the rest as sorted JSON, "segments": [base offsets, ascending]}

The list is replaced as a whole and fsynced: after a segment's file is made and before its first byte is confirmed, and
before a file is deleted. So a crash may leave files that are not listed, but never a listed file that is gone. An
unlisted file that is newer was about to begin or to be cut, and belongs to the log. An older one was about to be
deleted.

A copy without a manifest, written by an older version, gets one from its files.
"""

from __future__ import annotations

import logging

from qmq.crc import decode_checked, encode_checked
from qmq.log import quarantine
from qmq.log.disk import Disk
from qmq.log.segments import FOLDER, segment_bases

log = logging.getLogger(__name__)

NAME = f"{FOLDER}/manifest"


def write_manifest(disk: Disk, bases: list[int]) -> None:
    """Replace the list, durably."""
    disk.put(NAME, encode_manifest(bases))


def encode_manifest(bases: list[int]) -> bytes:
    return encode_checked({"segments": bases})


def decode_manifest(data: bytes) -> list[int]:
    """Return the base offsets; raises ValueError if the list is damaged."""
    fields = decode_checked(data)
    try:
        bases = list(map(int, fields["segments"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of segments: {error}") from None
    if bases != sorted(set(bases)):
        raise ValueError("not ascending")
    return bases


def read_manifest(disk: Disk) -> list[int] | None:
    """Return the bases of the segments that must exist; None without a manifest.

    A damaged manifest goes to quarantine. Then the present files count as complete, as without a manifest.
    """
    if not (data := disk.read(NAME, 0, disk.size(NAME))):
        return None
    try:
        return decode_manifest(data)
    except ValueError as error:
        log.error("manifest damaged, rebuilt from the present files: %s", error)
        quarantine.keep_files(disk, [NAME], 0, 0, "manifest-damaged")
        return None


def expected_bases(disk: Disk) -> tuple[list[int], list[int]]:
    """Return the bases of the segments that this copy must have, and those of files left over from a deletion."""
    there, listed = segment_bases(disk), read_manifest(disk)
    if listed is None:
        return there, []
    newer = [base for base in there if not listed or base > listed[-1]]
    return [*listed, *newer], [base for base in there if base not in listed and base not in newer]
