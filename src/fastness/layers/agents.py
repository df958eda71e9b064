"""Agents: registered names with a public key, and the world that receives their mail.

    (u, universe, "agents", name)  ->  the agent

An agent has a mailbox without being registered. A registered agent can authenticate itself. The mail of an agent that
is bound to a world goes to the world's inbox, which is drained into the journal.
"""

from functools import lru_cache

import msgspec

from fastness.encryption import checked_public_key
from fastness.errors import AgentExists, PayloadTooLarge
from fastness.kv import Subspace, Transaction
from fastness.layers import inboxes
from fastness.layers.worlds import World, describe
from fastness.limits import INBOX_INLINE_BYTES_MAX
from fastness.wire.agents import Agent
from fastness.wire.inboxes import InboundMessage
from fastness.wire.mail import NewMail

MAIL_INBOX = "mail"  # The inbox name of mail in a world's inbox.

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Agent).decode


def register(
    tx: Transaction,
    universe: str,
    name: str,
    *,
    public_key: bytes | None = None,
    world: str | None = None,
    replace: bool = False,
) -> Agent:
    """Register an agent or update it. Omitted values stay unchanged.

    Raises:
        AgentExists: it has another key, and `replace` is false.
        InvalidArgument: the key has the wrong length, or is weak.
        WorldNotFound: the world does not exist.
    """
    if public_key is not None:
        public_key = checked_public_key(public_key)
    known = find(tx, universe, name)
    key = None if known is None else known.public_key
    if not replace and key is not None and public_key not in (None, key):
        raise AgentExists(f"{name}@{universe} is registered with another key; pass replace to use the new key")
    if world is not None:
        describe(tx, World(universe, world))
    agent = Agent(
        name,
        public_key or key,
        world or (known.world if known is not None else None),
        tx.now_ms if known is None else known.registered_ms,
    )
    tx.put(_key(universe, name), _encode(agent))
    return agent


def find(tx: Transaction, universe: str, name: str) -> Agent | None:
    """The agent with this name; None if it is not registered."""
    stored = tx.get(_key(universe, name))
    return None if stored is None else _decode(stored)


def page(tx: Transaction, universe: str, *, after: str, limit: int) -> list[Agent]:
    """At most `limit` agents after the name `after`, ordered by name."""
    subspace = Subspace("u", universe, "agents")
    begin, end = subspace.range()
    if after:
        begin = subspace.key(after) + b"\x00"
    return [_decode(value) for _, value in tx.scan(begin, end, limit=limit)]


def world_of(tx: Transaction, universe: str, name: str) -> World | None:
    """The world that receives an agent's mail; None if the agent is not bound to one."""
    agent = find(tx, universe, name)
    return None if agent is None or agent.world is None else World(universe, agent.world)


def enqueue_mail(tx: Transaction, world: World, new: NewMail, *, sender: str, id: str, correlation_id: str) -> None:
    """Enqueue a mail in a world's inbox.

    Raises:
        PayloadTooLarge: the body is too large for an inbox item.
    """
    if len(new.body) > INBOX_INLINE_BYTES_MAX:
        raise PayloadTooLarge(
            f"The mail has {len(new.body)} bytes, and a world's inbox takes {INBOX_INLINE_BYTES_MAX}; "
            "store a blob and send its hash"
        )
    headers = {"from": sender, "id": id, "content_type": new.content_type, "correlation_id": correlation_id}
    inboxes.enqueue(tx, world, InboundMessage(inbox_name=MAIL_INBOX, payload=new.body, headers=headers))


@lru_cache(maxsize=4_096)
def _key(universe: str, name: str) -> bytes:
    return Subspace("u", universe, "agents").key(name)
