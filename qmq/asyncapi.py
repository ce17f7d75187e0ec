"""Shell. AsyncAPI 3 document of an application: `qmq asyncapi shop.handlers:consumer`.

Channels are subjects. Each listener is an operation that receives, with the schema of its payload. Operations that send
are `reply_to` and the declarations of producers. Schemas are made by pydantic, also those of dataclasses and plain
types. An unknown type is described by its name.

Ids have the letters that the specification allows; a channel's address is the subject.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Hashable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from qmq.blocking.producer import Producer as BlockingProducer
from qmq.client.listener import Listener
from qmq.client.outgoing import Declared
from qmq.client.producer import Producer
from qmq.worker.process import AnyConsumer, CannotRun, load, names_in, values_of_modules

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
    "pre{background:#f4f4f4;padding:1em;overflow:auto}"
)
SCHEMAS = "#/components/schemas/{model}"
Sent = dict[str, list[Declared]]
"""Declared messages by subject."""


def document(
    consumers: Iterable[AnyConsumer], sent: Iterable[Sent] = (), *, title: str, version: str = "1.0.0"
) -> dict[str, Any]:
    """Return the AsyncAPI 3.0.0 document of consumers, and of the messages that producers declare."""
    found = _Document()
    for consumer in consumers:
        for listener in consumer.listeners.values():
            found.add(listener)
    for declared in sent:
        for subject, kinds in declared.items():
            for message in kinds:
                found.add_sent(subject, message)
    messages, schemas = found.components()
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "channels": found.channels,
        "operations": found.operations,
        "components": {"messages": messages, "schemas": schemas},
    }


class _Ids:
    """Ids of one part of a document, of allowed letters; different keys have different ids."""

    def __init__(self) -> None:
        self._keys: dict[str, Hashable] = {}

    def of(self, text: str, key: Hashable) -> str:
        """Return the id of `key`, made of `text`."""
        made = base = re.sub(r"[^A-Za-z0-9._-]", "_", text)
        number = 2
        while self._keys.setdefault(made, key) != key:
            made, number = f"{base}-{number}", number + 1
        return made


class _Document:
    """Parts of a document while listeners and declarations are added."""

    def __init__(self) -> None:
        self.channels: dict[str, Any] = {}
        self.operations: dict[str, Any] = {}
        self._kinds: dict[str, Any] = {}
        """Payload types of the messages, by id."""
        self._channel_ids, self._message_ids, self._operation_ids = _Ids(), _Ids(), _Ids()

    def add(self, listener: Listener) -> None:
        handling = listener._handling
        is_broadcast = listener.terms.broadcast  # its group is a random name
        name = listener.subject if is_broadcast else f"{listener.subject}.{listener.group}"
        group = {} if is_broadcast else {"x-qmq-group": listener.group}
        about = handling.bound.about or handling.name
        operation_id = self._operation_ids.of(name, listener)
        self._operation("receive", operation_id, listener.subject, handling.bound.payload_type, about, group)
        if handling.publish is not None and (reply_to := handling.publish.reply_to) is not None:
            operation_id = self._operation_ids.of(f"{name}.reply", listener)
            self._operation("send", operation_id, reply_to, handling.bound.result_type, about, {})

    def add_sent(self, subject: str, message: Declared) -> None:
        about = message.about or f"Send {_name(message.payload_type)}."
        operation_id = self._operation_ids.of(f"{subject}.send", subject)
        self._operation("send", operation_id, subject, message.payload_type, about, {})

    def _operation(
        self, action: str, operation_id: str, subject: str, kind: Any, about: str, more: dict[str, str]
    ) -> None:
        """Add a message to an operation, which is made with the first one."""
        channel_id = self._channel_ids.of(subject, subject)
        channel = self.channels.setdefault(channel_id, {"address": subject, "messages": {}})
        message = self._message_ids.of(f"{subject}.{_name(kind)}", (subject, _key(kind)))
        self._kinds[message] = kind
        channel["messages"][message] = {"$ref": f"#/components/messages/{message}"}
        place = f"#/channels/{channel_id}"
        operation = {"action": action, "channel": {"$ref": place}, "summary": about.partition("\n")[0], **more}
        messages = self.operations.setdefault(operation_id, operation | {"messages": []})["messages"]
        if (reference := {"$ref": f"{place}/messages/{message}"}) not in messages:
            messages.append(reference)

    def components(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the messages and the schemas that they share, by id."""
        adapters = {name: adapter for name, kind in self._kinds.items() if (adapter := _adapter(kind)) is not None}
        # One call for all: classes of one name get different schemas.
        made, shared = TypeAdapter.json_schemas(
            [(name, "validation", adapter) for name, adapter in adapters.items()], ref_template=SCHEMAS
        )
        messages = {}
        for name, kind in self._kinds.items():
            payload = made[name, "validation"] if name in adapters else _described(kind)
            messages[name] = {"name": _name(kind), "title": _name(kind), "payload": payload}
        return messages, shared.get("$defs", {})


def _key(kind: Any) -> Hashable:
    """Return the key that distinguishes payload types."""
    return kind if isinstance(kind, Hashable) else repr(kind)


def _name(kind: Any) -> str:
    if kind is None:
        return "Message"
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    text = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text).strip("_")


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    """Return pydantic's adapter of a payload type that has a schema, or None."""
    if kind is None or kind is bytes:
        return None
    try:
        adapter = TypeAdapter(kind)
        adapter.json_schema()
    except PydanticUserError:
        return None
    return adapter


def _described(kind: Any) -> dict[str, Any]:
    """Return the description of a payload without a schema."""
    if kind is None or kind is bytes:
        return {"description": "Properties, or a body of bytes."}
    return {"title": _name(kind), "description": f"See {kind!r}."}


def html(found: dict[str, Any]) -> str:
    """Return a document as one page without scripts, styles or pictures of other hosts."""
    title = escape(found["info"]["title"])
    parts = [f"<h1>{title}</h1><p>AsyncAPI {found['asyncapi']}, version {escape(found['info']['version'])}</p>"]
    for name, operation in found["operations"].items():
        subject = found["channels"][operation["channel"]["$ref"].rpartition("/")[2]]
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


def clients_at(target: str) -> tuple[list[AnyConsumer], list[Sent]]:
    """Return the consumers at a target, and the declarations of producers.

    Args:
        target: "module:name" of a consumer or producer, or a module. A consumer or a module adds the declarations of
            all producers that are attributes of imported modules.

    Raises:
        CannotRun: the target has neither consumers nor declarations.
    """
    module, _, name = target.partition(":")
    names = names_in(module)
    if isinstance(producer := names.get(name), Producer | BlockingProducer):
        return [], [producer._outgoing.declared]
    producers: list[Producer | BlockingProducer] = values_of_modules(Producer, BlockingProducer)
    sent = [producer._outgoing.declared for producer in producers if producer._outgoing.declared]
    if sent and not name and not any(isinstance(value, AnyConsumer) for value in names.values()):
        return [], sent
    try:
        return load([target]), sent
    except CannotRun as error:
        raise CannotRun(f"{error}. Or declare what a producer sends, with producer.declare(...)") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="qmq asyncapi", description="Print the AsyncAPI document of an application.")
    parser.add_argument(
        "target", help="module:name of a consumer or producer, or a module with all that it has, such as shop.handlers"
    )
    parser.add_argument("--title", default="", help="title of the document; by default the module")
    parser.add_argument("--html", action="store_true", help="one page of HTML instead of JSON")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(Path.cwd()))
    try:
        consumers, sent = clients_at(options.target)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    found = document(consumers, sent, title=options.title or options.target.partition(":")[0])
    print(html(found) if options.html else json.dumps(found, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
