"""Core. Commands for messages: options, message formats, choice of dead letters."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from random import Random

import pytest

from qmq.codec import (
    batch_encoder,
    decode_message,
    decode_properties,
    encode_message,
    join_batch,
    label_of,
    stored_body,
    with_properties,
)
from qmq.dead_letters import REASON, SEQUENCE
from qmq.message import CONTENT_ENCODING, TIMES, Message
from qmq.message_view import body_json
from qmq.proto import qmq_pb2 as pb
from qmq.redrive.redriving import Choice, batches_of, others_of, ranges_of
from qmq.remoting.commands import Piece
from qmq.tools.commands import COMMANDS
from qmq.tools.files import NoInput, read_body
from qmq.tools.messages.brokers import Looker
from qmq.tools.messages.browse import _Reader, is_newest_first
from qmq.tools.messages.lines import line_of, message_json, to_json, typed_messages
from qmq.tools.messages.redrive import _Pace
from qmq.tools.usage import WrongUsage, parse

NOW_MS = 1_800_000_000_000


def read(*typed):
    return parse([*typed, "--metaserver=m:1"], {}, now_ms=NOW_MS)


def problem(*typed):
    options = read(*typed)
    return options.command.fault_of(options.command.arguments(options.values))


def messages(*typed, lines=()):
    options = read("Produce", "--subject=s", *typed)
    assert options.command.fault_of(options.command.arguments(options.values)) == ""
    return list(typed_messages(options.values, lines))


# Options.


@pytest.mark.parametrize(
    "typed, problem_text",
    [
        ("Produce --subject=s", "nothing to send"),
        ("Produce --subject=s --file=- --body=a", "--file excludes"),
        ("Produce --subject=s --property a=1 --content-type=a/b", "--content-type needs --body"),
        ("Produce --subject=s --body=a --content-type=a/b", ""),
        ("Produce --subject=s --file=- --property a=1", "--file excludes"),
        ("Produce --subject=s --file=- --count=2", "--file excludes"),
        ("Produce --subject=s --property a=1 --count=0", "--count is at least 1"),
        ("Produce --subject=a/b --property a=1", "slashes"),
        ("Consume --subject=s --ack", "--ack needs --group"),
        ("Consume --subject=s --group=a/b", "slashes"),
        ("Browse --subject=s --deadLetters", "go together"),
        ("Tail --subject=s --group=g", "go together"),
        ("Browse --subject=s --limit=0", "--limit is at least 1"),
        ("Redrive --subject=s --group=g --rate=0", "--rate is at least 1"),
        ("Redrive --subject=%DEAD_RETRY%s --group=g", ""),
        ("Consume --subject=s --group=g --ack --start=90m", ""),
        ("Browse --subject=s --deadLetters --group=g", ""),
    ],
)
def test_conflicting_options_are_rejected(typed, problem_text):
    found = problem(*typed.split(" "))
    assert problem_text in found and bool(problem_text) == bool(found)


def test_property_names_are_unique():
    typed = read("Produce", "--subject=s", "--property", "a=1", "--property=b=x=y", "--property", "c=")
    assert json.loads(typed.values["property"]) == {"a": "1", "b": "x=y", "c": ""}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(WrongUsage):
            read("Produce", "--subject=s", *(word for pair in wrong for word in ("--property", pair)))


@pytest.mark.parametrize("typed, sent", [("latest", "latest"), ("2d", str(NOW_MS - 2 * 86_400_000)), ("5", "5")])
def test_a_start_is_a_word_or_a_moment(typed, sent):
    assert read("Consume", "--subject=s", f"--start={typed}").values["start"] == sent
    with pytest.raises(WrongUsage):
        read("Consume", "--subject=s", "--start=Latest")


@pytest.mark.parametrize(
    "typed, newest",
    [
        ("", True),
        ("--since=1h", False),
        ("--sequence=5", False),
        ("--sequence=5 --order=newest", True),
        ("--order=oldest", False),
        ("--until=1h", True),
    ],
)
def test_browse_reads_forwards_from_a_position(typed, newest):
    assert is_newest_first(read("Browse", "--subject=s", *typed.split()).values) is newest


def test_unknown_redrive_names_the_dead_letters():
    look = COMMANDS["Redrive"].look_with("m:1", {"subject": "a b", "group": "g"})
    assert look == "tools.sh Browse --metaserver=m:1 --subject='a b' --deadLetters --group=g"


# Typed messages.


def test_count_repeats_the_message():
    made = messages("--property", "a=1", "--tag=x,y", "--orderKey=k", "--count=3")
    assert [(message.properties, message.tags, message.order_key, message.id) for message in made] == [
        ({"a": "1"}, {"x", "y"}, "k", None)
    ] * 3
    assert len({id(message) for message in made}) == 3, "each gets an id of its own"


def test_members_of_a_json_object_are_properties():
    [made] = messages('--json-body={"a": 1, "b": true, "c": [1, {"d": "é"}], "e": null, "f": "x"}', "--property=f=y")
    assert made.properties == {"a": 1, "b": True, "c": '[1, {"d": "é"}]', "f": "y"}
    assert decode_message(encode_message(Message("s", made.properties, id="i"), 0))["b"] is True


def test_bad_lines_do_not_stop_the_others():
    made = messages("--file=-", lines=['{"a": 1}\n', "\n", "{", "[1]", '{"properties": {}, "tags": "x"}', '{"b": 2}'])
    assert [message if isinstance(message, str) else dict(message.properties) for message in made[:1] + made[-1:]] == [
        {"a": 1},
        {"b": 2},
    ]
    assert made[1].startswith("line 3: not JSON") and made[2] == "line 4: not a JSON object"
    assert made[3] == "line 5: 'tags' is no list"


def test_produce_reads_the_output_of_browse():
    shown = message_json(
        id="i1",
        broker_group="g1",
        sequence=7,
        properties={"a": "1", "qmq_orderKey": "k"},
        tags={"y", "x"},
        created_ms=5,
        stored=6,
        problem="",
    )
    assert shown == {
        "id": "i1",
        "brokerGroup": "g1",
        "sequence": 7,
        "created": 5,
        "tags": ["x", "y"],
        "stored": 6,
        "orderKey": "k",
        "properties": {"a": "1"},
    }
    [made] = messages("--file=-", "--tag=z", lines=[json.dumps(shown)])
    assert (made.id, made.properties, made.tags, made.order_key) == ("i1", {"a": "1"}, {"x", "y", "z"}, "k")


def test_message_lines_have_no_control_characters():
    shown = message_json(
        id="i\x1b[2J", broker_group="g1", sequence=7, properties={"a": "\x9b\n"}, tags=["x"], created_ms=1_000
    )
    line = line_of(shown, "line")
    assert line == '1970-01-01 00:00:01Z  g1/7  i\\u001b[2J  [x]  {"a": "\\u009b\\n"}'
    assert json.loads(line_of(shown, "json")) == shown and line_of(shown, "properties").startswith('{"a": "')


# Bodies.


@pytest.mark.parametrize(
    ("typed", "body", "content_type"),
    [
        (["--body=[1]"], b"[1]", "application/json"),
        (["--body=no JSON"], b"no JSON", None),
        (["--body=@{file}"], b"\xff[1]", None),
        (["--body=@{file}", "--content-type=image/png"], b"\xff[1]", "image/png"),
        (["--property=a=1", "--body={}", "--content-type=text/x", "--count=2"], b"{}", "text/x"),
    ],
)
def test_body_is_typed_or_read_from_a_file(tmp_path, typed, body, content_type):
    (tmp_path / "file").write_bytes(b"\xff[1]")
    options = read("Produce", "--subject=s", *(word.replace("{file}", str(tmp_path / "file")) for word in typed))
    assert options.command.fault_of(options.command.arguments(options.values)) == ""
    made = list(typed_messages(options.values, (), read_body(options.values["body"])))
    assert [(message.body, message.content_type) for message in made] == [(body, content_type)] * len(made)


def test_unreadable_body_is_named(tmp_path):
    with pytest.raises(NoInput, match="the body cannot be read from"):
        read_body(f"@{tmp_path}/none")
    with pytest.raises(NoInput, match="the body cannot be read from"):
        read_body(f"@{tmp_path}")
    assert read_body("a@b") == b"a@b"


def stored(message, sequence=3):
    """Return a message as a broker's Browse shows it, with 10 bytes of its body."""
    data = encode_message(message, 77)
    texts, body = decode_properties(data), stored_body(data)
    shown = pb.BrowsedMessage(sequence=sequence, id=message.id, tags=message.tags, stored_ms=5, created_ms=77)
    shown.properties.extend(pb.Property(name=name, value=value) for name, value in texts.items())
    if body is not None:
        shown.body_bytes, shown.body = len(body), body[:10]
    return shown


class Broker:
    """Sends parts of 7 bytes of one message's body, until retention deletes it."""

    broker_group = "g1"

    def __init__(self, message, parts=1000):
        self._body, self._parts = stored_body(encode_message(message, 77)), parts

    async def ask(self, request):
        assert (request.begin, request.end, request.messages_max) == (3, 4, 1)
        self._parts -= 1
        part = self._body[request.body_begin :][:7]
        return pb.BrowseAnswer(messages=[pb.BrowsedMessage(sequence=3, body=part)] if self._parts >= 0 else [])

    whole_body = Looker.whole_body


CONTENT = {"at": datetime(2026, 1, 31, tzinfo=UTC), "no": 7, "x": 0.5, "paid": True, "text": "7"}


@pytest.mark.parametrize("body", [b'{"a": "\xc3\xa9\\u001b"}', bytes(range(256)), b"", None])
async def test_produced_body_is_shown_by_browse(body):
    sent = Message(
        "s", CONTENT, body=body, content_type=None if body is None else "x/y", tags={"a"}, id="i1", order_key="k"
    )
    shown = await _Reader(1 << 20).read(Broker(sent), stored(sent))
    [again] = messages("--file=-", lines=[to_json(shown)])
    assert encode_message(again, 77) == encode_message(sent, 77)


async def test_compressed_bodies_are_shown_whole():
    sent = Message("s", body=b"0123456789" * 100, content_type="text/x", id="i1")
    packed = batch_encoder("s", 77, 1)(sent)
    broker, shown = Broker(sent), stored(sent)
    broker._body = stored_body(packed)
    shown.body_bytes, shown.body = len(broker._body), broker._body[:9]
    shown.properties.add(name=CONTENT_ENCODING, value="zstd")
    found = await _Reader(1 << 20).read(broker, shown)
    assert found["body"] == "0123456789" * 100 and found["bodyEncoding"] == "zstd" and "bodyCut" not in found


async def test_cut_body_is_not_sent_again():
    sent = Message("s", body=b"0123456789" * 9, id="i1")
    for shown in (
        await _Reader(0).read(Broker(sent), stored(sent)),
        await _Reader(1 << 20).read(Broker(sent, parts=2), stored(sent)),
    ):
        [problem] = messages("--file=-", lines=[to_json(shown)])
        assert problem == "line 1: its body is cut; Browse --json prints whole ones"


async def test_bodies_beyond_the_sum_are_cut():
    sent, reader = Message("s", body=b"x" * 60, id="i1"), _Reader(100)
    cut = [(await reader.read(Broker(sent), stored(sent))).get("bodyCut", False) for _ in range(3)]
    assert cut == [False, True, True]


def test_message_line_shows_its_body():
    body = body_json(b"a\n\x1b[2J\xe2\x80\xae", 9, content_type="text/x", encoding=None, bytes_max=99)
    shown = message_json(id="i", broker_group="g1", sequence=7, properties={}, tags=[], created_ms=1_000, body=body)
    assert line_of(shown, "line") == "1970-01-01 00:00:01Z  g1/7  i  {}  text/x, 9 bytes: a\\n\\u001b[2J\\u202e"


# Dead letters.


def dead(id, *, tags=(), reason="it broke", sequence=0, order_key=None, body=None, **properties):
    """Return a message as sent, and as stored when it is a dead letter."""
    sent = encode_message(Message("s", properties, tags=tags, id=id, order_key=order_key, body=body), 77)
    return sent, with_properties(sent, {TIMES: "3", REASON: reason, SEQUENCE: str(sequence)})


def pieces(*letters, pull_sequence=1 << 40, sequence=10):
    return [Piece(pull_sequence, sequence, len(letters), 0, 1, memoryview(join_batch(letters)))]


def chosen(choice, *letters, bounds=(0, 1 << 62)):
    return list(choice.of("g1", pieces(*letters), bounds))


def test_dead_letter_returns_byte_for_byte():
    content = {"no": 7, "text": "x" * 9_000}
    sent, letter = dead("i1", tags=["b", "a"], reason="é" * 300, order_key="k", body=bytes(range(256)), **content)
    [found] = chosen(Choice(), letter)
    assert found.data == sent and found.label == label_of(["a", "b"], "k")
    assert found.json() == {"id": "i1", "brokerGroup": "g1", "sequence": 10, "times": "3", "deadReason": "é" * 300}


@pytest.mark.parametrize(
    "choice, expected",
    [
        (Choice(), "abc"),
        (Choice(id="b"), "b"),
        (Choice(reason="time"), "ac"),
        (Choice(reason="time", tags=frozenset({"x"})), "a"),
        (Choice(properties={"no": "1"}), "ab"),
        (Choice(properties={"no": "1", "to": "y"}), "b"),
        (Choice(tags=frozenset({"x", "y"})), ""),
    ],
)
def test_dead_letters_are_filtered(choice, expected):
    letters = [
        dead("a", tags=["x"], reason="timeout", no=1)[1],
        dead("b", tags=["y"], reason="refused", no=1, to="y")[1],
        dead("c", reason="out of time", no=2)[1],
    ]
    assert "".join(letter.id for letter in chosen(choice, *letters)) == expected


def test_dead_letters_are_filtered_by_time():
    letters = [dead(f"i{at}")[1] for at in range(5)]
    assert [letter.sequence for letter in chosen(Choice(), *letters, bounds=(11, 14))] == [11, 12, 13]


def test_undecodable_message_stays_a_dead_letter():
    assert [letter.id for letter in chosen(Choice(), b"\xff" * 40, dead("i1")[1])] == ["i1"]


@pytest.mark.parametrize("seed", range(20))
def test_batches_keep_order_and_bounds(seed):
    rng = Random(seed)
    letters = chosen(
        Choice(), *[dead(f"i{at}", text="x" * rng.randrange(300))[1] for at in range(rng.randrange(1, 40))]
    )
    most, size = rng.randint(1, 9), rng.randint(1, 900)
    cut = list(batches_of(letters, messages_max=most, bytes_max=size))
    assert [letter for batch in cut for letter in batch] == letters
    assert all(0 < len(batch) <= most for batch in cut)
    assert all(sum(len(letter.data) for letter in batch) <= size or len(batch) == 1 for batch in cut)


def test_pull_sequences_are_acked_as_ranges():
    letters = chosen(Choice(), *[dead(f"i{at}")[1] for at in range(6)])
    base = 1 << 40
    assert ranges_of(letters) == [(base, base + 6)]
    assert ranges_of([letters[at] for at in (0, 1, 3, 5)]) == [
        (base, base + 2),
        (base + 3, base + 4),
        (base + 5, base + 6),
    ]
    assert ranges_of([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_other_dead_letters_are_skipped(seed):
    rng, gap = Random(seed), Random(seed).choice([5, 9])
    handed = [
        piece
        for at in range(rng.randint(1, 4))
        for piece in pieces(*[dead("i")[1]] * rng.randint(1, 5), pull_sequence=at * gap)
    ]
    letters = [letter for letter in Choice().of("g1", handed, (0, 1 << 62)) if rng.random() < 0.4]
    others = {at for begin, end in others_of(handed, letters) for at in range(begin, end)}
    everything = {piece.pull_sequence + at for piece in handed for at in range(piece.count)}
    assert others == everything - {letter.pull_sequence for letter in letters}


async def test_redrive_keeps_its_rate(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    pace = _Pace(4)
    monkeypatch.setattr("asyncio.sleep", sleep)
    for _ in range(3):
        await pace.wait(8)
    assert slept == pytest.approx([0, 2, 4], abs=0.5)
