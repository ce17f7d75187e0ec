"""Core. What a SUBSCRIBE asks for, checked."""

from __future__ import annotations

from typing import Any

from qmq.codec import TAGS_MAX
from qmq.errors import InvalidRequest
from qmq.remoting import commands
from qmq.remoting.packet import Packet
from qmq.subjects import check_name, check_subject, is_dead_letter_subject


def read_terms(packet: Packet) -> dict[str, Any]:
    """Read a SUBSCRIBE; raises InvalidRequest or InvalidName, before anything is looked up for it."""
    f = commands.decode_json(
        packet.body,
        subject=str,
        group=str,
        consumer=str,
        start=str,
        since_ms=int,
        broadcast=bool,
        held_end=int,
        is_new=bool,
        deliveries_max=int,
        tags=list,
        tag_mode=str,
    )
    check_subject(f["subject"])
    check_name("consumer group", f["group"])
    check_name("consumer id", f["consumer"])
    if f["start"] not in ("latest", "earliest", "since"):
        raise InvalidRequest(f"start is 'latest', 'earliest' or 'since', not {f['start']!r}")
    if f["tag_mode"] not in ("any", "all"):
        raise InvalidRequest(f"tag_mode is 'any' or 'all', not {f['tag_mode']!r}")
    if len(f["tags"]) > TAGS_MAX or not all(_is_word(tag) for tag in f["tags"]):
        raise InvalidRequest(f"tags are at most {TAGS_MAX} words")
    if min(f["deliveries_max"], f["held_end"], f["since_ms"]) < 0:
        raise InvalidRequest("deliveries_max, held_end and since_ms are 0 or more")
    f["ephemeral"] = f.get("ephemeral") is True
    f["begins"] = f.get("begins") is True
    f["exclusive_ms"] = since_ms if isinstance(since_ms := f.get("exclusive_ms", 0), int) else 0
    if is_dead_letter_subject(f["subject"]):
        f["deliveries_max"] = 0
    return f


def _is_word(tag: object) -> bool:
    return isinstance(tag, str) and tag != "" and not any("\ud800" <= one <= "\udfff" for one in tag)
