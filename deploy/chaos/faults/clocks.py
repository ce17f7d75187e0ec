"""Shell. The clock of one machine is wrong: by minutes, a day, a year; ahead or behind."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from qmq.deploy.chaos.target import Strike, Target

LIBRARY = "faketime/libfaketimeMT.so.1"
STEPS = ("+3m", "-3m", "+1d", "-1d", "+400d")


def _wrong_clock(target: Target, group: str) -> None:
    """A copy starts with a wrong clock and, some seconds later, with the right one. The clock's rate stays right."""
    broker = target.any_copy(group)
    service = target.cluster.service(broker.hostname)
    target.cluster.end(broker.hostname)
    service.environ = {
        "LD_PRELOAD": str(_library()),
        "FAKETIME": target.rng.choice(STEPS),
        "DONT_FAKE_MONOTONIC": "1",
    }
    target.cluster.begin(broker.hostname)
    target.pause(2.0, 8.0)
    target.cluster.end(broker.hostname)
    service.environ = {}
    target.cluster.begin(broker.hostname)


@cache
def _library() -> Path | None:
    return next((path for root in ("/usr/lib", "/usr/lib64") for path in Path(root).glob(f"*/{LIBRARY}")), None)


def _missing() -> str:
    return "" if _library() else "libfaketime is not installed (Debian: apt-get install faketime)"


STRIKES = {"wrong clock": Strike(_wrong_clock, _missing)}
