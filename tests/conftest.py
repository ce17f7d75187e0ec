"""Shell. Settings of all tests: a clean environment, and the same hypothesis examples on every machine."""

from __future__ import annotations

import gc
import os
import signal

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from qmq import logs
from tests.support.effort import examples

pytest_plugins = ["tests.support.databases", "tests.support.timeouts"]

# The same random examples in every run; others are for `make simulate`.
hypothesis.settings.register_profile(
    "same everywhere",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=examples(200),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long",  # pytest --hypothesis-profile=long: more examples, different in each run
    deadline=None,
    max_examples=5000,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same everywhere")

# Hypothesis also tries constants of our loaded modules, which depend on the tests run before in the same process.
_constants_of_loaded_modules = providers._get_local_constants
providers._get_local_constants = lambda: (
    providers.Constants() if hypothesis.settings.default.derandomize else _constants_of_loaded_modules()
)

# Settings in the environment must not reach processes of tests.
for name in [name for name in os.environ if name.startswith("QMQ_")]:
    del os.environ[name]

# Requests to this machine must not go through a proxy.
for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
    del os.environ[name]

# Shells let background commands ignore Ctrl-C, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# With Python's defaults the cyclic collector scans modules and long-lived worlds again and again: a fifth of a
# simulation's time, with next to no garbage found.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish(session: pytest.Session) -> None:
    if unstable := [item.nodeid for item in session.items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"workers would collect other names than this one; write ids: {unstable[:3]}")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Event loop of async tests."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _each_test_logs_by_itself() -> None:
    """The library bounds its log lines per process."""
    logs.LIBRARY.forget()
