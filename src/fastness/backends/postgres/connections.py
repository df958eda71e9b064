"""Connects to PostgreSQL: to one server, or to the primary among several.

    postgresql://fastness@db/plane              one server
    postgresql://fastness@a:5432,b:5432/plane   the one of them that accepts writes

A session of an open key space that finds no primary waits for one: in a failover the standby becomes the primary within
seconds. How long it waits is counted from the moment when the servers stopped answering, so that an outage delays each
caller once, and later callers fail at once.
"""

import threading
import time
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from fastness import limits
from fastness.errors import InvalidUrl, Unreachable

APPLICATION: Final = "fastness"  # The application name of connections, which shows whether a plane is in use.

# Settings that a URL does not give. A server that is gone without a word is noticed after about ten seconds: by
# tcp_user_timeout if it was sent something, and by keepalives if it was to answer.
_DEFAULTS: Final = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "fallback_application_name": APPLICATION,
}

# The server refuses the connection, so a retry cannot help. libpq has no error codes for these.
_FINAL_ANSWERS: Final = ("does not exist", "authentication failed", "no pg_hba.conf entry", "permission denied")


class Outage:
    """How long the servers of one URL have not answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = 0.0
        self._failed_at: float | None = None  # When the last attempt failed; None if it succeeded.

    def end(self) -> None:
        """Record that a connection was opened."""
        with self._lock:
            self._failed_at = None

    def failed(self) -> float:
        """Record a failed attempt. Returns for how many seconds the attempts have failed."""
        now = time.monotonic()
        with self._lock:
            # What happened since an attempt of long ago is not known.
            if self._failed_at is None or now - self._failed_at > limits.FAILOVER_SECONDS_MAX:
                self._since = now
            self._failed_at = now
            return now - self._since


_outages: dict[str, Outage] = {}


def connect(url: str, *, await_failover: bool = False) -> psycopg.Connection[tuple[object, ...]]:
    """A connection to the primary, after a few attempts with doubling pauses.

    With `await_failover`, the attempts continue until the servers have not answered for FAILOVER_SECONDS_MAX.

    Raises:
        Unreachable: no server answered as a primary.
        InvalidUrl: `url` is not a PostgreSQL URL.
    """
    parameters = connection_parameters(url)
    outage = _outages.setdefault(url, Outage())
    attempts = 0
    while True:
        try:
            connection = psycopg.connect("", autocommit=True, **parameters)  # type: ignore[arg-type]
        except psycopg.OperationalError as error:
            attempts += 1
            failed_seconds = outage.failed()
            if await_failover:
                # A server that starts, or that is about to be promoted, may refuse connections for any reason.
                if failed_seconds >= limits.FAILOVER_SECONDS_MAX:
                    raise _unreachable(error) from error
            elif attempts >= limits.CONNECT_ATTEMPTS_MAX or _is_final(error):
                raise _unreachable(error) from error
            longest_ms = limits.FAILOVER_PAUSE_MS_MAX if await_failover else limits.CONNECT_PAUSE_MS_MAX
            time.sleep(min(100 << min(attempts - 1, 10), longest_ms) / 1_000)
        else:
            outage.end()
            return connection


def connect_once(url: str, *, seconds: int, session: str | None = None) -> psycopg.Connection[tuple[object, ...]]:
    """A connection after a single attempt; `session` replaces the kind of server that the URL asks for.

    Raises:
        Unreachable: no server of that kind answered.
        InvalidUrl: `url` is not a PostgreSQL URL.
    """
    parameters = connection_parameters(url)
    parameters["connect_timeout"] = str(seconds)
    if session is not None:
        parameters["target_session_attrs"] = session
    try:
        return psycopg.connect("", autocommit=True, **parameters)  # type: ignore[arg-type]
    except psycopg.OperationalError as error:
        raise _unreachable(error) from error


def connect_standby(url: str) -> psycopg.Connection[tuple[object, ...]]:
    """A connection to one of the URL's servers that is a standby.

    Raises:
        Unreachable: there is none.
    """
    return connect_once(url, seconds=limits.STANDBY_CONNECT_SECONDS, session="standby")


def connection_parameters(url: str) -> dict[str, str]:
    """The connection parameters of a URL, with defaults for what it does not say.

    Raises:
        InvalidUrl: it is not a PostgreSQL URL.
    """
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        raise invalid_url_error(error) from None
    return {**_DEFAULTS, "target_session_attrs": "read-write" if _has_several_hosts(given) else "primary", **given}


def _has_several_hosts(parameters: dict[str, str]) -> bool:
    return "," in parameters.get("host", "") or "," in parameters.get("hostaddr", "")


def _is_final(error: psycopg.OperationalError) -> bool:
    return any(answer in str(error) for answer in _FINAL_ANSWERS)


def _unreachable(error: psycopg.OperationalError) -> Unreachable:
    return Unreachable(f"PostgreSQL does not answer as a primary ({error}); start it, or correct the URL")


def invalid_url_error(error: psycopg.ProgrammingError) -> InvalidUrl:
    """The error for an invalid URL, without the part that may be a password."""
    reason = "a % in it is written %25" if "percent-encoded" in str(error) else error
    return InvalidUrl(f"The PostgreSQL URL is invalid ({reason}); write postgresql://user@host/database")
