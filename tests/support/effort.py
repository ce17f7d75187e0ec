"""Shell. How much a test tries: all in `make test`, a part of it in `make quick`, which sets QUICK."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

IS_QUICK = os.environ.get("QUICK") == "1"


def examples(number: int) -> int:
    """Return the number of random cases to try: all, or an eighth with QUICK."""
    return max(2, number // 8) if IS_QUICK else number


def generated(number: int) -> settings:
    """Return the settings of generated requests to a server: the same ones in each run, none kept or shrunk."""
    return settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def every(step: int) -> int:
    """Return the step of a loop over all cases: 1, or `step` with QUICK."""
    return step if IS_QUICK else 1
