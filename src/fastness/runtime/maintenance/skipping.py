"""Maintenance goes on with the other universes where a value of one cannot be decrypted."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fastness.errors import DecryptionFailed
from fastness.kv import Database
from fastness.kv.value_cipher import cipher_of

_log: Final = logging.getLogger("fastness.upkeep")


@contextmanager
def skip_undecryptable(database: Database, universe: str, task: str) -> Iterator[None]:
    """Skip the rest of the block if a value cannot be decrypted. It is counted, and logged the first time.

    The records of the keys themselves concern all universes: their damage is raised.
    """
    try:
        yield
    except DecryptionFailed as error:
        cipher = cipher_of(database)
        if error.key is None or cipher is None:
            raise
        level = logging.DEBUG if cipher.skipped[universe, task] else logging.WARNING
        cipher.skipped[universe, task] += 1
        _log.log(level, "%s of %s was skipped, the other universes go on: %s", task, universe or "the plane", error)
