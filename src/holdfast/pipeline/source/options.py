"""What the options of a read or a write say."""

import os
from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.limits import SOURCE_PARTITION_ROWS
from holdfast.names import checked_name, folder_at
from holdfast.pipeline.config import Config

READ: Final = ("journal", "activity", "segments", "queues", "mail", "entities")
STREAMED: Final = ("journal", "activity")
WRITTEN: Final = ("queues", "mail", "inboxes")
KNOWN: Final = (
    "url",
    "table",
    "token",
    "ca",
    "cert",
    "certkey",
    "objects",
    "activity",
    "universe",
    "staging",
    "damage",
    "rowsperpartition",
    "maxrowsperbatch",
    "startingoffsets",
    "load",
    "key",
    "queue",
)
SPARKS_OWN: Final = ("path", "checkpointlocation", "queryname")  # What Spark says of `load(path)`, and of streams.


class Options(msgspec.Struct, frozen=True):
    """The options, checked. It travels, so it holds nothing but words and numbers."""

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


def options_of(given: Mapping[str, str]) -> Options:
    """What was given, with defaults for the rest.

    Raises:
        InvalidArgument: an option is missing, unknown, or says nothing that is understood.
        InvalidName: the universe is none.
    """
    found = {name.lower(): value for name, value in given.items()}
    storage = {name.removeprefix("storage."): value for name, value in found.items() if name.startswith("storage.")}
    for name in found:
        if name not in (*KNOWN, *SPARKS_OWN) and not name.startswith("storage."):
            raise InvalidArgument(f"There is no option {name!r}; use {', '.join(KNOWN)} or storage.NAME")
    url = found.get("url") or found.get("path") or os.environ.get("HOLDFAST_URL")
    if not url:
        raise InvalidArgument('Say which plane with option("url", "http://HOST:PORT"), dir:PATH or postgresql://…')
    universe = checked_name("universe", found["universe"]) if found.get("universe") else None
    config = Config(
        data=url,
        lake="",
        objects=found.get("objects") or os.environ.get("HOLDFAST_OBJECTS"),
        activity=found.get("activity"),
        token=found.get("token") or os.environ.get("HOLDFAST_TOKEN"),
        ca=found.get("ca") or os.environ.get("HOLDFAST_CA"),
        cert=found.get("cert") or os.environ.get("HOLDFAST_CERT"),
        cert_key=found.get("certkey") or os.environ.get("HOLDFAST_KEY"),
        storage=storage,
        universes=(universe,) if universe else (),
    )
    return Options(
        config,
        _one_of(found, "table", (*READ, "inboxes"), "journal"),
        _staging(found.get("staging"), url),
        _one_of(found, "damage", ("fail", "skip"), "fail") == "skip",
        _number(found, "rowsperpartition") or SOURCE_PARTITION_ROWS,
        _number(found, "maxrowsperbatch"),
        _one_of(found, "startingoffsets", ("earliest", "latest"), "earliest") == "latest",
        universe,
        found.get("load"),
        found.get("key") or "key",
        found.get("queue"),
    )


def check_table(options: Options, allowed: tuple[str, ...], *, what_for: str) -> None:
    """Raise InvalidArgument unless the table is one of those."""
    if options.table not in allowed:
        raise InvalidArgument(f'The table {options.table} cannot be {what_for}; use option("table", …) with {allowed}')


def _staging(given: str | None, url: str) -> str:
    """Where to put what executors read: if nothing is said, beside the data, or in this user's cache.

    It is a folder of our own in any case, because what has become old in it is removed.
    """
    if given:
        return f"{given.rstrip('/')}/holdfast-staged"
    if url.startswith("dir:"):
        return f"dir:{folder_at(url).absolute() / '.staged'}"
    home = folder_at(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return f"dir:{home.absolute() / 'holdfast' / 'staged'}"


def _one_of(found: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = found.get(name, default).lower()
    if value not in allowed:
        raise InvalidArgument(f"The option {name} is {value!r}; use {', '.join(allowed)}")
    return value


def _number(found: Mapping[str, str], name: str) -> int | None:
    value = found.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise InvalidArgument(f"The option {name} is {value!r}; give a number from 1 on")
    return int(value)
