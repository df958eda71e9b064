"""Connects to PostgreSQL."""

import time
from typing import Final

import psycopg

from holdfast import limits
from holdfast.errors import InvalidUrl, Unreachable

APPLICATION: Final = "holdfast"  # The application name of connections, which shows whether a plane is in use.

# The server refuses the connection, so a retry cannot help. libpq has no error codes for these.
_FINAL_ANSWERS: Final = ("does not exist", "authentication failed", "no pg_hba.conf entry", "permission denied")


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    """A connection, after a few attempts with doubling pauses.

    Raises:
        Unreachable: the server did not answer any of them.
    """
    failure: psycopg.Error | None = None
    for attempt in range(limits.CONNECT_ATTEMPTS_MAX):
        if attempt:
            time.sleep(min(100 << attempt - 1, limits.CONNECT_PAUSE_MS_MAX) / 1_000)
        try:
            return psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=5,
                tcp_user_timeout=10_000,
                fallback_application_name=APPLICATION,
            )
        except psycopg.ProgrammingError as error:
            raise invalid_url_error(error) from None
        except psycopg.OperationalError as error:
            failure = error
            if any(answer in str(error) for answer in _FINAL_ANSWERS):
                break
    raise Unreachable(f"PostgreSQL does not answer ({failure}); start it, or correct the URL") from failure


def invalid_url_error(error: psycopg.ProgrammingError) -> InvalidUrl:
    """The error for an invalid URL, without the part that may be a password."""
    reason = "a % in it is written %25" if "percent-encoded" in str(error) else error
    return InvalidUrl(f"The PostgreSQL URL is invalid ({reason}); write postgresql://user@host/database")
