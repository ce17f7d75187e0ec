"""Shell. `python -m qmq.gateway`."""

from __future__ import annotations

import sys

from qmq.control_plane import use_older_engine

use_older_engine()  # before main is imported, which imports grpc

from qmq.gateway.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
