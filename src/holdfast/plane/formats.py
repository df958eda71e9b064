"""Formats: what this version writes, and what it can read."""

from typing import Final

FORMAT: Final = 1  # Of a data directory.
