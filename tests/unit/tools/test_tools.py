"""Core. How tools read addresses and print tables; every command's words are those the metaserver knows."""

from __future__ import annotations

import pytest

from tools.call import Address
from tools.main import COMMANDS, build_parser
from tools.table import render_table


@pytest.mark.parametrize(
    "text, address",
    [
        ("127.0.0.1:8080", Address("127.0.0.1", 8080)),
        ("meta", Address("meta", 8080)),
        ("http://meta:81", Address("meta", 81)),
        ("http://meta:81/", Address("meta", 81)),
        ("https://meta", Address("meta", 443, secure=True)),
    ],
)
def test_metaserver_is_host_and_port_or_url(text, address):
    assert Address.parse(text) == address


@pytest.mark.parametrize("text", ["", ":8080", "meta:x", "meta:0", "meta:99999", "ftp://meta", "http://meta/x?y"])
def test_other_addresses_are_refused(text):
    with pytest.raises(ValueError):
        Address.parse(text)


def test_table_aligns_columns_and_shows_what_is_missing():
    table = render_table(("NAME", "END"), [("a", 4096), ("longer", 7), (None, True)])
    assert table.splitlines() == ["NAME    END", "a       4096", "longer     7", "-       yes"]


def test_empty_table_is_its_head():
    assert render_table(("NAME", "END"), []) == "NAME  END"


def test_commands_have_qmqs_names_and_options():
    options = {command.name: [option.name for option in command.options] for command in COMMANDS}
    broker = ["brokerGroup", "role", "hostname", "ip", "servePort", "syncPort"]
    assert options == {
        "AddBroker": broker,
        "ReplaceBroker": broker,
        "ListBrokers": ["brokerGroup"],
        "ListBrokerGroups": [],
        "MarkReadonly": ["brokerGroup", "subject"],
        "UnMarkReadonly": ["brokerGroup", "subject"],
        "SwapRoles": ["brokerGroup"],
        "ReplicaStatus": ["brokerGroup"],
    }


@pytest.mark.parametrize(
    "words", [["--metaserver=m:1", "--brokerGroup=g"], ["--metaserver", "m:1", "--brokerGroup", "g"]]
)
def test_options_are_written_with_an_equals_sign_or_without(words):
    options = build_parser().parse_args(["MarkReadonly", *words])
    assert (options.brokerGroup, options.subject, options.metaserver) == ("g", "*", Address("m", 1))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="nothing"),
        pytest.param(["Explode"], id="unknown command"),
        pytest.param(["MarkReadonly", "--metaserver=m:1"], id="required option missing"),
        pytest.param(["ListBrokers", "--metaserver=m:1", "--broker=g"], id="abbreviated option"),
        pytest.param(["ListBrokers", "--metaserver=m:x"], id="wrong address"),
        pytest.param(["MarkReadonly", "--metaserver=m:1", "--brokerGroup=g", "--color=red"], id="unknown option"),
    ],
)
def test_wrong_usage_ends_with_2_on_stderr(words, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(words)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "usage:" in printed.err
