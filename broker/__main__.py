"""Shell. `python -m qmq.broker`."""

from __future__ import annotations

import sys

from qmq.control_plane import use_older_engine

use_older_engine()  # before main is imported, and grpc with it

from qmq.broker.main import main  # noqa: E402

sys.exit(main())
