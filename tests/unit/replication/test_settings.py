"""Core. Addresses of a copy: where it listens, and where others connect."""

from __future__ import annotations

import pytest

from qmq.delayserver.settings import DelaySettings
from qmq.replication.assignment import Address
from qmq.settings import InvalidSettings, load

NEEDED = {"QMQ_DELAY_HOSTNAME": "d1", "QMQ_DELAY_DATA": "d1", "QMQ_DELAY_TOKEN": "t"}


def read(**words):
    environ = NEEDED | {f"QMQ_DELAY_{name.upper()}": value for name, value in words.items()}
    return load(DelaySettings, prefix="QMQ_DELAY", path=None, environ=environ)


@pytest.mark.parametrize(
    ("words", "listen_on", "advertised"),
    [
        pytest.param({}, "127.0.0.1", Address("127.0.0.1", 20801, 20802, 20803), id="defaults"),
        pytest.param({"ip": "10.0.0.1"}, "10.0.0.1", Address("10.0.0.1", 20801, 20802, 20803), id="only ip, as before"),
        pytest.param({"ip": "[FD00:0::2]"}, "fd00::2", Address("fd00::2", 20801, 20802, 20803), id="IPv6"),
        pytest.param({"ip": "MQ1", "bind": "::"}, "::", Address("mq1", 20801, 20802, 20803), id="name"),
        pytest.param(
            {
                "ip": "203.0.113.7",
                "bind": "0.0.0.0",
                "advertised_serve_port": "31",
                "advertised_sync_port": "32",
                "advertised_control_port": "33",
            },
            "0.0.0.0",
            Address("203.0.113.7", 31, 32, 33),
            id="NAT",
        ),
    ],
)
def test_copy_listens_and_advertises_separately(words, listen_on, advertised):
    settings = read(**words)
    assert (settings.listen_on, settings.advertised) == (listen_on, advertised)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        pytest.param({"ip": "::"}, "set bind = ::, and ip to this machine's address", id="any ip"),
        pytest.param({"ip": "mq1"}, "bind: missing; ip is a name", id="name without bind"),
        pytest.param({"bind": "mq1"}, "bind: mq1 is a name; use an IP address", id="name to listen on"),
        pytest.param({"ip": "fd00::2%eth0"}, "ip: .*use an address without %", id="zone"),
        pytest.param({"ip": "mq1:20801"}, "ip: .*use the host alone", id="port in ip"),
        pytest.param({"metaserver": "http://a,b c"}, "several separated by commas", id="bad list"),
    ],
)
def test_wrong_addresses_are_refused(words, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        read(**words)
