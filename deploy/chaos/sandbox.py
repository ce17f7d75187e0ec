"""Shell. Network and mounts of a run's own, where the system allows them: faults there affect no other program."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "QMQ_CHAOS_SANDBOX"
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
INTERFACE = "16sh"
"""Name and flags of a network device, as the ioctl takes them."""


def is_inside() -> bool:
    return INSIDE in os.environ


def enter(module: str, arguments: Sequence[str]) -> None:
    """Run `module` again within its own namespaces; return if it already is there, or if the system does not
    allow it.
    """
    if is_inside():
        _raise_loopback()
        return
    command = ["unshare", "--net", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--"]
    if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        environ = os.environ | {INSIDE: "1"}
        os.execvpe(command[0], [*command, sys.executable, "-m", module, *arguments], environ)


def _raise_loopback() -> None:
    """A new network has a loopback device that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack(INTERFACE, b"lo", IFF_UP))
