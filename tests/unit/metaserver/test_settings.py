"""Core. The metaserver's settings: defaults, and all complaints at once."""

from __future__ import annotations

import pytest

from metaserver.access import Tokens
from metaserver.settings import MetaserverSettings
from qmq.errors import AccessError
from qmq.settings import InvalidSettings, load


def read(**environ):
    return load(MetaserverSettings, prefix="QMQ_METASERVER", path=None, environ=environ)


def test_only_tokens_must_be_given():
    settings = read(QMQ_METASERVER_TOKENS="one,two")
    assert settings.tokens == ("one", "two") and settings.advertised == "127.0.0.1"


@pytest.mark.parametrize(
    "environ, complaint",
    [
        pytest.param({}, "tokens: missing", id="no tokens"),
        pytest.param({"QMQ_METASERVER_TOKENS": ","}, "tokens: empty", id="empty tokens"),
        pytest.param(
            {"QMQ_METASERVER_TOKENS": "t", "QMQ_METASERVER_HOST": "0.0.0.0"}, "advertised_ip", id="any host, no address"
        ),
        pytest.param(
            {"QMQ_METASERVER_TOKENS": "t", "QMQ_METASERVER_SWAP_HOLD_MS": "1000"}, "swap_hold_ms", id="hold too short"
        ),
        pytest.param(
            {"QMQ_METASERVER_TOKENS": "t", "QMQ_METASERVER_HTTP_PORT": "70000"}, "http_port", id="port too large"
        ),
    ],
)
def test_wrong_settings_are_complained_about(environ, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        read(**environ)


@pytest.mark.parametrize("token", ["", None, "on", "one ", "One", b"\xff", "\udcff", "one,two"])
def test_other_tokens_are_refused(token):
    with pytest.raises(AccessError):
        Tokens(["one", "two"]).check(token)


@pytest.mark.parametrize("token", ["one", "two", b"two"])
def test_each_valid_token_is_accepted(token):
    Tokens(["one", "two"]).check(token)
