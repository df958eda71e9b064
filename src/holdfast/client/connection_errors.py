"""Why a server does not answer, and what to do about it."""

import socket
import ssl
from typing import Final

import websockets

from holdfast.errors import Backend, Busy, Closed, CommitUnknown, HoldfastError, NotAllowed, Unreachable

# A server says these before it looks for a key, so they tell nothing of an earlier sending: a rate, for instance.
BEFORE_KEYS: Final = (Backend, Busy, Closed, NotAllowed)


def told(url: str, reason: BaseException | None) -> HoldfastError:
    """What to raise when nobody answered at `url` for too long."""
    if isinstance(reason, HoldfastError):
        return reason
    return Unreachable(f"{url} does not answer: {_why(reason)}")


def unknown(request: object, why: object) -> CommitUnknown:
    """What to raise when a write was sent, and nobody will say what became of it."""
    return CommitUnknown(
        f"The answer to {type(request).__name__} was lost ({why}); look whether it happened before you do it again"
    )


def _why(reason: BaseException | None) -> str:
    if isinstance(reason, websockets.InvalidStatus):
        return f"it says HTTP {reason.response.status_code}; check that the URL is that of a Holdfast server"
    if isinstance(reason, websockets.InvalidHandshake):
        return f"it is no Holdfast server ({reason}); check the URL"
    if isinstance(reason, ssl.SSLError):
        return f"TLS failed ({reason}); check the certificate, and whether the URL is https://"
    if isinstance(reason, socket.gaierror):
        return f"there is no such host ({reason.strerror}); check the URL"
    if isinstance(reason, TimeoutError) or reason is None:
        return "nothing came back; check the URL, the network, and that `holdfast serve` runs there"
    return f"{reason}; check that `holdfast serve` runs there"
