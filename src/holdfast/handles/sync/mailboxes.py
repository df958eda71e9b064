"""Generated from handles/mailboxes.py by tools/make_twins.py; change that file instead."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.encryption import SEALED, AgentKey
from holdfast.errors import HoldfastError, InvalidArgument, rebuild
from holdfast.handles.sync.queues import payload_of
from holdfast.limits import MAIL_WAIT_SECONDS_MAX
from holdfast.names import checked_agent
from holdfast.tiers import Tier
from holdfast.wire import Transport
from holdfast.wire.agents import GetAgent
from holdfast.wire.mail import (
    BlockSender,
    ConfirmMail,
    CountMail,
    Envelope,
    JoinMailbox,
    LeaveMailbox,
    ListBlocks,
    MailCount,
    MailReceipt,
    NewMail,
    ReadMail,
    ReadReceipts,
    SendMail,
    SentMail,
)


class Mailbox:
    """The mailbox of one agent: what it sends, and what was sent to it.

    Mail is stored before `send` returns and stays until its recipient confirms it, so it may come twice and is never
    lost. It comes in the order in which it was stored.
    """

    def __init__(
        self,
        transport: Transport,
        universe: str,
        agent: str,
        *,
        key: AgentKey | None = None,
        contacts: Mapping[str, bytes] | None = None,
    ) -> None:
        self.agent = checked_agent(agent, universe)
        self.address = f"{self.agent}@{universe}"
        self._transport = transport
        self._universe = universe
        self._key = key
        self._contacts = (
            None if contacts is None else {checked_agent(name, universe): contacts[name] for name in contacts}
        )

    def send(
        self,
        to: str,
        body: Any,
        *,
        id: str | None = None,
        content_type: str | None = None,
        correlation_id: str | None = None,
        seal: bool = False,
        tier: Tier = Tier.CRITICAL,
    ) -> SentMail:
        """Send a mail: bytes as they are, anything else as JSON.

        Sent again under the same `id` while it waits, it is not stored again; `duplicate` says so. With `seal` only the
        recipient can read it; the mailbox must have been opened with the agent's `key`.

        Raises:
            MailboxFull: the recipient's mailbox holds as many mails as it may.
            SenderBlocked: the recipient does not want mail of this agent.
        """
        payload, kind = payload_of(body)
        kind = content_type or kind
        if seal:
            payload = self._own_key().seal(payload, kind, recipient=self._public_key(to))
            kind = SEALED
        mail = NewMail(to, payload, id, kind, correlation_id)
        sent = (self.send_many([mail], tier=tier))[0]
        if sent.code is not None:
            raise rebuild(sent.code, sent.detail or sent.code)
        return sent

    def send_many(self, mails: Iterable[NewMail], *, tier: Tier = Tier.CRITICAL) -> list[SentMail]:
        """Send up to 256 mails as one commit; the outcome of each. One that is refused does not stop the others."""
        return (self._transport.call(SendMail(self.agent, list(mails), self._universe, tier=tier))).mails

    def read(
        self, *, after: int = -1, limit: int = 50, wait_seconds: float = 0.0, peek: bool = False
    ) -> list[Envelope]:
        """At most `limit` mails behind the sequence `after`, in order. They stay until they are confirmed.

        Their senders are told that they were delivered, unless this is only a `peek`.
        """
        request = ReadMail(self.agent, after, limit, wait_seconds, None, peek, self._universe)
        return (self._transport.call(request)).mails

    def confirm(self, mails: Envelope | str | Iterable[Envelope | str], *, tier: Tier = Tier.CRITICAL) -> int:
        """These mails, or the mails of these ids, have arrived for good; how many of them were still there."""
        some = [mails] if isinstance(mails, Envelope | str) else mails
        ids = [mail.id if isinstance(mail, Envelope) else mail for mail in some]
        return (self._transport.call(ConfirmMail(self.agent, ids, self._universe, tier=tier))).count

    def __iter__(self) -> Iterator[Envelope]:
        return self.subscribe()

    def subscribe(self, *, wait_seconds: float | None = None) -> Iterator[Envelope]:
        """Mail as it comes, the oldest first. Each is confirmed when the next one is asked for.

        One whose loop was left, or that made its loop fail, is not confirmed and comes again. Ends when nothing came
        for `wait_seconds`, or never. Whoever subscribes last is the only reader.

        Raises:
            MailboxTaken: somebody else subscribed.
        """
        session, after = uuid.uuid4().hex, -1
        patience = MAIL_WAIT_SECONDS_MAX if wait_seconds is None else wait_seconds
        self._transport.call(JoinMailbox(self.agent, session, self._universe))
        try:
            while True:
                request = ReadMail(self.agent, after, wait_seconds=patience, session=session, universe=self._universe)
                mails = (self._transport.call(request)).mails
                if not mails and wait_seconds is not None:
                    return
                for mail in mails:
                    after = mail.sequence
                    yield mail
                    self.confirm([mail])
        finally:
            with suppress(HoldfastError):  # Whoever joins next does without, and the plane may be closed by now.
                self._transport.call(LeaveMailbox(self.agent, session, self._universe))

    def unseal(self, mail: Envelope) -> Envelope:
        """A mail that was sealed for this agent, opened; one that was not is returned as it is.

        Raises:
            SealBroken: its sender did not seal it for this agent's key, or it was changed on its way.
        """
        if mail.content_type != SEALED:
            return mail
        body, kind = self._own_key().open(mail.body, sender=self._public_key(mail.sender))
        return msgspec.structs.replace(mail, body=body, content_type=kind)

    def _own_key(self) -> AgentKey:
        if self._key is None:
            raise InvalidArgument("Sealing takes the agent's key; open the mailbox with key=")
        return self._key

    def _public_key(self, address: str) -> bytes:
        agent = checked_agent(address, self._universe)
        if self._contacts is not None:
            found = self._contacts.get(agent)
        else:
            known = (self._transport.call(GetAgent(agent, self._universe))).agent
            found = None if known is None else known.public_key
        if found is None:
            raise InvalidArgument(f"No public key of {agent} is known; have it registered, or give it in contacts=")
        return found

    def count(self) -> int:
        """How many mails wait for their confirmation."""
        return (self.stats()).pending

    def stats(self) -> MailCount:
        """How many mails wait, how many may, since when the oldest does, and whether anybody reads."""
        return self._transport.call(CountMail(self.agent, self._universe))

    def receipts(self, *, after: int = -1, limit: int = 100, wait_seconds: float = 0.0) -> list[MailReceipt]:
        """What became of the mail that this agent has sent, in order, behind the sequence `after`."""
        return (self._transport.call(ReadReceipts(self.agent, after, limit, wait_seconds, self._universe))).receipts

    def block(self, sender: str) -> None:
        """Refuse what `sender` sends from now on."""
        self._transport.call(BlockSender(self.agent, sender, True, self._universe))

    def unblock(self, sender: str) -> None:
        """Accept what `sender` sends again."""
        self._transport.call(BlockSender(self.agent, sender, False, self._universe))

    def blocked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` addresses whose mail is refused, in order."""
        return (self._transport.call(ListBlocks(self.agent, after, limit, self._universe))).addresses
