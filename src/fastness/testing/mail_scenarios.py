"""Mailboxes in the simulator: senders race with the switch to live, readers crash, rejoin and take over sessions."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fastness.kv import Subspace, Transaction
from fastness.layers import mailboxes as layer
from fastness.layers.mailboxes import Address
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.limits import MAIL_SWEEP_SECONDS
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.maintenance.mail_sweeper import MailSweeper
from fastness.testing.histories import Operation, Outcome, Violation
from fastness.testing.histories.mail import MailboxEntry, check_mailbox, check_receipts, check_was_stored
from fastness.testing.simulation import Client, Simulation
from fastness.wire.mail import MailPolicy, MailReceipt, NewMail

_BOB, _EVE = Address("main", "bob"), Address("main", "eve")
_SENDERS: Final = ("ada", "carl", "dora")
_PENDING_MAX: Final = 8  # Small, so that mailboxes are sometimes full.
_PAUSE_FACTORS: Final = (1, 1, 100)  # By seed: multiplies all pauses.
_TTL_SECONDS: Final = (604_800, 604_800, 60)  # In every third run mail expires before it is read.
_READS_MAX: Final = 1_000  # Far more than a run has mail.


def mail(simulation: Simulation) -> Callable[[], None]:
    """No mail is lost, skipped, reordered or read after its confirmation, and senders get receipts for it."""
    ttl_seconds = _TTL_SECONDS[simulation.seed % len(_TTL_SECONDS)]
    simulation.database.transact(layer.set_policy, "main", MailPolicy(_PENDING_MAX, ttl_seconds))
    pause_factor = _PAUSE_FACTORS[simulation.seed % len(_PAUSE_FACTORS)]
    for sender in _SENDERS:
        simulation.add(sender, partial(_send_mail, pause_factor))
        simulation.add(f"watcher of {sender}", partial(_watch, pause_factor, Address("main", sender)))
    for number in range(2):
        simulation.add(f"bob-{number}", partial(_read_mail, pause_factor, _BOB))
    simulation.add("eve-0", partial(_read_mail, pause_factor, _EVE))
    simulation.add("sweeper", partial(_sweep, pause_factor))
    return lambda: _check(simulation, ttl_seconds * 1_000)


async def _send_mail(pause_factor: int, client: Client) -> None:
    sender = Address("main", client.name)
    for step in range(14):
        to, id = client.random.choice((_BOB, _BOB, _EVE)), f"{client.name}.{client.crashes}.{step}"
        for _ in range(3):  # Without an answer it may be sent again, because the mail has an id.
            about = {"id": id, "from": str(sender)}
            answer = await client.operate("send", str(to), about, _send, sender, to, id)
            if answer is not None or client.random.random() < 0.3:
                break
        await client.pause(pause_factor * client.random.randrange(500))


async def _read_mail(pause_factor: int, agent: Address, client: Client) -> None:
    unconfirmed: list[str] = []  # Mail that it read and did not confirm, also in earlier sessions.
    for number in range(6):
        session = f"{client.name}.{client.crashes}.{number}"
        if await client.operate("join", str(agent), session, layer.join, agent, session) is not None:
            await _read_session(pause_factor, agent, client, session, unconfirmed)
            if client.random.random() < 0.5:  # Other sessions end without a leave.
                await client.operate("leave", str(agent), session, layer.leave, agent, session)
        await client.pause(pause_factor * client.random.randrange(1_500))


async def _read_session(
    pause_factor: int, agent: Address, client: Client, session: str, unconfirmed: list[str]
) -> None:
    after = -1
    for _ in range(client.random.randrange(1, 12)):
        limit = client.random.choice((1, 2, 5))
        about = [session, after, limit]
        answer = await client.operate("read", str(agent), about, _read, agent, session, after, limit)
        if answer is None and client.random.random() < 0.5:
            return
        for sequence, id, *_ in answer[0] if answer is not None else ():
            after = sequence
            unconfirmed.append(id)
        if unconfirmed and client.random.random() < 0.7:
            some = client.random.sample(unconfirmed, client.random.randrange(1, len(unconfirmed) + 1))
            confirmed = await client.operate("confirm", str(agent), some, _confirm, agent, some)
            if confirmed is not None and client.random.random() < 0.9:
                unconfirmed[:] = [id for id in unconfirmed if id not in some]
        await client.pause(pause_factor * client.random.randrange(600))


async def _watch(pause_factor: int, sender: Address, client: Client) -> None:
    after = -1
    for _ in range(15):
        limit = client.random.choice((2, 10, 100))
        answer = await client.operate("receipts", str(sender), [after, limit], _receipts, sender, after, limit)
        for receipt in answer[0] if answer is not None else ():
            after = receipt[0]
        await client.pause(pause_factor * client.random.randrange(1_500))


async def _sweep(pause_factor: int, client: Client) -> None:
    for _ in range(15):
        await client.operate("sweep", "main", None, _sweep_once)
        await client.pause(pause_factor * client.random.randrange(2_000))


# Checks at the end.


def _check(simulation: Simulation, ttl_ms: int) -> None:
    now_ms = simulation.clock.now_ms()
    for operation in simulation.history.operations:
        if operation.kind == "join" and operation.outcome is Outcome.OK and operation.result[0] > _PENDING_MAX:
            raise Violation(f"{operation.key} had more mail than its limit of {_PENDING_MAX}", [operation])
    for agent in (_BOB, _EVE):
        check_mailbox(simulation.history, str(agent), left=_content(simulation, agent), end_ms=now_ms, ttl_ms=ttl_ms)
        _drain(simulation, agent)
        check_mailbox(simulation.history, str(agent), end_ms=now_ms, ttl_ms=ttl_ms)
    receipts = [
        receipt for sender in _SENDERS for receipt in _check_receipts(simulation, Address("main", sender), ttl_ms)
    ]
    for agent in (_BOB, _EVE):
        confirmed = [each for each in receipts if each.state == "confirmed" and each.to == str(agent)]
        check_was_stored(simulation.history, str(agent), {each.id: each.was_stored for each in confirmed})
    _check_all_swept(simulation, ttl_ms)


def _content(simulation: Simulation, agent: Address) -> list[MailboxEntry]:
    """The unexpired mail in a mailbox. Also checks its counter and its index of ids."""
    entries, ids, count = simulation.database.read(_read_mailbox, agent)
    if len(entries) != count:
        raise Violation(f"{agent} has {len(entries)} mails, but its counter is {count}", [])
    if ids != {entry.id: entry.sequence for entry in entries}:
        raise Violation(f"{agent} has {len(ids)} indexed ids for {len(entries)} mails", [])
    return [entry for entry in entries if entry.expires_ms > simulation.clock.now_ms()]


def _drain(simulation: Simulation, agent: Address) -> None:
    """Read and confirm everything, in order, without faults."""
    record, database, after = simulation.history.record, simulation.database, -1
    record("auditor", "join", str(agent), "auditor", partial(database.transact, layer.join, agent, "auditor"))
    for _ in range(_READS_MAX):
        read = partial(database.transact, _read, agent, "auditor", after, 3)
        mails, live_from, _ = record("auditor", "read", str(agent), ["auditor", after, 3], read).result
        for sequence, id, *_ in mails:
            after = sequence
            record("auditor", "confirm", str(agent), [id], partial(database.transact, _confirm, agent, [id]))
        if live_from is not None:
            break
    left = _content(simulation, agent)
    if left:
        raise Violation(f"{agent} was read to its end, but {left[0].id} is still there", [])


def _check_receipts(simulation: Simulation, sender: Address, ttl_ms: int) -> list[MailReceipt]:
    """Check that a sender has a receipt for every state of its mail, unless the receipt has expired."""
    now_ms, after = simulation.clock.now_ms(), -1
    for _ in range(_READS_MAX):
        read = partial(simulation.database.transact, _receipts, sender, after, 50)
        found = simulation.history.record("auditor", "receipts", str(sender), [after, 50], read).result[0]
        if not found:
            break
        after = found[-1][0]
    receipts = check_receipts(simulation.history, str(sender), ttl_ms=ttl_ms)
    known = {(receipt.state, receipt.id) for receipt in receipts.values()}
    for state, id, at_ms, operation in _certain_states(simulation, str(sender)):
        if (state, id) not in known and at_ms + ttl_ms > now_ms:
            raise Violation(f"{sender} has no receipt that {id} was {state}", [operation])
    return list(receipts.values())


def _certain_states(simulation: Simulation, sender: str) -> list[tuple[str, str, int, Operation]]:
    """The states that a sender's mail certainly reached, and the earliest time of each."""
    operations = [each for each in simulation.history.operations if each.outcome is Outcome.OK]
    mine = {each.argument["id"] for each in operations if each.kind == "send" and each.argument["from"] == sender}
    happened: list[tuple[str, str, int, Operation]] = []
    for operation in operations:
        if operation.kind == "send" and operation.argument["from"] == sender and not operation.result[1]:
            happened.append(("stored", operation.argument["id"], operation.result[2], operation))
        elif operation.kind == "read":
            # It may have been delivered before, with an expired receipt, but only after it was sent.
            found = [(id, sent_ms) for _, id, sent_ms, _ in operation.result[0] if id in mine]
            happened += [("delivered", id, sent_ms, operation) for id, sent_ms in found]
        elif operation.kind == "confirm" and operation.result[0] == len(operation.argument):
            confirmed = [id for id in operation.argument if id in mine]
            happened += [("confirmed", id, operation.result[1], operation) for id in confirmed]
    return happened


def _check_all_swept(simulation: Simulation, ttl_ms: int) -> None:
    """Check that sweeps remove everything once it has expired."""
    simulation.clock.advance_ms(ttl_ms + 2 * round(MAIL_SWEEP_SECONDS * 1_000))
    runner = BackgroundRunner(starts_threads=False)
    runner.add(MailSweeper(simulation.database, shared=False).job)
    runner.run_due()
    left = simulation.database.read(_leftovers)
    if left:
        simulation.database.transact(_sweep_once)  # Raises what the job has logged.
        raise Violation(f"Everything has expired, but {len(left)} keys are left, {left[0]!r} among them", [])


# Transaction functions.


def _send(tx: Transaction, sender: Address, to: Address, id: str) -> list[Any]:
    _, duplicate = layer.send(tx, sender, to, NewMail(str(to), id.encode(), id))
    entry = tx.get(mailbox_keys.keys_of(to).id_key(id)) or b""
    return [id, duplicate, mailbox_keys.mail_at(tx, mailbox_keys.keys_of(to), int.from_bytes(entry, "big")).sent_ms]


def _read(tx: Transaction, agent: Address, session: str, after: int, limit: int) -> list[Any]:
    found, live_from = layer.deliver(tx, agent, after=after, limit=limit, session=session)
    return [[[mail.sequence, mail.id, mail.sent_ms, mail.expires_ms] for mail in found], live_from, tx.now_ms]


def _confirm(tx: Transaction, agent: Address, ids: list[str]) -> list[int]:
    return [layer.confirm(tx, agent, ids), tx.now_ms]


def _receipts(tx: Transaction, sender: Address, after: int, limit: int) -> list[Any]:
    found = layer.receipts(tx, sender, after=after, limit=limit)
    receipts = [[each.sequence, each.id, each.to, each.state, each.at_ms, each.was_stored] for each in found]
    return [receipts, tx.now_ms]


def _sweep_once(tx: Transaction) -> bool:
    entries = layer.due_entries(tx, "main")
    layer.sweep(tx, "main", entries)
    return bool(entries)


def _read_mailbox(tx: Transaction, agent: Address) -> tuple[list[MailboxEntry], dict[str, int], int]:
    box_keys = mailbox_keys.keys_of(agent)
    entries = []
    for key, value in tx.scan(*box_keys.mails_from(0), limit=10_000):
        stored = mailbox_keys.decode_mail(value)
        entries.append(MailboxEntry(int.from_bytes(key[-8:], "big"), stored.id, stored.sent_ms, stored.expires_ms))
    ids = tx.scan(box_keys.id, box_keys.id + b"\xff", limit=10_000)
    return (
        entries,
        {key[len(box_keys.id) :].decode(): int.from_bytes(value, "big") for key, value in ids},
        layer.summary(tx, agent).box.count,
    )


def _leftovers(tx: Transaction) -> list[bytes]:
    """The keys that are left, except those of the mailboxes themselves."""
    keys = [key for key, _ in tx.scan(*Subspace("u", "main").range(), limit=10_000)]
    kept = [mailbox_keys.keys_of(Address("main", agent)) for agent in (*_SENDERS, "bob", "eve")]
    known = {key for box_keys in kept for key in (box_keys.box, box_keys.outgoing, box_keys.reader)}
    return [key for key in keys if key not in known and b"mail-policy" not in key]
