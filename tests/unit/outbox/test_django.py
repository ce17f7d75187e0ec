"""Shell. Django only: its hooks, and managed or unmanaged transactions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.utils.connection import ConnectionProxy

import qmq.blocking
from qmq import Outcome
from qmq.django.models import Row
from qmq.errors import InvalidRequest
from tests.unit.outbox.test_transactions import Failed, paid, sent
from tests.unit.outbox.worlds import TABLE, DjangoWorld


@pytest.fixture
def world(tmp_path):
    world = DjangoWorld(f"sqlite:///{tmp_path / 'shop.db'}")
    yield world
    world.close()


def hooks(world):
    return len(world.connection.run_on_commit)


def test_savepoint_messages_are_sent_in_hook_order(world, broker, producer):
    order = []
    with world.begin() as begun:
        for number in (1, 2):
            producer.send(paid(number), session=begun.session)
        assert hooks(world) == 1
        transaction.on_commit(lambda: order.append("other"), using=world.connection.alias)
        producer.send(paid(3), session=begun.session)
        with begun.savepoint():
            producer.send(paid(4), session=begun.session)
        assert hooks(world) == 4
    producer.flush()
    assert sent(broker) == ["paid-1", "paid-2", "paid-3", "paid-4"]
    assert (order, world.rows()) == (["other"], [])


def test_the_proxy_of_the_current_thread_is_a_session(world, broker, producer):
    proxy = ConnectionProxy(connections, world.connection.alias)
    with transaction.atomic(using=world.connection.alias):
        producer.send(paid(1), session=proxy)
    producer.flush()
    assert (sent(broker), world.rows()) == (["paid-1"], [])


def test_alias_may_be_first_used_in_a_transaction(world, broker):
    producer = qmq.blocking.Producer(metaserver=broker.metaserver, app="shop", outbox=world.connection.alias)
    with world.begin() as begun:
        producer.send(paid(1), session=begun.session)
    producer.close()
    assert (sent(broker), world.rows()) == (["paid-1"], [])


def test_django_rollback_has_unknown_outcome(world, producer):
    with pytest.raises(Failed), world.begin() as begun:
        later = producer.send(paid(1), session=begun.session)
        raise Failed
    assert later.result(5).outcome is Outcome.UNKNOWN


def test_a_connection_without_managed_transactions_is_refused(world, producer):
    world.connection.set_autocommit(False)
    with pytest.raises(InvalidRequest, match="atomic"):
        producer.send(paid(1), session=world.connection)
    world.connection.rollback()
    world.connection.set_autocommit(True)
    assert world.rows() == []


def test_app_makes_the_table_and_finds_nothing_to_change(shop_url):
    world = DjangoWorld(shop_url)
    world.drop_outbox()
    alias = world.connection.alias
    call_command("migrate", "qmq_outbox", database=alias, verbosity=0)
    assert (world.rows(), Row.objects.using(alias).count()) == ([], 0)
    call_command("migrate", "qmq_outbox", "zero", database=alias, verbosity=0)
    world.make_tables()
    call_command("migrate", "qmq_outbox", database=alias, verbosity=0)  # it exists: nothing happens
    call_command("makemigrations", "qmq_outbox", check=True, dry_run=True, verbosity=0)
    world.close()


def test_failed_insert_rolls_back_its_nested_block(world, broker, producer):
    with world.begin() as begun:
        begun.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(OperationalError), begun.savepoint():
            begun.execute("INSERT INTO orders VALUES (2)")
            begun.execute(f"ALTER TABLE {TABLE} RENAME TO gone")
            producer.send(paid(2), session=begun.session)
        producer.send(paid(1), session=begun.session)
    producer.flush()
    assert (sent(broker), world.orders(), world.rows()) == (["paid-1"], [1], [])


def test_old_name_installs_the_same_app(tmp_path):
    """The app's name until 0.3."""
    code = f"""
import django
from django.conf import settings
database = {{"ENGINE": "django.db.backends.sqlite3", "NAME": r"{tmp_path / "shop.db"}"}}
settings.configure(DATABASES={{"default": database}}, INSTALLED_APPS=["qmq.outbox.django_app"])
django.setup()
from django.core.management import call_command
from django.db import connection
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True, verbosity=0)
print([name for name in connection.introspection.table_names() if name.startswith("qmq")])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['qmq_msg_queue']\n", "")
