"""Maintenance goes on with the other universes where a value of one cannot be decrypted."""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from fastness.errors import Backend, Busy, Closed, DecryptionFailed
from fastness.kv import Database
from fastness.kv.value_cipher import cipher_of

_log: Final = logging.getLogger("fastness.upkeep")
RETRY_SECONDS: Final = 1.0  # After an unexpected error.
SKIPPED_SECONDS: Final = 60.0  # Until work is tried again of which a value cannot be decrypted.
Outcome = TypeVar("Outcome")


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


def run_isolated(
    database: Database, universe: str, task: str, failure: str, steps: Generator[float, None, Outcome]
) -> Generator[float, None, Outcome | float]:
    """What `steps` return, or in how many seconds to try again. An error that concerns only them stops no others."""
    try:
        with skip_undecryptable(database, universe, task):
            return (yield from steps)
        return SKIPPED_SECONDS
    except (Backend, Busy, Closed):
        raise
    except Exception:
        _log.exception(failure)
        return RETRY_SECONDS
