"""Core. Which names are legal: subjects, consumer groups, consumer ids, broker groups.

QMQ lets any name through to the broker, where one of 256 bytes stops all indexing for ever (weakness W7). Here a
name is checked before it is stored, at both ends.
"""

from __future__ import annotations

import re

from qmq.errors import InvalidName

NAME_BYTES_MAX = 100
"""QMQ's limit for real subjects; consumer groups and ids share it."""

_ILLEGAL = re.compile(r"[\x00-\x1f\x7f/\\\u0085\u2028\u2029]")


def check_name(what: str, name: str) -> str:
    """Return `name` if it is legal: 1 to 100 bytes of UTF-8, no slash, no control or line-breaking character.

    Raises:
        InvalidName: says which rule is broken. `what` names the argument, for instance "subject".
    """
    if not name:
        raise InvalidName(f"{what} is empty")
    if len(name) > NAME_BYTES_MAX or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise InvalidName(f"{what} {name[:20]!r}… is longer than {NAME_BYTES_MAX} bytes")
    if illegal := _ILLEGAL.search(name):
        raise InvalidName(
            f"{what} {name!r} contains {illegal.group()!r}; slashes and control characters are not allowed"
        )
    if name != name.strip():
        raise InvalidName(f"{what} {name!r} begins or ends with white space")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidName(f"{what} {name!r} is not valid Unicode") from None
    return name
