"""Tokens: who may come in from the network, into which universes, and what for.

    hft_<id>_<secret>        what a caller shows
    queue:put, queue:*, *    what a token allows: the noun and the verb of a request, one noun, everything

Whoever asks for a token makes its secret, and is the only one who ever has it: what travels and what is stored is its
SHA-256. So neither a log, nor a backup, nor the memory of a repeated call can give it away.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, get_args

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.names import checked_name
from holdfast.wire.requests import Request

PREFIX: Final = "hft"
EVERYTHING: Final = "*"  # Every verb, or every universe.
TOKEN_TTL_SECONDS_MAX: Final = 315_360_000.0  # Ten years; a token without an end is one that says so.
TOKEN_RATE_MAX: Final = 1_000_000.0
TOKEN_UNIVERSES_MAX: Final = 64  # They are looked at with every call.
METRICS: Final = "metrics:read"  # What the door of the metrics asks for; no request does.

_NOUNS: Final = {
    "activity": "activity",
    "agents": "agent",
    "atomic": "atomic",
    "backups": "backup",
    "blobs": "blob",
    "checkups": "doctor",
    "entities": "entity",
    "leases": "lease",
    "mail": "mail",
    "pairs": "pair",
    "queues": "queue",
    "states": "state",
    "tokens": "token",
    "universes": "universe",
    "worlds": "world",
}
_TOKEN: Final = re.compile(rf"{PREFIX}_([0-9a-f]{{32}})_([0-9A-Za-z]{{16,128}})")
_SHA256: Final = re.compile("[0-9a-f]{64}")


class TokenInfo(msgspec.Struct, frozen=True):
    """What is known of a token: everything but its secret."""

    id: str
    name: str
    universes: list[str]
    verbs: list[str]
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    rate_per_second: float | None
    body_bytes_max: int | None


class NewToken(msgspec.Struct, frozen=True):
    """A token that was just made. `token` is what its holder shows; nobody can read it again, so keep it now."""

    token: str
    info: TokenInfo

    def __repr__(self) -> str:
        return f"<token {self.info.name} ({self.info.id}), its secret not shown>"


class TokenPage(msgspec.Struct, frozen=True):
    """Tokens in the order in which they were made; `next` is where the next page starts, if there is one."""

    tokens: list[TokenInfo]
    next: str | None


class Revoked(msgspec.Struct, frozen=True):
    """Whether the token could be used until now."""

    revoked: bool


class CreateToken(Request[TokenInfo], frozen=True, tag="tokens.create"):
    """Know whoever shows the secret of this SHA-256 from now on. `universes` of ["*"] are all of them."""

    name: str
    universes: list[str]
    verbs: list[str]
    secret_sha256: str
    ttl_seconds: float | None = None  # None: until it is revoked.
    rate_per_second: float | None = None  # Calls; no limit if nothing is said.
    body_bytes_max: int | None = None  # Of one call; no limit but everybody's if nothing is said.

    def check(self) -> None:
        if not _SHA256.fullmatch(self.secret_sha256):
            raise InvalidArgument("secret_sha256 is no SHA-256; send the 64 hex digits of a random secret's")


class ListTokens(Request[TokenPage], frozen=True, tag="tokens.list"):
    """Every token, those that were revoked or ran out lately too."""

    after: str = ""
    limit: int = 100


class RevokeToken(Request[Revoked], frozen=True, tag="tokens.revoke"):
    """Refuse whoever shows this token from now on."""

    id: str


def token_text(id: str, secret: str) -> str:
    """A token as its holder shows it."""
    return f"{PREFIX}_{id}_{secret}"


def split_token(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None if it is none."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1], found[2])


@cache
def verb_of(kind: type[Request[Any]]) -> str:
    """What a token must allow for a type of request: `queue:put` for `queues.put`."""
    noun, _, verb = str(kind.__struct_config__.tag).partition(".")
    return f"{_NOUNS[noun]}:{verb}"


def covers(allowed: Collection[str], verb: str) -> bool:
    """Whether a verb, or a pattern of verbs, is among those that are allowed."""
    return EVERYTHING in allowed or verb in allowed or f"{verb.partition(':')[0]}:*" in allowed


def known_verbs() -> list[str]:
    """Everything that a token can allow."""
    verbs = {verb_of(kind) for kind in Request.__subclasses__() if _noun(kind) in _NOUNS} | {METRICS}
    return sorted(verbs | {f"{verb.partition(':')[0]}:*" for verb in verbs} | {EVERYTHING})


def checked_verbs(verbs: Iterable[str]) -> list[str]:
    """The verbs in order, each once.

    Raises:
        InvalidArgument: there is none, or one of them is no verb.
    """
    known, wanted = known_verbs(), sorted({verb.strip().lower() for verb in verbs})
    for verb in wanted:
        if verb not in known:
            near = get_close_matches(verb, known, n=1, cutoff=0.3) or ["queue:put, queue:* or *"]
            raise InvalidArgument(f"{verb!r} is nothing that a token can allow; did you mean {near[0]}?")
    if not wanted:
        raise InvalidArgument("A token allows something; name verbs, as in queue:put,queue:receive, or *")
    return wanted


def checked_universes(universes: Iterable[str]) -> list[str]:
    """The universes in order, each once; ["*"] if they are all.

    Raises:
        InvalidArgument: there is none, or too many.
        InvalidName: one of them is no name.
    """
    wanted = set(universes)
    if EVERYTHING in wanted:
        return [EVERYTHING]
    if not 0 < len(wanted) <= TOKEN_UNIVERSES_MAX:
        raise InvalidArgument(f"A token is for 1 to {TOKEN_UNIVERSES_MAX} universes, or for all of them: *")
    return sorted({checked_name("universe", universe) for universe in wanted})


def universes_of(request: Any) -> Iterator[str]:
    """Every universe that a request names, at whatever depth: its own, those of leases it shows, those of its steps."""
    kind: Any = type(request)
    for name, look in _places(kind):
        value = getattr(request, name)
        if look is None:
            yield value.lower()  # Names are lower-cased at the edge, so MAIN is main.
        else:
            yield from look(value)


@cache
def _places(kind: type[Any]) -> tuple[tuple[str, Callable[[Any], Iterator[str]] | None], ...]:
    """The fields of a struct in which universes are named; with those that are structs themselves, how to look."""
    places: list[tuple[str, Callable[[Any], Iterator[str]] | None]] = []
    for field in msgspec.structs.fields(kind):
        if field.name == "universe":
            places.append((field.name, None))
        elif any(_places(struct) for struct in _structs_in(field.type)):
            places.append((field.name, _inside))
    return tuple(places)


def _inside(value: Any) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        yield from universes_of(value)
    elif isinstance(value, dict):
        yield from _inside(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _inside(each)


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type annotation names."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in get_args(kind):
        yield from _structs_in(part)


def _noun(kind: type[Request[Any]]) -> str:
    return str(kind.__struct_config__.tag).partition(".")[0]
