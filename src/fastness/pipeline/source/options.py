"""Parses the options of a read or a write."""

import os
from collections.abc import Mapping
from typing import Final

import msgspec

from fastness.errors import InvalidArgument
from fastness.limits import SOURCE_PARTITION_ROWS
from fastness.names import checked_name, folder_at
from fastness.pipeline.config import Config
from fastness.pipeline.source import selections
from fastness.pipeline.source.selections import Selection

READABLE_TABLES: Final = ("journal", "activity", "segments", "queues", "mail", "entities")
STREAMABLE_TABLES: Final = ("journal", "activity")
WRITABLE_TABLES: Final = ("queues", "mail", "inboxes")
OPTION_NAMES: Final = (
    "url",
    "table",
    "token",
    "ca",
    "cert",
    "certKey",
    "objects",
    "activity",
    "universe",
    "staging",
    "damage",
    *selections.OPTIONS,
    "rowsPerPartition",
    "maxRowsPerBatch",
    "startingOffsets",
    "load",
    "key",
    "queue",
)
_KNOWN: Final = frozenset(name.lower() for name in OPTION_NAMES)  # Spark's options are case-insensitive.
SPARK_OPTIONS: Final = (
    "path",
    "checkpointlocation",
    "queryname",
)  # Spark itself sets these, for `load(path)` and streams.


class Options(msgspec.Struct, frozen=True):
    """The validated options. They are sent to executors, so they are plain values only."""

    config: Config
    table: str
    staging: str
    skips_damage: bool
    partition_rows: int
    batch_rows: int | None
    is_latest: bool
    universe: str | None
    load: str | None
    key: str
    queue: str | None
    selection: Selection


def parse_options(given: Mapping[str, str]) -> Options:
    """The validated options, with defaults.

    Raises:
        InvalidArgument: an option is missing, unknown or invalid.
        InvalidName: the universe, a world or a kind is not a valid name.
    """
    found = {name.lower(): value for name, value in given.items()}
    storage = {name.removeprefix("storage."): value for name, value in found.items() if name.startswith("storage.")}
    for name in found:
        if name not in _KNOWN and name not in SPARK_OPTIONS and not name.startswith("storage."):
            raise InvalidArgument(f"Unknown option {name!r}; use {', '.join(OPTION_NAMES)} or storage.NAME")
    url = found.get("url") or found.get("path") or os.environ.get("FASTNESS_URL")
    if not url:
        raise InvalidArgument('No plane is given; use option("url", "http://HOST:PORT"), dir:PATH or postgresql://…')
    universe = checked_name("universe", found["universe"]) if found.get("universe") else None
    config = Config(
        data=url,
        lake="",
        objects=found.get("objects") or os.environ.get("FASTNESS_OBJECTS"),
        activity=found.get("activity"),
        token=found.get("token") or os.environ.get("FASTNESS_TOKEN"),
        ca=found.get("ca") or os.environ.get("FASTNESS_CA"),
        cert=found.get("cert") or os.environ.get("FASTNESS_CERT"),
        cert_key=found.get("certkey") or os.environ.get("FASTNESS_KEY"),
        storage=storage,
        universes=(universe,) if universe else (),
    )
    table = _one_of(found, "table", (*READABLE_TABLES, "inboxes"), "journal")
    return Options(
        config,
        table,
        _staging(found.get("staging"), url),
        _one_of(found, "damage", ("fail", "skip"), "fail") == "skip",
        _number(found, "rowsPerPartition") or SOURCE_PARTITION_ROWS,
        _number(found, "maxRowsPerBatch"),
        _one_of(found, "startingOffsets", ("earliest", "latest"), "earliest") == "latest",
        universe,
        found.get("load"),
        found.get("key") or "key",
        found.get("queue"),
        selections.parse_selection(table, found),
    )


def check_table(options: Options, allowed: tuple[str, ...], *, operation: str) -> None:
    """Raise InvalidArgument unless the table is allowed."""
    if options.table not in allowed:
        raise InvalidArgument(f'The table {options.table} cannot be {operation}; use option("table", …) with {allowed}')


def _staging(given: str | None, url: str) -> str:
    """The staging store: by default beside the data directory, or in the user's cache.

    Always a dedicated folder, because old files in it are deleted.
    """
    if given:
        return f"{given.rstrip('/')}/fastness-staged"
    if url.startswith("dir:"):
        return f"dir:{folder_at(url).absolute() / '.staged'}"
    home = folder_at(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return f"dir:{home.absolute() / 'fastness' / 'staged'}"


def _one_of(found: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = found.get(name.lower(), default).lower()
    if value not in allowed:
        raise InvalidArgument(f"The option {name} is {value!r}; use {', '.join(allowed)}")
    return value


def _number(found: Mapping[str, str], name: str) -> int | None:
    value = found.get(name.lower())
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value) < 1:
        raise InvalidArgument(f"The option {name} is {value!r}; use a number from 1 on")
    return int(value)
