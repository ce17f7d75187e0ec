"""The client: parts of `qmq.Producer` and `qmq.Consumer`."""
