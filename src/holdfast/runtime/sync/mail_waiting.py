"""Generated from runtime/mail_waiting.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from holdfast.clock import Clock, SystemClock, when_moved
from holdfast.kv import Database, Transaction
from holdfast.layers import mailboxes
from holdfast.layers.mailboxes import Address
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.tiers import Tier
from holdfast.wire.mail import MailReceipts, Mails

Publish = Callable[[Sequence[tuple[Any, ...]]], None]  # Of what happened, once it is committed.


class MailWaiter:
    """Reads mail and receipts, now or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, waits: ConsumerOptions, publish: Publish) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._waits = waits
        self._publish = publish
        self._jitter = Random()

    def read(
        self,
        address: Address,
        *,
        after: int,
        limit: int,
        wait_ms: int,
        session: str | None,
        peek: bool,
        bytes_max: int | None = None,
        tier: Tier,
    ) -> Mails:
        """At least one mail, unless `wait_ms` pass without any.

        Raises:
            MailboxTaken: `session` does not read this mailbox any more.
        """

        def look() -> Mails:
            if peek:
                found = self._database.read(mailboxes.peek, address, after=after, limit=limit, tier=tier)
                return Mails(found)
            found, live_from, events = self._database.transact(
                _deliver, address, after=after, limit=limit, session=session, bytes_max=bytes_max, tier=tier
            )
            if events:
                self._publish(events)
            return Mails(found, live_from)

        answer: Mails = self._wait(address, wait_ms, look)
        return answer

    def receipts(self, address: Address, *, after: int, limit: int, wait_ms: int, tier: Tier) -> MailReceipts:
        """At least one receipt, unless `wait_ms` pass without any."""

        def look() -> MailReceipts:
            return MailReceipts(self._database.read(mailboxes.receipts, address, after=after, limit=limit, tier=tier))

        answer: MailReceipts = self._wait(address, wait_ms, look)
        return answer

    def _wait(self, address: Address, wait_ms: int, look: Callable[[], Any]) -> Any:
        """The first answer of `look` that has something, or its last one."""
        answer = look()
        if _has_something(answer) or not wait_ms:
            return answer
        until_ms = self._clock.now_ms() + wait_ms
        with self._database.watch(mailboxes.keys_of(address).prefix) as watch:
            stop_listening = when_moved(self._clock, watch.fire)
            try:
                while True:
                    answer = look()
                    left_ms = until_ms - self._clock.now_ms()
                    if _has_something(answer) or left_ms <= 0:
                        return answer
                    watch.wait(min(left_ms, self._waits.look_again_ms(self._jitter)) / 1_000)
            finally:
                stop_listening()


def _has_something(answer: Mails | MailReceipts) -> bool:
    return bool(answer.mails if isinstance(answer, Mails) else answer.receipts)


def _deliver(tx: Transaction, address: Address, **options: Any) -> tuple[Any, int | None, list[tuple[Any, ...]]]:
    found, live_from = mailboxes.deliver(tx, address, **options)
    return found, live_from, tx.events
