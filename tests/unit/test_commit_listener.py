"""The commit listener finds the sessions that a commit affects, also from truncated keys."""

import asyncio
from typing import Any

import pytest

from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address, keys_of
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.runtime.relay.commit_listener import CommitListener
from fastness.runtime.relay.hub import RelayHub
from fastness.runtime.relay.session import Session
from fastness.wire.mail import (
    NewMail,
)
from tests.unit import relay_fixtures
from tests.unit.relay_fixtures import Agent, quiet

transport = relay_fixtures.transport
commits = relay_fixtures.commits
hub = relay_fixtures.hub


@pytest.fixture(params=[0, 6], ids=["one universe", "many universes"])
async def listener(hub: RelayHub, request: pytest.FixtureRequest) -> tuple[CommitListener, list[Any]]:
    notified: list[Any] = []

    def notify(session: Session, *details: Any) -> None:
        if session.address.universe == "main":
            notified.append((session.address.agent, *details))

    listener = CommitListener(
        lambda session, sequence: notify(session, "mail", sequence),
        lambda session, sequence: notify(session, "receipt", sequence),
        lambda session: notify(session, "unknown"),
    )
    for agent in ("bob", "bobby"):
        listener.add_session(Session(hub, Address("main", agent), "s", lambda request: None))
    for number in range(request.param):
        listener.add_session(Session(hub, Address(f"main-{number}", "bob"), "s", lambda request: None))
    return listener, notified


def notification(key: bytes) -> tuple[bytes, bytes]:
    return key, key[:-1] + bytes((key[-1] + 1,))


async def test_keys_identify_the_session_and_the_sequence_number(listener: tuple[CommitListener, list[Any]]) -> None:
    commit_listener, notified = listener
    bob, bobby, eve = (keys_of(Address("main", agent)) for agent in ("bob", "bobby", "eve"))
    elsewhere = keys_of(Address("other", "bob"))
    commit_listener.on_commit(
        [bob.mail_key(7), bobby.receipt_key(3), eve.mail_key(1), bob.box, bob.id_key("12345678m")], ()
    )
    commit_listener.on_commit([bob.reader, elsewhere.mail_key(9), elsewhere.reader, b"m", b""], ())
    assert notified == [("bob", "mail", 7), ("bobby", "receipt", 3), ("bob", "unknown")]
    notified.clear()
    keys = [bob.mail_key(7), bobby.receipt_key(3), eve.mail_key(1), bob.box, bob.outgoing, bob.id_key("x"), bob.reader]
    commit_listener.on_commit((), [notification(key) for key in keys])
    assert notified == [("bob", "mail", 7), ("bobby", "receipt", 3), ("bob", "unknown")]


async def test_truncated_keys_notify_every_session_they_may_affect(listener: tuple[CommitListener, list[Any]]) -> None:
    commit_listener, notified = listener
    bob = keys_of(Address("main", "bob"))
    key = bob.mail_key(7)
    for length in range(1, len(key) + 1):
        notified.clear()
        commit_listener.on_commit((), [notification(key[:length])])
        assert ("bob", "mail", 7) in notified or ("bob", "unknown") in notified, length
        assert length < len(bob.prefix) or not [each for each in notified if each[0] == "bobby"]
    notified.clear()
    commit_listener.on_commit((), [(b"", b"\xff" * 100)])
    assert sorted(notified) == [("bob", "unknown"), ("bobby", "unknown")]
    notified.clear()
    commit_listener.on_commit((), [(b"\x02u\x00\x02other", b"\x02u\x00\x02other\xff"), notification(b"\x02q\x00")])
    assert notified == []


async def test_removed_sessions_are_not_notified(hub: RelayHub, listener: tuple[CommitListener, list[Any]]) -> None:
    commit_listener, notified = listener
    keys = keys_of(Address("main", "bob"))
    commit_listener.remove_session(Session(hub, Address("main", "bob"), "s", lambda request: None))
    commit_listener.on_commit([keys.mail_key(1), keys.receipt_key(1), keys.reader], [notification(keys.prefix)])
    assert notified == []


async def test_commits_of_other_threads_are_dispatched_on_the_event_loop(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        transact = transport.services.database.transact
        ada, to_bob = Address("main", "ada"), Address("main", "bob")
        await asyncio.to_thread(transact, mailboxes.send, ada, to_bob, NewMail("bob", b"x", "id"))
        await bob.get(1)
