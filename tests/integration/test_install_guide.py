"""Shell. The blocks of docs/install.md, run in their order on real MariaDB and nginx.

The test changes only values of `install.env`: directories, addresses and ports. The word behind `sh` is the kind of a
block. These kinds are not run:

- `packages`: the suite has its virtual environment and Debian's packages already;
- `systemd`: the guide's `by-hand` block that follows does the same, and the unit files are compared with it below;
- `copies`: all is on one machine.

A `repeat` block is repeated until it succeeds, as the guide instructs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.installation_world import NGINX_MAIN
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "install.md"
UNITS = ROOT / "deploy" / "systemd"
HOST = "127.0.0.1"
BLOCK_S = 180
RUN = {"", "by-hand", "repeat"}
NOT_RUN = {"packages", "systemd", "copies"}
BLOCK = re.compile(r"^```sh ?([a-z-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENV = re.compile(r"\b([A-Z][A-Z0-9]*_[A-Z]+)=(\S+)")


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    step: str
    """Heading above it."""


def read_blocks() -> list[Block]:
    guide = GUIDE.read_text()
    headings = [(found.start(), found[1]) for found in re.finditer(r"^## (.*)$", guide, re.MULTILINE)]
    return [
        Block(found[1], found[2], max((h for h in headings if h[0] < found.start()), default=(0, ""))[1])
        for found in BLOCK.finditer(guide)
    ]


class Shell:
    """One bash that runs a block after the other and stops at the first failure."""

    def __init__(self, folder, environ):
        self._output = folder / "shell.log"
        with self._output.open("wb") as output:
            self._bash = subprocess.Popen(
                ["bash"], stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=folder, env=environ, text=True
            )
        self._read_chars = 0
        self._number = 0
        self.type("set -eo pipefail")

    def type(self, text):
        """Run a block; return its output."""
        self._number += 1
        done = f"== {self._number} done ==\n"
        self._bash.stdin.write(f"{text}\necho; echo '{done.strip()}'\n")
        self._bash.stdin.flush()
        deadline = time.monotonic() + BLOCK_S
        while not (output := self._output.read_text(errors="replace")[self._read_chars :]).endswith(done):
            assert self._bash.poll() is None, f"this ended with {self._bash.returncode}:\n{text}\n\n{output}"
            assert time.monotonic() < deadline, f"this takes too long:\n{text}\n\n{output}"
            time.sleep(0.05)
        self._read_chars += len(output)
        return output.removesuffix(done)

    def close(self):
        self._bash.stdin.close()
        self._bash.wait(BLOCK_S)


class Reader:
    """Reader who follows the guide, with a folder as the machine."""

    def __init__(self, folder, mariadb):
        self.folder, self.etc, self.data = folder, folder / "etc", folder / "data"
        self.blocks = read_blocks()
        names = re.findall(r"\b([A-Z][A-Z0-9]*_(?:PORT|HTTP|GRPC|SERVE|SYNC|CONTROL|METRICS))=\d", self._text())
        self.values = dict(zip(names, map(str, free_ports(len(names)))))
        self.values |= dict.fromkeys(re.findall(r"\b([A-Z0-9]+_HOST)=", self._text()), HOST)
        self.values |= {
            "DB_PORT": str(mariadb.port),
            "QMQ_HOME": str(ROOT),
            "QMQ_ETC": str(self.etc),
            "QMQ_DATA": str(self.data),
        }
        (folder / ".my.cnf").write_text(f"[client]\nuser=root\nsocket={mariadb.directory}/socket\n")
        fits = {"SEGMENT_BYTES": str(1 << 20), "DISK_FREE_LIMIT": "0"}  # for any test machine
        small = {f"QMQ_{kind}_{name}": value for kind in ("BROKER", "DELAY") for name, value in fits.items()}
        known = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
        (folder / "bin").mkdir()
        (folder / "bin" / "qmq").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m qmq "$@"\n')
        (folder / "bin" / "qmq").chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.shell = Shell(folder, known | small | {"HOME": str(folder), "PATH": path})
        self.nginx = None

    def _text(self):
        return "".join(block.text for block in self.blocks if block.step.startswith("2. "))

    def follow(self, step):
        """Run all blocks of one step; return their output."""
        blocks = [block for block in self.blocks if block.step.startswith(f"{step}. ")]
        assert blocks, f"the guide has no step {step}"
        return "".join(self._do(block) for block in blocks)

    def _do(self, block):
        if block.kind in NOT_RUN:
            return ""
        if block.step.startswith("2. "):
            return self.shell.type(ENV.sub(self._value, block.text))
        if block.kind == "repeat":
            return self.shell.type(f"until {{ {block.text} }}; do sleep 1; done")
        return self.shell.type(block.text)

    def _value(self, found):
        return f"{found[1]}={self.values.get(found[1], found[2])}"

    def start_nginx(self):
        (self.folder / "qmq.conf").write_text((self.etc / "nginx.conf").read_text())
        (self.folder / "nginx.conf").write_text(NGINX_MAIN.format(folder=self.folder))
        program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
        assert program, "these tests need Debian's nginx: apt-get install nginx"
        command = [program, "-c", str(self.folder / "nginx.conf"), "-e", str(self.folder / "nginx.log")]
        self.nginx = subprocess.Popen(command, start_new_session=True)

    def end(self):
        for file in sorted(self.data.glob("*.pid")):
            try:
                os.kill(int(file.read_text()), signal.SIGTERM)
            except ProcessLookupError:
                pass
        self.shell.close()
        if self.nginx:
            self.nginx.terminate()
            self.nginx.wait(BLOCK_S)


@pytest.fixture
def reader(mariadb, tmp_path):
    someone = Reader(tmp_path, mariadb)
    try:
        yield someone
    finally:
        someone.end()
        mariadb.execute("DROP DATABASE IF EXISTS qmq")
        mariadb.execute("DROP USER IF EXISTS 'qmq'@'%'")


def test_install_guide_works_step_by_step(reader):
    for step in (2, 4, 5, 6):
        reader.follow(step)
    secret = [path for path in reader.etc.iterdir() if path.stat().st_mode & 0o077 == 0]
    assert {path.name for path in secret} == {"metaserver.env", "broker.env"}

    assert reader.follow(7).count('"ready":true') == 2
    reader.start_nginx()
    first = (reader.etc / "admin.token").read_text()
    listed = reader.follow(8)
    assert all(f"{HOST}:{reader.values[name]}" in listed for name in ("M1_HTTP", "M2_HTTP"))
    own = (reader.etc / "admin.token").read_text()
    assert own.startswith("qmq_") and own != first and (reader.etc / "admin.token").stat().st_mode & 0o077 == 0

    reader.follow(9)
    well = reader.follow(10)
    assert "FAIL" not in well.rsplit("name resolution", 1)[1]

    hello = reader.follow(11)
    assert "sent: stored" in hello and "got:  {'orderNo': '42'} {'pay'}" in hello
    assert masters(reader) == ["b1"]
    reader.follow(12)
    assert masters(reader) == ["b2"]

    reader.follow(13)
    assert '"b2"' in (reader.etc / "metadata.json").read_text()
    reader.follow(14)
    assert "CREATE TABLE" in (reader.folder / "qmq-before-upgrade.sql").read_text()
    assert "sent: stored" in reader.follow(11)
    reader.follow(15)
    left = reader.shell.type("qmq ListMetaservers")
    assert f"{HOST}:{reader.values['M1_HTTP']}" in left

    pending = reader.follow(16)
    assert re.search(r"^delay +0 ", pending, re.MULTILINE), "the group answers, and nothing pends"
    nights = reader.follow(17)
    assert all(f'qmq_nightly_exit_status{{name="{name}"}} 0' in nights for name in ("backup", "scrub"))


def masters(reader):
    """Hostnames of the masters, as the metaserver lists them."""
    output = reader.shell.type("qmq ListBrokers")
    return re.findall(r"\b(b\d)\b", "\n".join(line for line in output.splitlines() if "MASTER" in line))


def test_every_guide_block_has_a_known_kind():
    blocks = read_blocks()
    assert {block.kind for block in blocks} == RUN | NOT_RUN
    assert len(blocks) == GUIDE.read_text().count("```") / 2
    by_hand, by_systemd = (
        re.findall(pattern, "".join(block.text for block in blocks if block.kind == kind), re.MULTILINE)
        for kind, pattern in (
            ("by-hand", r"^qmq_run (\w+) (\w+)$"),
            ("systemd", r"^systemctl (?:enable --now|restart) qmq-(\w+)@(\w+)$"),
        )
    )
    assert by_systemd == by_hand, "the two ways start and restart the same, in the same order"


@pytest.mark.parametrize("module", ["metaserver", "broker", "delayserver"])
def test_unit_runs_the_command_of_the_guide(module):
    unit = RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(UNITS / f"qmq-{module}@.service")
    service = unit["Service"]
    given = dict(ENV.findall(next(block.text for block in read_blocks() if "QMQ_HOME=" in block.text)))
    command = f"{given['QMQ_HOME']}/.venv/bin/qmq"
    assert f"ln -s {command} /usr/local/bin/qmq\n" in GUIDE.read_text()
    assert service["ExecStart"] == f"{command} {module} --config {given['QMQ_ETC']}/%i.toml"
    assert service["EnvironmentFile"] == f"{given['QMQ_ETC']}/{module}.env"
    assert service["WorkingDirectory"] == given["QMQ_DATA"] == f"/var/lib/{service['StateDirectory']}"
    assert (service["Restart"], service["RestartSec"], service["KillSignal"]) == ("always", "1", "SIGTERM")
    assert int(service["LimitNOFILE"]) >= 65536
