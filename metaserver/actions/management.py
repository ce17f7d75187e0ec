"""Core. The answers of /management, byte for byte as QMQ's tools know them: three styles, QMQ's fields and order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qmq.metaserver.actions.action import DETAILS, Action, Answer, Status, Style
from qmq.metaserver.actions.catalog import ACTIONS
from qmq.metaserver.actions.shapes import as_qmq
from qmq.metaserver.actions.words import unknown_word

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Body:
    """An HTTP answer; its status is always 200."""

    text: str
    media_type: str = JSON_TYPE


def no_such_action(name: str) -> Body:
    """The answer when there is no action, or an unknown one. QMQ's is plain text, too."""
    if not name:
        return Body("need provide action param", TEXT_TYPE)
    return Body(f"unknown action: {name[:100]}\n{unknown_word('action', name, ACTIONS)}", TEXT_TYPE)


def refused_token(text: str) -> Body:
    """The answer to a bad or missing token, whatever the action's style is."""
    return _json(_envelope(Status.REFUSED, text, None))


def render(action: Action, answer: Answer, given: Mapping[str, str]) -> Body:
    """Put an answer into the style of its action."""
    details = given.get(DETAILS, "").lower() == "true"
    if answer.done:
        data = answer.data if details else as_qmq(action, answer.data)
        is_preview = isinstance(answer.data, dict) and "dryRun" in answer.data
        if action.style is Style.RAW and not is_preview:
            return _json(data)
        if action.style is Style.MAP:
            return _json({"data": data})
        return _json(_envelope(answer.status, answer.message, data))
    if action.style is Style.MAP or (action.style is Style.RAW and action.changes):
        shown = {"error": answer.message, **answer.details}
        if answer.status is not Status.REFUSED:  # QMQ's tools know no other; ours have to tell them apart
            shown["status"] = int(answer.status)
        return _json(shown if answer.data is None else {**shown, "data": answer.data})
    return _json(_envelope(answer.status, answer.message, answer.data))


def _envelope(status: Status, message: str, data: Any) -> dict[str, Any]:
    return {"status": int(status), "message": message, "data": data}


def _json(content: Any) -> Body:
    return Body(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
