"""Shell. `python -m qmq.metaserver --config metaserver.toml`."""

from __future__ import annotations

import os
import sys

OLDER_ENGINE = (
    "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints,-event_engine_callback_cq"
)
"""gRPC's older I/O engine: a told client costs a third less (docs/metaservers.md). A version of gRPC that does not know
one of these names any more goes on with the newer one and logs an error for each."""

os.environ.setdefault("GRPC_EXPERIMENTS", OLDER_ENGINE)  # read once, when grpc is imported: so before main is

from qmq.metaserver.main import main  # noqa: E402

sys.exit(main())
