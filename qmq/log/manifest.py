"""Core. Which segments a copy should have: a file that is gone is damage, and never taken for retention.

    log/manifest   JSON {"crc": CRC-32 of the rest as sorted JSON, "segments": [base offsets, ascending]}

It is replaced as a whole and fsynced, after a segment's file is made and before the first byte in it is confirmed, and
before a file is deleted. So a crash leaves files that are not listed, never the other way round. What is not listed and
newer was about to be begun, or to be cut: it counts. What is not listed and older was about to be deleted.

A copy from before there were manifests gets one of the files that it has.
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
    """Return the bases of the segments that there should be; None: nothing says so.

    A list that is damaged goes into quarantine: what is there has to be believed, as before there were lists.
    """
    if not (data := disk.read(NAME, 0, disk.size(NAME))):
        return None
    try:
        return decode_manifest(data)
    except ValueError as error:
        log.error("manifest damaged, and made anew of the files that are there: %s", error)
        quarantine.keep_files(disk, [NAME], 0, 0, "manifest-damaged")
        return None


def expected_bases(disk: Disk) -> tuple[list[int], list[int]]:
    """Return the bases of the segments that this copy should have, and of files that are left over from a deletion."""
    there, listed = segment_bases(disk), read_manifest(disk)
    if listed is None:
        return there, []
    newer = [base for base in there if not listed or base > listed[-1]]
    return [*listed, *newer], [base for base in there if base not in listed and base not in newer]
