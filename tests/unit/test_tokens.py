"""Tokens: stored hashed, scoped to universes and verbs, revocable at once."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness.backends.memory import MemoryDatabase
from fastness.errors import Busy, InvalidArgument, InvalidName, NotAllowed, NotFound, PayloadTooLarge
from fastness.handles.sync.tokens import Tokens
from fastness.handles.tokens import AsyncTokens
from fastness.kv import Database
from fastness.layers import tokens as layer
from fastness.limits import TOKEN_QUEUES_MAX
from fastness.names import UNIVERSE
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.operations import OPERATIONS
from fastness.plane.services import Services
from fastness.server import tokens as server_tokens
from fastness.server.authorization import NoAuthentication
from fastness.server.tokens import (
    Loopback,
    TokenAuthenticator,
    TokenAuthorizer,
    check_bind,
    is_loopback,
    make_authenticator,
)
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.audit import detail_of
from fastness.wire.backups import BeginBackup
from fastness.wire.catalog import NETWORK_REQUESTS
from fastness.wire.collections import GetRows, WaitForRows
from fastness.wire.ingress import Push, PushMany, WatchPushes
from fastness.wire.leases import KeepLease, LeaseProof
from fastness.wire.mail import ReadMail, SendMail
from fastness.wire.pairs import GetPair
from fastness.wire.permissions import (
    TOKEN_UNIVERSES_MAX,
    checked_queues,
    checked_universes,
    checked_verbs,
    covers,
    known_verbs,
    universes_of,
)
from fastness.wire.queues import (
    AckMessages,
    CancelMessage,
    CancelMessages,
    ExtendMessages,
    GetQueueStats,
    ListQueues,
    MessageLease,
    MoveMessages,
    NewMessage,
    PackedAck,
    PutMessages,
    QueueNames,
    QueuePolicy,
    ReceiveMessages,
    RedriveMessages,
    SetQueuePolicy,
    SurveyQueues,
    WaitForCancel,
)
from fastness.wire.quotas import GetQuota, GetUsage
from fastness.wire.requests import Request, permission_of
from fastness.wire.sqs import (
    CancelMoveTask,
    CreateSqsQueue,
    GetSqsSettings,
    ListMoveTasks,
    ListSqsQueues,
    ListSqsSources,
    SetSqsAttributes,
    SqsQueueNames,
    StartMoveTask,
)
from fastness.wire.states import UpdateState
from fastness.wire.tokens import CreateToken, ListTokens, NewToken, RevokeToken, ShowOwnToken, split_token, token_text
from fastness.wire.type_checks import check_types
from fastness.wire.worlds import CheckRestore, GetBaseline
from tests.support.failures import Failures

HASH = hashlib.sha256(b"secret").digest()
PUT = PutMessages("jobs", [NewMessage(b"1")])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def log_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the rate limit of log lines."""
    monkeypatch.setattr(logging.getLogger("fastness.refusals"), "filters", [])


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def make(tx: Any, **options: Any) -> layer.Token:
    return layer.create(tx, **{"name": "ci", "universes": ["main"], "verbs": ["*"], "secret_hash": HASH, **options})


# The layer.


def test_token_is_checked_by_its_secret(database: Database) -> None:
    made = database.transact(make)
    found = database.read(layer.find, made.id)
    assert found == made
    assert layer.check(found, HASH, made.created_ms) == made
    for wrong in (hashlib.sha256(b"guess").digest(), b"", HASH[:-1]):
        with pytest.raises(NotAllowed, match="The token is unknown"):
            layer.check(found, wrong, made.created_ms)
    with pytest.raises(NotAllowed, match="The token is unknown"):
        layer.check(None, HASH, made.created_ms)


def test_token_expires_by_the_clock_of_the_key_space(database: Database, clock: ManualClock) -> None:
    made = database.transact(make, ttl_ms=1_000)
    assert made.expires_ms == clock.now_ms() + 1_000
    assert layer.check(made, HASH, clock.now_ms() + 999) == made
    with pytest.raises(NotAllowed, match="expired"):
        layer.check(made, HASH, clock.now_ms() + 1_000)


def test_revoked_token_stays_revoked(database: Database) -> None:
    made = database.transact(make)
    assert database.transact(layer.revoke, made.id) is True
    assert database.transact(layer.revoke, made.id) is False
    with pytest.raises(NotAllowed, match="revoked"):
        layer.check(database.read(layer.find, made.id), HASH, 0)
    with pytest.raises(NotFound, match="list them"):
        database.transact(layer.revoke, "0" * 32)


def family(database: Database) -> dict[str, str]:
    """The ids of a token, its child and its grandchildren, and of a token that does not come from it."""
    ids: dict[str, str] = {"": ""}
    for name, maker in (("a", ""), ("a/b", "a"), ("a/b/c", "a/b"), ("a/b/d", "a/b"), ("other", "")):
        ids[name] = database.transact(make, name=name, maker=ids[maker]).id
    return ids


def usable(database: Database) -> list[str]:
    return [each.name for each in database.read(layer.all_tokens) if each.revoked_ms is None]


@pytest.mark.parametrize(("revoked", "left"), [("a/b", ["a", "other"]), ("a", ["other"])])
def test_revoking_a_token_revokes_those_that_come_from_it(database: Database, revoked: str, left: list[str]) -> None:
    ids = family(database)
    assert database.transact(layer.revoke, ids[revoked]) is True
    assert usable(database) == left
    with pytest.raises(NotAllowed, match="revoked"):
        database.transact(make, maker=ids["a/b/c"])


def test_children_that_are_kept_count_as_created_by_the_maker_of_their_maker(database: Database) -> None:
    ids = family(database)
    assert database.transact(layer.revoke, ids["a/b"], keep_children=True) is True
    assert usable(database) == ["a", "a/b/c", "a/b/d", "other"]
    assert database.transact(layer.revoke, ids["a/b"]) is False
    assert usable(database) == ["a", "a/b/c", "a/b/d", "other"]
    database.transact(layer.revoke, ids["a"])
    assert usable(database) == ["other"]


def test_many_large_children_do_not_prevent_a_revocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of a stolen token could create them, so that revoking all of them exceeds a transaction."""
    universes = [f"{number:0255}" for number in range(TOKEN_UNIVERSES_MAX)]
    with MemoryDatabase() as database:
        stolen = database.transact(make, universes=["*"])
        for _ in range(20):
            database.transact(make, universes=universes, maker=stolen.id)
        monkeypatch.setattr("fastness.kv.transactions.TRANSACTION_BYTES_MAX", 10 * len("".join(universes)))
        assert database.transact(layer.revoke, stolen.id) is True
        assert usable(database) == []


def test_tokens_are_listed_in_pages_in_creation_order(database: Database) -> None:
    made = [database.transact(make, name=f"t{n}") for n in range(5)]
    first = database.read(layer.page, after="", limit=3)
    assert [*first, *database.read(layer.page, after=first[-1].id, limit=3)] == made


def test_ended_token_is_deleted_after_a_while(clock: ManualClock) -> None:
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


def test_number_of_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "TOKENS_MAX", 2)
    with MemoryDatabase() as database:
        database.transact(make)
        database.transact(make)
        with pytest.raises(Busy, match="2 tokens"):
            database.transact(make)


# Verbs and universes.


def test_every_request_has_a_verb() -> None:
    shared = (CancelMessages, CheckRestore, GetQuota, Push, PushMany, WaitForCancel, WaitForRows, WatchPushes)
    verbs = [permission_of(kind) for kind in OPERATIONS if kind not in shared]
    assert permission_of(CheckRestore) == permission_of(GetBaseline)  # A restore began with the baseline before.
    assert permission_of(WaitForCancel) == permission_of(ExtendMessages)  # Tokens of workers have it already.
    assert permission_of(Push) == permission_of(PushMany) == permission_of(SendMail)  # A push is stored as mail.
    assert permission_of(WatchPushes) == permission_of(ReadMail)
    assert permission_of(CancelMessages) == permission_of(CancelMessage)
    assert permission_of(GetQuota) == permission_of(GetUsage)
    assert permission_of(WaitForRows) == permission_of(GetRows)
    assert len(set(verbs)) == len(verbs)
    assert all(verb.partition(":")[0] and verb.partition(":")[2] for verb in verbs)
    assert permission_of(PutMessages) == "queue:put"
    assert set(verbs) <= set(known_verbs())


def test_a_pattern_covers_a_noun_or_everything() -> None:
    verbs = {"queue:put", "queue:policy.set", "token:create"}
    for allowed, covered in (
        (["queue:put"], {"queue:put"}),
        (["queue:*"], {"queue:put", "queue:policy.set"}),
        (["*"], verbs),
        (["queue"], set()),
        ([], set()),
    ):
        assert {verb for verb in verbs if covers(allowed, verb)} == covered, allowed


def test_unknown_verb_is_refused_with_the_nearest_one() -> None:
    assert checked_verbs(["Queue:Put ", "queue:put", "*"]) == ["*", "queue:put"]
    with pytest.raises(InvalidArgument, match="did you mean queue:receive"):
        checked_verbs(["queue:recieve"])
    with pytest.raises(InvalidArgument, match="at least one verb"):
        checked_verbs([])


def test_universes_are_names_or_a_star() -> None:
    assert checked_universes(["beta", "alpha", "beta"]) == ["alpha", "beta"]
    assert checked_universes(["alpha", "*"]) == ["*"]
    with pytest.raises(InvalidName):
        checked_universes(["../alpha"])
    with pytest.raises(InvalidArgument, match="1 to 64"):
        checked_universes([])


def test_split_token_inverts_token_text() -> None:
    for text in ("", "fnt_", "fnt_x_y", f"fnt_{'0' * 32}_", f"fnt_{'0' * 32}_{'a' * 200}", "x" * 90):
        assert split_token(text) is None, text
    assert split_token(token_text("0" * 32, "s" * 48)) == ("0" * 32, "s" * 48)


def universes_in(value: Any) -> set[str]:
    """Every universe in the encoded form of a request."""
    if isinstance(value, dict):
        own = {value["universe"]} if isinstance(value.get("universe"), str) else set()
        return own.union(*map(universes_in, value.values()))
    return set().union(*map(universes_in, value)) if isinstance(value, list | tuple) else set()


def with_universes(kind: Any, names: Iterator[str]) -> Any:
    """An instance of a struct in which every universe has a different name."""
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


def test_every_universe_of_a_request_is_found() -> None:
    failures = Failures()
    for kind in OPERATIONS:
        whole = msgspec.defstruct("Whole", [], bases=(kind,), frozen=True, tag="whole", omit_defaults=False)
        with failures.of(kind.__name__):
            request = with_universes(kind, (f"u{n}" for n in range(10)))
            encoded = msgspec.to_builtins(whole(**msgspec.structs.asdict(request)))
            default = {UNIVERSE} if kind is CommitAtomic else set()  # Defaults are not encoded.
            assert set(universes_of(request)) == universes_in(encoded) | default
            assert not [field.name for field in msgspec.structs.fields(kind) if field.type is Any]
    failures.check()


# Through the plane.


@pytest.fixture
def plane() -> Iterator[Tokens]:
    transport = EmbeddedTransport(Services(MemoryDatabase()))
    yield Tokens(transport)
    transport.close()


def test_secret_is_returned_only_by_create(plane: Tokens) -> None:
    made = plane.create("ci", universes="main, beta", verbs="queue:put,queue:receive", ttl_seconds=60)
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


def test_token_is_revoked_by_its_id_or_its_text(plane: Tokens) -> None:
    one, other = (plane.create("ci", universes="*", verbs="*") for _ in range(2))
    assert plane.revoke(one.info.id) is True
    assert plane.revoke(other.token) is True
    assert plane.revoke(other.token) is False
    assert all(token.revoked_ms for token in plane.page().tokens)


def test_invalid_token_options_are_refused(plane: Tokens) -> None:
    failures = Failures()
    wrong: dict[str, Any]
    for wrong in (
        {"universes": "a b"},
        {"universes": []},
        {"verbs": "queue:burn"},
        {"verbs": ""},
        {"rate_per_second": 0},
        {"rate_per_second": float("inf")},
        {"body_bytes_max": 0},
    ):
        with failures.of(wrong):
            options: dict[str, Any] = {"universes": "*", "verbs": "*", **wrong}
            with pytest.raises((InvalidArgument, InvalidName)):
                plane.create("ci", **options)
            assert plane.page().tokens == []
    failures.check()


def test_a_secret_hash_is_in_lower_case(plane: Tokens) -> None:
    with pytest.raises(InvalidArgument, match="SHA-256"):
        plane._transport.call(CreateToken("ci", ["*"], ["*"], "AB" * 32))


# The authenticator.


class TokenServer:
    """A plane in memory with a token authenticator and a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.transport = AsyncEmbeddedTransport(Services(MemoryDatabase(clock=self.clock), clock=self.clock))
        self.rejected: list[str] = []
        self.ended: list[str] = []
        self.authenticator = TokenAuthenticator(self.transport, rejected=self.rejected.append, ended=self.ended.append)
        self.tokens = AsyncTokens(self.transport)

    async def token(self, universes: str = "main", verbs: str = "*", **options: Any) -> NewToken:
        made = await self.tokens.create("ci", universes=universes, verbs=verbs, **options)
        await until(lambda: made.info.id in self.authenticator._tokens)
        return made

    def authenticate(self, made: NewToken) -> Any:
        return self.authenticator.authenticate(bearer(made.token), "10.0.0.1")


@pytest.fixture
async def server() -> AsyncIterator[TokenServer]:
    server = TokenServer()
    await server.authenticator.start()
    yield server
    await server.authenticator.stop()
    await server.transport.close()


async def test_valid_token_is_accepted(server: TokenServer) -> None:
    made = await server.token()
    authorizer = server.authenticate(made)
    assert authorizer.name == made.info.id
    authorizer.authorize(PUT)
    assert server.rejected == []


async def test_missing_or_wrong_token_is_refused(server: TokenServer, caplog: pytest.LogCaptureFixture) -> None:
    made = await server.token()
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
            server.authenticator.authenticate(headers, "10.0.0.1")
    assert server.rejected == ["token"] * len(wrong)
    assert len(caplog.records) == len(wrong)
    assert caplog.records[0].client == "10.0.0.1"  # type: ignore[attr-defined]
    assert made.token.rpartition("_")[2] not in caplog.text


async def test_token_expires_while_a_connection_is_open(server: TokenServer) -> None:
    authorizer = server.authenticate(await server.token(ttl_seconds=10))
    server.clock.advance_ms(9_999)
    authorizer.authorize(PUT)
    server.clock.advance_ms(1)
    with pytest.raises(NotAllowed, match="expired"):
        authorizer.authorize(PUT)


async def test_revoked_token_is_refused_at_once(server: TokenServer) -> None:
    made = await server.token()
    authorizer = server.authenticate(made)
    await server.transport.call(RevokeToken(made.info.id))
    for _ in range(3):
        await asyncio.sleep(0)  # Three iterations of the event loop: an answer takes longer to reach its caller.
    with pytest.raises(NotAllowed, match="revoked"):
        authorizer.authorize(PUT)
    with pytest.raises(NotAllowed, match="revoked"):
        server.authenticate(made)
    assert server.ended == [made.info.id]


async def test_deleted_token_is_refused(server: TokenServer) -> None:
    made = await server.token()
    authorizer = server.authenticate(made)
    await server.transport.transact(lambda tx: tx.delete_range(*layer.SUBSPACE.range()), tier=PUT.tier)
    await until(lambda: server.ended)
    with pytest.raises(NotAllowed, match="removed"):
        authorizer.authorize(PUT)
    assert server.ended == [made.info.id]


def proof(universe: str) -> LeaseProof:
    return LeaseProof("k", "l", 1, universe=universe)


OTHER_UNIVERSE = [
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


async def test_token_of_one_universe_cannot_access_another(server: TokenServer) -> None:
    authorizer = server.authenticate(await server.token("main"))
    in_another_case = [PutMessages("jobs", [NewMessage(b"1")], universe) for universe in ("MAIN", "Main")]
    failures = Failures()
    for request in (*OTHER_UNIVERSE, *in_another_case):
        with failures.of(request):
            server.rejected.clear()
            with pytest.raises(NotAllowed, match="is not for"):
                authorizer.authorize(request)
            assert server.rejected == ["not_allowed"]
    failures.check()


async def test_token_may_cover_several_universes_or_all(server: TokenServer) -> None:
    several, every = server.authenticate(await server.token("main,beta")), server.authenticate(await server.token("*"))
    for authorizer in (several, every):
        authorizer.authorize(CommitAtomic([PUT, PutMessages("jobs", [NewMessage(b"1")], "beta")]))
    every.authorize(ListTokens())


async def test_token_allows_only_its_verbs(server: TokenServer) -> None:
    authorizer = server.authenticate(await server.token("*", "queue:put,lease:*"))
    ack = AckMessages("jobs", [])
    authorizer.authorize(PUT)
    authorizer.authorize(KeepLease(proof("main")))
    authorizer.authorize(CommitAtomic([PUT, KeepLease(proof("main"))]))
    for refused in (ack, CommitAtomic([PUT, ack]), GetPair(b"a")):
        with pytest.raises(NotAllowed, match="does not allow"):
            authorizer.authorize(refused)
    assert server.rejected == ["not_allowed"] * 3


async def test_acks_that_come_with_a_receive_need_the_right_to_acknowledge(server: TokenServer) -> None:
    receive = ReceiveMessages("jobs", "ada")
    with_acks = msgspec.structs.replace(receive, acks=[PackedAck(b"lease", 1, [], b"\x01")])
    reader = server.authenticate(await server.token("*", "queue:receive"))
    reader.authorize(receive)
    with pytest.raises(NotAllowed, match="does not allow queue:ack"):
        reader.authorize(with_acks)
    server.authenticate(await server.token("*", "queue:receive,queue:ack")).authorize(with_acks)


async def test_every_usable_token_shows_itself_and_no_other(server: TokenServer) -> None:
    other = await server.token()
    made = await server.token("beta", "lease:check", rate_per_second=2)
    authorizer = server.authenticate(made)
    for claimed in ("", other.info.id):  # Whatever id the caller claims.
        request = ShowOwnToken(claimed)
        authorizer.authorize(request)
        assert authorizer.is_allowed(request)
        assert (await server.transport.call(authorizer.attributed(request))).token == made.info
    without = NoAuthentication().authenticate({}, "").attributed(ShowOwnToken(other.info.id))
    assert (await server.transport.call(without)).token is None
    assert await server.tokens.self() is None
    await server.tokens.revoke(made.info.id)
    await until(lambda: server.ended)
    with pytest.raises(NotAllowed, match="revoked"):
        authorizer.authorize(ShowOwnToken())


async def test_token_cannot_create_a_token_with_more_rights(server: TokenServer) -> None:
    authorizer = server.authenticate(await server.token("*", "token:create,queue:*"))
    authorizer.authorize(CreateToken("x", ["beta"], ["queue:put", "queue:*"], "0" * 64))
    for verb in ("*", "token:*", "lease:acquire"):
        with pytest.raises(NotAllowed, match="does not allow"):
            authorizer.authorize(CreateToken("x", ["beta"], [verb], "0" * 64))


@given(data=st.data())
def test_no_token_creates_a_wider_one(data: st.DataObject) -> None:
    """Whatever a token asks for, the new token allows a subset of what it allows, or the refusal names the field."""
    some_universes = st.sampled_from([["*"], ["main"], ["main", "beta"], ["beta"]])
    some_verbs = st.lists(st.sampled_from(["*", "token:*", "token:create", "queue:*", "queue:put", "lease:acquire"]))
    limits: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {},
        optional={
            "ttl_seconds": st.sampled_from([1.0, 60.0, 3_600.0, 7_200.0]),
            "rate_per_second": st.sampled_from([0.5, 5.0, 100.0]),
            "body_bytes_max": st.sampled_from([1, 1_000, 10_000]),
        },
    )
    clock = ManualClock()
    with MemoryDatabase(clock=clock) as database:
        transport = EmbeddedTransport(Services(database, clock=clock))
        verbs = ["token:create", *data.draw(some_verbs, "the maker's verbs")]
        request = CreateToken("maker", data.draw(some_universes), verbs, "0" * 64, **data.draw(limits))
        maker = transport.call(request)
        clock.advance_ms(data.draw(st.sampled_from([0, 1, 900])))
        wanted = data.draw(limits, "the limits that it asks for")
        verbs = data.draw(some_verbs.filter(bool), "the verbs that it asks for")
        request = CreateToken("child", data.draw(some_universes), verbs, "0" * 64, maker=maker.id, **wanted)
        child, refusal = None, ""
        try:
            child = transport.call(request)
        except NotAllowed as error:
            refusal = str(error)
        if child is None:
            assert refusal.partition(" ")[0] in ("universes", "verbs", *wanted)
            return
        assert "*" in maker.universes or set(child.universes) <= set(maker.universes)
        for verb in known_verbs():
            assert covers(maker.verbs, verb) or not covers(child.verbs, verb)
        for limit in ("expires_ms", "rate_per_second", "body_bytes_max"):
            most, given = getattr(maker, limit), getattr(child, limit)
            assert most is None or (given is not None and given <= most)
        for limit in ("rate_per_second", "body_bytes_max"):
            assert getattr(child, limit) == wanted.get(limit, getattr(maker, limit))


async def test_server_limits_a_token_by_the_token_of_its_caller(server: TokenServer) -> None:
    maker = await server.token("*", "*", ttl_seconds=3_600, rate_per_second=5)
    authorizer = server.authenticate(maker)
    claims = [CreateToken("x", ["*"], ["*"], "0" * 64, maker=claimed) for claimed in ("", "0" * 32)]
    for claim in claims:  # Whatever maker the caller claims.
        request = authorizer.attributed(claim)
        child = await server.transport.call(request)
        assert (child.expires_ms, child.rate_per_second) == (maker.info.expires_ms, 5)
    with pytest.raises(NotAllowed, match="ttl_seconds is 7200"):
        await server.transport.call(authorizer.attributed(CreateToken("x", ["*"], ["*"], "0" * 64, 7_200)))
    await server.tokens.revoke(maker.info.id)
    with pytest.raises(NotAllowed, match="revoked"):
        await server.transport.call(authorizer.attributed(claims[0]))
    claimed_by_nobody = CreateToken("x", ["*"], ["*"], "0" * 64, maker=maker.info.id)
    assert NoAuthentication().authenticate({}, "").attributed(claimed_by_nobody).maker == ""


async def test_token_has_a_rate_limit(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fastness.server.tokens.monotonic", lambda: now)
    authorizer = server.authenticate(await server.token(rate_per_second=2))
    authorizer.authorize(PUT)
    authorizer.authorize(PUT)
    with pytest.raises(Busy, match="2 calls per second"):
        authorizer.authorize(PUT)
    now += 0.5
    authorizer.authorize(PUT)
    with pytest.raises(Busy):
        authorizer.authorize(PUT)
    await server.token()  # A new token does not reset the rate of others.
    with pytest.raises(Busy):
        authorizer.authorize(PUT)
    now += 3_600
    authorizer.authorize(PUT)
    authorizer.authorize(PUT)
    with pytest.raises(Busy):  # Unused calls do not add up beyond the burst.
        authorizer.authorize(PUT)
    assert set(server.rejected) == {"busy"}


async def test_tokens_share_the_rate_of_the_one_that_created_them(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token cannot make more calls by creating others, which may create others in turn."""
    now = 100.0
    monkeypatch.setattr("fastness.server.tokens.monotonic", lambda: now)

    async def made_by(maker: str = "", **limits: Any) -> TokenAuthorizer:
        secret = secrets.token_hex(16)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        info = await server.transport.call(CreateToken("made", ["*"], ["*"], digest, maker=maker, **limits))
        await until(lambda: server.authenticator.known_token(info.id))
        return server.authenticator.authorizer_of(info.id, "test")

    def calls(authorizer: TokenAuthorizer) -> int:
        """How many calls are allowed now, up to ten."""
        for count in range(10):
            try:
                authorizer.authorize(PUT)
            except Busy:
                return count
        return 10

    maker = await made_by(rate_per_second=4)
    child, other = await made_by(maker.name), await made_by(maker.name)
    slow = await made_by(maker.name, rate_per_second=1)
    grandchild = await made_by(slow.name)
    assert [calls(each) for each in (child, other, maker, slow, grandchild)] == [4, 0, 0, 0, 0]
    now += 60  # One second's worth is left to all of them together.
    assert [calls(each) for each in (grandchild, slow, other, child, maker)] == [1, 0, 3, 0, 0]
    now += 60
    with pytest.raises(Busy, match="made, with those that it created, is limited to 1 calls per second"):
        for _ in range(2):
            grandchild.authorize(PUT)
    assert calls(maker) == 3  # What the slow one refused counts for no other.
    assert calls(await made_by()) == 10


async def test_token_has_a_size_limit(server: TokenServer) -> None:
    authorizer = server.authenticate(await server.token(body_bytes_max=1_000))
    authorizer.authorize(PUT)
    with pytest.raises(PayloadTooLarge, match="allows 1000"):
        authorizer.authorize(PutMessages("jobs", [NewMessage(b"x" * 1_000)]))
    authorizer.authorize_body(1_000)
    with pytest.raises(PayloadTooLarge, match="allows 1000"):
        authorizer.authorize_body(1_001)
    assert server.rejected == ["payload_too_large"] * 2
    server.authenticate(await server.token()).authorize_body(10**15)


async def test_verb_without_request_is_authorized_in_every_universe(server: TokenServer) -> None:
    server.authenticate(await server.token("*", "metrics:read")).authorize_verb("metrics:read")
    for universes, verbs in (("main", "*"), ("*", "queue:*")):
        with pytest.raises(NotAllowed):
            server.authenticate(await server.token(universes, verbs)).authorize_verb("metrics:read")


async def test_server_without_any_token_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    server = TokenServer()
    with caplog.at_level(logging.WARNING):
        await server.authenticator.start()
    assert "none exists" in caplog.text
    await server.authenticator.stop()
    await server.transport.close()


async def test_authenticator_stops_after_its_database_is_closed() -> None:
    server = TokenServer()
    await server.authenticator.start()
    await server.transport.close()
    watching = server.authenticator._watching
    assert watching is not None
    await until(watching.done)
    await server.authenticator.stop()


@given(st.text(max_size=300))
def test_any_invalid_header_is_refused(text: str) -> None:
    authenticator = TokenAuthenticator(NO_PLANE)
    with pytest.raises(NotAllowed):
        authenticator.authenticate({"authorization": text}, "")


class _NoPlane:
    """A transport without a plane."""

    class services:  # noqa: N801
        database = None
        shared = False
        clock = None
        quotas = None


NO_PLANE: Any = _NoPlane()


# Addresses.


def test_loopback_address_needs_no_tokens_or_tls() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"):
        assert is_loopback(host), host
        check_bind(host, tokens_on=False, tls=False, insecure=False)


def test_any_other_address_needs_tokens_and_tls() -> None:
    failures = Failures()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.0.0.1.example.com"):
        with failures.of(host):
            with pytest.raises(InvalidArgument, match=r"unless tokens are on.*fastness token create --universe u"):
                check_bind(host, tokens_on=False, tls=True, insecure=True)
            with pytest.raises(InvalidArgument, match=r"without TLS.*--insecure"):
                check_bind(host, tokens_on=True, tls=False, insecure=False)
            check_bind(host, tokens_on=True, tls=True, insecure=False)
            check_bind(host, tokens_on=True, tls=False, insecure=True)
    failures.check()


def test_loopback_without_tokens_needs_no_authentication() -> None:
    authenticator = make_authenticator(NO_PLANE, tokens_on=False)
    assert isinstance(authenticator, NoAuthentication)
    authenticator.authenticate({"host": "127.0.0.1:9440"}, "127.0.0.1").authorize(PUT)
    assert isinstance(make_authenticator(NO_PLANE, tokens_on=True), TokenAuthenticator)


def test_local_process_can_call_a_server_without_tokens_and_a_web_page_cannot() -> None:
    failures = Failures()
    for headers in (
        {"origin": "https://evil.example", "host": "127.0.0.1:9440"},
        {"origin": "null", "host": "localhost:9440"},
        {"origin": "http://[", "host": "localhost"},
        {"host": "evil.example:9440"},
    ):
        with failures.of(headers), pytest.raises(NotAllowed):
            Loopback().authenticate(headers, "127.0.0.1")
    own = {"origin": "http://localhost:9440", "host": "localhost:9440"}
    for headers in (own, {}, *({"host": host} for host in ("localhost:9440", "[::1]:9440", "10.0.0.1"))):
        with failures.of(headers):
            Loopback().authenticate(headers, "127.0.0.1").authorize(PUT)
    failures.check()


async def test_failed_load_of_tokens_is_retried_soon(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch fires once per change: waiting for it again would accept a revoked token for a minute."""
    monkeypatch.setattr(server_tokens, "_POLL_SECONDS_SHARED", 0.001)
    made = await server.token()
    read, failed = server.authenticator._database.read_async, list[Exception]()

    async def fail_once(*args: Any, **options: Any) -> Any:
        if len(failed) < 2:
            failed.append([Busy("away"), ZeroDivisionError()][len(failed)])
            raise failed[-1]
        return await read(*args, **options)

    monkeypatch.setattr(server.authenticator._database, "read_async", fail_once)
    await server.tokens.revoke(made.info.id)
    await until(lambda: server.ended == [made.info.id])
    assert len(failed) == 2


async def test_failing_callback_does_not_stop_the_load_of_tokens(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked, *others = sorted([await server.token() for _ in range(3)], key=lambda made: made.info.id)

    def fail(id: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.authenticator, "_ended", fail)
    await server.tokens.revoke(revoked.info.id)
    tokens = server.authenticator._tokens
    await until(lambda: server.authenticator._tokens is not tokens)
    for other in others:
        server.authenticate(other)
    with pytest.raises(NotAllowed):
        server.authenticate(revoked)


# Tokens for some queues.


def test_queues_of_a_token_are_names_and_patterns() -> None:
    failures = Failures()
    cases: list[tuple[list[str], list[str]]] = [
        ([], []),
        (["*"], []),
        (["orders", "*"], []),
        (["b", "a", "b"], ["a", "b"]),
        (["orders-eu-*", "orders-*", "orders-us", "orders"], ["orders", "orders-*"]),
        (["orders.fifo"], ["orders.fifo"]),
    ]
    for queues, kept in cases:
        with failures.of(queues):
            assert checked_queues(queues) == kept
    for queue in ("", "a b", "*a", "a**", "a*b", "**", "a/b", "..", "..*", "é"):
        with failures.of(queue), pytest.raises(InvalidName):
            checked_queues(["ok", queue])
    failures.check()


def test_a_token_has_a_bounded_number_of_queues() -> None:
    assert len(checked_queues(f"q{number}" for number in range(TOKEN_QUEUES_MAX))) == TOKEN_QUEUES_MAX
    with pytest.raises(InvalidArgument, match="patterns"):
        checked_queues(f"q{number}" for number in range(TOKEN_QUEUES_MAX + 1))


def redrive(queue: str) -> dict[str, str]:
    return {"RedrivePolicy": f'{{"deadLetterTargetArn": "arn:aws:sqs:us-east-1:000000000000:{queue}"}}'}


LEASE = MessageLease("0" * 32, "l", 1)
IN_SCOPE: list[Request[Any]] = [
    PutMessages("jobs", [NewMessage(b"1")]),
    GetQueueStats("jobs-eu"),
    MoveMessages("jobs", ["1"], "jobs-eu"),
    SetQueuePolicy("jobs", QueuePolicy()),
    SetQueuePolicy("jobs", QueuePolicy(dead_letter_queue="jobs-dead")),
    CommitAtomic([PUT, AckMessages("jobs-eu", [LEASE])]),
    ListQueues(),
    SurveyQueues(),
    CreateSqsQueue("jobs", {**redrive("jobs-dead"), "DelaySeconds": "1"}),
    SetSqsAttributes("jobs", {"RedrivePolicy": ""}),
    ListSqsQueues(),
    ListMoveTasks("jobs-dead"),
    StartMoveTask("jobs-dead", "jobs"),
    CancelMoveTask("jobs-dead/1"),
    UpdateState("k", b"\x01", LeaseProof("k", "l", 1)),
]
OTHER_QUEUE: list[Request[Any]] = [
    PutMessages("job", [NewMessage(b"1")]),
    PutMessages("jobs.dlq", [NewMessage(b"1")]),
    PutMessages("*", [NewMessage(b"1")]),
    PutMessages("", [NewMessage(b"1")]),
    GetQueueStats("payments"),
    MoveMessages("jobs", ["1"], "payments"),
    MoveMessages("payments", ["1"], "jobs"),
    SetQueuePolicy("jobs", QueuePolicy(dead_letter_queue="payments")),
    CommitAtomic([PUT, PutMessages("payments", [NewMessage(b"1")])]),
    CommitAtomic([PUT, AckMessages("payments", [LEASE])]),
    RedriveMessages("payments"),
    CreateSqsQueue("payments"),
    CreateSqsQueue("jobs", redrive("payments")),
    SetSqsAttributes("jobs", redrive("payments")),
    SetSqsAttributes("jobs", {"RedrivePolicy": "[" * 2_000}),
    SetSqsAttributes("jobs", {"RedrivePolicy": "\ud800"}),
    GetSqsSettings("payments"),
    ListMoveTasks("payments"),
    StartMoveTask("jobs", "payments"),
    StartMoveTask("payments", "jobs"),
    StartMoveTask("jobs"),  # Back to queues that are not known yet.
    CancelMoveTask("payments/1"),
    CancelMoveTask(""),
    GetPair(b"\x02u\x00\x02main\x00"),
    BeginBackup(),
]


async def test_token_for_queues_allows_them_and_refuses_others(server: TokenServer) -> None:
    authorizer = server.authenticate(await server.token("*", queues="jobs,jobs-*"))
    failures = Failures()
    for request in IN_SCOPE:
        with failures.of(request):
            authorizer.authorize(request)
    for request in OTHER_QUEUE:
        with failures.of(request):
            with pytest.raises(NotAllowed, match=r"is not for (the queue|all queues)"):
                authorizer.authorize(request)
            assert not authorizer.is_allowed(request)
            with pytest.raises(NotAllowed):
                authorizer.check_allowed(request)
    failures.check()


async def test_metrics_of_all_queues_need_a_token_for_all_queues(server: TokenServer) -> None:
    server.authenticate(await server.token("*")).authorize_verb("metrics:read")
    authorizer = server.authenticate(await server.token("*", queues="jobs"))
    assert not authorizer.is_allowed("metrics:read")
    with pytest.raises(NotAllowed, match="not for all queues"):
        authorizer.authorize_verb("metrics:read")


def test_every_request_of_queues_names_one_or_lists_those_of_the_token() -> None:
    """Otherwise a token for some queues could not be kept from the others; such a request is refused to all of them."""
    for kind in NETWORK_REQUESTS:
        if permission_of(kind).startswith(("queue:", "sqs:")):
            fields = {field.name for field in msgspec.structs.fields(kind)}
            names = kind.operation.queue_field in fields or "queue_names" in vars(kind)
            assert names or (kind.operation.lists_queues and "only" in fields), kind
        assert not (kind.operation.lists_queues and kind.operation.all_queues)


async def test_lists_have_only_the_queues_of_the_token(server: TokenServer) -> None:
    for queue in ("a", "jobs", "jobs-eu", "jobs-us", "jobs.dlq", "payments", "zeta"):
        await server.transport.call(PutMessages(queue, [NewMessage(b"1")]))
    authorizer = server.authenticate(await server.token("*", queues="zeta,jobs,jobs-*,none,pay"))

    async def names(request: ListQueues | ListSqsQueues | SurveyQueues) -> list[str]:
        answer = await server.transport.call(authorizer.attributed(request))
        if isinstance(answer, QueueNames | SqsQueueNames):
            return answer.names
        return [each.queue for each in answer.queues]

    mine = ["jobs", "jobs-eu", "jobs-us", "zeta"]
    for kind in (ListQueues, ListSqsQueues, SurveyQueues):
        assert await names(kind()) == mine
        assert await names(kind(only=["payments"])) == mine, "the caller's list does not count"
        assert await names(kind(limit=2)) == mine[:2]
        assert await names(kind(after="jobs", limit=2)) == mine[1:3]
        assert await names(kind(after="jobs-us")) == ["zeta"]
        assert await names(kind(after="zeta")) == []
    assert await names(SurveyQueues(text="US")) == ["jobs-us"]
    for prefix, expected in {
        "jobs-": mine[1:3],
        "jobs-u": ["jobs-us"],
        "z": ["zeta"],
        "pay": [],
        "j": mine[:3],
    }.items():
        assert await names(ListSqsQueues(prefix)) == expected
    everything = server.authenticate(await server.token("*"))
    assert len((await server.transport.call(everything.attributed(ListQueues(only=["a"])))).names) == 7


async def test_sources_of_dead_letters_are_only_the_queues_of_the_token(server: TokenServer) -> None:
    for queue in ("a", "jobs", "jobs-eu", "payments"):
        await server.transport.call(SetQueuePolicy(queue, QueuePolicy(dead_letter_queue="dead")))
    await server.transport.call(SetQueuePolicy("dead", QueuePolicy()))
    authorizer = server.authenticate(await server.token("*", queues="dead,jobs*"))
    found = []
    request, following = ListSqsSources("dead", limit=1, only=["a"]), ""
    while following is not None:
        request = msgspec.structs.replace(request, after=following)
        authorizer.authorize(request)
        page = await server.transport.call(authorizer.attributed(request))
        found += page.names
        following = page.next
        assert following in (None, "jobs", "jobs-eu"), "it is shown to the caller"
    assert found == ["jobs", "jobs-eu"]
    with pytest.raises(NotAllowed, match="not for the queue payments"):
        authorizer.authorize(ListSqsSources("payments"))


def test_child_token_is_for_no_more_queues(database: Database) -> None:
    failures = Failures()
    cases: list[tuple[list[str], list[str], list[str] | None]] = [
        ([], ["a"], ["a"]),
        (["a", "b*"], [], ["a", "b*"]),
        (["a", "b*"], ["a"], ["a"]),
        (["a", "b*"], ["bc", "bd*"], ["bc", "bd*"]),
        (["a", "b*"], ["b*", "a"], ["a", "b*"]),
        (["a"], ["a*"], None),
        (["a*"], ["b"], None),
        (["ab*"], ["a*"], None),
        (["a"], ["a", "c"], None),
    ]
    for parent, child, kept in cases:
        with failures.of((parent, child)):
            maker = database.transact(make, queues=checked_queues(parent))
            if kept is None:
                with pytest.raises(NotAllowed, match="queues is"):
                    database.transact(make, maker=maker.id, queues=checked_queues(child))
            else:
                assert database.transact(make, maker=maker.id, queues=checked_queues(child)).queues == kept
    failures.check()


async def test_secret_of_an_access_key_is_not_shown(server: TokenServer) -> None:
    request = CreateToken("x", ["main"], ["queue:put"], "0" * 64, sqs_secret="s" * 40)
    assert "ssss" not in repr(request)
    assert "ssss" not in detail_of(request)
    assert "sqs_secret" in detail_of(request), "the audit log tells that an access key was made"
    with pytest.raises(InvalidArgument, match="create a random one") as caught:
        check_types(CreateToken("x", ["main"], ["queue:put"], "0" * 64, sqs_secret="secret!"))
    assert "secret!" not in str(caught.value)
    made = await server.token(sqs=True)
    assert made.info.access_key_id == f"FN{made.info.id.upper()}"
    assert made.secret_access_key not in repr(made)
    assert made.secret_access_key not in made.token
