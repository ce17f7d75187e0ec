"""Shell. Commands about messages against a real cluster: produce, browse, tail, consume, redrive."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from operator import itemgetter

import pytest

import qmq
from qmq.audit.data_source import TableReader, TableStream
from qmq.remoting import commands
from qmq.remoting.commands import Command, Nack, NackEntry, Verdict
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.tools.call import Address
from qmq.tools.commands import COMMANDS
from qmq.tools.messages import redrive as redrive_module
from qmq.tools.session import Session
from tests.integration.cluster_world import Wire, pull, shared_cluster, until
from tests.integration.tools_world import (
    DONE,
    REFUSED,
    TOOLS,
    UNKNOWN,
    UNREACHABLE,
    USAGE,
    environment,
    run_at_terminal,
    typed,
)
from tests.support.ports import free_ports
from tests.support.waiting import until_async

COUNT = 12


cluster = shared_cluster(groups=("g1", "g2"), lease_ms=5_000)


@pytest.fixture(scope="module")
def tokens(cluster):
    def make(role, **words):
        return cluster.manage("AddToken", name=f"plain {role} {words}"[:60], role=role, **words)["token"]

    return {role: make(role) for role in ("viewer", "operator", "admin", "client")} | {
        "narrow": make("client", subjects="consume:mine"),
        "elsewhere": make("client", groups="g2"),
    }


def lines(ended, status=DONE):
    """Return the objects that a command printed with --json, one a line."""
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def browse(cluster, *words, **options):
    [answer] = lines(cluster.tool("Browse", "--json", *words, **options))
    assert answer["unasked"] == {}
    return answer["messages"]


def ids(messages):
    return [message["id"] for message in messages]


def now_ms():
    return time.time_ns() // 1_000_000


def send(cluster, *messages):
    """Send messages in different milliseconds, all stored; return the receipts."""

    async def main():
        receipts = []
        async with cluster.producer() as sender:
            for message in messages:
                receipts.append(await sender.send(message))
                stored_ms = now_ms()
                await until_async(lambda at=stored_ms: now_ms() > at, "the clock goes on")
        return receipts

    receipts = asyncio.run(main())
    assert all(receipt.is_stored for receipt in receipts), receipts
    return receipts


def make_dead(cluster, subject, group, reasons):
    """Make dead letters of all waiting messages, with a reason by the message's number; return their count."""
    dead = 0
    for name in ("g1", "g2"):
        with Wire(cluster.broker(name, "master").serve_port, token=cluster.token) as wire:
            terms = {"subject": subject, "group": group, "consumer": "c", "start": "earliest", "deliveries_max": 32}
            answer = wire.ask(Command.SUBSCRIBE, commands.encode_subscribe(**terms))
            subscription = commands.decode_json(answer.body)["subscription"]
            while pieces := pull(wire, subscription):
                for piece in pieces:
                    for at in range(piece.count):
                        entry = NackEntry(
                            piece.pull_sequence + at, piece.pull_sequence + at + 1, 0, Verdict.DEAD_LETTER
                        )
                        reason = reasons[(piece.sequence + at) % len(reasons)]
                        nack = wire.ask(Command.NACK, commands.encode_nack(Nack(subscription, [entry], reason)))
                        assert nack.code == 0, bytes(nack.body)
                        dead += 1
    return dead


def failed(cluster, subject, count=COUNT, reasons=("timeout", "refused")):
    """Send messages, and make each a dead letter of group g."""
    cluster.send_all(subject, count)
    assert make_dead(cluster, subject, "g", reasons) == count


def mailbox(cluster, subject):
    return browse(cluster, "--limit=1000", "--order=oldest", subject=retry_subject(subject, "g"))


def redrive(cluster, subject, *words, **options):
    return cluster.tool("Redrive", "--json", *words, subject=subject, group="g", **options)


@pytest.fixture
def process():
    """Start commands that run until the test ends them."""
    started = []

    def start(cluster, command, *words, **options):
        started.append(
            subprocess.Popen(
                [TOOLS, command, f"--metaserver={cluster.metaserver}", *typed(options), *words],
                env=environment(cluster.token, PYTHONUNBUFFERED="1"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


# Produce.


def test_each_produced_message_has_its_outcome(cluster, subject):
    sent = lines(cluster.tool("Produce", "--json", "--property", "a=1", "--tag=x", "--count=3", subject=subject))
    assert [row["outcome"] for row in sent] == ["stored"] * 3
    stored = {(row["brokerGroup"], row["sequence"], row["id"]) for row in sent}
    shown = browse(cluster, subject=subject)
    assert {(row["brokerGroup"], row["sequence"], row["id"]) for row in shown} == stored
    assert all((row["tags"], row["properties"]) == (["x"], {"a": "1"}) for row in shown)


@pytest.mark.parametrize("place", ["file", "standard input"])
def test_line_with_invalid_unicode_is_refused_alone(cluster, subject, tmp_path, place):
    content = b'{"n": "1"}\n{"n": "\xe9"}\n\xff\n{"properties": {}, "id": "\xe9"}\n{"n": "3"}\n'
    (file := tmp_path / "lines").write_bytes(content)
    with open(file, "rb") as stdin:
        ended = subprocess.run(
            [
                TOOLS,
                "Produce",
                f"--metaserver={cluster.metaserver}",
                f"--subject={subject}",
                "--json",
                f"--file={file if place == 'file' else '-'}",
            ],
            env=environment(cluster.token),
            stdin=stdin,
            capture_output=True,
            text=True,
        )
    refused = ["refused"] * 3
    assert [row["outcome"] for row in lines(ended, REFUSED)] == ["stored", *refused, "stored"]
    assert sorted(row["properties"]["n"] for row in browse(cluster, subject=subject)) == ["1", "3"]


def test_interrupted_produce_reports_an_unknown_outcome(cluster, subject, process):
    producing = process(cluster, "Produce", "--file=-", subject=subject)
    producing.stdin.write('{"n": "1"}\n' * 1_000)
    producing.stdin.flush()
    assert "stored" in producing.stdout.readline()
    producing.send_signal(signal.SIGINT)
    _, output = producing.communicate(timeout=120)
    assert producing.returncode == UNKNOWN and "before anything was changed" not in output


def test_produce_with_unwritable_outcomes_reports_unknown(cluster, subject):
    command = [TOOLS, "Produce", f"--metaserver={cluster.metaserver}", f"--subject={subject}", "--json-body={}"]
    with open("/dev/full", "w") as full:
        environ = environment(cluster.token, PYTHONUNBUFFERED="1")
        ended = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    assert len(browse(cluster, subject=subject)) == 1
    assert ended.returncode == UNKNOWN and "nothing was changed" not in ended.stderr


def test_dry_run_sends_nothing(cluster, subject):
    checked = lines(cluster.tool("Produce", "--json", "--dry-run", '--json-body={"a": 5}', subject=subject))
    assert checked == [{"outcome": "would be sent", "properties": {"a": 5}}]
    assert cluster.tool("Produce", "--dry-run", "--file=-", stdin="[]", subject=subject).returncode == REFUSED
    assert browse(cluster, subject=subject) == []


def test_unreachable_or_refusing_server_is_named(cluster, subject, tokens):
    (closed,) = free_ports(1)
    for command in (
        "Produce --property a=1",
        "Consume --limit=1",
        "Tail --limit=1",
        "Browse",
        "Redrive --group=g --yes",
    ):
        name, *words = command.split()
        away = cluster.tool(name, *words, metaserver=f"127.0.0.1:{closed}", subject=subject)
        assert away.returncode == UNREACHABLE and "cannot reach a metaserver" in away.stderr, command
        refused = cluster.tool(name, *words, token="qmq_x_y", subject=subject)
        assert refused.returncode == REFUSED and refused.stderr and refused.stdout == "", command
    empty = cluster.tool("Produce", "--file=-", stdin="\n", subject=subject)
    assert empty.returncode == USAGE and "no message to send" in empty.stderr


def test_bodies_go_through_the_commands(cluster, subject, tmp_path):
    body = json.dumps({"lines": [{"sku": f"A-{at}", "note": "é\u202e" * 9} for at in range(9_000)]}, ensure_ascii=False)
    (file := tmp_path / "order.json").write_text(body)
    [sent] = lines(cluster.tool("Produce", "--json", "--property=n=1", f"--body=@{file}", subject=subject))
    [shown] = browse(cluster, id=sent["id"], subject=subject)
    assert (shown["body"], shown["contentType"]) == (body, "application/json") and shown["bodyBytes"] > 1 << 19
    elsewhere = f"{subject}.copy"
    printed = cluster.tool("Browse", "--json", subject=subject).stdout
    again = "\n".join(json.dumps(row) for row in json.loads(printed)["messages"])
    lines(cluster.tool("Produce", "--json", "--file=-", stdin=again, subject=elsewhere))
    consumed = cluster.tool("Consume", "--json", "--start=earliest", "--limit=1", subject=elsewhere)
    assert lines(consumed)[0]["body"] == body and "\u202e" not in printed
    line = cluster.tool("Tail", "--last=1", "--limit=1", subject=elsewhere).stdout
    assert "application/json, " in line and '{"lines": [{"sku": "A-0"' in line and len(line) < 1_500
    missing = cluster.tool("Produce", f"--body=@{tmp_path}/none", subject=subject)
    assert missing.returncode == USAGE and "the body cannot be read" in missing.stderr


# Browse.


def test_browse_filters_messages(cluster, subject):
    receipts = send(
        cluster, *[qmq.Message(subject, {"no": n, "kind": n % 3}, id=f"m{n}", tags={f"t{n % 2}"}) for n in range(6)]
    )
    middle_ms = browse(cluster, id="m3", subject=subject)[0]["stored"]
    send(cluster, *[qmq.Message(subject, {"no": n, "kind": n % 3}, id=f"m{n}") for n in range(6, COUNT)])
    newest = [f"m{n}" for n in reversed(range(COUNT))]
    assert ids(browse(cluster, subject=subject)) == newest
    assert ids(browse(cluster, "--order=oldest", "--limit=4", subject=subject)) == newest[::-1][:4]
    assert ids(browse(cluster, property="no=7", subject=subject)) == ["m7"]
    assert ids(browse(cluster, "--property=kind=1", "--property=no=4", subject=subject)) == ["m4"]
    assert ids(browse(cluster, tag="t1", subject=subject)) == ["m5", "m3", "m1"]
    assert ids(browse(cluster, tag="t1", id="m4", subject=subject)) == []
    assert "m3" in ids(browse(cluster, since=middle_ms, subject=subject))
    assert "m3" not in ids(browse(cluster, until=middle_ms, subject=subject))
    both = [*browse(cluster, until=middle_ms, subject=subject), *browse(cluster, since=middle_ms, subject=subject)]
    assert sorted(ids(both)) == sorted(newest)
    place = receipts[2]
    [at, *_] = browse(cluster, sequence=place.sequence, brokerGroup=place.broker_group, subject=subject)
    assert (at["id"], at["sequence"], at["brokerGroup"]) == ("m2", place.sequence, place.broker_group)


def test_silent_broker_group_is_named_beside_the_others(cluster, subject):
    receipts = send(cluster, *[qmq.Message(subject, {}, id=f"m{n}") for n in range(COUNT)])
    cluster.end(cluster.broker("g2", "master").hostname)
    try:
        [answer] = lines(cluster.tool("Browse", "--json", subject=subject), UNREACHABLE)
    finally:
        cluster.begin(cluster.broker("g2", "master").hostname)
    assert sorted(ids(answer["messages"])) == sorted(r.message_id for r in receipts if r.broker_group == "g1")
    assert list(answer["unasked"]) == ["g2"]
    until(lambda: cluster.tool("Browse", subject=subject).returncode == DONE, "it is back")


# Tail.


def test_tail_shows_new_messages_over_a_swap(cluster, subject, process):
    send(cluster, *[qmq.Message(subject, {"n": str(n)}, id=f"old{n}") for n in range(5)])
    tail = process(cluster, "Tail", "--last=2", "--json", subject=subject)
    first = [json.loads(tail.stdout.readline())["id"] for _ in range(2)]
    assert first == ["old3", "old4"]
    sent = [f"new{n}" for n in range(COUNT)]
    receipts = send(cluster, *[qmq.Message(subject, {}, id=id) for id in sent])
    assert len({receipt.broker_group for receipt in receipts}) == 2
    assert sorted(json.loads(tail.stdout.readline())["id"] for _ in sent) == sorted(sent)
    assert cluster.tool("SwapRoles", "--yes", brokerGroup="g1").returncode == DONE
    more = [f"more{n}" for n in range(COUNT)]
    send(cluster, *[qmq.Message(subject, {}, id=id) for id in more])
    assert sorted(json.loads(tail.stdout.readline())["id"] for _ in more) == sorted(more)
    tail.send_signal(signal.SIGINT)
    assert tail.communicate(timeout=120)[0] == "" and tail.returncode == DONE


def test_tail_leaves_no_consumer_group(cluster, subject, process):
    tail = process(cluster, "Tail", "--last=0", "--limit=2", "--tag=x", subject=subject)
    while tail.poll() is None:
        send(cluster, qmq.Message(subject, {"n": "1"}, tags={"x"}), qmq.Message(subject, {"n": "2"}, tags={"y"}))
    shown, complaints = tail.communicate()
    assert tail.returncode == DONE and complaints == ""
    assert len(shown.splitlines()) == 2 and all("[x]" in line for line in shown.splitlines())
    groups = json.loads(cluster.tool("Consumers", "--json", subject=subject).stdout)["data"]["groups"]
    assert groups == []


# Consume.


def test_only_unacked_messages_come_again(cluster, subject):
    cluster.send_all(subject, COUNT)
    options = {"group": "g", "start": "earliest", "wait": 60, "subject": subject}
    assert len(lines(cluster.tool("Consume", "--json", f"--limit={COUNT}", **options))) == COUNT
    again = lines(cluster.tool("Consume", "--json", "--ack", "--limit=5", **options))
    assert len(again) == 5 and all(row["times"] >= 2 for row in again)
    rest = lines(cluster.tool("Consume", "--json", "--ack", f"--limit={COUNT - 5}", **options))
    assert sorted(ids(again) + ids(rest)) == sorted(f"m-{at}" for at in range(COUNT))
    assert lines(cluster.tool("Consume", "--json", **options | {"wait": 3})) == []


def test_consume_without_a_group_is_broadcast(cluster, subject):
    send(cluster, *[qmq.Message(subject, {"n": str(n)}, id=f"m{n}", tags={f"t{n % 2}"}) for n in range(6)])
    for _ in range(2):
        seen = cluster.tool("Consume", "--start=earliest", "--format=properties", "--limit=6", subject=subject)
        assert sorted(json.loads(line)["n"] for line in seen.stdout.splitlines()) == list("012345"), seen.stderr
    odd = lines(cluster.tool("Consume", "--json", "--start=1h", "--tags=t1", "--limit=3", subject=subject))
    assert sorted(ids(odd)) == ["m1", "m3", "m5"]


def test_logs_are_read_as_table_and_stream(cluster, subject):
    """As Spark's tasks read them: routes from the metaserver, frames from brokers."""
    cluster.send_all(subject, COUNT, name="m")
    options = {"metaserver": cluster.metaserver, "token": cluster.token, "subject": subject}
    table = TableReader(options, ["broker_group", "id"])
    rows = [row for part in table.partitions() for batch in table.read(part) for row in batch.to_pylist()]
    assert sorted(row["id"] for row in rows) == sorted(f"m-{at}" for at in range(COUNT))
    assert {row["broker_group"] for row in rows} <= {"g1", "g2"}
    stream, seen = TableStream(options, ["id"]), []
    at = stream.initialOffset()
    assert sorted(at) == ["g1", "g2"]

    def goes_on():
        nonlocal at
        start, at = at, stream.latestOffset(at)
        for part in stream.partitions(start, at):
            seen.extend(row["id"] for batch in stream.read(part) for row in batch.to_pylist())
        return len(seen) >= COUNT

    until(goes_on, "the slaves know that both copies have the messages")
    assert sorted(seen) == sorted(f"m-{at}" for at in range(COUNT)), "each once"


# Dead letters.


def test_dead_letters_are_browsed_and_redriven_by_choice(cluster, subject, tmp_path):
    """The whole way: sent, failed, browsed, planned, returned with a receipt, consumed."""
    failed(cluster, subject)
    letters = browse(cluster, "--deadLetters", "--limit=100", subject=subject, group="g")
    assert sorted(ids(letters)) == sorted(f"m-{at}" for at in range(COUNT))
    assert {letter["properties"]["qmq_deadReason"] for letter in letters} == {"timeout", "refused"}
    timeouts = {letter["id"] for letter in letters if letter["properties"]["qmq_deadReason"] == "timeout"}

    [plan] = lines(redrive(cluster, subject, "--dry-run", "--reason=timeout"))
    assert {letter["id"] for letter in plan["chosen"]} == timeouts and plan["deadLetters"] == COUNT
    assert mailbox(cluster, subject) == []

    out = tmp_path / "receipt.json"
    [receipt] = lines(redrive(cluster, subject, "--yes", "--reason=timeout", out=out))
    assert {letter["id"] for letter in receipt["moved"]} == timeouts and json.loads(out.read_text()) == receipt
    assert not receipt["unknown"] and not receipt["left"] and out.stat().st_mode & 0o077 == 0
    arrived = {(message["brokerGroup"], message["sequence"]): message for message in mailbox(cluster, subject)}
    assert {(letter["brokerGroup"], letter["newSequence"]) for letter in receipt["moved"]} == set(arrived)
    for letter in receipt["moved"]:
        back = arrived[letter["brokerGroup"], letter["newSequence"]]
        assert back["id"] == letter["id"] and list(back["properties"]) == ["x"]

    consumed = lines(cluster.tool("Consume", "--json", "--ack", subject=subject, group="g", wait=10))
    assert {message["id"] for message in consumed} == timeouts and len(consumed) == len(timeouts)
    [rest] = lines(redrive(cluster, subject, "--yes"))
    assert {letter["id"] for letter in rest["moved"]} == {f"m-{at}" for at in range(COUNT)} - timeouts
    [nothing] = lines(redrive(cluster, subject, "--yes"))
    assert (nothing["deadLetters"], nothing["moved"]) == (0, [])


def test_dead_letters_are_redriven_over_a_chosen_subject(cluster, subject):
    chosen, limit = f"{subject}.dead", {"subject": subject, "group": "g"}
    cluster.send_all(chosen, 1, name="own")
    assert cluster.manage("LimitGroup", deadLettersTo=chosen, **limit)["deadLettersTo"] == chosen
    for name in ("g1", "g2"):
        data = cluster.data(cluster.broker(name, "master"))
        until(lambda at=data: any(chosen in file.read_text() for file in at.glob("*.json")), "its broker knows of it")

    failed(cluster, subject)
    assert browse(cluster, "--deadLetters", "--limit=100", subject=subject, group="g") == []
    want = f"--limit={COUNT + 1}"
    seen = lines(cluster.tool("Consume", "--json", "--ack", "--start=earliest", want, subject=chosen, group="people"))
    letters = [message for message in seen if message["properties"].get("qmq_deadGroup") == "g"]
    assert len(seen) == len(letters) + 1 and sorted(ids(letters)) == sorted(f"m-{at}" for at in range(COUNT))

    [receipt] = lines(redrive(cluster, subject, "--yes", **{"from": chosen}))
    assert sorted(letter["id"] for letter in receipt["moved"]) == sorted(ids(letters)) and not receipt["left"]
    assert sorted(ids(mailbox(cluster, subject))) == sorted(ids(letters))
    cluster.manage("LimitGroup", deadLettersTo="%DEAD_RETRY", **limit)
    assert cluster.manage("ListLimits", subject=subject) == []


def test_concurrent_redrives_return_each_dead_letter_once(cluster, subject, process):
    failed(cluster, subject, 60)
    both = [process(cluster, "Redrive", "--json", "--yes", subject=subject, group="g", rate=200) for _ in range(2)]
    moved = [letter["id"] for redrive in both for letter in json.loads(redrive.communicate(timeout=120)[0])["moved"]]
    [rest] = lines(redrive(cluster, subject, "--yes"))
    moved += ids(rest["moved"])
    assert sorted(moved) == sorted(f"m-{at}" for at in range(60)) == sorted(ids(mailbox(cluster, subject)))


def test_metaserver_redrives_like_the_command(cluster, subject):
    failed(cluster, subject, 6)
    words = {"subject": subject, "group": "g", "reason": "timeout"}
    found = cluster.manage("Browse", subject=subject, deadLettersOf="g")["messages"]
    chosen = [letter["id"] for letter in found if letter["properties"]["qmq_deadReason"] == "timeout"]
    assert len(found) == 6 and 0 < len(chosen) < 6
    plan = cluster.manage("Redrive", dryRun="true", **words)
    assert plan["wouldChange"] and (plan["before"]["deadLetters"], plan["after"]["moved"]) == (6, len(chosen))
    assert mailbox(cluster, subject) == []
    done = cluster.manage("Redrive", **words)
    assert (done["moved"], done["unknown"], done["left"]) == (len(chosen), 0, 0)
    assert sorted(ids(mailbox(cluster, subject))) == sorted(done["ids"]) == sorted(chosen)
    rows = cluster.manage("AuditTrail", name="Redrive", subject=subject)["rows"]
    assert [row["result"] for row in rows] == ["done", "begun"] and rows[0]["after"]["moved"] == len(chosen)
    assert cluster.manage("Redrive", **words)["moved"] == 0
    [rest] = lines(redrive(cluster, subject, "--yes"))
    assert len(rest["moved"]) == 6 - len(chosen)


def test_redrive_with_unwritable_receipt_reports_unknown(cluster, subject, tmp_path):
    failed(cluster, subject, 3)
    typed = f"{TOOLS} Redrive --metaserver={cluster.metaserver} --subject={subject} --group=g --yes --out={tmp_path}/r"
    ended = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; {typed}"], env=environment(cluster.token), capture_output=True, text=True
    )
    assert sorted(ids(mailbox(cluster, subject))) == ["m-0", "m-1", "m-2"]
    assert ended.returncode == UNKNOWN and "nothing was changed" not in ended.stderr
    assert "tools.sh Browse" in ended.stderr and list(tmp_path.iterdir()) == []


def test_interrupted_redrive_reports_its_progress(cluster, subject, process, tmp_path):
    failed(cluster, subject, 40)
    out = tmp_path / "receipt.json"
    slow = process(cluster, "Redrive", "--json", "--yes", subject=subject, group="g", rate=2, out=out)
    until(lambda: mailbox(cluster, subject), "some went back")
    slow.send_signal(signal.SIGINT)
    text, complaints = slow.communicate(timeout=120)
    assert slow.returncode == UNKNOWN, complaints
    receipt = json.loads(text)
    assert json.loads(out.read_text()) == receipt
    assert "Browse" in complaints and f"--subject={subject} --deadLetters --group=g" in complaints
    done = ids(receipt["moved"]) + ids(receipt["unknown"]) + ids(receipt["left"])
    assert sorted(done) == sorted(f"m-{at}" for at in range(40)) and receipt["moved"] and receipt["left"]
    [rest] = lines(redrive(cluster, subject, "--yes"))
    assert set(ids(receipt["left"])) <= set(ids(rest["moved"]))
    assert set(ids(mailbox(cluster, subject))) == {f"m-{at}" for at in range(40)}


def test_redrive_passes_over_messages_above_its_memory(cluster, subject, monkeypatch, capsys):
    monkeypatch.setattr("qmq.tools.messages.redrive.OTHERS_MAX", 5)
    monkeypatch.setattr("qmq.redrive.dead_letters.PULL_MESSAGES", 4)
    failed(cluster, subject, 40)
    last = max(browse(cluster, "--deadLetters", "--limit=99", subject=subject, group="g"), key=itemgetter("sequence"))
    values = {option.name: option.default or "" for option in COMMANDS["Redrive"].options}
    values |= {"subject": subject, "group": "g", "id": last["id"]}
    address = Address.parse(cluster.metaserver)
    assert redrive_module.run(Session(COMMANDS["Redrive"], address, cluster.token, values, True, False, True)) == DONE
    assert ids(json.loads(capsys.readouterr().out)["moved"]) == [last["id"]]
    [plan] = lines(redrive(cluster, subject, "--dry-run"))
    assert len(plan["chosen"]) < 39, "these come again later"
    lag = json.loads(cluster.tool("Lag", "--json", subject=dead_letter_subject(subject, "g")).stdout)["data"]["lag"]
    assert sum(row["messages"] for row in lag) == 39, "and all of them are dead letters still"


def test_dead_letters_keep_their_order_on_another_subject(cluster, subject):
    """Order holds within a broker group and for an order key; the other subject has only the other broker group."""
    elsewhere = f"{subject}.repaired"
    send(cluster, *[qmq.Message(subject, {"n": str(n)}, id=f"m{n}", order_key="k") for n in range(6)])
    cluster.send_all(elsewhere, 1)
    assert make_dead(cluster, subject, "g", ["timeout"]) == 6
    [[here], found] = [
        {message["brokerGroup"] for message in browse(cluster, *words, subject=subject)}
        for words in (["--deadLetters", "--group=g"], [])
    ]
    assert {here} == found
    cluster.tool("RemoveSubjectBrokerGroup", "--yes", "--force", subject=elsewhere, brokerGroup=here)

    def token(*patterns):
        return cluster.manage("AddToken", name="t", role="client", subjects=",".join(patterns))["token"]

    refused = redrive(cluster, subject, "--yes", to=elsewhere, token=token(f"consume:{subject}", f"redrive:{subject}"))
    assert refused.returncode == REFUSED and f"may not produce to '{elsewhere}'" in refused.stderr + refused.stdout
    assert len(browse(cluster, subject=elsewhere)) == 1
    [receipt] = lines(
        redrive(cluster, subject, "--yes", to=elsewhere, token=token(f"consume:{subject}", f"produce:{elsewhere}"))
    )
    assert ids(receipt["moved"]) == [f"m{n}" for n in range(6)] and receipt["to"] == elsewhere
    found = browse(cluster, "--order=oldest", subject=elsewhere)[1:]
    assert [(message["id"], message["orderKey"], list(message["properties"])) for message in found] == [
        (f"m{n}", "k", ["n"]) for n in range(6)
    ]
    assert {message["brokerGroup"] for message in found} == {"g1", "g2"} - {here}
    assert mailbox(cluster, subject) == [] and lines(redrive(cluster, subject, "--yes"))[0]["deadLetters"] == 0


def test_redrive_to_an_unused_subject_is_refused(cluster, subject):
    failed(cluster, subject, 2)
    for how in ("--dry-run", "--yes"):
        ended = redrive(cluster, subject, how, to=f"{subject}.typo")
        assert ended.returncode == REFUSED and f"{subject}.typo has no route yet" in ended.stderr
    assert cluster.tool("QuerySubjectRoute", subject=f"{subject}.typo").returncode == REFUSED
    assert lines(redrive(cluster, subject, "--yes"))[0]["deadLetters"] == 2


def test_plan_is_confirmed_at_a_terminal(cluster, subject):
    failed(cluster, subject, 3)
    for answer in ("n", ""):
        ended = run_at_terminal(
            "Redrive", cluster.metaserver, answer=answer, token=cluster.token, subject=subject, group="g"
        )
        assert ended.returncode == REFUSED and "3 of them go back to g" in ended.shown and "Do it? [y/N]" in ended.shown
        assert "not confirmed" in ended.shown and mailbox(cluster, subject) == []
    ended = run_at_terminal("Redrive", cluster.metaserver, answer="y", token=cluster.token, subject=subject, group="g")
    assert ended.returncode == DONE and "3 dead letters went back to g" in ended.stdout
    assert len(mailbox(cluster, subject)) == 3


def test_unredrivable_message_stays_and_is_named(cluster, subject):
    failed(cluster, subject, 8)
    letters = browse(cluster, "--deadLetters", subject=subject, group="g")
    name = letters[0]["brokerGroup"]
    assert cluster.tool("MarkReadonly", "--yes", brokerGroup=name).returncode == DONE
    until(lambda: cluster.manage("ListReadonly", brokerGroup=name), "it is marked")
    ended = redrive(cluster, subject, "--yes")
    assert cluster.tool("UnMarkReadonly", "--yes", brokerGroup=name).returncode == DONE
    receipt = json.loads(ended.stdout)
    here = {letter["id"] for letter in letters if letter["brokerGroup"] == name}
    assert set(ids(receipt["left"])) == here and all("operator" in letter["why"] for letter in receipt["left"])
    assert ended.returncode == (UNKNOWN if receipt["moved"] else REFUSED)
    [rest] = lines(redrive(cluster, subject, "--yes"))
    assert set(ids(rest["moved"])) == here, "they were dead letters all the time"
