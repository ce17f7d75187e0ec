"""The client: what `qmq.Producer` and `qmq.Consumer` are made of."""

import os

# gRPC reads it when it is imported. Its handlers of fork, which are on if nobody says otherwise, give up when another
# thread is at work in it, and one time in five the new process then ended with a segmentation fault. It needs none: see
# qmq.control_plane.has_grpc.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
