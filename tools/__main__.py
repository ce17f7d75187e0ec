"""Shell. `python -m tools <Command> --option=value`."""

from __future__ import annotations

import sys

from tools.main import main

sys.exit(main())
