"""Settings of a server: a TOML file, then the environment, then flags; what comes later decides.

    port = 9440                     HOLDFAST_PORT=9440              --port 9440
    [tls]
    cert = "server.pem"             HOLDFAST_TLS_CERT=server.pem    --tls-cert server.pem

A key that nobody knows is an error that names the nearest one, and every error says where its value came from.
"""

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from holdfast.errors import InvalidArgument, PathUnusable
from holdfast.limits import (
    PUSHES_PER_MINUTE,
    PUSHES_PER_MINUTE_MAX,
    RELAY_AUTHENTICATE_SECONDS,
    RELAY_BURST,
)
from holdfast.names import UNIVERSE, checked_name
from holdfast.plane.open import Options
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.server.http.limits import HttpLimits

_PREFIX: Final = "HOLDFAST_"
_FILE: Final = "HOLDFAST_CONFIG"
# What clients and commands read or set in the same environment is none of a server's business.
_OTHERS: Final = ("CA", "CERT", "CONFIG", "CONTEXT", "DEBUG", "KEY", "TOKEN", "UNIVERSE", "URL")
_EXPORTED: Final = ("FENCE", "LEASE_", "LOCK_", "QUEUE_", "STATE_")
_WORDS: Final = {"on": True, "yes": True, "off": False, "no": False}

_Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
_SecondsOrZero = Annotated[float, Meta(ge=0, le=31_536_000)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be said to a server."""

    data: str = "dir:./data"  # Where the key space is: dir:PATH, memory: or postgresql://…
    objects: str | None = None  # The object store for big bytes; a directory has one in itself.
    activity: str | None = None  # The folder of session logs; a directory has one in itself.
    tiers: str | None = None  # The TOML file that says which tier each field of an entity has.
    verify_blobs: Literal["always", "sampled", "never"] = "always"
    compact_every_seconds: _Seconds | None = None  # Never if nothing is said.

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 9440  # 0: any that is free.
    tokens: bool = False
    tls_cert: str | None = None  # With its chain, PEM.
    tls_key: str | None = None
    tls_client_ca: str | None = None  # Only clients with a certificate of this authority come in.
    insecure: bool = False  # Tokens without TLS, at an address that others reach.

    drain_seconds: _SecondsOrZero = 10.0  # How long calls under way may take when the server is told to stop.
    connections_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 20_000  # That are open at a time.
    header_bytes_max: Annotated[int, Meta(ge=1_024, le=1_048_576)] = 32_768  # Of one request, its address included.
    header_seconds: _Seconds = 10.0  # How long they may take to arrive.
    body_bytes_max: Annotated[int, Meta(ge=65_536, le=268_435_456)] = HttpLimits().body_bytes_max  # Held in memory.
    stream_bytes_max: Annotated[int, Meta(ge=65_536)] = HttpLimits().stream_bytes_max  # On its way to a blob.
    keep_alive_seconds: Annotated[int, Meta(ge=1, le=3_600)] = 75  # How long a connection that nobody uses stays open.

    queue_max_consumers: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # 0: by the number of processors.
    queue_poll_interval_seconds: _Seconds = 3.0
    queue_poll_jitter_seconds: _SecondsOrZero = 0.5
    queue_resilient_poll_interval_seconds: _SecondsOrZero = 300.0  # 0: never.

    relay_host: str | None = None  # What agents call this server; if nothing is said, the address that they reach.
    relay_registration: Literal["open", "closed"] | None = None  # Open on loopback without tokens if nothing is said.
    relay_rate_per_second: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None  # 0: no limit, as on loopback.
    relay_burst: Annotated[int, Meta(ge=1, le=1_000_000)] = RELAY_BURST  # As many mails may come at once.
    relay_authenticate_seconds: _Seconds = RELAY_AUTHENTICATE_SECONDS  # To answer the challenge.

    ingress_agent: str | None = None  # Who receives what is pushed to nobody in particular.
    ingress_pushes_per_minute: Annotated[int, Meta(ge=0, le=PUSHES_PER_MINUTE_MAX)] = PUSHES_PER_MINUTE  # 0: no limit.

    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_queues_max: Annotated[int, Meta(ge=0, le=10_000)] = 100  # Queues whose depth the metrics tell.
    pipeline_reports: str | None = None  # The folder of the pipeline's reports, which the console shows.
    metrics_worlds_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 1_000  # Worlds that are looked at for the metrics.

    @property
    def tls(self) -> bool:
        """Whether the server speaks TLS."""
        return self.tls_cert is not None

    @property
    def options(self) -> Options:
        """How to open the plane."""
        return Options(
            objects=self.objects,
            activity=self.activity,
            tiers=self.tiers,
            verify_blobs=self.verify_blobs,
            compact_every_seconds=self.compact_every_seconds,
            waits=ConsumerOptions(
                consumers_max=self.queue_max_consumers,
                poll_seconds=self.queue_poll_interval_seconds,
                poll_jitter_seconds=self.queue_poll_jitter_seconds,
                resilient_poll_seconds=self.queue_resilient_poll_interval_seconds,
            ),
            pushes_per_minute=self.ingress_pushes_per_minute,
        )

    @property
    def http_limits(self) -> HttpLimits:
        """What the HTTP door lets its callers do."""
        return HttpLimits(body_bytes_max=self.body_bytes_max, stream_bytes_max=self.stream_bytes_max)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """The settings of a file (or the one that HOLDFAST_CONFIG names), an environment, and flags.

        A flag that is None was not given.

        Raises:
            InvalidArgument: a key is unknown, or a value is not what its key wants.
            PathUnusable: the file cannot be read.
        """
        environment = os.environ if environment is None else environment
        file = file or environment.get(_FILE) or None
        values: dict[str, Any] = {}
        for source in (_of_file(file), _of_environment(environment), _of_flags(flags or {})):
            values |= source
        return cls(**values)._checked()

    def _checked(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("tls_cert and tls_key belong together; give both of them, or none")
        if self.tls_client_ca is not None and not self.tls:
            raise InvalidArgument("tls_client_ca needs tls_cert and tls_key; give them too")
        if not self.host:
            raise InvalidArgument("host is empty; name an address, as in 127.0.0.1")
        if self.ingress_agent is not None:
            agent, at, universe = self.ingress_agent.partition("@")
            checked_name("agent", agent)
            checked_name("universe", universe if at else UNIVERSE)
        return self


_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(Settings)}


def _of_file(file: str | os.PathLike[str] | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PathUnusable(f"The settings in {file} cannot be read ({error}); name a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{file} is not TOML ({error}); correct it") from None
    return {key: _converted(key, value, f"{file}", strict=True) for key, value in _flat(document, "").items()}


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Tables taken apart: `cert` of `[tls]` is `tls_cert`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        flat |= _flat(value, f"{name}_") if isinstance(value, dict) else {name: value}
    return flat


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, text in environment.items():
        key = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or not text or _is_of_others(key):
            continue
        values[key] = _converted(key, text, f"the environment ({variable})", strict=False)
    return values


def _is_of_others(key: str) -> bool:
    if key in _TYPES:
        return False
    if key.upper() in _OTHERS:
        return True
    # What `queue get` exports has the same beginning as our knobs; what is nearly one of them is a slip of the pen.
    return key.upper().startswith(_EXPORTED) and not get_close_matches(key, _TYPES, n=1, cutoff=0.8)


def _of_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for flag, value in flags.items():
        key = flag.lstrip("-").replace("-", "_")
        if value is not None:
            values[key] = _converted(key, value, f"the flags (--{key.replace('_', '-')})", strict=False)
    return values


def _converted(key: str, value: Any, source: str, *, strict: bool) -> Any:
    if key not in _TYPES:
        near = get_close_matches(key, _TYPES, n=1, cutoff=0.3) or ["one of " + ", ".join(_TYPES)]
        raise InvalidArgument(f"There is no setting {key}, which comes from {source}; did you mean {near[0]}?")
    kind = _TYPES[key]
    if kind is bool and isinstance(value, str) and not strict:
        value = _WORDS.get(value.lower(), value)
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{key} is {value!r}, which comes from {source}: {error}") from None
