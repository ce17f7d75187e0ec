"""Shell. `python -m delayserver`."""

from __future__ import annotations

import sys

from delayserver.main import main

sys.exit(main())
