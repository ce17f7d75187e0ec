"""Shell. Databases, tokens, backup and restore."""

from __future__ import annotations

import json

import pytest

from qmq.metaserver.actions.context import Vault
from qmq.metaserver.model import LeaseRow, MetaserverRow

DB = {"host": "db1", "port": 3306, "username": "app", "password": "hunter2"}


async def test_repeated_registration_updates_the_password(world):
    """Weakness 2: QMQ answers "register success" and keeps the old password."""
    first = await world.done("AddDb", **DB)
    second = await world.done("AddDb", **(DB | {"password": "other", "username": "app2"}))
    assert (first["replaced"], second["replaced"]) == (False, True)
    [source] = await world.database.read(lambda repository: repository.data_sources())
    assert world.context.vault.decrypt(source.password) == "other"
    [shown] = await world.done("ListDbs")
    assert (shown["url"], shown["username"], shown["room"]) == ("mmm://db1:3306", "app2", "default")
    assert "password" not in shown


async def test_database_is_registered_and_removed(world):
    """Weakness 8: QMQ keeps a data source for ever."""
    more = {"database": "shop", "table": "outbox.messages", "rate": 500, "age": 120}
    await world.done("AddDb", **DB, **more)
    [shown] = await world.done("ListDbs")
    assert shown["url"] == "mmm://db1:3306/shop"
    assert (shown["table"], shown["rate"], shown["age"]) == ("outbox.messages", 500, 120)
    await world.done("RemoveDb", host="db1", port=3306, database="shop")
    assert await world.done("ListDbs") == []
    assert "no database mmm://db1:3306" in await world.refused("RemoveDb", host="db1", port=3306)


async def test_each_kind_of_database_has_its_own_parameters(world):
    """A file has no server, no user and no password, so it needs no key for passwords either."""
    user = {"username": "app", "password": "hunter2"}
    await world.done("AddDb", type="postgresql", host="db1", **user)
    await world.done("AddDb", type="mariadb", host="db1", database="shop", **user)
    object.__setattr__(world.context, "vault", Vault())
    await world.done("AddDb", type="sqlite", database="/var/lib/shop.db")
    urls = ["mariadb://db1:3306/shop", "postgresql://db1:5432", "sqlite:////var/lib/shop.db"]
    assert sorted(shown["url"] for shown in await world.done("ListDbs")) == urls
    for words, why in (
        ({"type": "oracle", "host": "db1", **user}, "none of mmm, mysql"),
        ({"type": "sqlite", "database": "shop.db"}, "--database=/"),
        ({"type": "postgresql", **user}, "--host"),
        ({"type": "postgresql", "host": "db1", "password": "hunter2"}, "--username"),
        ({"type": "postgresql", "host": "db1", "username": "app"}, "--password-file"),
    ):
        assert why in await world.refused("AddDb", **words)
    await world.done("RemoveDb", type="sqlite", database="/var/lib/shop.db")
    assert len(await world.done("ListDbs")) == 2


async def test_tls_of_a_database_is_replaced_with_it(world):
    """The name stays that of the database: its metrics, and RemoveDb, do not change."""
    files = {"tlsCa": "/tls/ca.pem", "tlsCert": "/tls/own.pem", "tlsKey": "/tls/own.key"}
    place = {"type": "postgresql", "host": "db1", "database": "shop"}
    await world.done("AddDb", **place, username="app", password="hunter2")
    assert (await world.done("AddDb", **place, username="app", tls="verify-full", **files))["replaced"]
    [shown] = await world.done("ListDbs")
    words = "sslmode=verify-full&sslrootcert=/tls/ca.pem&sslcert=/tls/own.pem&sslkey=/tls/own.key"
    assert (shown["url"], shown["tls"]) == ("postgresql://db1:5432/shop", words)
    [source] = await world.database.read(lambda repository: repository.data_sources())
    assert source.url == f"postgresql://db1:5432/shop?{words}"
    await world.done("RemoveDb", **place)
    assert await world.done("ListDbs") == []


async def test_tls_that_cannot_work_is_refused(world):
    assert "--tlsCa" in await world.refused("AddDb", **DB, tls="verify-full")
    assert "none of disable, require" in await world.refused("AddDb", **DB, tls="on")
    assert "a file: /etc/ssl" in await world.refused("AddDb", **DB, tls="verify-ca", tlsCa="system")


async def test_watchdogs_are_listed_by_room(world):
    wish = LeaseRow("watchdog/default", "n1", 0, 0, "10.0.0.1:8090")
    await world.database.write(lambda repository: repository.hold_lease(wish, take=False, release=False))
    [shown] = await world.done("ListWatchdogs")
    assert (shown["room"], shown["active"], shown["address"], shown["term"]) == ("default", "n1", "10.0.0.1:8090", 1)


async def test_password_requires_a_key(world):
    """Weakness 29: QMQ stores passwords in clear text."""
    object.__setattr__(world.context, "vault", Vault())
    text = await world.refused("AddDb", **DB)
    assert "password_keys" in text and "Fernet.generate_key()" in text and "hunter2" not in text


@pytest.mark.parametrize(
    "words, why",
    [
        pytest.param({"password": "p" * 200}, "password is too long", id="password"),
        pytest.param({"host": "h" * 100, "database": "d" * 150}, "250 fit", id="URL"),
        pytest.param({"database": "d "}, "space", id="space at the end"),
        pytest.param({"table": "x; DROP TABLE y"}, "is not the name of a table", id="table"),
    ],
)
async def test_database_that_cannot_be_stored_is_refused(world, words, why):
    for more in ({"dryRun": "true"}, {}):
        assert why in await world.refused("AddDb", **(DB | words), **more)
    assert await world.done("ListDbs") == []
    await world.done("AddDb", **(DB | {"password": "p" * 100}))


def test_password_survives_key_rotation():
    old, new = "nBLTTCpvJX7S7PbZ1o0DqLuE4pQ3yJ7rZ0w3cJ3jX1A=", "AAAATCpvJX7S7PbZ1o0DqLuE4pQ3yJ7rZ0w3cJ3jX1A="
    stored = Vault([old]).encrypt("hunter2")
    assert Vault([new, old]).decrypt(stored) == "hunter2" and "hunter2" not in stored


async def test_token_is_shown_once(world):
    """Weakness 28: QMQ's tokens stand in a file, in clear text, each with all rights."""
    made = await world.done("AddToken", name="shop", role="client", subjects="shop.*,produce:x", days=30)
    assert made["token"].startswith(f"qmq_{made['id']}_") and made["subjects"] == ["shop.*", "produce:x"]
    assert made["expires"] - made["created"] == 30 * 24 * 3600 * 1000
    [listed] = await world.done("ListTokens")
    secret = made["token"].rpartition("_")[2]
    trail = json.dumps([[row.parameters, row.after] for row in await world.audit()])
    assert secret not in json.dumps(listed) + trail and listed["valid"]
    shown = await world.done("AddToken", name="shop", role="client", dryRun="true")
    assert "token" not in shown["after"]
    await world.done("RevokeToken", id=made["id"])
    assert not (await world.done("ListTokens"))[0]["valid"]
    await world.done("RevokeToken", id=made["id"])
    assert "no token x1" in await world.refused("RevokeToken", id="x1")


async def test_empty_scope_is_refused(world):
    for name in ("subjects", "groups"):
        text = await world.refused("AddToken", **{"name": "shop", "role": "client", name: " , "})
        assert f"{name} ' , ' names none" in text
    assert not await world.done("ListTokens")


async def test_backup_cannot_grant_the_cluster_role(world):
    await world.done("AddToken", name="me", role="admin")
    backup = await world.done("Backup")
    backup["tables"]["api_token"][0]["role"] = "cluster"
    assert "are invalid" in await world.refused("Restore", backup=json.dumps(backup), force="true")
    assert [token["role"] for token in await world.done("ListTokens")] == ["admin"]


async def test_trail_is_filtered_by_group_and_subject(world):
    await world.copies("g1", "g11", "g2")
    await world.routed("s1", "s11", groups=("g1", "g11"))
    await world.done("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g11", force="true")
    await world.done("RemoveBroker", hostname="g1-b", servePort=20881)

    async def actions(**words):
        return [row["action"] for row in (await world.done("AuditTrail", **words))["rows"]]

    assert await actions(brokerGroup="g1") == ["RemoveBroker", "RemoveSubjectBrokerGroup", "AddBroker", "AddBroker"]
    assert await actions(subject="s1", brokerGroup="g11") == ["RemoveSubjectBrokerGroup"]
    assert await actions(subject="s1", brokerGroup="g2") == await actions(subject="s") == []


async def test_two_tokens_of_a_name_may_be_valid(world):
    first = await world.done("AddToken", name="shop", role="client")
    await world.done("AddToken", name="shop", role="client")
    assert "RevokeToken the older one" in await world.refused("AddToken", name="shop", role="client")
    await world.done("RevokeToken", id=first["id"])
    await world.done("AddToken", name="shop", role="client")


async def test_backup_is_restored_into_an_empty_metaserver(world, tmp_path):
    await world.routed_copies("s1")
    await world.done("AddDb", **DB)
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    backup = json.dumps(await world.done("Backup"))
    other = await world.another(f"sqlite:///{tmp_path / 'other.db'}")
    shown = await other.done("Restore", backup=backup, dryRun="true")
    assert shown["wouldChange"] and shown["after"]["subject_route"] == 1 and shown["before"]["subject_route"] == 0
    assert shown["subjects"]["names"] == ["s1"] and not other.registry.directory.groups
    done = await other.done("Restore", backup=backup)
    assert done["restored"]["broker"] == 2
    assert other.groups_of("s1") == ("g1",) and other.registry.directory.is_marked("g1", "s1")
    assert [source["url"] for source in await other.done("ListDbs")] == ["mmm://db1:3306"]
    assert "Restore" in [row.action for row in await other.audit()]


async def test_restore_over_rows_requires_force(world):
    await world.copies("g1")
    backup = json.dumps(await world.done("Backup"))
    await world.copies("g2")
    text = await world.refused("Restore", backup=backup)
    assert "is in use" in text and "4 rows of broker" in text
    await world.done("Restore", backup=backup, force="true")
    assert list(world.registry.directory.groups) == ["g1"]
    rows = {row.action: row for row in await world.audit()}
    assert rows["Restore"].parameters["backup"] == "(not recorded)" and rows["Restore"].before["broker"] == 4


async def test_wrong_backup_is_refused_by_dry_run_too(cluster):
    backup = await cluster.done("Backup")
    assert "no backup" in await cluster.refused("Restore", backup="[1]")
    for spoil, text in (
        ({"schema": "0001"}, "tables of version 0001"),
        ({"tables": {**backup["tables"], "broker": []}}, "g1 is served by g1-a:20881"),
    ):
        words = {"backup": json.dumps(backup | spoil), "force": "true"}
        assert text in await cluster.refused("Restore", **words, dryRun="true")
        assert text in await cluster.refused("Restore", **words)


async def test_metaservers_are_listed(world):
    for number in (1, 2):
        row = MetaserverRow(f"m{number}", f"10.0.0.{number}:8080", f"10.0.0.{number}:8081", beat=1, version="1")
        await world.database.write(lambda repository, row=row: repository.beat(row))
    rows = await world.database.read(lambda repository: repository.load_metaservers())
    world.liveness.peers.read(rows[:1], now_ms=world.registry.now_ms())
    listed = await world.done("ListMetaservers")
    assert [(row["id"], row["up"], row["answersThis"], row["cluster"]) for row in listed] == [
        ("m1", True, True, "prod"),
        ("m2", False, False, "prod"),
    ]
