"""Shell. The wheel, built from the repository's files and installed beside other packages.

The wheel is installed without dependencies and without a registry. Declared dependencies are linked from the
environment of the tests, so an undeclared one is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from qmq.cli import CANNOT_START, PROGRAMS
from qmq.version import VERSION
from tests.support.http import ask, is_served
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKS = {path.name for path in (ROOT / "qmq").iterdir() if path.is_symlink()}
OTHER_PEOPLES = ("watchdog", "tools", "deploy", "broker")
NEED = re.compile(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?")


def tracked():
    """Return the files of a fresh clone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source)
    (built,) = out.iterdir()
    return built


def pip(*words):
    ended = subprocess.run([sys.executable, "-m", "pip", *map(str, words)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


class Machine:
    """Fresh environment with the wheel, beside foreign packages with the names of our folders."""

    def __init__(self, directory, wheel, needs):
        venv.create(directory / "env", with_pip=False)
        self.bin = directory / "env" / "bin"
        (self.site,) = (directory / "env" / "lib").glob("python*/site-packages")
        for name in OTHER_PEOPLES:
            (self.site / name).mkdir()
            (self.site / name / "__init__.py").write_text(f"OWNER = 'somebody else, {name}'\n")
        lent = directory / "lent"
        lent.mkdir()
        for distribution in with_what_they_need(needs):
            lend(distribution, lent)
        (self.site / "lent.pth").write_text(f"{lent}\n")
        pip("--python", self.bin / "python", "install", "--no-deps", "--no-index", wheel)
        self.directory = directory

    def run(self, program, *words):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("QMQ_", "PYTHON"))}
        return subprocess.run(
            [self.bin / program, *words], cwd=self.directory, env=environ, capture_output=True, text=True, timeout=120
        )

    def python(self, code):
        ended = self.run("python", "-c", code)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()


def with_what_they_need(needs):
    """Return the names of the distributions in `needs`, written as in pyproject.toml, and of their dependencies."""
    found, waiting = set(), list(needs)
    while waiting:
        need, _, marker = waiting.pop().partition(";")
        name, extras = NEED.match(need).groups()
        key = (name.lower().replace("_", "-"), extras or "")
        asked = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
        if key in found or asked:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            assert marker, f"{name} is not installed"
            continue  # not for this machine
        found.add(key)
        for extra in filter(None, (extras or "").split(",")):
            pattern = re.compile(rf"extra == ['\"]{extra}['\"]")
            waiting += [need.partition(";")[0] for need in requires if pattern.search(need)]
        waiting += requires
    return {name for name, _ in found}


def lend(distribution, directory):
    site = Path(importlib.metadata.distribution(distribution).locate_file(""))
    for top in {file.parts[0] for file in importlib.metadata.files(distribution) if file.parts[0] != ".."}:
        if not (directory / top).exists():
            (directory / top).symlink_to(site / top)


def needs_of(*extras):
    return [*PROJECT["dependencies"], *(need for extra in extras for need in PROJECT["optional-dependencies"][extra])]


@pytest.fixture(scope="module")
def machine(wheel, tmp_path_factory):
    """Make one machine per set of extras."""
    made = {}

    def get(*extras):
        if extras not in made:
            made[extras] = Machine(tmp_path_factory.mktemp("machine"), wheel, needs_of(*extras))
        return made[extras]

    return get


def test_wheel_has_one_root_and_no_link(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {entry.filename: entry for entry in archive.infolist()}
        metadata = archive.read(f"qmq-{VERSION}.dist-info/METADATA").decode()
        entry_points = archive.read(f"qmq-{VERSION}.dist-info/entry_points.txt").decode()
    assert {name.partition("/")[0] for name in inside} == {"qmq", f"qmq-{VERSION}.dist-info"}
    assert [name for name, entry in inside.items() if entry.external_attr >> 28 == 0o12] == [], "a link"
    expected = {
        name if name.startswith("qmq/") else f"qmq/{name}"
        for name in tracked()
        if name.partition("/")[0] in {"qmq", *LINKS} and not (ROOT / name).is_symlink() and not name.endswith(".sh")
    }
    assert len(expected) > 400 and len(LINKS) == 7
    assert {name for name in inside if name.startswith("qmq/")} == expected
    assert f"qmq-{VERSION}.dist-info/licenses/LICENSE" in inside and "License-Expression: Apache-2.0" in metadata
    assert "[console_scripts]\nqmq = qmq.cli:main\n" in entry_points and entry_points.count("\n\n") == 1


def test_other_peoples_packages_stay_as_they_are(machine):
    names = ", ".join(OTHER_PEOPLES)
    told = machine().python(f"import qmq, {names}\nprint([one.OWNER for one in ({names})])")
    assert told == str([f"somebody else, {name}" for name in OTHER_PEOPLES])
    ours = {path.name for path in machine().site.iterdir()}
    assert ours == {"qmq", f"qmq-{VERSION}.dist-info", "lent.pth", *OTHER_PEOPLES}


def test_the_client_needs_nothing_of_the_servers(machine):
    public = "[getattr(qmq, name) for name in qmq.__all__]"
    told = machine().python(f"import qmq\n{public}\nprint(qmq.__version__, qmq.__file__)")
    assert told == f"{VERSION} {machine().site}/qmq/__init__.py"
    machine().python("import qmq.blocking, qmq.outbox, qmq.idempotence")
    missing = machine().run("python", "-c", "import numpy")
    assert "No module named 'numpy'" in missing.stderr, "an undeclared dependency is linked"


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.extra] + ["ListBrokers"])
def test_missing_program_names_its_install_command(machine, name):
    extra = PROGRAMS[name].extra if name in PROGRAMS else "tools"
    ended = machine().run("qmq", name, "--help")
    assert (ended.returncode, ended.stdout) == (CANNOT_START, "")
    assert re.fullmatch(rf"qmq {name}: \w+ is not installed; type: pip install 'qmq\[{extra}\]'\n", ended.stderr)


@pytest.mark.parametrize("name", PROGRAMS)
def test_named_extras_are_enough(machine, name):
    extras = PROGRAMS[name].extra
    ended = machine(*extras.split(",")).run("qmq", name, "--help") if extras else machine().run("qmq", name, "--help")
    assert ended.returncode == 0 and ended.stdout.startswith(f"usage: qmq {name} ["), ended.stderr


def test_every_completion_is_accepted(machine):
    for name, program in PROGRAMS.items():
        extras = filter(None, program.extra.split(","))
        usage = machine(*extras).run("qmq", name, "--help").stdout
        for word in program.words:
            assert re.search(rf"{re.escape(word.rstrip('='))}\b", usage), f"qmq {name} has no {word}"


def test_operators_commands_and_completion(machine):
    tools = machine("tools")
    assert tools.run("qmq", "--version").stdout == f"qmq {VERSION}\n"
    help_text = tools.run("qmq", "--help").stdout
    assert all(re.search(rf"^  {name} ", help_text, re.MULTILINE) for name in (*PROGRAMS, "SwapRoles", "Doctor"))
    assert "example:\n  qmq ListBrokers --metaserver=" in tools.run("qmq", "ListBrokers", "--help").stdout
    mistyped = tools.run("qmq", "brokr")
    assert mistyped.returncode == 2 and mistyped.stderr.endswith("qmq: 'brokr' is no command; did you mean broker?\n")
    nobody = tools.run("qmq", "ListBrokers", f"--metaserver=127.0.0.1:{free_ports(1)[0]}")
    assert nobody.returncode == 3 and nobody.stderr.startswith("qmq: "), nobody.stderr
    assert tools.run("qmq", "completion", "bash").stdout.endswith("complete -F _qmq qmq\n\n")


def test_tests_of_applications_have_their_broker(machine):
    code = """
import asyncio, qmq
from qmq.testing import Broker
async def main():
    async with qmq.Producer(metaserver=broker.metaserver, app="shop") as producer:
        receipt = await producer.send(qmq.Message("order.changed", {"orderNo": "42"}))
        print(receipt.outcome.value, len(broker.messages("order.changed")))
with Broker() as broker:
    asyncio.run(main())
"""
    assert machine("testing").python(code) == "stored 1"


def test_metaserver_runs_from_the_wheel(machine):
    server = machine("server")
    http_port, grpc_port = free_ports(2)
    (server.directory / "m.toml").write_text(
        f'http_port = {http_port}\ngrpc_port = {grpc_port}\ncluster_token = "a token of a test"\n'
        f'database = "sqlite:///{server.directory}/m.db"\n'
    )
    with (
        (server.directory / "m.log").open("wb") as log,
        subprocess.Popen(
            [server.bin / "qmq", "metaserver", "--config", "m.toml"], cwd=server.directory, stdout=log, stderr=log
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{http_port}"
            while True:
                assert process.poll() is None, (server.directory / "m.log").read_text()
                if is_served(f"{url}/health/ready"):
                    break
                time.sleep(0.05)
            for path, text in {"/console/login": "<h1>Log in</h1>", "/console/console.css": "--link:"}.items():
                assert text in ask(f"{url}{path}").text
        finally:
            process.terminate()
    assert process.returncode == 0
