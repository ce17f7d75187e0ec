"""Shell. Descriptors: the bounds of ports leave some for files, and a missing one delays a file."""

from __future__ import annotations

import errno
import gc
import os
import resource
from pathlib import Path

import pytest

from qmq import descriptors
from qmq.descriptors import Spares, copy_ports, files_of, meta_ports, opening, raise_limit, watchdog_ports
from qmq.log import RealDisk

LIMITS = [256, 1024, 4096, 20_000, 65_536, 1 << 20]


@pytest.mark.parametrize("limit", LIMITS)
def test_bounds_of_ports_leave_files_their_part(limit):
    for ports in (copy_ports(limit, 10_000), meta_ports(limit, 50_000), watchdog_ports(limit)):
        assert sum(ports) + files_of(limit) <= limit
    assert all(bound >= 16 for bound in copy_ports(limit, 10_000))
    assert copy_ports(limit, 5).clients == 5


def test_service_manager_limit_allows_the_defaults():
    assert copy_ports(65_536, 10_000) == (10_000, 200, 1_000, 200)
    assert meta_ports(65_536, 50_000).clients == 50_000


def test_soft_limit_is_raised_to_the_hard_one(monkeypatch):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 65_536))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    raise_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    raise_limit()
    assert given == [(65_536, 65_536), (descriptors.LIMIT_MAX, resource.RLIM_INFINITY)]


@pytest.fixture
def spares(monkeypatch):
    """Replace the spares of this process."""
    spares = Spares()
    monkeypatch.setattr(descriptors, "spares", spares)
    yield spares
    while spares.give():
        pass


def failing(*codes):
    """Return a call that fails with each code, then returns "opened"."""
    left = list(codes)

    def call():
        if left:
            code = left.pop(0)
            raise OSError(code, os.strerror(code))
        return "opened"

    return call


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_file_takes_a_spare_then_waits(spares, monkeypatch, code):
    waits = []
    monkeypatch.setattr(descriptors.time, "sleep", waits.append)
    spares.hold()
    assert opening(failing(*[code] * descriptors.SPARES)) == "opened" and not waits
    assert opening(failing(code, code)) == "opened" and len(waits) == 2
    spares.fill()
    assert opening(failing(code)) == "opened" and len(waits) == 2


def test_other_errors_of_opening_are_raised(spares):
    spares.hold()
    with pytest.raises(OSError, match="Input/output"):
        opening(failing(errno.EIO))


def test_shortage_of_descriptors_fails_no_disk(tmp_path, spares, monkeypatch):
    disk = RealDisk(tmp_path)
    disk.put("log/f", b"before")
    real, left = os.open, [errno.EMFILE, errno.ENFILE] * 20

    def scarce(path, flags, *mode, **options):
        if left and path != os.devnull:
            raise OSError(left.pop(), str(path))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(descriptors.time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "open", scarce)
    spares.hold()
    disk.put("log/f", b"after")
    disk.close()
    assert not left and disk.read("log/f", 0, 9) == b"after"


def test_mapped_file_holds_no_descriptor(tmp_path):
    disk = RealDisk(tmp_path)
    disk.put("f", bytes(range(256)) * 32)
    before = len(os.listdir("/proc/self/fd"))
    mapped = disk.map("f")
    part = mapped[256:512]
    assert (len(mapped), bytes(part)) == (8192, bytes(range(256))) and mapped.readonly
    assert len(os.listdir("/proc/self/fd")) == before
    del mapped
    gc.collect()
    assert str(tmp_path / "f") in Path("/proc/self/maps").read_text() and part[1] == 1, "a slice keeps the map"
    del part
    gc.collect()
    assert str(tmp_path / "f") not in Path("/proc/self/maps").read_text()
