"""Shell. What every test shares: a quiet environment and the same hypothesis examples on every machine."""

from __future__ import annotations

import os

import hypothesis

pytest_plugins = ["tests.support.databases"]

# Random examples that differ from run to run belong into `make simulate`; a test that was green stays green.
hypothesis.settings.register_profile(
    "same everywhere",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=200,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long",  # pytest --hypothesis-profile=long: many more of them, and others each time
    deadline=None,
    max_examples=5000,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same everywhere")

# Settings of whoever runs the tests must not reach the processes that they start.
for name in [name for name in os.environ if name.startswith("QMQ_")]:
    del os.environ[name]
