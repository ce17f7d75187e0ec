"""Core. Settings of the metaserver: defaults, and all errors at once."""

from __future__ import annotations

import pytest

from qmq.metaserver.settings import MetaserverSettings
from qmq.settings import InvalidSettings, load

TOKEN = {"QMQ_METASERVER_CLUSTER_TOKEN": "long enough"}


def read(**environ):
    return load(MetaserverSettings, prefix="QMQ_METASERVER", path=None, environ=environ)


def test_only_the_cluster_token_must_be_given():
    settings = read(QMQ_METASERVER_CLUSTER_TOKEN="one token")
    assert settings.cluster_token == "one token" and settings.advertised == "127.0.0.1"


def test_local_proxy_is_trusted():
    assert read(**TOKEN).trusted_proxies == ("127.0.0.1", "::1")
    more = read(**TOKEN, QMQ_METASERVER_TRUSTED_PROXIES="10.0.0.7, 10.1.0.0/16,::1")
    assert more.trusted_proxies == ("10.0.0.7", "10.1.0.0/16", "::1")
    assert read(**TOKEN, QMQ_METASERVER_TRUSTED_PROXIES="").trusted_proxies == ()


OIDC = TOKEN | {
    f"QMQ_METASERVER_OIDC_{name}": value
    for name, value in (("CLIENT_ID", "qmq"), ("REDIRECT", "https://m/console/oidc/callback"), ("ROLES", "viewer=x"))
}


def test_plain_http_is_for_this_machine():
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert read(**OIDC, QMQ_METASERVER_OIDC_ISSUER=f"http://{host}:8180/realm").oidc_issuer
    with pytest.raises(InvalidSettings, match="oidc_issuer: .* is no https:// address"):
        read(**OIDC, QMQ_METASERVER_OIDC_ISSUER="http://login.example")


@pytest.mark.parametrize(
    "environ, complaint",
    [
        pytest.param({}, "cluster_token: missing", id="no token"),
        pytest.param({"QMQ_METASERVER_CLUSTER_TOKEN": ""}, "cluster_token: '' is no text", id="empty token"),
        pytest.param({"QMQ_METASERVER_CLUSTER_TOKEN": "short"}, "cluster_token: fewer", id="short token"),
        pytest.param(TOKEN | {"QMQ_METASERVER_HOST": "0.0.0.0"}, "advertised_ip", id="any host, no address"),
        pytest.param(TOKEN | {"QMQ_METASERVER_HOST": "[::]"}, "advertised_ip: missing", id="any IPv6 host"),
        pytest.param(TOKEN | {"QMQ_METASERVER_ADVERTISED_IP": "::"}, "others cannot connect to ::", id="any address"),
        pytest.param(TOKEN | {"QMQ_METASERVER_ADVERTISED_IP": "a b"}, "advertised_ip: 'a b' is no host", id="no host"),
        pytest.param(TOKEN | {"QMQ_METASERVER_HOST": "::1:8080:"}, "host: .* is no IPv6 address", id="no address"),
        pytest.param(TOKEN | {"QMQ_METASERVER_SWAP_HOLD_MS": "1000"}, "swap_hold_ms", id="hold too short"),
        pytest.param(TOKEN | {"QMQ_METASERVER_CLUSTER": 'a"b'}, "cluster: .* is no name", id="no label"),
        pytest.param(TOKEN | {"QMQ_METASERVER_HTTP_PORT": "70000"}, "http_port", id="port too large"),
        pytest.param(TOKEN | {"QMQ_METASERVER_TRUSTED_PROXIES": "::1,*"}, "trusted_proxies: '\\*'", id="anybody"),
        pytest.param(TOKEN | {"QMQ_METASERVER_TRUSTED_PROXIES": "10.0.0.7/24"}, "trusted_proxies", id="no network"),
        pytest.param(TOKEN | {"QMQ_METASERVER_PASSWORD_KEYS": "abc"}, "password_keys", id="no Fernet key"),
    ],
)
def test_wrong_settings_are_refused(environ, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        read(**environ)
