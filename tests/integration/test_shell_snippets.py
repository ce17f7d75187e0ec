"""Shell. Shell blocks of the pages, typed in the order of a page on one machine with the cluster of `qmq dev`.

The machine is a network namespace with its own /etc and /var/lib, so addresses and ports are those of the pages. A word
behind `sh` names the kind of a block; of KINDS the test types the first three. Fences with a file's name are written
to that file first. The checkout is below the folder, which is empty otherwise.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from qmq.tools.commands import COMMANDS
from tests.support.shell import Shell
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
KINDS = {
    "": "",
    "service": "a process in the foreground, which runs until the page ends",
    "plan": "changes a cluster that other pages use: typed with --dry-run, and may be refused with a reason",
    "printed": "shows what `qmq dev` prints; the shell of the test has it",
    "packages": "installs packages",
    "minutes": "takes minutes; tests/chaos runs it in smaller pieces",
    "spark": "needs Spark, Java or a cluster of Spark; test_audit_cluster, test_log_table and test_spark_connect",
    "systemd": "needs systemd as process 1",
}
OWN_TESTS = {
    "install.md": "test_install_guide, on three machines",
    "tutorial.md": "test_snippets, with the files of the tutorial",
    "runbook.md": "test_commands_of_the_runbook_are_accepted: templates with the names of an alert",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
PROGRAMS = (
    "qmq",
    "make",
    "curl",
    "python",
    "pip",
    "spark-submit",
    "systemctl",
    "nginx",
    "export",
    ".venv/bin/",
    "tools.sh",
)
BEGINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, PROGRAMS))})")
MANAGE = """import os, sys
from django.core.management import execute_from_command_line
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
execute_from_command_line(sys.argv)
"""
HANDLERS = """import qmq
consumer = qmq.Consumer()
@consumer.listen("order.changed", group="billing")
async def on_change(message): ...
"""
FILES = {
    "ticket.png": "a picture",
    "db1.password": "secret",
    "order.json": '{"orderNo": "42"}',
    "orders.ndjson": '{"orderNo": "43"}\n',
    "manage.py": MANAGE,
    "shop/handlers.py": HANDLERS,
}
"""Files that a reader has; those of a page replace them."""
MACHINE = """
set -e
ip link set lo up
ip address add 10.0.0.1/24 dev lo
ip address add 10.0.0.2/24 dev lo
for place in etc var/lib; do
    mkdir -p "$WORLD/$place"
    [ $place = etc ] && cp -a /etc/. "$WORLD/etc"
    mount --bind "$WORLD/$place" /$place
done
mkdir -p /var/lib/node_exporter/textfile /var/lib/qmq
echo "127.0.0.1 localhost mq1 mq2 $(hostname)" > /etc/hosts
mkdir -p /etc/shop /etc/prometheus
"""
DEV = f"QMQ_METASERVER_HOST=0.0.0.0 QMQ_METASERVER_ADVERTISED_IP=127.0.0.1 {sys.executable} -m qmq dev --dir run"
SPACES = ["--net", "--mount", "--pid"]
CURL = "silent\nshow-error\nfail-with-body\nretry = 60\nretry-delay = 1\nretry-all-errors\n"
"""A reader tries again while a process starts; a refused request fails the page."""

SERVE = """
setsid bash -e > {log} 2>&1 <<'END' &
{text}
END
group=$!
echo $group >> groups
until ls -l $(pgrep -g $group | sed 's|.*|/proc/&/fd|') 2>/dev/null | grep -q socket: ; do
    kill -0 $group || {{ cat {log}; exit 1; }}
    sleep 0.1
done
"""


def fences(page):
    """Return (language, words behind it, text) of the code fences of a page."""
    return [found.groups() for found in FENCE.finditer(page.read_text())]


def is_typed(page):
    return any(language in ("sh", "bash") for language, _, _ in fences(page)) and page.name not in OWN_TESTS


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    path.chmod(0o600)


class Machine:
    """Cluster of `qmq dev` in namespaces of its own; all processes end with it."""

    def __init__(self, world):
        self.world = world
        paths = f"{world / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
        fits = {"SEGMENT_BYTES": str(1 << 20), "DISK_FREE_LIMIT": "0"}  # for any test machine
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
        environ |= {f"QMQ_{kind}_{name}": value for kind in ("BROKER", "DELAY") for name, value in fits.items()}
        environ |= {
            "WORLD": str(world),
            "PATH": paths,
            "HOME": str(world),
            "RUN_DIR": str(world / "run"),
            "PYTHONPATH": str(ROOT),
        }
        self._environ = environ
        (world / ".curlrc").write_text(CURL)
        for name, module in (("qmq", "-m qmq"), ("gunicorn", "-m gunicorn"), ("python", "")):
            self.program(name, f'exec {sys.executable} {module} "$@"')
        self._first = Shell(
            ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc"], world / "first.log", env=environ, cwd=world
        )

    def start(self):
        self._first.type(MACHINE)
        process = self._first.process.pid
        [inner] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        self._enter = ["nsenter", "--target", inner, *SPACES, f"--wdns={self.world}"]
        log = self.world / "dev.log"
        log.touch()
        self._first.type(f"({DEV}) > dev.log 2>&1 </dev/null &")
        until(lambda: "Ctrl-C" in log.read_text(), "the cluster runs")
        self._environ |= dict(re.findall(r"export (QMQ_\w+)=(\S+)", log.read_text()))
        for number, letter in enumerate("ab", start=1):
            (self.world / "var/lib/qmq" / f"b{number}").symlink_to(self.world / "run" / f"g1-{letter}" / "data")
        self.token = self._environ["QMQ_TOKEN"]
        for name in ("shop", "prometheus"):
            write(self.world / "etc" / name / "qmq.token", self.token)

    def program(self, name, script):
        path = self.world / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def shell(self, folder, **environ):
        folder.mkdir()
        for path in ROOT.iterdir():
            if path.name in ("docs", "deploy", "qmq"):
                (folder / path.name).symlink_to(path)
        (folder / ".venv").symlink_to(sys.prefix)
        for name, content in FILES.items():
            write(folder / name, content)
        for name in ("token", "operator.token"):
            write(folder / name, self.token)
        command = [*self._enter[:-1], f"--wdns={folder}"]
        shell = Shell(command, self.world / f"{folder.name}.log", env=self._environ | environ, cwd=folder)
        shell.type("set -eo pipefail")
        return shell

    def end_groups(self, path):
        """End the groups of processes that a file lists, and wait for the last process of each."""
        groups = path.read_text().split() if path.exists() else []
        for group in groups:
            self._first.type(f"kill -- -{group} || true; while pgrep -g {group}; do sleep 0.1; done")

    def close(self):
        self._first.process.kill()
        self._first.close()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip(f"no network namespaces can be made here: {tried.stderr.strip()}")
    made = Machine(tmp_path_factory.mktemp("machine"))
    try:
        made.start()
        yield made
    finally:
        made.close()


class Reader:
    """Reader of one page; types its blocks."""

    def __init__(self, machine, folder):
        self.folder, self._shell, self._services = folder, machine.shell(folder), 0
        self._machine = machine

    def type(self, text):
        return self._shell.type(f"{{ {text}\n}} </dev/null")

    def serve(self, text):
        """Start a process that stays in the foreground; return once it has a socket."""
        self._services += 1
        self._shell.type(SERVE.format(text=text, log=f"service{self._services}.log"))

    def plan(self, text):
        for line in text.replace("\\\n", " ").splitlines():
            command = line.partition(" #")[0]
            self.type(f"{command} --dry-run || [ $? = 1 ]" if command.strip() else ":")

    def end(self):
        """Check that the services still run."""
        self._shell.type("[ ! -e groups ] || kill -0 $(cat groups)")

    def close(self):
        """End the services, also of a page that failed, so that the next page finds their ports free."""
        self._shell.close()
        self._machine.end_groups(self.folder / "groups")


@pytest.fixture
def reader(machine, request):
    typing = Reader(machine, machine.world / request.node.name.removeprefix("test_").replace("[", "-").rstrip("]"))
    yield typing
    typing.close()


@pytest.mark.parametrize("page", [page for page in PAGES if is_typed(page)], ids=lambda page: page.stem)
def test_blocks_run_as_pasted(machine, reader, page):
    folder = reader.folder
    for language, words, text in fences(page):
        if language not in ("sh", "bash") and re.fullmatch(r"[\w/]+\.\w+", words):
            write(folder / words, text.replace('"…"', f'"{machine.token}"'))
    for language, words, text in fences(page):
        if language not in ("sh", "bash"):
            continue
        if words == "service":
            reader.serve(text)
        elif words == "plan":
            reader.plan(text)
        elif not words:
            reader.type(text)
    reader.end()


def deployed(kind):
    """Return (environment, command) of a deployment on the page of workers."""
    texts = {language: text for language, _, text in fences(ROOT / "docs" / "worker.md")}
    if kind == "systemd":
        unit = re.sub("%d/", "/etc/shop/", texts["ini"])
        assert "LoadCredential=qmq.token:/etc/shop/qmq.token\n" in unit and "kill -HUP $MAINPID\n" in unit
        environ = " ".join(re.findall(r"^Environment=(.*)$", unit, re.MULTILINE))
        return environ, re.search(r"^ExecStart=/srv/shop/venv/bin/(.*)$", unit, re.MULTILINE)[1]
    [container] = yaml.safe_load(texts["yaml"])["containers"]
    environ = " ".join(f"{row['name']}={row['value']}" for row in container["env"])
    assert [container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")] == ["/live", "/ready"]
    return environ.replace("/run/secrets/qmq/token", "/etc/shop/qmq.token"), shlex.join(container["command"])


@pytest.mark.parametrize("kind", ["systemd", "kubernetes"])
def test_worker_runs_as_deployed(reader, kind):
    """It gets ready, reloads, and ends with status 0 after the signal to its parent alone."""
    environ, command = deployed(kind)
    reader.serve(f"export {environ}\nunset QMQ_TOKEN\nexec {command}")
    ready = "curl http://127.0.0.1:9000/ready"
    reader.type(f"{ready}; kill -HUP $group; {ready}; curl http://127.0.0.1:9000/live; kill -TERM $group; wait $group")


def test_every_shell_block_is_fenced_with_a_known_kind():
    wrong = []
    for page in PAGES:
        if page.name in OWN_TESTS:
            continue
        blocks = [(f"{language} {words}".strip(), text) for language, words, text in fences(page)]
        rest = FENCE.sub("", page.read_text())
        blocks += [("indented", dedent(text)) for text in re.findall(r"(?:^\n)((?: {4}.*\n)+)", rest, re.MULTILINE)]
        for kind, text in blocks:
            language, _, words = kind.partition(" ")
            is_shell = language in ("sh", "bash") or BEGINS.match(text)
            if is_shell and (language != "sh" or words not in KINDS):
                wrong.append((page.name, kind, text.splitlines()[0]))
            if is_shell and words not in ("printed", "packages", "spark", "systemd", "minutes") and "…" in text:
                wrong.append((page.name, "a place holder", text.splitlines()[0]))
    assert wrong == []


NAMES = {
    "brokerGroup=GROUP": "brokerGroup=g1",
    "--group GROUP": "--group g1",
    "MASTER_IP:CONTROL_PORT": "127.0.0.1:20883",
    "SLAVE_IP:CONTROL_PORT": "127.0.0.1:20887",
    "--token-file TOKEN": "--token-file token",
    "DATA_DIRECTORY": "/var/lib/qmq/b1",
    "=DIRECTORY": "=ledger",
    "--host=BROKER": "--host=g1-b",
    "NAME,NAME": "old",
    "--hostname=B": "--hostname=g1-b",
    "--hostname=A": "--hostname=g1-c",
    "NEW_IP": "127.0.0.1",
    "=IP": "=127.0.0.1",
    "servePort=PORT": "servePort=20885",
    "syncPort=PORT": "syncPort=20886",
    "NEW_PORT": "20899",
    "SUBJECT": "order.changed",
    "group=GROUP": "group=billing",
}
"""Place holders of the runbook, and names of the cluster, in the order of their replacement."""


def test_commands_of_the_runbook_are_accepted(machine, reader):
    """Changes are typed with --dry-run; a cluster without a fault refuses some, with status 1."""
    lines = re.findall(r"^    (qmq [A-Za-z].*)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    typed = dict.fromkeys(lines)
    assert len(typed) > 30
    for line in typed:
        for holder, name in NAMES.items():
            line = line.replace(holder, name)
        assert not re.search(r"=[A-Z]{2}", line), line
        plans = (command := COMMANDS.get(line.split()[1])) and command.changes and "--dry-run" not in line
        reader.type(f"{line} {'--dry-run' if plans else ''} || [ $? = 1 ]")
