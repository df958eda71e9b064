"""Blocked senders, mail to worlds, and arguments that are refused."""

from typing import Any

import pytest

from fastness.errors import (
    BatchTooLarge,
    FastnessError,
    InvalidArgument,
    PayloadTooLarge,
    SenderBlocked,
    WorldNotActive,
)
from fastness.kv import Database
from fastness.layers import agents, inboxes, journal_records, journals, mailboxes, worlds
from fastness.layers.mailboxes import Address, sending
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.layers.worlds import World, WorldState
from fastness.plane.executor import execute
from fastness.wire.inboxes import InboundMessage
from fastness.wire.mail import ConfirmMail, MailPolicy, SetMailPolicy
from tests.support.failures import Failures
from tests.unit.mailbox_calls import (
    ADA,
    BOB,
    EVE,
    block,
    bodies,
    confirm,
    count,
    deliver,
    everything,
    peek,
    receipts_of,
    send,
    states,
)

# Blocks.


def test_mail_from_blocked_senders_is_refused(database: Database) -> None:
    send(database, b"before")
    block(database, ADA)
    before = everything(database)
    with pytest.raises(SenderBlocked, match="blocks mail from ada@main"):
        send(database)
    assert everything(database) == before
    send(database, b"eve's", sender=EVE)
    send(database, to=EVE)
    assert bodies(database) == [b"before", b"eve's"]
    block(database, ADA, blocked=False)
    block(database, ADA, blocked=False)
    send(database, b"after")
    assert bodies(database)[-1] == b"after"


def test_the_box_stores_whether_any_sender_may_be_blocked(database: Database) -> None:
    """So most mail is stored without a lookup of its sender."""

    def may_block() -> bool:
        return database.read(lambda tx: mailbox_keys.box_of(tx, mailbox_keys.keys_of(BOB)).may_block)

    send(database)
    assert not may_block()
    block(database, EVE)
    assert may_block()
    send(database)
    assert may_block()


def test_a_block_does_not_match_name_prefixes(database: Database) -> None:
    block(database, Address("main", "ada-2"))
    send(database)
    block(database, ADA)
    send(database, sender=Address("main", "ada-3"))
    assert count(database) == 2


def test_blocks_are_listed_in_pages(database: Database) -> None:
    senders = [Address("main", f"a{number}") for number in range(5)]
    for sender in reversed(senders):
        block(database, sender)

    def page(after: str, limit: int) -> list[str]:
        return database.read(mailboxes.blocks, BOB, after=after, limit=limit)

    assert page("", 3) == ["a0@main", "a1@main", "a2@main"]
    assert page("a2@main", 3) == ["a3@main", "a4@main"]
    assert page("a4@main", 3) == []
    assert database.read(mailboxes.blocks, ADA, after="", limit=10) == []


def test_the_number_of_blocked_senders_is_limited(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BLOCKS_MAX", 2)
    block(database, ADA)
    block(database, EVE)
    block(database, ADA)
    with pytest.raises(InvalidArgument, match="the maximum"):
        block(database, BOB)
    block(database, EVE, blocked=False)
    block(database, BOB)


# Worlds.


def bind(database: Database, agent: Address = BOB, world: str = "w") -> World:
    bound = World("main", world)
    database.transact(worlds.create, bound)
    database.transact(agents.register, "main", agent.agent, world=world)
    return bound


def test_mail_to_an_agent_bound_to_a_world_is_drained_into_its_journal(database: Database) -> None:
    world = bind(database)
    id = send(database, b"hello", content_type="text/plain", correlation_id="because")
    assert (count(database), peek(database)) == (0, [])
    headers = {"from": "ada@main", "id": id, "content_type": "text/plain", "correlation_id": "because"}
    delivery = InboundMessage(inbox_name="mail", payload=b"hello", headers=headers)
    assert database.read(inboxes.read, world, after=None, limit=10) == [(0, delivery)]
    assert states(database) == [(id, "confirmed")]
    assert not receipts_of(database)[0].was_stored
    database.transact(inboxes.drain, world)
    assert database.read(journals.read_hot, world, 0, 10) == [(0, journal_records.ingress(0, delivery))]


def test_mail_that_a_world_refuses_writes_nothing(database: Database) -> None:
    world = bind(database)
    before = everything(database)
    with pytest.raises(PayloadTooLarge, match="a world's inbox takes 4096"):
        send(database, b"x" * 4_097)
    assert everything(database) == before
    send(database, b"x" * 4_096)
    database.transact(worlds.change_state, world, WorldState.ARCHIVED)
    before = everything(database)
    with pytest.raises(WorldNotActive):
        send(database)
    assert everything(database) == before


def test_a_world_gets_no_mail_from_senders_its_agent_blocks(database: Database) -> None:
    world = bind(database)
    block(database, ADA)
    with pytest.raises(SenderBlocked):
        send(database)
    assert database.read(inboxes.read, world, after=None, limit=10) == []


# Invalid mail.

BAD: list[tuple[dict[str, Any], type[FastnessError], str]] = [
    ({"body": b"x" * 65_537}, PayloadTooLarge, "at most 65536 bytes, not 65537; store a blob"),
    ({"id": ""}, InvalidArgument, "not a mail id"),
    ({"id": "x" * 65}, InvalidArgument, "not a mail id"),
    ({"id": "ü"}, InvalidArgument, "not a mail id"),
    ({"id": "a\x00b"}, InvalidArgument, "not a mail id"),
    ({"content_type": "text/ü"}, InvalidArgument, "not a content type"),
    ({"content_type": "a\r\nb"}, InvalidArgument, "not a content type"),
    ({"content_type": "x" * 257}, InvalidArgument, "not a content type"),
]


def test_invalid_mail_is_refused_and_writes_nothing(database: Database) -> None:
    failures = Failures()
    for wrong, error, message in BAD:
        with failures.of((wrong, error, message)):
            with pytest.raises(error, match=message):
                send(database, **wrong)
            assert everything(database) == []
    failures.check()


def test_mail_at_the_limits_is_accepted(database: Database) -> None:
    long = {"id": "i" * 64, "content_type": "c" * 256, "correlation_id": "r" * 128}
    universe, agent = "u" * 128, "a" * 128
    to, sender = Address(universe, agent), Address(universe, "b" * 128)
    send(database, b"\xff" * 65_536, sender=sender, to=to, **long)
    block(database, sender, of=to)
    (mail,) = deliver(database, to)[0]
    assert (mail.body, mail.id) == (b"\xff" * 65_536, "i" * 64)
    assert confirm(database, mail.id, of=to) == 1
    assert [receipt.to for receipt in receipts_of(database, sender)] == [str(to)] * 3


def test_confirming_an_invalid_id_is_refused(database: Database) -> None:
    failures = Failures()
    for id in ["", "x" * 65, "ü"]:
        with failures.of(id):
            good = send(database)
            before = everything(database)
            with pytest.raises(InvalidArgument, match="1 to 64 printable ASCII characters"):
                database.transact(execute, ConfirmMail("bob", [good, id]))
            with pytest.raises(BatchTooLarge, match="at most 256"):
                database.transact(execute, ConfirmMail("bob", ["x"] * 257))
            assert everything(database) == before
    failures.check()


def test_a_mail_policy_out_of_range_is_refused(database: Database) -> None:
    failures = Failures()
    policies: list[dict[str, Any]] = [
        {"pending_max": 0},
        {"pending_max": 1_000_001},
        {"ttl_seconds": 0.5},
        {"ttl_seconds": float("nan")},
        {"ttl_seconds": float("inf")},
        {"ttl_seconds": 10 * 365 * 86_400 + 1},
    ]
    for policy in policies:
        with failures.of(policy):
            with pytest.raises(InvalidArgument, match=next(iter(policy))):
                database.transact(execute, SetMailPolicy(MailPolicy(**policy)))
            assert everything(database) == []
            assert database.read(mailboxes.policy_of, "main") == MailPolicy(1_000, 604_800.0)
    failures.check()
