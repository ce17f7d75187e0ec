"""Shell. Packets and the bodies of our commands, version 100: bytes with their meaning, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest

from qmq.errors import InvalidRequest
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.packet import PacketReader, packet_header, read_packet
from qmq.types import Epoch

FOLDER = Path(__file__).parent / "packet_v1"
REQUESTS, ANSWERS, REFUSED = (
    json.loads((FOLDER / f"{name}.json").read_text()) for name in ("requests", "answers", "refused")
)


def _pieces(rows):
    for row in rows:
        body = bytes.fromhex(row["body"])
        place = row["pull_sequence"], row["sequence"], row["count"]
        yield commands.piece_header(*place, len(body), crc32(body), row["flags"], row["times"]) + body


ENCODE = {
    "AUTHENTICATE": lambda m: commands.encode_json(**m),
    "PRODUCE": lambda m: (
        commands.produce_header(m["producer"], m["batch"], m["count"], m["crc"], m["subject"], m["flags"])
        + bytes.fromhex(m["body"])
    ),
    "PULL": lambda m: commands.encode_pull(commands.Pull(**m)),
    "ACK": lambda m: commands.encode_ack(commands.Ack(**m)),
    "NACK": lambda m: commands.encode_nack(
        commands.Nack(m["subscription"], [commands.NackEntry(*row) for row in m["entries"]], m["reason"])
    ),
    "BEGIN": lambda m: commands.encode_ack(commands.Ack(**m)),
    "HEARTBEAT": lambda m: b"",
    "FRAMES": lambda m: commands.offset_header(m["offset"]) + bytes.fromhex(m["data"]),
    "BEAT": lambda m: commands.encode_beat(commands.Beat(**m)),
    "CONFIRM": lambda m: commands.encode_confirmation(
        commands.Confirmation(Epoch(m["term"], m["boot"]), m["matched_end"], m["chain"])
    ),
    "Produced": lambda m: commands.encode_produced(
        commands.Produced(
            m["first_sequence"], m["stored"], m["durability"], [tuple(row) for row in m["refused"]], m["batch_bytes"]
        )
    ),
    "Pulled": lambda m: b"".join(_pieces(m["pieces"])),
    "Acked": lambda m: commands.encode_acked(m["acked_end"]),
    "error": lambda m: m["text"].encode(),
}


def _beat(beat):
    return beat._asdict() if beat.is_disk_full else {"wall_ms": beat.wall_ms}


DECODE = {
    "AUTHENTICATE": lambda body: commands.decode_json(body, token=str, app=str),
    "PRODUCE": lambda body: (p := commands.decode_produce(body))._asdict() | {"body": p.body.hex()},
    "PULL": lambda body: commands.decode_pull(body)._asdict(),
    "ACK": lambda body: (
        (ack := commands.decode_ack(body))._asdict() | {"ranges": [list(range_) for range_ in ack.ranges]}
    ),
    "NACK": lambda body: (
        (nack := commands.decode_nack(body))._asdict() | {"entries": [list(entry) for entry in nack.entries]}
    ),
    "BEGIN": lambda body: (
        (begun := commands.decode_ack(body))._asdict() | {"ranges": [list(range_) for range_ in begun.ranges]}
    ),
    "HEARTBEAT": lambda body: {},
    "FRAMES": lambda body: dict(zip(("offset", "data"), (lambda o, d: (o, d.hex()))(*commands.split_offset(body)))),
    "BEAT": lambda body: _beat(commands.decode_beat(body)),
    "CONFIRM": lambda body: (
        {
            "term": (c := commands.decode_confirmation(body)).epoch.term,
            "boot": c.epoch.boot,
            "matched_end": c.matched_end,
            "chain": c.chain,
        }
    ),
    "Produced": lambda body: (
        (p := commands.decode_produced(body))._asdict() | {"refused": [list(row) for row in p.refused]}
    ),
    "Pulled": lambda body: {
        "pieces": [piece._asdict() | {"body": piece.body.hex()} for piece in commands.decode_pulled(body)]
    },
    "Acked": lambda body: {"acked_end": commands.decode_acked(body)},
}

ROWS = [(row["command"], row) for row in REQUESTS] + [(row["answer"], row) for row in ANSWERS]
IDS = [f"{position} {kind}" for position, (kind, _) in enumerate(ROWS)]


@pytest.mark.parametrize("kind, row", ROWS, ids=IDS)
def test_meaning_encodes_to_golden_bytes(kind, row):
    body = ENCODE[kind](row["meaning"])
    assert (packet_header(**row["packet"], body_bytes=len(body)) + body).hex() == row["bytes"]


@pytest.mark.parametrize("kind, row", ROWS, ids=IDS)
def test_golden_bytes_decode(kind, row):
    packet = read_packet(bytes.fromhex(row["bytes"]))
    assert {name: getattr(packet, name) for name in row["packet"]} == row["packet"]
    if kind == "error":
        assert {"code": packet.code, "text": str(packet.body, "utf-8")} == row["meaning"]
    else:
        assert DECODE[kind](packet.body) == row["meaning"]


@pytest.mark.parametrize("row", REQUESTS, ids=[row["command"] for row in REQUESTS])
def test_command_codes(row):
    assert Command[row["command"]] == row["packet"]["code"]


@pytest.mark.parametrize("row", REFUSED, ids=[row["name"] for row in REFUSED])
def test_wrong_bytes_end_the_connection(row):
    reader = PacketReader(row["packet_bytes_max"])
    data = bytes.fromhex(row["bytes"])
    reader.buffer()[: len(data)] = data
    with pytest.raises(InvalidRequest, match=row["reason"]):
        reader.received(len(data))
