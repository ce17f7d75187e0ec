"""Shell. How much a test tries: all in `make test`, a part of it in `make quick`, which sets QUICK."""

from __future__ import annotations

import os

IS_QUICK = os.environ.get("QUICK") == "1"


def examples(number: int) -> int:
    """Return the number of random cases to try: all, or an eighth with QUICK."""
    return max(2, number // 8) if IS_QUICK else number


def every(step: int) -> int:
    """Return the step of a loop over all cases: 1, or `step` with QUICK."""
    return step if IS_QUICK else 1
