"""Agents: who is known by name, by which key, and whether a world takes their mail.

    (u, universe, "agents", name)  ->  the agent

An agent need not be registered to have a mailbox. One that is can prove who it is, and one that is bound to a world has
its mail put into the world's inbox, where it is drained into the journal like everything else from outside.
"""

from functools import lru_cache

import msgspec

from holdfast.errors import AgentExists, InvalidArgument, PayloadTooLarge
from holdfast.kv import Subspace, Transaction
from holdfast.layers import inboxes
from holdfast.layers.worlds import World, describe
from holdfast.limits import AGENT_KEY_BYTES, INBOX_INLINE_BYTES_MAX, READ_ENTRIES_MAX
from holdfast.wire.agents import Agent
from holdfast.wire.inboxes import Delivery
from holdfast.wire.mail import NewMail

MAIL_INBOX = "mail"  # What the items of a world's inbox are called that are mail.

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
    """Know an agent by name; what is not given stays as it is.

    Raises:
        AgentExists: it has another key, and `replace` was not said.
        InvalidArgument: the key has the wrong length.
        WorldNotFound: there is no such world.
    """
    if public_key is not None and len(public_key) != AGENT_KEY_BYTES:
        raise InvalidArgument(f"An agent's key has {AGENT_KEY_BYTES} bytes (Ed25519), not {len(public_key)}")
    known = find(tx, universe, name)
    key = None if known is None else known.public_key
    if not replace and key is not None and public_key not in (None, key):
        raise AgentExists(f"{name}@{universe} is registered with another key; say replace to give it this one")
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
    """The agent of that name, if it is registered."""
    stored = tx.get(_key(universe, name))
    return None if stored is None else _decode(stored)


def page(tx: Transaction, universe: str, *, after: str, limit: int) -> list[Agent]:
    """At most `limit` agents in the order of their names, the first one behind `after`."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"A page has 1 to {READ_ENTRIES_MAX} agents, not {limit}")
    subspace = Subspace("u", universe, "agents")
    begin, end = subspace.range()
    if after:
        begin = subspace.key(after) + b"\x00"
    return [_decode(value) for _, value in tx.scan(begin, end, limit=limit)]


def world_of(tx: Transaction, universe: str, name: str) -> World | None:
    """The world that takes the mail of an agent, if one does."""
    agent = find(tx, universe, name)
    return None if agent is None or agent.world is None else World(universe, agent.world)


def enter(tx: Transaction, world: World, new: NewMail, *, sender: str, id: str, correlation_id: str) -> None:
    """Put a mail into a world's inbox.

    Raises:
        PayloadTooLarge: the inbox does not take so much in one item.
    """
    if len(new.body) > INBOX_INLINE_BYTES_MAX:
        raise PayloadTooLarge(
            f"Mail that a world takes has at most {INBOX_INLINE_BYTES_MAX} bytes, not {len(new.body)}; "
            "store a blob and send its hash"
        )
    headers = {"from": sender, "id": id, "content_type": new.content_type, "correlation_id": correlation_id}
    inboxes.enqueue(tx, world, Delivery(inbox_name=MAIL_INBOX, payload=new.body, headers=headers))


@lru_cache(maxsize=4_096)
def _key(universe: str, name: str) -> bytes:
    return Subspace("u", universe, "agents").key(name)
