"""Shell. The audit of directories in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qmq.audit.copies import place_options
from qmq.audit.group import audit_group
from qmq.audit.results import Group, Result

NO_SPARK: Any = None
PIECE_BYTES = 16_384
COPIES = ("master", "slave")


def audit(folder: Path, copies: Sequence[str] = COPIES, **options: Any) -> Result:
    """Audit the directories of `folder` with these names."""
    return audit_places({copy: place_options(str(folder / copy), "") for copy in copies}, **options)


def audit_places(places: Mapping[str, Mapping[str, str]], **options: Any) -> Result:
    """Audit one group by the places of its copies."""
    return audit_group(NO_SPARK, Group("g1", places), **({"piece_bytes": PIECE_BYTES} | options))


def named(result: Result) -> set[tuple[str, str, int | None]]:
    return {(row["what"], row["copy"], row["offset"]) for row in result.findings}
