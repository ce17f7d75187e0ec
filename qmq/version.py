"""Core. Version of this code. Processes report it, so that a half-finished upgrade shows."""

from __future__ import annotations

VERSION = "0.3.0"
"""The same as in pyproject.toml; a checkout that is not installed has no metadata to ask."""
