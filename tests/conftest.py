"""Shell. What every test shares: a quiet environment and the same hypothesis examples on every machine."""

from __future__ import annotations

import gc
import os
import signal

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from qmq import logs
from tests.support.effort import examples

pytest_plugins = ["tests.support.databases"]

# Random examples that differ from run to run belong into `make simulate`; a test that was green stays green.
hypothesis.settings.register_profile(
    "same everywhere",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=examples(200),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long",  # pytest --hypothesis-profile=long: many more of them, and others each time
    deadline=None,
    max_examples=5000,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same everywhere")

# Hypothesis also tries the constants that it finds in modules of ours, as far as they happen to be loaded: which these
# are differs with the tests that ran before in the same process.
_constants_of_loaded_modules = providers._get_local_constants
providers._get_local_constants = lambda: (
    providers.Constants() if hypothesis.settings.default.derandomize else _constants_of_loaded_modules()
)

# Settings of whoever runs the tests must not reach the processes that they start.
for name in [name for name in os.environ if name.startswith("QMQ_")]:
    del os.environ[name]

# Nor are servers on this machine asked through somebody's proxy.
for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
    del os.environ[name]

# A shell makes commands in the background deaf to Ctrl-C, and whom they start: tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# By Python's own numbers the collector of circles looks again and again at what was imported, and at worlds that live
# as long as their test: a fifth of the time of a simulation, and it finds next to nothing.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Event loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _each_test_logs_by_itself() -> None:
    """What the library logs is bounded for the whole process."""
    logs.LIBRARY.forget()
