"""Tokens: stored hashed, scoped to universes and verbs, revocable at once."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import Busy, InvalidArgument, InvalidName, NotAllowed, NotFound, PayloadTooLarge
from holdfast.handles.sync.tokens import Tokens
from holdfast.handles.tokens import AsyncTokens
from holdfast.kv import Database
from holdfast.layers import tokens as layer
from holdfast.names import UNIVERSE
from holdfast.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from holdfast.plane.operations import OPERATIONS
from holdfast.plane.services import Services
from holdfast.server import tokens as server_tokens
from holdfast.server.authorization import Open
from holdfast.server.tokens import Loopback, TokenGuards, check_bind, choose_guards, is_loopback
from holdfast.testing.clock import ManualClock
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.leases import KeepLease, LeaseProof
from holdfast.wire.pairs import GetPair
from holdfast.wire.queues import AckMessages, GetQueueStats, NewMessage, PutMessages
from holdfast.wire.requests import Request
from holdfast.wire.states import UpdateState
from holdfast.wire.tokens import (
    CreateToken,
    ListTokens,
    NewToken,
    RevokeToken,
    checked_universes,
    checked_verbs,
    covers,
    known_verbs,
    split_token,
    token_text,
    universes_of,
    verb_of,
)

HASH = hashlib.sha256(b"secret").digest()
PUT = PutMessages("jobs", [NewMessage(b"1")])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are faster than the lines that a second has."""
    monkeypatch.setattr(logging.getLogger("holdfast.refusals"), "filters", [])


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def make(tx: Any, **options: Any) -> layer.Token:
    return layer.create(tx, **{"name": "ci", "universes": ["main"], "verbs": ["*"], "secret_hash": HASH, **options})


# The layer.


def test_a_token_is_known_by_its_secret_alone(database: Database) -> None:
    made = database.transact(make)
    found = database.read(layer.find, made.id)
    assert found == made
    assert layer.check(found, HASH, made.created_ms) == made
    for wrong in (hashlib.sha256(b"guess").digest(), b"", HASH[:-1]):
        with pytest.raises(NotAllowed, match="Nobody is known"):
            layer.check(found, wrong, made.created_ms)
    with pytest.raises(NotAllowed, match="Nobody is known"):
        layer.check(None, HASH, made.created_ms)


def test_a_token_ends_by_the_clock_of_the_key_space(database: Database, clock: ManualClock) -> None:
    made = database.transact(make, ttl_ms=1_000)
    assert made.expires_ms == clock.now_ms() + 1_000
    assert layer.check(made, HASH, clock.now_ms() + 999) == made
    with pytest.raises(NotAllowed, match="expired"):
        layer.check(made, HASH, clock.now_ms() + 1_000)


def test_a_token_that_was_revoked_stays_revoked(database: Database) -> None:
    made = database.transact(make)
    assert database.transact(layer.revoke, made.id) is True
    assert database.transact(layer.revoke, made.id) is False
    with pytest.raises(NotAllowed, match="revoked"):
        layer.check(database.read(layer.find, made.id), HASH, 0)
    with pytest.raises(NotFound, match="list them"):
        database.transact(layer.revoke, "0" * 32)


def test_tokens_are_listed_in_pages_in_the_order_in_which_they_were_made(database: Database) -> None:
    made = [database.transact(make, name=f"t{n}") for n in range(5)]
    first = database.read(layer.page, after="", limit=3)
    assert [*first, *database.read(layer.page, after=first[-1].id, limit=3)] == made
    for limit in (0, 10_001):
        with pytest.raises(InvalidArgument, match="page"):
            database.read(layer.page, after="", limit=limit)


def test_a_token_that_ended_is_forgotten_after_a_while(clock: ManualClock) -> None:
    with MemoryDatabase(clock=clock) as database:
        revoked, expired, lasting = (database.transact(make, ttl_ms=ttl) for ttl in (None, 1_000, None))
        database.transact(layer.revoke, revoked.id)
        clock.advance_ms(layer.KEPT_SECONDS * 1_000)
        database.transact(make)
        assert database.read(layer.find, revoked.id) is None
        assert database.read(layer.find, expired.id) is not None
        clock.advance_ms(1_000)
        database.transact(make)
        assert database.read(layer.find, expired.id) is None
        assert database.read(layer.find, lasting.id) == lasting


def test_there_are_only_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "TOKENS_MAX", 2)
    with MemoryDatabase() as database:
        database.transact(make)
        database.transact(make)
        with pytest.raises(Busy, match="2 tokens"):
            database.transact(make)


# Verbs and universes.


def test_every_request_has_a_verb() -> None:
    verbs = [verb_of(kind) for kind in OPERATIONS]
    assert len(set(verbs)) == len(verbs)
    assert all(verb.partition(":")[0] and verb.partition(":")[2] for verb in verbs)
    assert verb_of(PutMessages) == "queue:put"
    assert set(verbs) <= set(known_verbs())


@pytest.mark.parametrize(
    ("allowed", "covered"),
    [
        (["queue:put"], {"queue:put"}),
        (["queue:*"], {"queue:put", "queue:policy.set"}),
        (["*"], {"queue:put", "queue:policy.set", "token:create"}),
        (["queue"], set()),
        ([], set()),
    ],
)
def test_a_pattern_covers_a_noun_or_everything(allowed: list[str], covered: set[str]) -> None:
    assert {verb for verb in ("queue:put", "queue:policy.set", "token:create") if covers(allowed, verb)} == covered


def test_a_verb_that_nobody_knows_is_refused_with_the_nearest_one() -> None:
    assert checked_verbs(["Queue:Put ", "queue:put", "*"]) == ["*", "queue:put"]
    with pytest.raises(InvalidArgument, match="did you mean queue:receive"):
        checked_verbs(["queue:recieve"])
    with pytest.raises(InvalidArgument, match="allows something"):
        checked_verbs([])


def test_universes_are_names_or_all_of_them() -> None:
    assert checked_universes(["Beta", "alpha", "beta"]) == ["alpha", "beta"]
    assert checked_universes(["alpha", "*"]) == ["*"]
    with pytest.raises(InvalidName):
        checked_universes(["../alpha"])
    with pytest.raises(InvalidArgument, match="1 to 64"):
        checked_universes([])


@pytest.mark.parametrize("text", ["", "hft_", "hft_x_y", f"hft_{'0' * 32}_", f"hft_{'0' * 32}_{'a' * 200}", "x" * 90])
def test_what_is_no_token_is_none(text: str) -> None:
    assert split_token(text) is None


def test_a_token_is_taken_apart_as_it_was_put_together() -> None:
    assert split_token(token_text("0" * 32, "s" * 48)) == ("0" * 32, "s" * 48)


def brute(value: Any) -> set[str]:
    """Every universe in what a request looks like on the wire."""
    if isinstance(value, dict):
        own = {value["universe"]} if isinstance(value.get("universe"), str) else set()
        return own.union(*map(brute, value.values()))
    return set().union(*map(brute, value)) if isinstance(value, list | tuple) else set()


def with_universes(kind: Any, names: Iterator[str]) -> Any:
    """An instance of a struct in which every universe is another one."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "universe":
            values[field.name] = next(names)
        elif field.name == "lease":
            values[field.name] = LeaseProof("k", "l", 1, universe=next(names))
        elif field.name == "operations":
            values[field.name] = [
                PUT,
                UpdateState("k", b"", LeaseProof("k", "l", 1, universe=next(names)), universe=next(names)),
                KeepLease(LeaseProof("k", "l", 1, universe=next(names))),
            ]
        elif field.required:
            values[field.name] = "x"
    return kind(**values)


@pytest.mark.parametrize("kind", OPERATIONS, ids=lambda kind: kind.__name__)
def test_every_universe_of_a_request_is_found(kind: type[Request[Any]]) -> None:
    class Whole(kind, frozen=True, omit_defaults=False, tag=f"{verb_of(kind)}.whole"):  # type: ignore[misc, valid-type]
        pass

    request = with_universes(kind, (f"u{n}" for n in range(10)))
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    shown = msgspec.to_builtins(Whole(**fields))
    expected = brute(shown) | ({UNIVERSE} if kind is CommitAtomic else set())  # Defaults do not travel.
    assert set(universes_of(request)) == expected
    assert universes_of(request) is not None


def test_no_request_hides_its_parts_behind_any() -> None:
    for kind in OPERATIONS:
        assert not [field.name for field in msgspec.structs.fields(kind) if field.type is Any]


# Through the plane.


@pytest.fixture
def plane() -> Iterator[Tokens]:
    transport = EmbeddedTransport(Services(MemoryDatabase()))
    yield Tokens(transport)
    transport.close()


def test_a_token_shows_its_secret_once(plane: Tokens) -> None:
    made = plane.create("CI", universes="main, beta", verbs="queue:put,queue:receive", ttl_seconds=60)
    id, secret = split_token(made.token) or ("", "")
    assert made.info.id == id
    assert (made.info.name, made.info.universes) == ("ci", ["beta", "main"])
    assert made.info.expires_ms == made.info.created_ms + 60_000
    assert secret not in repr(made)
    assert secret not in repr(plane.page())
    assert plane.page().tokens == [made.info]


def test_the_secret_is_not_stored(plane: Tokens) -> None:
    made = plane.create("ci", universes="*", verbs="*")
    secret = made.token.rpartition("_")[2].encode()
    pairs = plane._transport.services.database.read(lambda tx: tx.scan(b"", b"\xff", limit=100))  # type: ignore[attr-defined]
    assert pairs
    assert not [key for key, value in pairs if secret in key or secret in value]


def test_a_token_is_revoked_by_its_id_or_by_itself(plane: Tokens) -> None:
    one, other = (plane.create("ci", universes="*", verbs="*") for _ in range(2))
    assert plane.revoke(one.info.id) is True
    assert plane.revoke(other.token) is True
    assert plane.revoke(other.token) is False
    assert all(token.revoked_ms for token in plane.page().tokens)


@pytest.mark.parametrize(
    "wrong",
    [
        {"universes": "a b"},
        {"universes": []},
        {"verbs": "queue:burn"},
        {"verbs": ""},
        {"ttl_seconds": 0},
        {"ttl_seconds": float("nan")},
        {"ttl_seconds": 1e12},
        {"rate_per_second": 0},
        {"rate_per_second": float("inf")},
        {"body_bytes_max": 0},
    ],
    ids=repr,
)
def test_a_token_that_makes_no_sense_is_refused(plane: Tokens, wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        plane.create("ci", **{"universes": "*", "verbs": "*", **wrong})
    assert plane.page().tokens == []


@pytest.mark.parametrize("digest", ["", "x" * 64, "ab" * 31, "AB" * 32])
def test_a_hash_that_is_none_is_refused(plane: Tokens, digest: str) -> None:
    with pytest.raises(InvalidArgument, match="SHA-256"):
        plane._transport.call(CreateToken("ci", ["*"], ["*"], digest))


# Guards.


class Hall:
    """A plane in memory with its guards, under a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.transport = AsyncEmbeddedTransport(Services(MemoryDatabase(clock=self.clock), clock=self.clock))
        self.rejected: list[str] = []
        self.ended: list[str] = []
        self.guards = TokenGuards(self.transport, rejected=self.rejected.append, ended=self.ended.append)
        self.tokens = AsyncTokens(self.transport)

    async def token(self, universes: str = "main", verbs: str = "*", **options: Any) -> NewToken:
        made = await self.tokens.create("ci", universes=universes, verbs=verbs, **options)
        await until(lambda: made.info.id in self.guards._passes)  # Made by somebody else, it is known a moment later.
        return made

    def admit(self, made: NewToken) -> Any:
        return self.guards.admit(bearer(made.token), "10.0.0.1")


@pytest.fixture
async def hall() -> AsyncIterator[Hall]:
    hall = Hall()
    await hall.guards.start()
    yield hall
    await hall.guards.stop()
    await hall.transport.close()


async def test_whoever_shows_a_token_comes_in(hall: Hall) -> None:
    made = await hall.token()
    guard = hall.admit(made)
    assert guard.name == made.info.id
    guard.allow(PUT)
    assert hall.rejected == []


async def test_whoever_shows_none_or_a_wrong_one_does_not(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    made = await hall.token()
    wrong = [
        {},
        {"authorization": ""},
        {"authorization": made.token},
        {"authorization": f"Basic {made.token}"},
        bearer(made.token[:-1] + ("0" if made.token[-1] != "0" else "1")),
        bearer(token_text("0" * 32, made.token.rpartition("_")[2])),
        bearer(made.token + "0" * 1_000),
        bearer("é" * 100),
    ]
    for headers in wrong:
        with pytest.raises(NotAllowed):
            hall.guards.admit(headers, "10.0.0.1")
    assert hall.rejected == ["token"] * len(wrong)
    assert len(caplog.records) == len(wrong)
    assert caplog.records[0].client == "10.0.0.1"  # type: ignore[attr-defined]
    assert made.token.rpartition("_")[2] not in caplog.text


async def test_a_token_ends_while_a_connection_is_open(hall: Hall) -> None:
    guard = hall.admit(await hall.token(ttl_seconds=10))
    hall.clock.advance_ms(9_999)
    guard.allow(PUT)
    hall.clock.advance_ms(1)
    with pytest.raises(NotAllowed, match="expired"):
        guard.allow(PUT)


async def test_a_token_that_was_revoked_is_refused_at_once(hall: Hall) -> None:
    made = await hall.token()
    guard = hall.admit(made)
    await hall.transport.call(RevokeToken(made.info.id))
    for _ in range(3):
        await asyncio.sleep(0)  # Three turns of the loop: an answer takes longer to reach whoever waits for it.
    with pytest.raises(NotAllowed, match="revoked"):
        guard.allow(PUT)
    with pytest.raises(NotAllowed, match="revoked"):
        hall.admit(made)
    assert hall.ended == [made.info.id]


async def test_a_token_that_was_forgotten_is_refused(hall: Hall) -> None:
    made = await hall.token()
    guard = hall.admit(made)
    await hall.transport.transact(lambda tx: tx.delete_range(*layer.ROOM.range()), tier=PUT.tier)
    await until(lambda: hall.ended)
    with pytest.raises(NotAllowed, match="removed"):
        guard.allow(PUT)
    assert hall.ended == [made.info.id]


def proof(universe: str) -> LeaseProof:
    return LeaseProof("k", "l", 1, universe=universe)


ELSEWHERE = [
    PutMessages("jobs", [NewMessage(b"1")], "beta"),
    PutMessages("jobs", [NewMessage(b"1")], ""),
    PutMessages("jobs", [NewMessage(b"1")], "main/../beta"),
    GetQueueStats("jobs", "beta"),
    KeepLease(proof("beta")),
    UpdateState("k", b"\x01", proof("beta")),
    CommitAtomic([PUT, PutMessages("jobs", [NewMessage(b"1")], "beta")]),
    CommitAtomic([KeepLease(proof("beta"))]),
    CommitAtomic([UpdateState("k", b"\x01", proof("beta"))]),
    GetPair(b"\x02u\x00\x02beta\x00"),
    ListTokens(),
    RevokeToken("0" * 32),
    CreateToken("x", ["main"], ["queue:put"], "0" * 64),
]


@pytest.mark.parametrize("request_", ELSEWHERE, ids=lambda request: repr(request)[:60])
async def test_a_token_of_one_universe_reaches_no_other(hall: Hall, request_: Request[Any]) -> None:
    guard = hall.admit(await hall.token("main"))
    with pytest.raises(NotAllowed, match="is not for"):
        guard.allow(request_)
    assert hall.rejected == ["not_allowed"]


@pytest.mark.parametrize("universe", ["main", "MAIN", "Main"])
async def test_names_of_universes_are_the_same_in_any_case(hall: Hall, universe: str) -> None:
    hall.admit(await hall.token("main")).allow(PutMessages("jobs", [NewMessage(b"1")], universe))


async def test_a_token_may_be_for_several_universes_or_all(hall: Hall) -> None:
    several, every = hall.admit(await hall.token("main,beta")), hall.admit(await hall.token("*"))
    for guard in (several, every):
        guard.allow(CommitAtomic([PUT, PutMessages("jobs", [NewMessage(b"1")], "beta")]))
    every.allow(ListTokens())


async def test_a_token_allows_its_verbs_and_no_others(hall: Hall) -> None:
    guard = hall.admit(await hall.token("*", "queue:put,lease:*"))
    ack = AckMessages("jobs", [])
    guard.allow(PUT)
    guard.allow(KeepLease(proof("main")))
    guard.allow(CommitAtomic([PUT, KeepLease(proof("main"))]))
    for refused in (ack, CommitAtomic([PUT, ack]), GetPair(b"a")):
        with pytest.raises(NotAllowed, match="does not allow"):
            guard.allow(refused)
    assert hall.rejected == ["not_allowed"] * 3


async def test_nobody_makes_a_token_that_may_do_more_than_their_own(hall: Hall) -> None:
    guard = hall.admit(await hall.token("*", "token:create,queue:*"))
    guard.allow(CreateToken("x", ["beta"], ["queue:put", "queue:*"], "0" * 64))
    for verb in ("*", "token:*", "lease:acquire"):
        with pytest.raises(NotAllowed, match="does not allow"):
            guard.allow(CreateToken("x", ["beta"], [verb], "0" * 64))


async def test_a_token_has_a_rate(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("holdfast.server.tokens.monotonic", lambda: now)
    guard = hall.admit(await hall.token(rate_per_second=2))
    guard.allow(PUT)
    guard.allow(PUT)
    with pytest.raises(Busy, match="2 calls a second"):
        guard.allow(PUT)
    now += 0.5
    guard.allow(PUT)
    with pytest.raises(Busy):
        guard.allow(PUT)
    await hall.token()  # That others are made gives nobody their rate back.
    with pytest.raises(Busy):
        guard.allow(PUT)
    now += 3_600
    guard.allow(PUT)
    guard.allow(PUT)
    with pytest.raises(Busy):  # What was not used is not saved up.
        guard.allow(PUT)
    assert set(hall.rejected) == {"busy"}


async def test_a_token_has_a_size(hall: Hall) -> None:
    guard = hall.admit(await hall.token(body_bytes_max=1_000))
    guard.allow(PUT)
    with pytest.raises(PayloadTooLarge, match="allows 1000"):
        guard.allow(PutMessages("jobs", [NewMessage(b"x" * 1_000)]))
    guard.allow_body(1_000)
    with pytest.raises(PayloadTooLarge, match="allows 1000"):
        guard.allow_body(1_001)
    assert hall.rejected == ["payload_too_large"] * 2
    hall.admit(await hall.token()).allow_body(10**15)


async def test_a_door_may_ask_for_a_verb_that_no_request_has(hall: Hall) -> None:
    hall.admit(await hall.token("*", "metrics:read")).permit("metrics:read")
    for universes, verbs in (("main", "*"), ("*", "queue:*")):
        with pytest.raises(NotAllowed):
            hall.admit(await hall.token(universes, verbs)).permit("metrics:read")


async def test_guards_without_any_token_say_so(caplog: pytest.LogCaptureFixture) -> None:
    hall = Hall()
    with caplog.at_level(logging.WARNING):
        await hall.guards.start()
    assert "there is none" in caplog.text
    await hall.guards.stop()
    await hall.transport.close()


async def test_guards_outlive_a_key_space_that_is_closed_first() -> None:
    hall = Hall()
    await hall.guards.start()
    await hall.transport.close()
    watching = hall.guards._watching
    assert watching is not None
    await until(watching.done)
    await hall.guards.stop()


@given(st.text(max_size=300))
def test_no_header_is_more_than_refused(text: str) -> None:
    guards = TokenGuards(_Nothing())
    with pytest.raises(NotAllowed):
        guards.admit({"authorization": text}, "")


class _Nothing:
    """A port of a plane that nobody opened."""

    class services:  # noqa: N801
        database = None
        shared = False
        clock = None


# Addresses.


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_a_loopback_address_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, tokens_on=False, tls=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.0.0.1.example.com"])
def test_any_other_address_needs_tokens_and_tls(host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"refused unless tokens are on.*holdfast token create --universe u"):
        check_bind(host, tokens_on=False, tls=True, insecure=True)
    with pytest.raises(InvalidArgument, match=r"without TLS.*--insecure"):
        check_bind(host, tokens_on=True, tls=False, insecure=False)
    check_bind(host, tokens_on=True, tls=True, insecure=False)
    check_bind(host, tokens_on=True, tls=False, insecure=True)


def test_loopback_without_tokens_is_open() -> None:
    guards = choose_guards(_Nothing(), tokens_on=False)
    assert isinstance(guards, Open)
    guards.admit({"host": "127.0.0.1:9440"}, "127.0.0.1").allow(PUT)
    assert isinstance(choose_guards(_Nothing(), tokens_on=True), TokenGuards)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "host": "127.0.0.1:9440"},
        {"origin": "null", "host": "localhost:9440"},
        {"origin": "http://[", "host": "localhost"},
        {"host": "evil.example:9440"},
    ],
    ids=repr,
)
def test_a_web_page_does_not_reach_a_server_without_tokens(headers: dict[str, str]) -> None:
    with pytest.raises(NotAllowed):
        Loopback().admit(headers, "127.0.0.1")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:9440"},
        {"host": "[::1]:9440"},
        {"host": "10.0.0.1"},
        {"origin": "http://localhost:9440", "host": "localhost:9440"},
    ],
    ids=repr,
)
def test_whoever_is_on_the_machine_does(headers: dict[str, str]) -> None:
    Loopback().admit(headers, "127.0.0.1").allow(PUT)


async def test_what_could_not_be_learnt_is_learnt_soon_and_not_when_something_else_changes(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch tells of a change once: guards that wait for it again would let a revoked token in for a minute."""
    monkeypatch.setattr(server_tokens, "_LOOK_SECONDS_SHARED", 0.001)
    made = await hall.token()
    read, failed = hall.guards._database.read_async, list[Exception]()

    async def fail_once(*args: Any, **options: Any) -> Any:
        if len(failed) < 2:
            failed.append([Busy("away"), ZeroDivisionError()][len(failed)])
            raise failed[-1]
        return await read(*args, **options)

    monkeypatch.setattr(hall.guards._database, "read_async", fail_once)
    await hall.tokens.revoke(made.info.id)
    await until(lambda: hall.ended == [made.info.id])
    assert len(failed) == 2


async def test_an_end_that_cannot_be_told_keeps_no_other_token_from_being_known(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked, *others = sorted([await hall.token() for _ in range(3)], key=lambda made: made.info.id)

    def fail(id: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hall.guards, "_ended", fail)
    await hall.tokens.revoke(revoked.info.id)
    passes = hall.guards._passes
    await until(lambda: hall.guards._passes is not passes)
    for other in others:
        hall.admit(other)
    with pytest.raises(NotAllowed):
        hall.admit(revoked)
