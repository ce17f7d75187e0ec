"""Shell. Three brokers of one group, two of which acknowledge: one is killed, and producing goes on.

They run without a metaserver, in the parts that their directories remember.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from qmq.deploy.control import broker_state
from qmq.deploy.copies import read_copy
from qmq.deploy.plan import write_settings
from qmq.deploy.processes import Service, module_command, stop_all
from qmq.log.disk import RealDisk
from qmq.remoting.commands import Command
from qmq.replication.assignment import Address, Assignment
from qmq.replication.identity import IdentityFile
from qmq.types import Role
from tests.integration.cluster_world import SETTINGS, Wire, produce_body
from tests.support.ports import free_ports
from tests.support.waiting import until

TOKEN, MORE = "secret", 200


class Copies:
    """The processes `a`, the master, `b` and `c`."""

    def __init__(self, folder: Path) -> None:
        self.places = {name: Address("127.0.0.1", *free_ports(3)) for name in "abc"}
        self.data = {name: folder / name / "data" for name in "abc"}
        self.services = {name: self._prepared(folder / name, name) for name in "abc"}

    def _prepared(self, folder: Path, name: str) -> Service:
        place, [metrics_port] = self.places[name], free_ports(1)
        settings = {
            "hostname": name, "ip": place.ip, "serve_port": place.serve_port, "sync_port": place.sync_port,
            "control_port": place.control_port, "metrics_port": metrics_port, "data": str(self.data[name]),
            "metaserver": "http://127.0.0.1:1", "token": TOKEN,
        }  # fmt: skip
        write_settings(folder / "broker.toml", settings | SETTINGS)
        self.data[name].mkdir()
        disk = RealDisk(self.data[name])
        slaves = self.places["b"], self.places["c"]
        role = Role.MASTER if name == "a" else Role.SLAVE
        part = Assignment("g1", 1, role, self.places["a"], slaves, min_copies=2)
        IdentityFile(disk, new_incarnation=name).assigned("g1", part.to_json(), f"{name}:{place.serve_port}")
        disk.close()
        return Service(name, module_command("qmq.broker", folder / "broker.toml"), folder / "log")

    def state(self, name):
        return broker_state(f"127.0.0.1:{self.places[name].control_port}", TOKEN, timeout_s=10.0)

    def in_step(self):
        said = self.state("a")
        return set(said.in_step) if said else set()

    def kill(self, name):
        service = self.services[name]
        service.signal(9)
        until(lambda: service.pid is None, f"{name} ends")

    def ends(self):
        said = [self.state(name) for name in "abc"]
        return {one and (one.log_end, one.chain) for one in said}


@contextmanager
def three_copies(folder):
    copies = Copies(folder)
    try:
        for service in copies.services.values():
            service.start()
        until(lambda: copies.in_step() == {"b", "c"}, "both slaves are in sync")
        yield copies
    finally:
        stop_all(list(copies.services.values()))


def test_of_three_copies_one_is_killed_and_producing_goes_on(tmp_path):
    with three_copies(tmp_path) as copies, Wire(copies.places["a"].serve_port, token=TOKEN) as wire:

        def produce():
            for at in range(MORE):
                answer = wire.ask(Command.PRODUCE, produce_body("s", {"n": str(at)}))
                assert answer.code == 0, bytes(answer.body)

        produce()
        for slave in "bc":
            copies.kill(slave)
            produce()  # each was acknowledged; none was refused for a moment
            until(lambda slave=slave: copies.in_step() == {"b", "c"} - {slave}, f"{slave} is missed")
            produce()
            assert copies.state("a").writable and not copies.state("a").readonly_reasons
            copies.services[slave].start()
            until(lambda: copies.in_step() == {"b", "c"}, f"{slave} catches up")
        until(lambda: len(copies.ends()) == 1, "equal copies")
        for name in "abc":
            copies.kill(name)
        first, *others = [read_copy(copies.data[name]) for name in "abc"]
        assert all(other == first for other in others)
        assert len([one for one in first.messages if one[0] == "s"]) == 5 * MORE


def test_of_three_copies_two_are_killed_and_nothing_more_is_stored(tmp_path):
    with three_copies(tmp_path) as copies, Wire(copies.places["a"].serve_port, token=TOKEN) as wire:
        assert wire.ask(Command.PRODUCE, produce_body("s", {"n": "1"})).code == 0
        for slave in "bc":
            copies.kill(slave)
        until(lambda: copies.state("a").readonly_reasons == ["slave_down"], "readonly")
        assert wire.ask(Command.PRODUCE, produce_body("s", {"n": "2"})).code != 0
        copies.services["c"].start()
        until(lambda: copies.state("a").writable, "two are enough")
        assert wire.ask(Command.PRODUCE, produce_body("s", {"n": "3"})).code == 0
