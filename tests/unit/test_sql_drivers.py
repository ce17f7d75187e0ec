"""Core. Timeouts and TLS in the words of each driver."""

from __future__ import annotations

import pytest

from qmq.sql_drivers import Tls, Waits, registered, tls_of

FILES = {"sslrootcert": "/a/ca.pem", "sslcert": "/a/own.pem", "sslkey": "/a/own.key"}


def test_postgresql_needs_no_startup_parameter():
    waits = Waits(connect=5, lock=10, answer=30, next_statement=2, idle=60)
    assert "options" not in waits.postgresql() and waits.postgresql()["prepare_threshold"] is None
    (statement,) = waits.in_transaction().values()
    assert statement.startswith("SELECT set_config('lock_timeout', '10s', true), set_config('statement_timeout', '30s'")


@pytest.mark.parametrize(
    "mode, checks",
    [
        ("require", {"verify_mode": False, "check_hostname": False}),
        ("verify-ca", {"verify_mode": True, "check_hostname": False}),
        ("verify-full", {"verify_mode": True, "check_hostname": True}),
    ],
)
def test_both_drivers_get_the_same_tls(mode, checks):
    files = FILES if mode != "require" else {name: FILES[name] for name in ("sslcert", "sslkey")}
    tls = Tls.of({"sslmode": mode, **files, "connect_timeout": "5"})
    assert tls.words() == {"sslmode": mode, **files}
    paths = {"cert": "/a/own.pem", "key": "/a/own.key"} | ({"ca": "/a/ca.pem"} if mode != "require" else {})
    assert tls.mariadb() == {"ssl": paths | checks}


def test_without_words_the_driver_decides():
    assert Tls.of({}).words() == Tls.of({}).mariadb() == {}
    assert Tls("disable").mariadb() == {"ssl_disabled": True}


@pytest.mark.parametrize(
    "query, why",
    [
        ({"sslmode": "verify"}, "none of disable, require"),
        ({"sslmode": "verify-full"}, "sslrootcert"),
        ({"sslrootcert": "/ca"}, "verify-full or verify-ca"),
        ({"sslmode": "require", "sslkey": "/key"}, "belong together"),
        ({"sslmode": "disable", "sslcert": "/cert", "sslkey": "/key"}, "needs sslmode require"),
        ({"sslmode": ("require", "disable")}, "given twice"),
    ],
)
def test_contradictory_tls_is_refused(query, why):
    with pytest.raises(ValueError, match=why):
        Tls.of(query)


@pytest.mark.parametrize("tls", [Tls("prefer"), Tls("verify-full", "system")])
def test_mariadb_refuses_words_of_postgresql(tls):
    tls.check()
    with pytest.raises(ValueError, match="MariaDB's driver"):
        tls.mariadb()


def test_registered_url_has_a_name_and_tls():
    tls = Tls("verify-full", "/a b/ca.pem")
    name, query = registered(f"postgresql://db1:5432/shop?{tls.query()}")
    assert (name, tls_of(query)) == ("postgresql://db1:5432/shop", tls)
    assert registered("sqlite:////var/lib/what?.db") == ("sqlite:////var/lib/what?.db", "")
