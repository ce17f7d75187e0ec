"""Shell. The Django app as a project installs it: its command, and its name until 0.3."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from django.core.management import CommandError, call_command

import qmq
import qmq.blocking
from tests.unit.outbox import worlds

HANDLED = []
ADDRESS = {"metaserver": "http://metaserver.invalid:8080", "app": "shop"}
CONSUMER = qmq.Consumer(**ADDRESS)
BLOCKING = qmq.blocking.Consumer(**ADDRESS)
EMPTY = qmq.Consumer(**ADDRESS)
HERE = __name__


@CONSUMER.listen("order", group="g", start="earliest")
async def on_order(message):
    HANDLED.append(message["n"])
    CONSUMER.stop()


@BLOCKING.listen("order", group="g", start="earliest")
def on_order_blocking(message):
    HANDLED.append(message["n"])
    BLOCKING.stop()


@pytest.mark.parametrize("name", ["CONSUMER", "BLOCKING"])
def test_runconsumer_handles_messages_until_it_is_stopped(qmq_blocking_broker, name, capsys):
    assert worlds.django.conf.settings.INSTALLED_APPS == ["qmq.django"]
    HANDLED.clear()
    with qmq.blocking.Producer(**ADDRESS) as producer:
        producer.send(qmq.Message("order", {"n": "1"}))
    call_command("runconsumer", f"{HERE}:{name}")
    qmq_blocking_broker.wait_until_consumed("order", "g")
    assert HANDLED == ["1"]
    assert f"{HERE}:{name} runs, id " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("two_consumers", "has 2 consumers: name one, such as two_consumers:consumer"),
        ("no_such_shop:consumer", "cannot be imported: No module named 'no_such_shop'"),
        (f"{HERE}:nothing", "has no consumer 'nothing': it has CONSUMER, BLOCKING"),
        (f"{HERE}:EMPTY", "a consumer has no listener: decorate a handler"),
    ],
)
def test_runconsumer_names_its_mistake(path, reason, monkeypatch):
    two = ModuleType("two_consumers")
    vars(two).update(first=CONSUMER, second=BLOCKING)
    monkeypatch.setitem(sys.modules, "two_consumers", two)
    with pytest.raises(CommandError, match=reason):
        call_command("runconsumer", path)


def test_old_name_installs_the_same_app(tmp_path):
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
