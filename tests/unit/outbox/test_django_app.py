"""Shell. The Django app's name until 0.3."""

from __future__ import annotations

import subprocess
import sys


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
