"""The configuration and the result of a job."""

import ssl
from typing import Any, Final

import msgspec

from fastness.client import tls
from fastness.encryption_keys import KeyProvider, provider_of
from fastness.kv.value_cipher import ValueCipher

PATIENCE_SECONDS: Final = 30.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Locations and credentials of the plane and the lake. It is sent to executors, so it holds plain values only."""

    data: str  # dir:PATH, postgresql://…, http://… or https://…
    lake: str  # A folder or s3://bucket/prefix
    objects: str | None = None  # The object store of large values, if `data` does not imply it (PostgreSQL).
    activity: str | tuple[str, ...] | None = None  # The folders of session logs, if `data` does not imply them.
    token: str | None = None  # Access token of a server.
    ca: str | None = None  # Certificate files for https://, as on the command line; executors that write need them too.
    cert: str | None = None
    cert_key: str | None = None
    patience_seconds: float = PATIENCE_SECONDS  # How long to keep retrying an unreachable server.
    storage: dict[str, str] = {}  # Object store options, such as aws_endpoint.
    universes: tuple[str, ...] = ()  # Restrict the job to these universes; empty: all.
    encryption_key_file: str | None = None  # The master keys of encrypted universes. None: the environment names them.
    key_file: str | None = None  # A file with the secret key of digests in the lake; executors do not read it.
    redact_file: str | None = None  # A file with the fields that are replaced before they are stored.
    reducer: str | None = None  # module:function, (state, record) -> state; None: a chain of hashes.

    @property
    def activity_folders(self) -> tuple[str, ...]:
        """The folders of session logs that are given: several nodes may have one each."""
        return (self.activity,) if isinstance(self.activity, str) else self.activity or ()

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for an https:// plane, otherwise None.

        Raises:
            PathUnusable: a certificate file is missing or invalid.
        """
        return tls.context(self.data, ca=self.ca, cert=self.cert, key=self.cert_key)

    def encryption(self) -> KeyProvider | None:
        """The master keys of encrypted universes; None: those that the environment names.

        Raises:
            PathUnusable: the key file cannot be read.
        """
        return provider_of(self.encryption_key_file, None)

    def cipher(self) -> ValueCipher | None:
        """What opens the values of encrypted universes; None: the keys that the environment names."""
        keys = self.encryption()
        return None if keys is None else ValueCipher(keys)


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job: row counts, findings and notes."""

    job: str
    ok: bool
    rows: dict[str, int]  # Rows written, or read, by table.
    seconds: float
    findings: list[dict[str, Any]] = []  # Each: {"universe", "world", "height", "reason", …}
    notes: list[str] = []
