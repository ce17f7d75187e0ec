"""Shell. Reads which module imports which, and holds the arrows of the architecture against them.

Imports point one way, towards what changes less. Acts that are forbidden to a core are lists of forbidden imports.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT: dict[str, set[str]] = {
    "qmq": set(),
    "qmq.server": {"qmq"},
    "qmq.testing": {"qmq", "qmq.server", "qmq.broker", "qmq.delayserver"},
    "qmq.broker": {"qmq", "qmq.server"},
    "qmq.delayserver": {"qmq", "qmq.server"},
    "qmq.metaserver": {"qmq"},
    "qmq.watchdog": {"qmq"},
    "qmq.gateway": {"qmq"},
    "qmq.tools": {"qmq"},
    "qmq.audit": {"qmq"},
    "qmq.deploy": {"qmq"},
    "benchmarks": {"qmq", "qmq.deploy", "qmq.audit", "qmq.delayserver"},
}
"""Package of ours -> other packages of ours that it may import. Whoever needs a process starts it, as a process.

`qmq.server` holds the shared parts of processes that keep one copy of a group; clients do not know it. The audit is no
process but a Spark program: its benchmark calls it within a session that is warm. The delay server's schedule is
measured alone, without its process. And `qmq.testing` is no part of the library but a world for the cores of broker and
delay server, as the simulator is; only tests may know it, those of applications and ours.
`qmq.cli` is no exception to the first line: it imports nobody, it runs a module by the name that was typed.
"""

LAYERS = ("qmq.remoting", "qmq.log", "qmq.replication", "qmq.server")
"""Inside `qmq`, from the wire outwards: a layer imports those before it, and the modules at the top of `qmq`."""

CLIENTS = {
    "qmq.client",
    "qmq.outbox",
    "qmq.idempotence",
    "qmq.blocking",
    "qmq.redrive",
    "qmq.django",
    "qmq.asyncapi",
    "qmq.fastapi",
    "qmq.kombu",
    "qmq.litestar",
    "qmq.metrics",
    "qmq.otel",
    "qmq.worker",
    "qmq.reply",
}
"""Beside the layers: these import the wire only. The last three extend the client for some applications."""

COMMANDS = "qmq.commands"
"""Table of operators' commands: for the metaserver and the tools, so nothing inside `qmq` loads it."""

CLIENT_MAY_IMPORT = {"qmq.log.frame.label_flags", "qmq.log.frame.FLAG_ORDERED"}
"""Flags that producers set and frames carry: bits of the wire format, drawn with the frame."""

FACADE = {"qmq", "qmq.testing", "qmq.cli"}
"""These put layers together: the names that applications import, and the in-memory broker."""

LINKED = {"broker", "delayserver", "metaserver", "watchdog", "tools", "audit", "deploy"}
"""Folders at the top of the repo that are packages below `qmq`, through the links there (decision 18)."""

IMPURE = {
    "asyncio",
    "time",
    "random",
    "uuid",
    "os",
    "socket",
    "threading",
    "grpc",
    "sqlalchemy",
    "fastapi",
    "starlette",
}
"""A core sees clock, dice, disk and network only through ports: it gets them as arguments."""

LINES_MAX = 60
"""Longest function, without its docstring: that of a public method lists a dozen arguments."""

LOOK_UPS = {
    f"socket.{name}"
    for name in ("gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getfqdn", "getaddrinfo", "create_connection")
}
"""They wait for a name server. The loop's own `getaddrinfo` runs in a thread."""
LOOKING_UP = "qmq.remoting.connection"
"""`look_up` has a thread per name. No loop waits for it, and no other look-up."""

PAIRS = {"qmq.metaserver.http.app": "subject:version", "qmq.testing.metaserver": "subject:version"}
"""Modules that split a text at its last colon which is no address."""
HOSTS = {"host", "ip", "HOST", "advertised", "bind", "address"}
"""Names of values that may be an IPv6 address."""

PURE = {"random.Random", "uuid.UUID"}
"""Types of values that are passed in; the modules themselves have dice that no seed governs."""


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, the first word of its docstring, its imports, whether it calls `open`."""

    name: str
    kind: str
    imports: frozenset[str]
    opens: bool
    empty: bool
    rebound: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    look_ups: tuple[str, ...] = ()
    addresses: tuple[int, ...] = ()

    @property
    def package(self) -> str:
        return package_of(self.name)

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def package_of(name: str) -> str:
    """Return the package of ours that `name`, dotted, belongs to; of others' names, the first part."""
    inner = ".".join(name.split(".")[:2])
    return inner if inner in MAY_IMPORT else name.partition(".")[0]


def read_modules(root: Path) -> list[Module]:
    """Parse every source file of ours below `root`, except those of protoc."""
    packages = sorted({package.partition(".")[0] for package in MAY_IMPORT} | LINKED)
    paths = (path for package in packages for path in sorted((root / package).rglob("*.py")))
    return [read_module(root, path) for path in paths if "_pb2" not in path.name]


def read_module(root: Path, path: Path) -> Module:
    tree = ast.parse(path.read_text(), str(path))
    parts = path.relative_to(root).with_suffix("").parts
    parts = ("qmq", *parts) if parts[0] in LINKED else parts
    package = parts[:-1]
    name = ".".join(parts if parts[-1] != "__init__" else package)
    nodes = list(ast.walk(tree))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return Module(
        name=name,
        kind=(ast.get_docstring(tree) or "").partition(" ")[0],
        imports=frozenset(imported(nodes, package)),
        opens=any(isinstance(called, ast.Name) and called.id == "open" for called in calls),
        empty=parts[-1] == "__init__",
        rebound=tuple(rebound(tree)),
        long=tuple(long_functions(nodes)),
        look_ups=tuple(sorted(LOOK_UPS & set(socket_names(nodes)))),
        addresses=tuple(own_addresses(nodes)),
    )


def socket_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that a module uses or imports, as `module.name`."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_addresses(nodes: list[ast.AST]) -> Iterator[int]:
    """Yield the lines that format or parse an address themselves, such as `f"{host}:{port}"` and `rsplit(":")`."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            for value, after in pairwise(node.values):
                begins = isinstance(after, ast.Constant) and re.match(r":(\d|$)", str(after.value))
                if begins and isinstance(value, ast.FormattedValue) and ends(value.value) in HOSTS:
                    yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("rpartition", "rsplit") and ast.unparse(node.args[0]) in ("':'", "b':'"):
                yield node.lineno


def ends(node: ast.expr) -> str:
    """Return the last name of an expression: `port` of `row["port"]` and of `self.port`."""
    return ast.unparse(node.slice if isinstance(node, ast.Subscript) else node).strip("'").rpartition(".")[2]


def rebound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds twice at its top level; the second value silently replaces the first."""
    names = Counter(
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    )
    yield from (name for name, count in names.items() if count > 1)


def long_functions(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield names of functions with more than LINES_MAX lines without their docstring."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            docstring = ast.get_docstring(node, clean=False)
            lines = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
            if lines > LINES_MAX:
                yield node.name


def imported(nodes: list[ast.AST], package: tuple[str, ...]) -> Iterator[str]:
    """Yield dotted names of all imports, also of those within functions; `from a import b` gives `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def wrong_arrows(modules: list[Module]) -> list[str]:
    """An import from one package of ours into another that it must not import."""
    return [
        f"{module.name} imports {target}"
        for module in modules
        for target in sorted(set(map(package_of, module.imports)) & {*MAY_IMPORT, "tests"})
        if target != module.package and target not in MAY_IMPORT[module.package]
    ]


def layer_of(name: str) -> str:
    """Return the layer or client package inside `qmq` that `name` belongs to; else "qmq" or another root."""
    inner = ".".join(name.split(".")[:2])
    return inner if inner in (*LAYERS, *CLIENTS, COMMANDS) else package_of(name)


def wrong_layers(modules: list[Module]) -> list[str]:
    """An import inside `qmq` against the order wire, log, replication, server, or from the client into a broker."""
    found = []
    for module in modules:
        here = layer_of(module.name)
        if module.package != "qmq" or module.name in FACADE:
            continue
        if here in LAYERS:
            refused = {*LAYERS[LAYERS.index(here) + 1 :], *CLIENTS}
        elif here in CLIENTS:
            refused = set(LAYERS[1:])
        else:
            refused = {*LAYERS, *CLIENTS}
        refused |= {COMMANDS} - {here}
        found += [
            f"{module.name} imports {name}"
            for name in sorted(module.imports - CLIENT_MAY_IMPORT)
            if layer_of(name) in refused
        ]
    return found


def second_roots(modules: list[Module]) -> list[str]:
    """An installation puts `qmq` alone on the import path, so no module may import more."""
    return [
        f"{module.name} imports {name}"
        for module in modules
        for name in sorted(module.imports)
        if name.partition(".")[0] in LINKED
    ]


def imports_of_main(modules: list[Module]) -> list[str]:
    """Only a `main` builds and joins objects; `__main__` may start it; no other module may import it."""
    mains = {module.name for module in modules if module.last in ("main", "__main__")}
    return [
        f"{module.name} imports {name}"
        for module in modules
        if module.last != "__main__"
        for name in sorted(module.imports)
        if name in mains or name.rpartition(".")[0] in mains
    ]


def impure_cores(modules: list[Module]) -> list[str]:
    """A core that imports a clock, dice, disk or network, or opens a file."""
    cores = [module for module in modules if module.kind == "Core."]
    imports = [
        f"{module.name} is a core and imports {name}"
        for module in cores
        for name in sorted({name.partition(".")[0] for name in module.imports - PURE} & IMPURE)
    ]
    return imports + [f"{module.name} is a core and calls open()" for module in cores if module.opens]


def unnamed_kinds(modules: list[Module]) -> list[str]:
    """A module without the word `Core.` or `Shell.`."""
    return [
        f"{module.name}: its docstring begins neither with 'Core.' nor with 'Shell.'"
        for module in modules
        if module.kind not in ("Core.", "Shell.") and not module.empty
    ]


def rebound_names(modules: list[Module]) -> list[str]:
    """A constant that a later one of the same name replaces, as after two modules were merged."""
    return [f"{module.name} binds {name} twice" for module in modules for name in module.rebound]


def too_long(modules: list[Module]) -> list[str]:
    """A function of more than LINES_MAX lines."""
    return [f"{module.name}.{name} is longer than {LINES_MAX} lines" for module in modules for name in module.long]


def blocking_look_ups(modules: list[Module]) -> list[str]:
    """A name server that does not answer stops an event loop for 40 s. Commands and benchmarks may block."""
    return [
        f"{module.name} looks up a name with {call}"
        for module in modules
        if not module.name.startswith(("qmq.tools.", "benchmarks.")) and module.name != LOOKING_UP
        for call in module.look_ups
    ]


def addresses_beside_endpoint(modules: list[Module]) -> list[str]:
    """An IPv6 address has brackets before its port. `qmq.types.Endpoint` writes and reads them."""
    return [
        f"{module.name}:{line} formats or parses an address; use Endpoint"
        for module in modules
        if module.name != "qmq.types" and module.name not in PAIRS
        for line in module.addresses
    ]


RULES = [
    addresses_beside_endpoint,
    blocking_look_ups,
    wrong_arrows,
    wrong_layers,
    second_roots,
    imports_of_main,
    impure_cores,
    unnamed_kinds,
    rebound_names,
    too_long,
]


@pytest.fixture(scope="module")
def modules():
    return read_modules(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.__name__))
def test_every_module_keeps_the_rule(modules, rule):
    assert len(modules) > 20, "the source was not found"
    assert rule(modules) == []


CASES = [
    pytest.param("qmq/a.py", "import qmq.broker", wrong_arrows, id="library knows a process"),
    pytest.param("broker/a.py", "from qmq.metaserver import model", wrong_arrows, id="process knows another process"),
    pytest.param("metaserver/a.py", "def f():\n    import qmq.broker.main", wrong_arrows, id="late import"),
    pytest.param("tools/a.py", "from qmq.audit.jobs import query", wrong_arrows, id="tool knows the audit"),
    pytest.param("audit/a.py", "import qmq.deploy", wrong_arrows, id="audit knows the deployment"),
    pytest.param("deploy/a.py", "from qmq.broker import service", wrong_arrows, id="runner knows what it starts"),
    pytest.param("benchmarks/a.py", "import qmq.server.service", wrong_arrows, id="benchmark reaches into a process"),
    pytest.param("qmq/a.py", "from tests import conftest", wrong_arrows, id="product knows its tests"),
    pytest.param("qmq/testing/a.py", "import qmq.metaserver", wrong_arrows, id="memory broker knows the metaserver"),
    pytest.param(
        "qmq/client/a.py", "from qmq.testing import Broker", wrong_arrows, id="client knows the memory broker"
    ),
    pytest.param(
        "qmq/client/a.py", "from qmq.commands import catalog", wrong_layers, id="client knows operators' commands"
    ),
    pytest.param("qmq/client/a.py", "from qmq.server import service", wrong_arrows, id="client knows the server"),
    pytest.param("tools/a.py", "from qmq import testing", wrong_arrows, id="tool knows the memory broker"),
    pytest.param("qmq/remoting/a.py", "from qmq.log.frame import Frame", wrong_layers, id="wire knows the log"),
    pytest.param("qmq/log/a.py", "from qmq.replication import ports", wrong_layers, id="log knows replication"),
    pytest.param("qmq/replication/a.py", "import qmq.client.batch", wrong_layers, id="replication knows the client"),
    pytest.param("qmq/client/a.py", "from qmq.log.message_log import X", wrong_layers, id="client writes a log"),
    pytest.param("qmq/outbox/a.py", "import qmq.replication.node", wrong_layers, id="outbox knows replication"),
    pytest.param("qmq/a.py", "from qmq.remoting import packet", wrong_layers, id="value knows the wire"),
    pytest.param("broker/a.py", "from metaserver import model", second_roots, id="a folder is no root"),
    pytest.param("qmq/a.py", "AT = 1\nAT = 2", rebound_names, id="constant replaced"),
    pytest.param("broker/a.py", "from .main import run", imports_of_main, id="relative import of main"),
    pytest.param("broker/a.py", "import qmq.broker.main", imports_of_main, id="import of main"),
    pytest.param("qmq/a.py", "def f():\n" + 60 * "    x\n", too_long, id="function of 61 lines"),
    pytest.param("qmq/a.py", "def f(): socket.getfqdn()", blocking_look_ups, id="name looked up on the loop"),
    pytest.param("qmq/a.py", "from socket import getaddrinfo", blocking_look_ups, id="look-up imported by name"),
    pytest.param("qmq/a.py", "def f(): socket.create_connection(a)", blocking_look_ups, id="connection by name"),
    pytest.param("qmq/a.py", "f'{host}:{port}'", addresses_beside_endpoint, id="address without brackets"),
    pytest.param("qmq/a.py", "f'http://{a.ip}:80/x'", addresses_beside_endpoint, id="URL without brackets"),
    pytest.param("qmq/a.py", "f'{row[\"ip\"]}:{port}'", addresses_beside_endpoint, id="address of a row"),
    pytest.param("qmq/a.py", "at.rsplit(':', 1)", addresses_beside_endpoint, id="address split at its colon"),
    pytest.param("qmq/a.py", "import time", impure_cores, id="core sees the clock"),
    pytest.param("qmq/a.py", "from os import path", impure_cores, id="core sees the disk"),
    pytest.param("qmq/a.py", "import grpc.aio", impure_cores, id="core sees the network"),
    pytest.param("qmq/a.py", "open('x')", impure_cores, id="core opens a file"),
    pytest.param("qmq/a.py", "from random import random", impure_cores, id="core throws dice of its own"),
]


@pytest.mark.parametrize("path, code, rule", CASES)
def test_the_rule_notices(tmp_path, path, code, rule):
    for module in ("broker/main.py", path):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "broker" / "main.py").write_text('"""Shell. Builds and joins."""\n')
    (tmp_path / path).write_text(f'"""Core. Planted."""\n{code}\n')
    assert len(rule(read_modules(tmp_path))) == 1


@pytest.mark.parametrize("text", ["", '"""Reads."""\n', "x = 1\n"], ids=["empty", "another word", "no docstring"])
def test_a_module_without_a_kind_is_noticed(tmp_path, text):
    (tmp_path / "qmq").mkdir()
    (tmp_path / "qmq" / "a.py").write_text(text)
    assert len(unnamed_kinds(read_modules(tmp_path))) == 1


def test_what_is_allowed_stays_allowed(tmp_path):
    for path, text in {
        "qmq/values.py": '"""Core. Values."""\nimport struct\nfrom random import Random\n',
        "qmq/__init__.py": "from qmq.values import X\n",
        "qmq/testing/copies.py": '"""Shell. Plays."""\nfrom qmq import values\nfrom qmq.replication.node import Node\n',
        "broker/__main__.py": '"""Shell. Starts."""\nfrom qmq.broker.main import main\n',
        "broker/main.py": '"""Shell. Joins."""\nimport asyncio\nfrom qmq.broker import service\n',
        "broker/service.py": '"""Shell. Acts."""\nopen("x")\n',
        "benchmarks/speed.py": '"""Shell. Measures."""\nfrom qmq.deploy.local import Cluster\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert [complaint for rule in RULES for complaint in rule(read_modules(tmp_path))] == []
