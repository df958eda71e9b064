"""What a job is told."""

import ssl
from typing import Any, Final

import msgspec

from holdfast.client import tls

PATIENCE_SECONDS: Final = 30.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Where the plane and the lake are. It travels to executors, so it holds nothing but words."""

    data: str  # dir:PATH, postgresql://…, http://… or https://…
    lake: str  # A folder or s3://bucket/prefix
    objects: str | None = None  # Where big bytes are, if the data do not say (PostgreSQL).
    activity: str | None = None  # The folder of session logs, if the data do not say.
    token: str | None = None  # For a server.
    ca: str | None = None  # Files of an https:// server, as on the command line; writes need them on executors too.
    cert: str | None = None
    cert_key: str | None = None
    patience_seconds: float = PATIENCE_SECONDS  # How long a server may be gone.
    storage: dict[str, str] = {}  # Options of the object stores, such as aws_endpoint.
    universes: tuple[str, ...] = ()  # Only these; none: all of them.
    reducer: str | None = None  # module:function, (state, record) -> state; None: a chain of hashes.

    def tls(self) -> ssl.SSLContext | None:
        """How to trust a server; None where nothing is encrypted.

        Raises:
            PathUnusable: a file is not there, or is none of its kind.
        """
        return tls.context(self.data, ca=self.ca, cert=self.cert, key=self.cert_key)


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did: a line for people, numbers for programs, and whether all is well."""

    job: str
    ok: bool
    rows: dict[str, int]  # Rows written, or looked at, by table.
    seconds: float
    findings: list[dict[str, Any]] = []  # What is wrong: {"universe", "world", "height", "reason", …}
    notes: list[str] = []
