"""Shell. A pytest plugin: `--failures=FILE` writes down each test that failed, as JSON, with what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", metavar="FILE", help="write the tests that failed to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist report to the controller, which alone sees every test.
    if (path := config.getoption("--failures")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(Path(path)), "failures")


class _Failures:
    """Collects failed phases of tests. `{"node id": "output"}`, in the order in which they failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outputs: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
            one = f"{report.when}:\n{report.longreprtext}{sections}\n"
            self._outputs[report.nodeid] = self._outputs.get(report.nodeid, "") + one

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outputs[report.nodeid] = report.longreprtext

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._outputs, indent=1))
