"""Core. Where a metaserver is."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_PORT = 8080


@dataclass(frozen=True, slots=True)
class Address:
    """Where a metaserver is."""

    host: str
    port: int
    secure: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host`, `host:port` or a URL; raises ValueError."""
        try:
            url = urlsplit(text if "://" in text else f"http://{text}")
            port = url.port
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/") or url.query:
            raise ValueError(f"{text!r} is neither host:port nor http://host:port")
        if port == 0:
            raise ValueError(f"{text!r}: 0 is no port")
        secure = url.scheme == "https"
        return cls(url.hostname, port or (443 if secure else DEFAULT_PORT), secure)

    def __str__(self) -> str:
        """As it may be typed."""
        place = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return f"https://{place}" if self.secure else place

    @property
    def url(self) -> str:
        return str(self) if self.secure else f"http://{self}"
