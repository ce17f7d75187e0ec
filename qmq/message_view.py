"""Core. Messages as operators see them: JSON with typed properties and bodies, and short texts for terminal and page.

Members of a message's JSON about its body, each left out if it is empty:

    contentType   media type
    bodyBytes     size as it is stored
    bodyEncoding  compression as it is stored: "zstd"
    body          the body as text, or
    bodyBase64    any other body; still compressed if there is a `bodyProblem`
    bodyCut       true: this is only the begin
    bodyProblem   reason why it could not be decompressed

`propertyTypes` names the types of properties that JSON has as texts: "datetime" and "float".
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from qmq.errors import InvalidMessage, MissingExtra
from qmq.message import Value
from qmq.message_sizes import BODY_BYTES_MAX
from qmq.zstd import decompressed, decompressed_begin

JSON_TYPE = "application/json"
ENCRYPTED = "application/x-qmq-encrypted"
_TEXTS = re.compile(r"text/|application/([\w.-]+\+)?(json|xml|yaml|toml|javascript|x-www-form-urlencoded)\b", re.I)
_BINARIES = re.compile(
    r"(image|audio|video|font)/|application/(octet-stream|(x-|vnd\.)?(protobuf|msgpack)|avro|pdf|zip|gzip"
    r"|x-qmq-encrypted)\b",
    re.I,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
LINE_BYTES, ROW_BYTES = 24, 16
"""Bytes of a binary body on one line, and on each row of a dump."""


def body_json(
    stored: bytes, size: int, *, content_type: str | None, encoding: str | None, bytes_max: int
) -> dict[str, Any]:
    """Return the members about a body.

    Args:
        stored: the body as it is stored, or its begin.
        size: size of the whole body as it is stored.
        bytes_max: size to which the decompressed body is cut; `BODY_BYTES_MAX` for the whole body.
    """
    data, problem, is_whole = stored, "", len(stored) == size
    if encoding and stored:
        try:
            if is_whole and bytes_max >= BODY_BYTES_MAX:
                data = decompressed(memoryview(stored), encoding, BODY_BYTES_MAX)
            else:
                data = decompressed_begin(stored, encoding, bytes_max + 1)
        except (InvalidMessage, MissingExtra) as error:
            problem = str(error)
    is_cut = not is_whole or len(data) > bytes_max
    data = data[:bytes_max]
    found = {"contentType": content_type, "bodyEncoding": encoding, "bodyProblem": problem, "bodyCut": is_cut}
    text = None if problem else _text(data, content_type or "", is_cut=is_cut)
    content = {"bodyBase64": b64encode(data).decode()} if text is None else {"body": text}
    return {"bodyBytes": size} | {name: value for name, value in found.items() if value} | content


def _text(data: bytes, content_type: str, *, is_cut: bool) -> str | None:
    """Return a body as text, or None if it is not text, judged by its type, or by its bytes if the type does not
    decide.
    """
    if _BINARIES.match(content_type):
        return None
    try:
        text = getincrementaldecoder("utf-8")().decode(data, not is_cut)
    except UnicodeDecodeError:
        return None
    return text if _TEXTS.match(content_type) or not _CONTROLS.search(text) else None


def body_bytes(message: Mapping[str, Any]) -> bytes | None:
    """Return the whole body in a message's JSON, or None without one.

    Raises:
        ValueError: the body is cut, compressed, or not valid; the text names the remedy.
    """
    text, base64 = message.get("body"), message.get("bodyBase64")
    if text is not None and base64 is not None:
        raise ValueError("'body' and 'bodyBase64' are one body; give one of them")
    if message.get("bodyCut"):
        raise ValueError("its body is cut; Browse --json prints whole ones")
    if problem := message.get("bodyProblem"):
        raise ValueError(f"its body is not readable: {problem}")
    if not isinstance(text, str | None) or not isinstance(base64, str | None):
        raise ValueError("'body' and 'bodyBase64' are texts")
    try:
        return text.encode() if text is not None else None if base64 is None else b64decode(base64, validate=True)
    except UnicodeEncodeError:
        raise ValueError("'body' is not valid Unicode") from None
    except ValueError:
        raise ValueError("'bodyBase64' is no Base64") from None


def json_type_of(body: bytes | None) -> str | None:
    """Return the content type of a body that was typed without one: that of JSON for an object or a list."""
    try:
        return JSON_TYPE if body is not None and isinstance(json.loads(body), dict | list) else None
    except (ValueError, RecursionError):
        return None


def body_facts(message: Mapping[str, Any]) -> str:
    """Return type, size and compression of a body: `application/json, 1,234 bytes, zstd`; empty without a body."""
    if "bodyBytes" not in message:
        return ""
    kind = message.get("contentType", "")
    size = message["bodyBytes"]
    facts = ("encrypted" if is_encrypted(message) else kind, f"{size:,} byte{'' if size == 1 else 's'}")
    return ", ".join(filter(None, (*facts, message.get("bodyEncoding"))))


def is_encrypted(message: Mapping[str, Any]) -> bool:
    return str(message.get("contentType", "")).partition(";")[0].strip().lower() == ENCRYPTED


def body_line(message: Mapping[str, Any], chars_max: int) -> str:
    """Return a body on one line, cut to `chars_max` characters of content: text, or its first bytes as hex."""
    facts = body_facts(message)
    if "bodyProblem" in message:
        return f"{facts}: {message['bodyProblem']}"
    if not facts or is_encrypted(message):
        return facts
    if (text := message.get("body")) is not None:
        rest = "…" if len(text) > chars_max or message.get("bodyCut") else ""
        return f"{facts}: {text[:chars_max]}{rest}" if text else facts
    data = b64decode(message.get("bodyBase64", ""))
    rest = "…" if len(data) > LINE_BYTES or message.get("bodyCut") else ""
    return f"{facts}: {data[:LINE_BYTES].hex(' ')}{rest}" if data else facts


def hex_dump(data: bytes) -> str:
    """Return bytes as rows of offset, hex and ASCII."""
    rows = []
    for at in range(0, len(data), ROW_BYTES):
        row = data[at : at + ROW_BYTES]
        ascii = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(f"{at:06x}  {row.hex(' '):<{3 * ROW_BYTES - 1}}  {ascii}")
    return "\n".join(rows)


def properties_json(properties: Mapping[str, Value]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return properties as values of JSON, and the types of those that JSON represents as texts."""
    shown, types = dict[str, Any](properties), dict[str, str]()
    for name, value in properties.items():
        if isinstance(value, datetime):
            shown[name], types[name] = value.astimezone(UTC).isoformat(), "datetime"
        elif isinstance(value, float) and not math.isfinite(value):
            shown[name], types[name] = str(value), "float"
    return shown, types


def typed_properties(properties: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Return properties of `properties_json` with their types; raises ValueError."""
    readers: dict[str, Callable[[str], Value]] = {"datetime": datetime.fromisoformat, "float": float}
    found = dict(properties)
    for name, kind in types.items():
        if kind not in readers or not isinstance(found.get(name), str):
            raise ValueError(f"'propertyTypes' names {name!r}: {kind!r:.50} is no type of a text there")
        found[name] = readers[kind](found[name])
    return found


def visible(text: str) -> str:
    """Return text with characters that control a terminal or the direction of writing as escapes of JSON.

    Line ends and tabs stay, and joiners, which scripts and emoji need.
    """
    return text if text.isprintable() else _ACTIVE.sub(_escape, text)


def one_line(text: str) -> str:
    """Return `visible` text with line ends and tabs as escapes."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"
