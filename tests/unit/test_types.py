import pytest

from qmq.types import Endpoint, Host

ENDPOINTS = {
    "10.0.0.1:8080": ("10.0.0.1", 8080),
    "mq1:1": ("mq1", 1),
    "MQ1.Example.:65535": ("mq1.example.", 65535),
    "qmq_broker-1.svc:20881": ("qmq_broker-1.svc", 20881),
    "[::1]:8080": ("::1", 8080),
    "[FD00:0::2]:8081": ("fd00::2", 8081),
    "[::ffff:10.0.0.1]:8080": ("10.0.0.1", 8080),
    "[10.0.0.1]:8080": ("10.0.0.1", 8080),
}
BAD_ENDPOINTS = {
    "": "use such as mq1:8080",
    "mq1": "use such as mq1:8080",
    "mq1:": "use such as mq1:8080",
    ":8080": "use such as mq1:8080",
    "mq1:0": "from 1 to 65535",
    "mq1:65536": "from 1 to 65535",
    "mq1:٨": "from 1 to 65535",
    "mq1:-1": "from 1 to 65535",
    "mq1: 80": "from 1 to 65535",
    "fd00::2:8081": r"or \[fd00::2\]:8080",
    "::1": "use such as mq1:8080",
    "[::1]": "use such as mq1:8080",
    "[fd00::2": "use such as mq1:8080",
    "[fd00::zz]:80": "no IPv6 address",
    "[mq1]:80": "no IPv6 address",
    "[fe80::1%eth0]:80": "use an address without %",
    "10.0.0.256:80": "no IPv4 address",
    "10.1:80": "no IPv4 address",
    "010.0.0.1:80": "no IPv4 address",
    "0x7f000001:80": "no IPv4 address",
    "http://mq1:80": "use such as mq1:8080",
    "mq 1:80": "is no host",
    "-mq1:80": "is no host",
    "a..b:80": "is no host",
    "mq1/x:80": "is no host",
    "münchen:80": "is no host",
    f"{'a' * 254}:80": "is no host",
}


@pytest.mark.parametrize("text", ENDPOINTS)
def test_endpoint_is_parsed_into_one_form(text):
    host, port = ENDPOINTS[text]
    endpoint = Endpoint.parse(text)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", BAD_ENDPOINTS, ids=lambda text: text[:20])
def test_bad_endpoint_is_refused_with_remedy(text):
    with pytest.raises(ValueError, match=BAD_ENDPOINTS[text]):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("text", "host", "is_any", "is_loopback"),
    [
        ("::", "::", True, False),
        ("[::]", "::", True, False),
        ("0:0:0:0:0:0:0:0", "::", True, False),
        ("0.0.0.0", "0.0.0.0", True, False),
        ("::ffff:0.0.0.0", "0.0.0.0", True, False),
        ("::1", "::1", False, True),
        ("127.0.0.2", "127.0.0.2", False, True),
        ("LocalHost", "localhost", False, True),
        ("fd00::2", "fd00::2", False, False),
        ("mq1", "mq1", False, False),
    ],
)
def test_host_names_all_or_own_machine(text, host, is_any, is_loopback):
    found = Host(text)
    assert (found, found.is_any, found.is_loopback) == (host, is_any, is_loopback)


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1:4711"),
        ("ipv6:%5B::1%5D:4711", "[::1]:4711"),
        ("ipv6:[fd00::2]:4711", "[fd00::2]:4711"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", "10.0.0.1:4711"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "[fe80::1%eth0]:4711"),
        ("unix:", ":0"),
    ],
)
def test_peer_of_grpc_is_shown_plainly(peer, shown):
    assert str(Endpoint.of_peer(peer)) == shown
