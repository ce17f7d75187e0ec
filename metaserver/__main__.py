"""Shell. `python -m metaserver --config metaserver.toml`."""

from __future__ import annotations

import sys

from metaserver.main import main

sys.exit(main())
