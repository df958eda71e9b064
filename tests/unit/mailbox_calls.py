"""Short forms of the mailbox functions for the tests of mailboxes, each in one transaction."""

from collections.abc import Callable
from typing import Any

from fastness.kv import Database, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.plane.executor import execute
from fastness.wire.mail import Envelope, MailPolicy, MailReceipt, NewMail, SetMailPolicy

ADA, BOB, EVE = (Address("main", agent) for agent in ("ada", "bob", "eve"))
DAY_MS = 86_400_000
TTL_MS = 7 * DAY_MS
SLOT_MS = 300_000  # Mail that expires in a slot of five minutes is swept at its end.


def send(database: Database, body: bytes = b"x", *, sender: Address = ADA, to: Address = BOB, **options: Any) -> str:
    return database.transact(mailboxes.send, sender, to, NewMail(str(to), body, **options))[0]


def send_again(database: Database, id: str, *, sender: Address = ADA, to: Address = BOB) -> bool:
    """Whether it is a duplicate."""
    return database.transact(mailboxes.send, sender, to, NewMail(str(to), b"again", id))[1]


def send_some(database: Database, count: int, **options: Any) -> None:
    """Send in one commit, which is faster."""

    def work(tx: Transaction) -> None:
        for number in range(count):
            mailboxes.send(tx, ADA, BOB, NewMail(str(BOB), b"%d" % number, **options))

    database.transact(work)


def deliver(database: Database, of: Address = BOB, **options: Any) -> tuple[list[Envelope], int | None]:
    return database.transact(mailboxes.deliver, of, **{"after": -1, "limit": 256, **options})


def bodies(database: Database, of: Address = BOB, **options: Any) -> list[bytes]:
    return [mail.body for mail in deliver(database, of, **options)[0]]


def peek(database: Database, of: Address = BOB, **options: Any) -> list[Envelope]:
    return database.read(mailboxes.peek, of, **{"after": -1, "limit": 256, **options})


def confirm(database: Database, *ids: str, of: Address = BOB) -> int:
    return database.transact(mailboxes.confirm, of, ids)


def join(database: Database, session: str, of: Address = BOB) -> tuple[int, int]:
    return database.transact(mailboxes.join, of, session)


def leave(database: Database, session: str, of: Address = BOB) -> None:
    database.transact(mailboxes.leave, of, session)


def receipts_of(database: Database, of: Address = ADA, **options: Any) -> list[MailReceipt]:
    return database.read(mailboxes.receipts, of, **{"after": -1, "limit": 1_000, **options})


def states(database: Database, of: Address = ADA, **options: Any) -> list[tuple[str, str]]:
    return [(receipt.id, receipt.state) for receipt in receipts_of(database, of, **options)]


def was_stored(database: Database, of: Address = ADA) -> dict[str, bool]:
    return {receipt.id: receipt.was_stored for receipt in receipts_of(database, of) if receipt.state == "confirmed"}


def count(database: Database, of: Address = BOB) -> int:
    return database.read(mailboxes.summary, of).pending


def stored_count(database: Database, of: Address = BOB) -> int:
    """The number of mails, including expired mail that is not removed yet."""
    return database.read(mailboxes.summary, of).box.count


def set_policy(database: Database, **options: Any) -> None:
    database.transact(execute, SetMailPolicy(MailPolicy(**options)))


def block(database: Database, sender: Address, *, of: Address = BOB, blocked: bool = True) -> None:
    database.transact(mailboxes.block, of, sender, blocked=blocked)


def sweep(database: Database, universe: str = "main") -> tuple[dict[str, int], bool]:
    entries = database.read(mailboxes.due_entries, universe)
    return database.transact(mailboxes.sweep, universe, entries), bool(entries)


def sweep_all(database: Database) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _ in range(10_000):
        found, more = sweep(database)
        for agent, number in found.items():
            counts[agent] = counts.get(agent, 0) + number
        if not more:
            return counts
    raise AssertionError("it never ends")


def everything(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))


def remaining_keys(database: Database, *addresses: Address) -> list[bytes]:
    """All keys except those that outlast mail: mailbox headers and policies."""
    kept = {key for each in addresses for key in (mailbox_keys.keys_of(each).box, mailbox_keys.keys_of(each).outgoing)}
    return [key for key, _ in everything(database) if key not in kept and b"mail-policy" not in key]


class Touches:
    """A transaction that records which keys it reads or writes, and how often it scans."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.keys: set[bytes] = set()
        self.scans = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def get(self, key: bytes) -> bytes | None:
        self.keys.add(key)
        return self._tx.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self.keys.add(key)
        self._tx.put(key, value)

    def delete(self, key: bytes) -> None:
        self.keys.add(key)
        self._tx.delete(key)

    def scan(self, begin: bytes, end: bytes, **options: Any) -> list[tuple[bytes, bytes]]:
        found = self._tx.scan(begin, end, **options)
        self.scans += 1
        self.keys |= {key for key, _ in found}
        return found


def touches(database: Database, work: Callable[..., Any], *args: Any, **options: Any) -> Touches:
    def watched(tx: Transaction) -> Touches:
        seen = Touches(tx)
        work(seen, *args, **options)
        return seen

    return database.transact(watched)
