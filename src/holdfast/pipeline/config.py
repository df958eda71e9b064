"""What a job is told."""

from typing import Any

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Where the plane and the lake are. It travels to executors, so it holds nothing but words."""

    data: str  # dir:PATH, postgresql://…, http://… or https://…
    lake: str  # A folder or s3://bucket/prefix
    objects: str | None = None  # Where big bytes are, if the data do not say (PostgreSQL).
    activity: str | None = None  # The folder of session logs, if the data do not say.
    token: str | None = None  # For a server.
    storage: dict[str, str] = {}  # Options of the object stores, such as aws_endpoint.
    universes: tuple[str, ...] = ()  # Only these; none: all of them.
    reducer: str | None = None  # module:function, (state, record) -> state; None: a chain of hashes.


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did: a line for people, numbers for programs, and whether all is well."""

    job: str
    ok: bool
    rows: dict[str, int]  # Rows written, or looked at, by table.
    seconds: float
    findings: list[dict[str, Any]] = []  # What is wrong: {"universe", "world", "height", "reason", …}
    notes: list[str] = []
