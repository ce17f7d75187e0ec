"""Core. Command line: addresses, options in QMQ's spelling, times, errors."""

from __future__ import annotations

import socket

import pytest

from qmq.tools.call import Address, reachable
from qmq.tools.usage import WrongUsage, build_parser, parse

NOW_MS = 1_800_000_000_000


def read(*typed, **environ):
    return parse(typed, environ, now_ms=NOW_MS)


@pytest.mark.parametrize(
    "text, address",
    [
        ("127.0.0.1:8080", Address("127.0.0.1", 8080)),
        ("meta", Address("meta", 8080)),
        ("http://meta:81", Address("meta", 81)),
        ("http://meta:81/", Address("meta", 81)),
        ("https://meta", Address("meta", 443, secure=True)),
        ("[::1]:8080", Address("::1", 8080)),
    ],
)
def test_metaserver_is_host_and_port_or_url(text, address):
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == Address.parse(address.url) == address, "a command that is named can be typed"


@pytest.mark.parametrize(
    "text", ["", ":8080", "meta:x", "meta:0", "meta:99999", "ftp://meta", "http://meta/x?y", "::1", "fd00::2:8080"]
)
def test_other_addresses_are_refused(text):
    with pytest.raises(ValueError, match=r"\[fd00::2\]:8080|0 is no port"):
        Address.parse(text)


@pytest.mark.parametrize(
    "words", [["--metaserver=m:1", "--brokerGroup=g"], ["--metaserver", "m:1", "--brokerGroup", "g"]]
)
def test_option_values_follow_equals_or_blank(words):
    options = read("MarkReadonly", *words)
    assert options.values == {"brokerGroup": "g", "subject": "*", "wait": ""}
    assert options.metaserver == (Address("m", 1),)


def test_wrong_metaserver_in_the_environment_is_reported():
    with pytest.raises(WrongUsage, match="is no address; use mq1:8080"):
        read("ListBrokers", QMQ_METASERVER="ftp://m")


def test_metaserver_may_come_from_the_environment():
    assert read("ListBrokers", QMQ_METASERVER="m:1").metaserver == (Address("m", 1),)
    assert read("ListBrokers", "--metaserver=n:2", QMQ_METASERVER="m:1").metaserver == (Address("n", 2),)


@pytest.mark.parametrize(
    "words, text",
    [
        pytest.param([], "which command", id="nothing"),
        pytest.param(["Explode"], "--help lists them", id="unknown command"),
        pytest.param(["markReadonly", "--metaserver=m"], "did you mean MarkReadonly?", id="case matters"),
        pytest.param(["MarkReadonly", "--metaserver=m:1"], "--brokerGroup", id="required option missing"),
        pytest.param(["ListBrokers"], "export QMQ_METASERVER=HOST:PORT", id="metaserver missing"),
        pytest.param(["ListBrokers", "--metaserver=m:1", "--broker=g"], "--broker=g", id="abbreviated option"),
        pytest.param(["ListBrokers", "--metaserver=m:x"], "m:x", id="wrong address"),
        pytest.param(["ListBrokers", "--metaserver=m", "--color=red"], "--color=red", id="unknown option"),
        pytest.param(["ListBrokers", "--metaserver=m", "g1"], "g1", id="a word without an option"),
        pytest.param(["ListBrokers", "--metaserver=m", "--brokerGroup=a", "--brokerGroup=b"], "twice", id="twice"),
        pytest.param(["ListBrokers", "--metaserver=m", "--yes"], "--yes", id="a list is not confirmed"),
        pytest.param(["RemoveDb", "--metaserver=m", "--host=h", "--port=0"], "'0' is no port", id="port 0"),
        pytest.param(["RemoveDb", "--metaserver=m", "--host=h", "--port=x"], "'x' is no number", id="port x"),
        pytest.param(["Clients", "--metaserver=m", "--limit=-1"], "--limit", id="negative number"),
        pytest.param(["Clients", "--metaserver=m", "--limit=١"], "is no number", id="digits of another script"),
        pytest.param(["AuditTrail", "--metaserver=m", "--since=yesterday"], "yesterday", id="no time"),
        pytest.param(["RemoveBroker", "--metaserver=m", "--force=maybe"], "maybe", id="no flag"),
        pytest.param(["completion", "fish"], "fish", id="unknown shell"),
    ],
)
def test_wrong_usage_shows_fault_and_usage(words, text):
    with pytest.raises(WrongUsage) as wrong:
        read(*words)
    assert text in str(wrong.value) and wrong.value.usage.startswith("usage: tools.sh")


@pytest.mark.parametrize(
    "typed, sent",
    [
        ("1769860800000", "1769860800000"),
        ("2026-01-31T12:00:00Z", "1769860800000"),
        ("2026-01-31T12:00:00", "1769860800000"),
        ("2026-01-31T13:00:00+01:00", "1769860800000"),
        ("2026-01-31", "1769817600000"),
        ("90m", str(NOW_MS - 90 * 60_000)),
        ("2d", str(NOW_MS - 2 * 86_400_000)),
    ],
)
def test_times_are_dates_moments_or_ages(typed, sent):
    assert read("AuditTrail", "--metaserver=m", f"--since={typed}").values["since"] == sent


def test_wait_is_in_seconds_default_a_minute():
    assert read("DrainGroup", "--metaserver=m", "--brokerGroup=g", "--wait").values["wait"] == "60000"
    assert read("DrainGroup", "--metaserver=m", "--brokerGroup=g", "--wait=5").values["wait"] == "5000"
    assert read("DrainGroup", "--metaserver=m", "--brokerGroup=g").values["wait"] == ""


def test_omitted_options_are_not_sent():
    options = read("Clients", "--metaserver=m", "--app=shop")
    assert options.command.arguments(options.values) == {"action": "Clients", "app": "shop"}


def test_reset_offset_action_is_sent_as_code():
    """Weakness 33: QMQ's ResetOffset never sent a request, even with --action=1."""
    options = read("ResetOffset", "--metaserver=m", "--subject=s", "--group=g", "--action=1")
    words = {"action": "ResetOffset", "subject": "s", "group": "g", "code": "1"}
    assert options.command.arguments(options.values).items() >= words.items() and options.command.fault_of(words) == ""


@pytest.mark.parametrize(
    "words, text",
    [
        ({}, "once"),
        ({"code": "1", "to": "latest"}, "once"),
        ({"to": "time"}, "--to=time needs --value"),
        ({"to": "sequence"}, "--to=sequence needs --value"),
        ({"to": "latest", "value": "3"}, "takes no --value"),
        ({"code": "2", "value": "3"}, "takes no --value"),
    ],
)
def test_reset_offset_takes_one_position(words, text):
    assert text in read("ResetOffset", "--metaserver=m", "--subject=s", "--group=g").command.fault_of(words)


def test_help_lists_every_command_within_80_columns():
    text = build_parser({}, now_ms=0).format_help()
    assert max(map(len, text.splitlines())) <= 80
    for name in ("AddBroker", "MarkReadonly", "Doctor", "completion", "exit status"):
        assert name in text


def test_options_may_stand_before_the_command():
    options = parse(["--metaserver=127.0.0.1:8080", "--json", "ListBrokers", "--brokerGroup=g1"], {}, now_ms=0)
    assert options.command.name == "ListBrokers" and options.json and options.values["brokerGroup"] == "g1"
    with pytest.raises(WrongUsage):
        parse(["--metaserver=127.0.0.1:8080"], {}, now_ms=0)


def test_empty_required_option_is_wrong_usage():
    with pytest.raises(WrongUsage, match="--subject is empty"):
        parse(["Produce", "--metaserver=127.0.0.1:8080", "--subject=", "--property=a=1"], {}, now_ms=0)


def test_first_metaserver_that_accepts_is_used():
    with socket.create_server(("127.0.0.1", 0)) as dead:
        gone = Address("127.0.0.1", dead.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        up = Address("127.0.0.1", listener.getsockname()[1])
        assert reachable(Address.parse_several(f"{gone}, {up}")) == up
    assert reachable((gone, up)) == gone
