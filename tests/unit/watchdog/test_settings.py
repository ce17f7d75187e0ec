"""Core. Addresses of a watchdog: where it listens, and where others connect."""

from __future__ import annotations

import pytest

from qmq.settings import InvalidSettings, load
from qmq.watchdog.settings import WatchdogSettings

NEEDED = {"QMQ_WATCHDOG_METASERVER": "http://m:8080", "QMQ_WATCHDOG_TOKEN": "t"}


def read(**words):
    environ = NEEDED | {f"QMQ_WATCHDOG_{name.upper()}": value for name, value in words.items()}
    return load(WatchdogSettings, prefix="QMQ_WATCHDOG", path=None, environ=environ)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ({}, "127.0.0.1:8090"),
        ({"host": "[FD00::2]"}, "[fd00::2]:8090"),
        ({"host": "::", "advertised_ip": "Dog.Example", "advertised_http_port": "30090"}, "dog.example:30090"),
    ],
)
def test_watchdog_listens_and_advertises_separately(words, address):
    assert read(**words).advertised(8090) == address


@pytest.mark.parametrize("words", [{"host": "::"}, {"host": "0:0::0"}, {"advertised_ip": "0.0.0.0"}])
def test_all_addresses_are_not_advertised(words):
    with pytest.raises(InvalidSettings, match="advertised_ip: "):
        read(**words)


def test_watchdog_takes_several_metaservers():
    assert read(metaserver="http://a,b:1").metaserver
    with pytest.raises(InvalidSettings, match="several separated by commas"):
        read(metaserver="http://a,b c")
