"""Generated from handles/mailboxes.py by tools/make_twins.py; change that file instead."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from fastness.encryption import SEALED, AgentKey, SealBinding, checked_public_key
from fastness.errors import Closed, FastnessError, InvalidArgument, RetryAdvice, SealBroken, rebuild
from fastness.handles.arguments import checked_items, checked_map
from fastness.handles.sync.queues import payload_of
from fastness.limits import MAIL_WAIT_SECONDS_MAX
from fastness.names import checked_agent
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.agents import GetAgent
from fastness.wire.mail import (
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
    """The mailbox of one agent: sends its mail and reads what it received.

    Mail is stored before `send` returns and stays until the recipient confirms it: it is delivered at least once, in
    the order in which it was stored. A mailbox that was opened with the agent's `key` decrypts sealed mail as it is
    read; a mail that cannot be decrypted is delivered sealed, and its `seal_error` says why. `sealed_by` of a mail is
    the agent that is proven to have sealed it. With `require_sealed`, mail without that proof has a `seal_error`.
    """

    def __init__(
        self,
        transport: Transport,
        universe: str,
        agent: str,
        *,
        key: AgentKey | None = None,
        contacts: Mapping[str, bytes] | None = None,
        require_sealed: bool = False,
    ) -> None:
        if require_sealed and key is None:
            raise InvalidArgument("require_sealed needs the agent's key to unseal mail; open the mailbox with key=")
        self.agent = checked_agent(agent, universe)
        self.address = f"{self.agent}@{universe}"
        self._transport = transport
        self._universe = universe
        self._key = key
        self._require_sealed = require_sealed
        self._contacts = None if contacts is None else _checked_contacts(contacts, universe)

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

        A second mail with the same `id` is not stored while the first is unconfirmed; `duplicate` is true. With `seal`
        only the recipient can read the mail; the mailbox must have been opened with the agent's `key`.

        Raises:
            MailboxFull: the recipient's mailbox is full.
            SenderBlocked: the recipient has blocked this agent.
        """
        payload, kind = payload_of(body)
        kind = content_type or kind
        if seal:
            id = id or str(uuid.uuid4())
            recipient = f"{checked_agent(to, self._universe)}@{self._universe}"
            binding = SealBinding(self.address, recipient, id, time.time_ns() // 1_000_000)
            payload = self._own_key().seal(payload, kind, recipient=self._public_key(to), binding=binding)
            kind = SEALED
        mail = NewMail(to, payload, id, kind, correlation_id)
        sent = (self.send_many([mail], tier=tier))[0]
        if sent.code is not None:
            raise rebuild(sent.code, sent.detail or sent.code)
        return sent

    def send_many(self, mails: Iterable[NewMail], *, tier: Tier = Tier.CRITICAL) -> list[SentMail]:
        """Send up to 256 mails in one commit; the outcome of each. A refused mail does not affect the others."""
        found = list(checked_items(mails, "wrap it in a list: send_many([NewMail(…)])"))
        return (self._transport.call(SendMail(self.agent, found, self._universe, tier=tier))).mails

    def read(
        self, *, after: int = -1, limit: int = 50, wait_seconds: float = 0.0, peek: bool = False
    ) -> list[Envelope]:
        """At most `limit` mails after the sequence `after`, in order. They stay until they are confirmed.

        Their senders get a delivery receipt, unless `peek` is set.
        """
        request = ReadMail(self.agent, after, limit, wait_seconds, None, peek, self._universe)
        return self._unseal_all((self._transport.call(request)).mails)

    def confirm(self, mails: Envelope | str | Iterable[Envelope | str], *, tier: Tier = Tier.CRITICAL) -> int:
        """Confirm and remove mails, given as envelopes or ids; how many of them still existed."""
        some = [mails] if isinstance(mails, Envelope | str) else checked_items(mails, "give an id, or a list of them")
        ids = [mail.id if isinstance(mail, Envelope) else mail for mail in some]
        return (self._transport.call(ConfirmMail(self.agent, ids, self._universe, tier=tier))).count

    def __iter__(self) -> Iterator[Envelope]:
        return self.subscribe()

    def subscribe(self, *, wait_seconds: float | None = None) -> Iterator[Envelope]:
        """Mail as it arrives, the oldest first. Each mail is confirmed when the loop asks for the next one.

        A mail whose iteration was left by `break` or an exception is not confirmed and is delivered again. Ends when no
        mail arrives for `wait_seconds`, or never. The last subscriber replaces any other reader.

        Raises:
            MailboxTaken: another reader has subscribed.
        """
        session, after = uuid.uuid4().hex, -1
        patience = MAIL_WAIT_SECONDS_MAX if wait_seconds is None else wait_seconds
        try:
            self._transport.call(JoinMailbox(self.agent, session, self._universe))
            while True:
                request = ReadMail(self.agent, after, wait_seconds=patience, session=session, universe=self._universe)
                mails = self._unseal_all((self._transport.call(request)).mails)
                if not mails and wait_seconds is not None:
                    return
                for mail in mails:
                    after = mail.sequence
                    yield mail
                    self.confirm([mail])
        finally:
            # Also if the loop was cancelled before it knew that it had joined. The next reader does not need it, and
            # the plane may be closed.
            with suppress(FastnessError):
                self._transport.call(LeaveMailbox(self.agent, session, self._universe))

    def unseal(self, mail: Envelope) -> Envelope:
        """A sealed mail, decrypted; any other mail is returned with `sealed_by` None.

        For mail that was read without the key, or that could not be decrypted then. Mail that was read with the key is
        already unsealed; its proof is lost if it is given here.

        Raises:
            SealBroken: it was not sealed by its sender for this agent and under this id, or was changed in transit; or
                it is not sealed, and the mailbox requires that.
            InvalidArgument: the mailbox has no key, or the sender's public key is unknown.
        """
        mail = _without_claims(mail)
        if mail.content_type == SEALED:
            mail = self._opened(mail, self._own_key(), self._public_key(mail.sender))
        if (fault := self._fault(mail)) is not None:
            raise SealBroken(fault)
        return mail

    def _unseal_all(self, mails: list[Envelope]) -> list[Envelope]:
        """The mails, decrypted as far as possible if the mailbox has a key. Each sender's key is read once."""
        mails = [_without_claims(mail) for mail in mails]
        if self._key is None:
            return mails
        unsealed: list[Envelope] = []
        senders: dict[str, bytes | FastnessError] = {}
        for mail in mails:
            if mail.content_type == SEALED:
                if mail.sender not in senders:
                    senders[mail.sender] = self._find_public_key(mail.sender)
                unsealed.append(self._unsealed(mail, self._key, senders[mail.sender]))
            else:
                unsealed.append(self._marked(mail))
        return unsealed

    def _unsealed(self, mail: Envelope, key: AgentKey, sender: bytes | FastnessError) -> Envelope:
        """The mail, decrypted; or still sealed, with the reason."""
        try:
            if isinstance(sender, FastnessError):
                raise sender
            return self._marked(self._opened(mail, key, sender))
        except FastnessError as error:
            return msgspec.structs.replace(mail, seal_error=str(error))

    def _opened(self, mail: Envelope, key: AgentKey, sender: bytes) -> Envelope:
        body, content_type, bound = key.unseal(mail.body, sender=sender)
        if (bound.sender, bound.to, bound.id) != (mail.sender, self.address, mail.id):
            raise SealBroken(
                f"The mail was sealed by {bound.sender} for {bound.to} as mail {bound.id}, and was delivered to "
                f"{self.address} as mail {mail.id} from {mail.sender}; do not trust it"
            )
        return msgspec.structs.replace(
            mail, body=body, content_type=content_type, sealed_by=bound.sender, sealed_ms=bound.sealed_ms
        )

    def _marked(self, mail: Envelope) -> Envelope:
        fault = self._fault(mail)
        return mail if fault is None else msgspec.structs.replace(mail, seal_error=fault)

    def _fault(self, mail: Envelope) -> str | None:
        """Why the mailbox does not accept the mail; None if it does."""
        if not self._require_sealed or mail.sealed_by is not None:
            return None
        return "The mail is not sealed, and this mailbox requires that; do not trust it"

    def _find_public_key(self, sender: str) -> bytes | FastnessError:
        """A sender's public key, or why it is unknown. Raises failures that may pass: the mail can be read again."""
        try:
            return self._public_key(sender)
        except FastnessError as error:
            if error.retry is not RetryAdvice.NEVER or isinstance(error, Closed):
                raise
            return error

    def _own_key(self) -> AgentKey:
        if self._key is None:
            raise InvalidArgument("Sealing needs the agent's key; open the mailbox with key=")
        return self._key

    def _public_key(self, address: str) -> bytes:
        agent = checked_agent(address, self._universe)
        if self._contacts is not None:
            found = self._contacts.get(agent)
        else:
            known = (self._transport.call(GetAgent(agent, self._universe))).agent
            found = None if known is None else known.public_key
        if found is None:
            raise InvalidArgument(
                f"The public key of {agent} is unknown; register the agent with its key, or give it in contacts="
            )
        return found

    def count(self) -> int:
        """How many mails can be read: neither confirmed nor expired."""
        return (self.stats()).pending

    def stats(self) -> MailCount:
        """The number of mails that can be read and its limit, the time of the oldest, and whether a reader is there."""
        return self._transport.call(CountMail(self.agent, self._universe))

    def receipts(self, *, after: int = -1, limit: int = 100, wait_seconds: float = 0.0) -> list[MailReceipt]:
        """Receipts for the mail that this agent has sent, in order, after the sequence `after`."""
        return (self._transport.call(ReadReceipts(self.agent, after, limit, wait_seconds, self._universe))).receipts

    def block(self, sender: str) -> None:
        """Refuse mail from `sender` from now on."""
        self._transport.call(BlockSender(self.agent, sender, True, self._universe))

    def unblock(self, sender: str) -> None:
        """Accept mail from `sender` again."""
        self._transport.call(BlockSender(self.agent, sender, False, self._universe))

    def blocked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` addresses whose mail is refused, in order."""
        return (self._transport.call(ListBlocks(self.agent, after, limit, self._universe))).addresses


def _checked_contacts(contacts: Mapping[str, bytes], universe: str) -> dict[str, bytes]:
    return {
        checked_agent(name, universe): checked_public_key(key)
        for name, key in checked_map("contacts", contacts).items()
    }


def _without_claims(mail: Envelope) -> Envelope:
    """The mail without what a server may claim about its seal."""
    if mail.seal_error is None and mail.sealed_by is None and mail.sealed_ms is None:
        return mail
    return msgspec.structs.replace(mail, seal_error=None, sealed_by=None, sealed_ms=None)
