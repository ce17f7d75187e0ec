"""Shell. A small file system of its own below a folder, which a test may fill to the last byte. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.deploy.chaos import faults


@contextlib.contextmanager
def small_disk(folder: Path, *, mib: int) -> Iterator[None]:
    """Mount `mib` MiB of memory at `folder`; skip the test where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file that fills the disk; return it."""
    filler = faults.fill(folder)
    assert free(folder) < 65_536
    return filler


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
