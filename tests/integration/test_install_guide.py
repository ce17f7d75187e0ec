"""Shell. The blocks of docs/install.md, run in their order on three machines, as they are written.

A machine is a network namespace on a switch of its own, with its own `/etc`, `/run`, `/var/lib` and `/var/log`, and one
shell. The first line of a block names its machines. Changed is only `QMQ_HOME`. Not run are

- `packages` blocks: the suite has its virtual environment and Debian's packages already;
- blocks with systemd: those without it follow and do the same. The unit files are compared with them below.

A `repeat` block is repeated until it succeeds, as the guide instructs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path

import pytest

import qmq
from qmq.outbox.row import encode_row
from tests.support.shell import BLOCK_S, Shell

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "install.md"
UNITS = ROOT / "deploy" / "systemd"
ADDRESSES = {1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.9"}
SUBJECT = "order.changed"
KINDS = {"", "repeat", "packages"}
BLOCK = re.compile(r"^```sh ?([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# machines? (\d)(?: and (\d))?(?:, (with|without) systemd)?\n")

MACHINE = """
set -eo pipefail
for place in etc run var/lib var/log; do
    mkdir -p "$FOLDER/$place"
    [ $place = etc ] && cp -a /etc/. "$FOLDER/etc"
    mount --bind "$FOLDER/$place" /$place
done
nsenter --target 1 --net ip link add "port$NUMBER" type veth peer name eth0 netns $$
nsenter --target 1 --net ip link set "port$NUMBER" master switch up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip link set lo up
echo $$ > "$WORLD/$ADDRESS.pid"
"""
"""Setup of a machine. Its process 1 is the switch."""

DATABASE_AND_NGINX = """
mkdir -p /var/log/mysql /var/log/nginx /var/lib/nginx
mariadb-install-db --user=mysql --skip-test-db
"""
"""Their packages do that when they are installed."""

PROGRAMS = {
    "qmq": f'PYTHONPATH={ROOT} exec {sys.executable} -m qmq "$@"',
    "ssh": 'to=$1; shift; exec nsenter --target "$(cat "$WORLD/$to.pid")" --net --mount -- sh -c "$*"',
    "scp": r"""[ "$1" = -p ] && shift
to="${!#}"
tar -cP --transform='s|.*/||' "${@:1:$#-1}" | ssh "${to%%:*}" tar -x -p -C "${to#*:}" """,
}
"""Stand-ins on the path of each machine, as scripts of bash."""


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    step: str
    """Heading above it."""
    machines: tuple[int, ...]
    systemd: str
    """"with", "without", or "" for both."""


def read_blocks() -> list[Block]:
    guide = GUIDE.read_text()
    headings = [(found.start(), found[1]) for found in re.finditer(r"^## (.*)$", guide, re.MULTILINE)]
    blocks = []
    for found in BLOCK.finditer(guide):
        place = PLACE.match(found[2])
        assert place, f"this block does not begin with its machine:\n{found[2]}"
        step = max((heading for heading in headings if heading[0] < found.start()), default=(0, ""))[1]
        machines = tuple(int(number) for number in place.groups()[:2] if number)
        blocks.append(Block(found[1], found[2], step, machines, place[3] or ""))
    return blocks


class Machines:
    """Shells of the three machines, by number. All processes on them end with the switch."""

    def __init__(self, folder):
        spaces = ["--net", "--mount", "--pid"]
        self._switch = Shell(["unshare", *spaces, "--fork", "--kill-child", "--mount-proc"], folder / "switch.log")
        self._switch.type("set -e; ip link add switch type bridge; ip link set switch up")
        [first] = Path(f"/proc/{self._switch.process.pid}/task/{self._switch.process.pid}/children").read_text().split()
        for name, script in PROGRAMS.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/bash\n{script}\n")
            program.chmod(0o755)
        fits = {"SEGMENT_BYTES": str(1 << 20), "DISK_FREE_LIMIT": "0"}  # for any test machine
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
        environ |= {f"QMQ_{kind}_{name}": value for kind in ("BROKER", "DELAY") for name, value in fits.items()}
        environ |= {"WORLD": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        self.folders = {number: folder / str(number) for number in ADDRESSES}
        self.shells = {}
        for number, address in ADDRESSES.items():
            self.folders[number].mkdir()
            own = {"NUMBER": str(number), "ADDRESS": address, "FOLDER": str(self.folders[number])}
            enter = ["nsenter", "--target", first, *spaces, "unshare", "--net", "--mount"]
            self.shells[number] = Shell(
                enter, folder / f"{number}.log", env=environ | own | {"HOME": own["FOLDER"]}, cwd=own["FOLDER"]
            )
            self.shells[number].type(MACHINE)

    def end(self):
        self._switch.close()
        for shell in self.shells.values():
            shell.process.communicate(timeout=BLOCK_S)


class Reader:
    """Reader who follows the guide."""

    def __init__(self, machines):
        self.machines, self.shells = machines, machines.shells
        self.blocks = [block for block in read_blocks() if block.kind != "packages" and block.systemd != "with"]

    def follow(self, step):
        """Run all blocks of one step; return their output."""
        blocks = [block for block in self.blocks if block.step.startswith(f"{step}. ")]
        assert blocks, f"the guide has no step {step}"
        return "".join(self._do(block, self.shells[number]) for block in blocks for number in block.machines)

    @staticmethod
    def _do(block, shell):
        text = block.text.replace("export QMQ_HOME=/opt/qmq ", f"export QMQ_HOME={ROOT} ")
        return shell.repeat(text) if block.kind == "repeat" else shell.type(text)

    def secrets(self, number):
        """Names of the files in /etc/qmq of a machine that only root reads."""
        files = (self.machines.folders[number] / "etc" / "qmq").iterdir()
        return {path.name for path in files if path.stat().st_mode & 0o077 == 0}

    def masters(self):
        """Hostnames of the masters, as the metaserver lists them."""
        output = self.shells[1].type("qmq ListBrokers")
        return re.findall(r"\b(b\d)\b", "\n".join(line for line in output.splitlines() if "MASTER" in line))


@pytest.fixture
def reader(tmp_path):
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "switch", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip(f"no network namespaces with a switch can be made here: {tried.stderr.strip()}")
    machines = Machines(tmp_path)
    try:
        yield Reader(machines)
    finally:
        machines.end()


@pytest.mark.timeout(1200)  # four minutes beside a busy suite
def test_install_guide_works_on_three_machines(reader):
    first, second, third = reader.shells.values()
    for step in (2, 4, 5):
        reader.follow(step)
    secrets = {"metaserver.env", "broker.env", "delayserver.env", "watchdog.env"}
    assert reader.secrets(1) == reader.secrets(2) == secrets
    third.type(DATABASE_AND_NGINX)
    reader.follow(6)
    assert reader.secrets(3) == set()

    assert reader.follow(7).count('"ready":true') == 2
    token = first.type('cat "$QMQ_TOKEN_FILE"')
    listed = reader.follow(8)
    assert all(address in listed for address in ("10.0.0.1:8180", "10.0.0.2:8280"))
    own = first.type('cat "$QMQ_TOKEN_FILE"')
    assert own.startswith("qmq_") and own != token and "admin.token" in reader.secrets(1)

    reader.follow(9)
    assert "FAIL" not in reader.follow(10).rsplit("name resolution", 1)[1]
    hello = reader.follow(11)
    assert "sent: stored" in hello and "got:  {'orderNo': '42'} {'pay'}" in hello
    assert reader.masters() == ["b1"]
    reader.follow(12)
    assert reader.masters() == ["b2"]
    reader.follow(13)
    assert '"b2"' in first.type('cat "$QMQ_ETC/metadata.json"')
    reader.follow(14)
    assert "CREATE TABLE" in third.type("cat qmq-before-upgrade.sql")
    reader.follow(15)
    assert re.search(r"^delay +0 ", reader.follow(16), re.MULTILINE), "the group answers, and nothing pends"
    reader.follow(17)
    assert sorted(reader.masters()) == ["b2", "b3"]
    reader.follow(18)

    content = encode_row(qmq.Message(SUBJECT, {"orderNo": "44"}, id="left"), 1).encode().hex()
    row = f"(CONVERT(0x{content} USING utf8mb4), NOW() - INTERVAL 1 HOUR)"
    third.type(f'mariadb shop -e "INSERT INTO qmq_msg_queue (content, update_time) VALUES {row}"')
    third.repeat('[ "$(mariadb shop -Ne "SELECT COUNT(*) FROM qmq_msg_queue")" = 0 ]')
    shop = f'--subject={SUBJECT} --token-file="$QMQ_ETC/shop.token"'
    first.type(f"qmq Produce {shop} --property orderNo=43 --count=20")
    consumed = second.type(f"qmq Consume {shop} --group=another --start=earliest --limit=22 --ack --format=properties")
    assert sorted(re.findall(r"orderNo\D+(\d+)", consumed)) == ["42"] + 20 * ["43"] + ["44"]

    nights = reader.follow(19)
    assert all(f'qmq_nightly_exit_status{{name="{name}"}} 0' in nights for name in ("audit", "backup", "scrub"))
    result = json.loads(first.type("cat /var/lib/qmq-nightly/result.json"))
    assert (result["verdict"], result["findings"]) == ("proven equal", 0)
    assert {group["group"] for group in result["groups"]} == {"delay", "g1", "g2"}


def test_every_guide_block_has_a_known_kind():
    blocks = read_blocks()
    assert {block.kind for block in blocks} == KINDS
    assert len(blocks) == GUIDE.read_text().count("```") / 2
    without, by_systemd = (
        [
            (block.machines, *started)
            for block in blocks
            if block.systemd == way
            for started in re.findall(pattern, block.text, re.MULTILINE)
        ]
        for way, pattern in (
            ("without", r"^qmq_run (\w+) (\w+)$"),
            ("with", r"^systemctl (?:enable --now|start|restart) qmq-(\w+)@(\w+)$"),
        )
    )
    assert by_systemd == without, "the two ways start and restart the same, in the same order"


@pytest.mark.parametrize("module", ["metaserver", "broker", "delayserver", "watchdog"])
def test_unit_runs_the_command_of_the_guide(module):
    unit = RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(UNITS / f"qmq-{module}@.service")
    service = unit["Service"]
    given = dict(re.findall(r"^export (QMQ_\w+)=(\S+)", GUIDE.read_text(), re.MULTILINE))
    command = f"{given['QMQ_HOME']}/.venv/bin/qmq"
    assert f"ln -s {command} /usr/local/bin/qmq\n" in GUIDE.read_text()
    assert service["ExecStart"] == f"{command} {module} --config {given['QMQ_ETC']}/%i.toml"
    assert service["EnvironmentFile"] == f"{given['QMQ_ETC']}/{module}.env"
    if module != "watchdog":  # it stores nothing
        assert service["WorkingDirectory"] == given["QMQ_DATA"] == f"/var/lib/{service['StateDirectory']}"
    assert (service["Restart"], service["RestartSec"], service["KillSignal"]) == ("always", "1", "SIGTERM")
    assert int(service["LimitNOFILE"]) >= 65536
