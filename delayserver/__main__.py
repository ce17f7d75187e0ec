"""Shell. `python -m qmq.delayserver`."""

from __future__ import annotations

import sys

from qmq.delayserver.main import main

sys.exit(main())
