"""Shell. AsyncAPI 3 document of a consumer's handlers: `qmq asyncapi shop.handlers:consumer`.

Channels are subjects. Each listener is an operation that receives, with the schema of its payload; `reply_to` is one
that sends. Schemas are made by pydantic, also those of dataclasses and plain types. A type that it does not know is
described by its name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from qmq.client.listener import Listener
from qmq.worker.process import AnyConsumer, CannotRun, load

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
    "pre{background:#f4f4f4;padding:1em;overflow:auto}"
)
SCHEMAS = "#/components/schemas/{model}"


def document(consumers: Iterable[AnyConsumer], *, title: str, version: str = "1.0.0") -> dict[str, Any]:
    """Return the AsyncAPI 3.0.0 document of consumers."""
    found = _Document()
    for consumer in consumers:
        for listener in consumer.listeners.values():
            found.add(listener)
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "channels": found.channels,
        "operations": found.operations,
        "components": {"messages": found.messages, "schemas": found.schemas},
    }


class _Document:
    """Parts of a document while listeners are added."""

    def __init__(self) -> None:
        self.channels: dict[str, Any] = {}
        self.operations: dict[str, Any] = {}
        self.messages: dict[str, Any] = {}
        self.schemas: dict[str, Any] = {}

    def add(self, listener: Listener) -> None:
        handling = listener._handling
        name = f"{listener.subject}.{listener.group}"
        group = {} if listener.terms.broadcast else {"x-qmq-group": listener.group}
        about = handling.bound.about or handling.name
        self._operation("receive", name, listener.subject, handling.bound.payload_type, about, group)
        if handling.publish is not None and (reply_to := handling.publish.reply_to) is not None:
            self._operation("send", f"{name}.reply", reply_to, handling.bound.result_type, about, {})

    def _operation(self, action: str, name: str, subject: str, kind: Any, about: str, more: dict[str, str]) -> None:
        channel = self.channels.setdefault(subject, {"address": subject, "messages": {}})
        message = self._message(subject, kind)
        channel["messages"][message] = {"$ref": f"#/components/messages/{message}"}
        place = f"#/channels/{subject.replace('~', '~0').replace('/', '~1')}"
        self.operations[name] = {
            "action": action,
            "channel": {"$ref": place},
            "summary": about.partition("\n")[0],
            "messages": [{"$ref": f"{place}/messages/{message}"}],
            **more,
        }

    def _message(self, subject: str, kind: Any) -> str:
        """Add the message of a subject with a payload type; return its name."""
        title = _name(kind)
        name = f"{subject}.{title}"
        schema = _schema(kind)
        self.schemas |= schema.pop("$defs", {})
        self.messages[name] = {"name": title, "title": title, "payload": schema}
        return name


def _name(kind: Any) -> str:
    if kind is None:
        return "Message"
    text = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text).strip("_")


def _schema(kind: Any) -> dict[str, Any]:
    if kind is None or kind is bytes:
        return {"description": "Properties, or a body of bytes."}
    try:
        return TypeAdapter(kind).json_schema(ref_template=SCHEMAS)
    except PydanticUserError:
        return {"title": _name(kind), "description": f"See {kind!r}."}


def html(found: dict[str, Any]) -> str:
    """Return a document as one page without scripts, styles or pictures of other hosts."""
    title = escape(found["info"]["title"])
    parts = [f"<h1>{title}</h1><p>AsyncAPI {found['asyncapi']}, version {escape(found['info']['version'])}</p>"]
    for name, operation in found["operations"].items():
        subject = found["channels"][
            operation["channel"]["$ref"].rpartition("/")[2].replace("~1", "/").replace("~0", "~")
        ]
        group = operation.get("x-qmq-group")
        heading = f"{operation['action']} {subject['address']}" + (f", group {group}" if group else "")
        parts.append(f'<h2 id="{escape(name)}">{escape(heading)}</h2><p>{escape(operation["summary"])}</p>')
        for reference in operation["messages"]:
            message = found["components"]["messages"][reference["$ref"].rpartition("/")[2]]
            parts.append(f"<h3>{escape(message['title'])}</h3>{_block(message['payload'])}")
    if found["components"]["schemas"]:
        parts.append("<h2>Schemas</h2>")
    for name, schema in found["components"]["schemas"].items():
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3>{_block(schema)}')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head><body>{''.join(parts)}</body></html>\n"
    )


def _block(value: object) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="qmq asyncapi", description="Print the AsyncAPI document of a consumer.")
    parser.add_argument("consumer", help="module:name, or a module with all its consumers, such as shop.handlers")
    parser.add_argument("--title", default="", help="title of the document; by default the consumer's module")
    parser.add_argument("--html", action="store_true", help="one page of HTML instead of JSON")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = document(load([options.consumer]), title=options.title or options.consumer.partition(":")[0])
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    print(html(found) if options.html else json.dumps(found, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
