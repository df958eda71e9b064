"""Mailboxes under the simulator: senders race the switch to live, readers crash, come back and take each other over."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from holdfast.kv import Subspace, Transaction
from holdfast.layers import mailboxes as layer
from holdfast.layers.mailboxes import Address
from holdfast.layers.mailboxes import keys as mailbox_keys
from holdfast.limits import MAIL_SWEEP_SECONDS
from holdfast.testing.histories import Operation, Outcome, Violation
from holdfast.testing.histories.mail import Place, Receipt, check_mailbox, check_receipts, check_was_stored
from holdfast.testing.simulation import Client, Simulation
from holdfast.wire.mail import MailPolicy, NewMail

_BOB, _EVE = Address("main", "bob"), Address("main", "eve")
_SENDERS: Final = ("ada", "carl", "dora")
_PENDING_MAX: Final = 8  # So that mailboxes are full now and then.
_HASTE: Final = (1, 1, 100)  # By seed: how many times longer everybody rests.
_TTL_SECONDS: Final = (604_800, 604_800, 60)  # In every third run mail is over before it is read, and swept.
_ROUNDS_MAX: Final = 1_000  # Far more than there can be mail.


def mail(simulation: Simulation) -> Callable[[], None]:
    """No mail is lost, stranded, overtaken or read once it was confirmed, and senders are told what became of it."""
    ttl_seconds = _TTL_SECONDS[simulation.seed % len(_TTL_SECONDS)]
    simulation.database.transact(layer.set_policy, "main", MailPolicy(_PENDING_MAX, ttl_seconds))
    rest = _HASTE[simulation.seed % len(_HASTE)]
    for sender in _SENDERS:
        simulation.add(sender, partial(_send_mail, rest))
        simulation.add(f"watcher of {sender}", partial(_watch, rest, Address("main", sender)))
    for number in range(2):
        simulation.add(f"bob-{number}", partial(_read_mail, rest, _BOB))
    simulation.add("eve-0", partial(_read_mail, rest, _EVE))
    simulation.add("sweeper", partial(_sweep, rest))
    return lambda: _check(simulation, ttl_seconds * 1_000)


async def _send_mail(rest: int, client: Client) -> None:
    sender = Address("main", client.name)
    for step in range(14):
        to, id = client.random.choice((_BOB, _BOB, _EVE)), f"{client.name}.{client.crashes}.{step}"
        for _ in range(3):  # Whoever got no answer may send it again, because the mail has an id.
            about = {"id": id, "from": str(sender)}
            answer = await client.operate("send", str(to), about, _send, sender, to, id)
            if answer is not None or client.random.random() < 0.3:
                break
        await client.pause(rest * client.random.randrange(500))


async def _read_mail(rest: int, agent: Address, client: Client) -> None:
    late: list[str] = []  # What it was given and did not confirm, whoever reads by then.
    for number in range(6):
        session = f"{client.name}.{client.crashes}.{number}"
        if await client.operate("join", str(agent), session, layer.join, agent, session) is not None:
            await _read_on(rest, agent, client, session, late)
            if client.random.random() < 0.5:  # Others are gone without a word.
                await client.operate("leave", str(agent), session, layer.leave, agent, session)
        await client.pause(rest * client.random.randrange(1_500))


async def _read_on(rest: int, agent: Address, client: Client, session: str, late: list[str]) -> None:
    after = -1
    for _ in range(client.random.randrange(1, 12)):
        limit = client.random.choice((1, 2, 5))
        about = [session, after, limit]
        answer = await client.operate("read", str(agent), about, _read, agent, session, after, limit)
        if answer is None and client.random.random() < 0.5:
            return
        for sequence, id, *_ in answer[0] if answer is not None else ():
            after = sequence
            late.append(id)
        if late and client.random.random() < 0.7:
            some = client.random.sample(late, client.random.randrange(1, len(late) + 1))
            confirmed = await client.operate("confirm", str(agent), some, _confirm, agent, some)
            if confirmed is not None and client.random.random() < 0.9:
                late[:] = [id for id in late if id not in some]
        await client.pause(rest * client.random.randrange(600))


async def _watch(rest: int, sender: Address, client: Client) -> None:
    after = -1
    for _ in range(15):
        limit = client.random.choice((2, 10, 100))
        answer = await client.operate("receipts", str(sender), [after, limit], _receipts, sender, after, limit)
        for receipt in answer[0] if answer is not None else ():
            after = receipt[0]
        await client.pause(rest * client.random.randrange(1_500))


async def _sweep(rest: int, client: Client) -> None:
    for _ in range(15):
        await client.operate("sweep", "main", None, _sweep_once)
        await client.pause(rest * client.random.randrange(2_000))


# What must hold at the end.


def _check(simulation: Simulation, ttl_ms: int) -> None:
    now_ms = simulation.clock.now_ms()
    for operation in simulation.history.operations:
        if operation.kind == "join" and operation.outcome is Outcome.OK and operation.result[0] > _PENDING_MAX:
            raise Violation(f"{operation.key} had more mail than the {_PENDING_MAX} that it holds", [operation])
    for agent in (_BOB, _EVE):
        check_mailbox(simulation.history, str(agent), left=_content(simulation, agent), end_ms=now_ms, ttl_ms=ttl_ms)
        _drain(simulation, agent)
        check_mailbox(simulation.history, str(agent), end_ms=now_ms, ttl_ms=ttl_ms)
    told = [receipt for sender in _SENDERS for receipt in _check_told(simulation, Address("main", sender), ttl_ms)]
    for agent in (_BOB, _EVE):
        confirmed = [each for each in told if each.state == "confirmed" and each.to == str(agent)]
        check_was_stored(simulation.history, str(agent), {each.id: each.was_stored for each in confirmed})
    _check_nothing_stays(simulation, ttl_ms)


def _content(simulation: Simulation, agent: Address) -> list[Place]:
    """What is in a mailbox, and not over; all that is in it is as much as it says."""
    places, ids, count = simulation.database.read(_look_at_all, agent)
    if len(places) != count:
        raise Violation(f"{agent} has {len(places)} mails, and counts {count}", [])
    if ids != {place.id: place.sequence for place in places}:
        raise Violation(f"{agent} knows {len(ids)} ids for {len(places)} mails", [])
    return [place for place in places if place.expires_ms > simulation.clock.now_ms()]


def _drain(simulation: Simulation, agent: Address) -> None:
    """One reader without a fault reads everything, in order, and confirms it."""
    record, database, after = simulation.history.record, simulation.database, -1
    record("auditor", "join", str(agent), "auditor", partial(database.transact, layer.join, agent, "auditor"))
    for _ in range(_ROUNDS_MAX):
        read = partial(database.transact, _read, agent, "auditor", after, 3)
        mails, live_from, _ = record("auditor", "read", str(agent), ["auditor", after, 3], read).result
        for sequence, id, *_ in mails:
            after = sequence
            record("auditor", "confirm", str(agent), [id], partial(database.transact, _confirm, agent, [id]))
        if live_from is not None:
            break
    left = _content(simulation, agent)
    if left:
        raise Violation(f"{agent} was read to its end, and {left[0].id} is still there", [])


def _check_told(simulation: Simulation, sender: Address, ttl_ms: int) -> list[Receipt]:
    """A sender was told whatever happened to its mail, unless that is so long ago that it was forgotten."""
    now_ms, after = simulation.clock.now_ms(), -1
    for _ in range(_ROUNDS_MAX):
        read = partial(simulation.database.transact, _receipts, sender, after, 50)
        found = simulation.history.record("auditor", "receipts", str(sender), [after, 50], read).result[0]
        if not found:
            break
        after = found[-1][0]
    told = check_receipts(simulation.history, str(sender), ttl_ms=ttl_ms)
    known = {(receipt.state, receipt.id) for receipt in told.values()}
    for state, id, at_ms, operation in _happened(simulation, str(sender)):
        if (state, id) not in known and at_ms + ttl_ms > now_ms:
            raise Violation(f"{sender} was not told that {id} was {state}", [operation])
    return list(told.values())


def _happened(simulation: Simulation, sender: str) -> list[tuple[str, str, int, Operation]]:
    """What certainly happened to the mail of a sender, and when at the earliest."""
    operations = [each for each in simulation.history.operations if each.outcome is Outcome.OK]
    mine = {each.argument["id"] for each in operations if each.kind == "send" and each.argument["from"] == sender}
    happened: list[tuple[str, str, int, Operation]] = []
    for operation in operations:
        if operation.kind == "send" and operation.argument["from"] == sender and not operation.result[1]:
            happened.append(("stored", operation.argument["id"], operation.result[2], operation))
        elif operation.kind == "read":
            # It may have been delivered, and that forgotten, before: after it was sent.
            found = [(id, sent_ms) for _, id, sent_ms, _ in operation.result[0] if id in mine]
            happened += [("delivered", id, sent_ms, operation) for id, sent_ms in found]
        elif operation.kind == "confirm" and operation.result[0] == len(operation.argument):
            confirmed = [id for id in operation.argument if id in mine]
            happened += [("confirmed", id, operation.result[1], operation) for id in confirmed]
    return happened


def _check_nothing_stays(simulation: Simulation, ttl_ms: int) -> None:
    """When everything is over, a sweep leaves nothing of it."""
    simulation.clock.advance_ms(ttl_ms + 2 * round(MAIL_SWEEP_SECONDS * 1_000))
    for _ in range(_ROUNDS_MAX):
        if not simulation.database.transact(_sweep_once):
            break
    left = simulation.database.read(_leftovers)
    if left:
        raise Violation(f"Everything is over, and {len(left)} keys are left, {left[0]!r} among them", [])


# The works that clients run.


def _send(tx: Transaction, sender: Address, to: Address, id: str) -> list[Any]:
    _, duplicate = layer.send(tx, sender, to, NewMail(str(to), id.encode(), id))
    place = tx.get(mailbox_keys.keys_of(to).id_key(id)) or b""
    return [id, duplicate, mailbox_keys.mail_at(tx, mailbox_keys.keys_of(to), int.from_bytes(place, "big")).sent_ms]


def _read(tx: Transaction, agent: Address, session: str, after: int, limit: int) -> list[Any]:
    found, live_from = layer.deliver(tx, agent, after=after, limit=limit, session=session)
    return [[[mail.sequence, mail.id, mail.sent_ms, mail.expires_ms] for mail in found], live_from, tx.now_ms]


def _confirm(tx: Transaction, agent: Address, ids: list[str]) -> list[int]:
    return [layer.confirm(tx, agent, ids), tx.now_ms]


def _receipts(tx: Transaction, sender: Address, after: int, limit: int) -> list[Any]:
    found = layer.receipts(tx, sender, after=after, limit=limit)
    told = [[each.sequence, each.id, each.to, each.state, each.at_ms, each.was_stored] for each in found]
    return [told, tx.now_ms]


def _sweep_once(tx: Transaction) -> bool:
    return layer.sweep(tx, "main")[1]


def _look_at_all(tx: Transaction, agent: Address) -> tuple[list[Place], dict[str, int], int]:
    room = mailbox_keys.keys_of(agent)
    places = []
    for key, value in tx.scan(*room.mails_from(0), limit=10_000):
        stored = mailbox_keys.decode_mail(value)
        places.append(Place(int.from_bytes(key[-8:], "big"), stored.id, stored.sent_ms, stored.expires_ms))
    ids = tx.scan(room.id, room.id + b"\xff", limit=10_000)
    return (
        places,
        {key[len(room.id) :].decode(): int.from_bytes(value, "big") for key, value in ids},
        layer.count(tx, agent)[0].count,
    )


def _leftovers(tx: Transaction) -> list[bytes]:
    """Keys of mail that is over: none may be left but those by which rooms are known."""
    keys = [key for key, _ in tx.scan(*Subspace("u", "main").range(), limit=10_000)]
    kept = [mailbox_keys.keys_of(Address("main", agent)) for agent in (*_SENDERS, "bob", "eve")]
    known = {key for room in kept for key in (room.box, room.outgoing, room.reader)}
    return [key for key in keys if key not in known and b"mail-policy" not in key]
