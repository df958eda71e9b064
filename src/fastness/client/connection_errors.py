"""The errors of calls that received no answer, with the cause and what to do about it."""

import ipaddress
import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

import websockets

from fastness.errors import Backend, Busy, Closed, CommitUnknown, FastnessError, NotAllowed, Unreachable

# A server raises these before it checks the idempotency key (a rate limit, for example), so on a repeated call they
# do not show whether the first attempt was carried out.
CHECKED_BEFORE_KEYS: Final = (Backend, Busy, Closed, NotAllowed)


def connection_error(url: str, reason: BaseException | None) -> FastnessError:
    """The error to raise when `url` did not answer in time, `reason` being the last failure."""
    if isinstance(reason, FastnessError):
        return reason
    return Unreachable(f"{url} does not answer: {_describe(url, reason)}")


def unknown(request: object, why: object) -> CommitUnknown:
    """The error to raise when a write was sent and its outcome cannot be known."""
    return CommitUnknown(
        f"The answer to {type(request).__name__} was lost ({why}); check whether it happened before you repeat it"
    )


def refused(url: str, token: str | None) -> NotAllowed:
    """The error to raise when the server at `url` did not accept the caller's token, or the lack of one."""
    create = "create one with `fastness token create NAME --allow VERBS`"
    if token:
        return NotAllowed(f"The server refused the token: it is unknown, revoked or expired; {create}")
    host_names = "" if _is_address(url) else ". A server without tokens accepts only localhost and IP addresses"
    return NotAllowed(
        "The server needs a token and none was given; give it as token=… in Python, or as FASTNESS_TOKEN or --token on "
        f"the command line, or {create}{host_names}"
    )


def _is_address(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _describe(url: str, reason: BaseException | None) -> str:
    # A server that expects TLS answers a request without it by an alert, or closes the connection.
    tls = "" if url.startswith(("https:", "wss:")) else ". A server with TLS needs https:// in place of http://"
    if isinstance(reason, websockets.InvalidStatus):
        return f"it responds with HTTP {reason.response.status_code}; check that the URL is that of a Fastness server"
    if isinstance(reason, websockets.InvalidHandshake):
        return f"it is not a Fastness server ({reason}); check the URL{tls}"
    if isinstance(reason, ssl.SSLError):
        return f"TLS failed ({reason}); check the certificate, and whether the URL is https://"
    if isinstance(reason, socket.gaierror):
        return f"unknown host ({reason.strerror}); check the URL"
    if isinstance(reason, TimeoutError) or reason is None:
        return "no response; check the URL, the network, and that `fastness serve` runs there"
    return f"{reason}; check that `fastness serve` runs there{tls if isinstance(reason, ConnectionResetError) else ''}"
