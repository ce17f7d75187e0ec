"""The client: what `qmq.Producer` and `qmq.Consumer` are made of."""
