"""Mail to agents that are away: stored before it is acknowledged, and read when they are back."""

from typing import Any, Final

from holdfast.demo.context import DemoContext
from holdfast.tiers import Tier
from holdfast.wire.mail import CONFIRMED, STORED, MailReceipt

LEAD: Final = "mira"
AGENTS: Final = ("ada", "ben", "cleo", "dov", "esme", "finn")
_WAITING: Final = 8  # Mails for each agent while it is away.
_LIVE: Final = 2  # And when it is back.


def tell(night: DemoContext) -> None:
    stage = night.stage
    stage.chapter("Mail for agents that are away")
    stage.say(
        f"Mira leads a fleet of support agents. It is evening, and all {len(AGENTS)} of them are away: there is no "
        "process that could read. She writes to each of them what the night will bring."
    )
    lead = night.plane.mailbox(LEAD)
    sent = []
    with stage.bar("mira writes", len(AGENTS) * _WAITING) as done:
        for n in range(_WAITING):
            for agent in AGENTS:
                sent.append(lead.send(agent, {"n": n, "plan": f"Shift note {n + 1} for {agent}"}))
                done(len(sent))
    waiting = sum(night.plane.mailbox(agent).count() for agent in AGENTS)
    stage.claim(
        "each send was acknowledged as `critical`, synced to disk, and every mail waits",
        waiting == len(sent) and all(mail.durability is Tier.CRITICAL for mail in sent),
        checked="promise of each answer; count of mails",
        figure=f"{waiting} mails",
    )
    stored = _receipts(night)
    stage.claim(
        "mira has a receipt for each: stored, not delivered",
        [receipt.id for receipt in stored] == [mail.id for mail in sent]
        and {receipt.state for receipt in stored} == {STORED},
        checked="receipts against answers, id by id",
        figure=f"{len(stored)} receipts",
    )
    _come_back(night)


def _come_back(night: DemoContext) -> None:
    stage, lead = night.stage, night.plane.mailbox(LEAD)
    stage.say(
        "DemoContext falls. The agents come back, each as a process, and Mira writes again while they still read."
    )
    mails = _WAITING + _LIVE
    readers = {agent: night.cast.agent("reader", night.server.url, agent, str(mails)) for agent in AGENTS}
    boxes = [night.plane.mailbox(agent) for agent in AGENTS]
    # Whoever has read once has read all that waited, and what comes from now on comes live.
    read: dict[str, list[dict[str, Any]]] = {agent: [reader.hear_of("read")] for agent, reader in readers.items()}
    live = {
        lead.send(agent, {"n": _WAITING + n, "plan": f"Welcome back, {agent}"}).id
        for n in range(_LIVE)
        for agent in AGENTS
    }
    with stage.bar("agents read", len(AGENTS) * mails) as done:
        for agent, reader in readers.items():
            for _ in range(mails - 1):
                read[agent].append(reader.hear_of("read"))
                done(sum(map(len, read.values())))
    night.cast.wait_for(*readers.values())
    stage.claim(
        "each agent read everything, in order: what had waited first, then what came live",
        all([mail["n"] for mail in each] == list(range(mails)) for each in read.values()),
        checked="what each process says it read",
        figure=f"{sum(map(len, read.values()))} mails, {len(AGENTS)} processes",
    )
    confirmed = {receipt.id: receipt for receipt in _receipts(night) if receipt.state == CONFIRMED}
    waited = sum(receipt.was_stored for receipt in confirmed.values())
    stage.claim(
        "every mail is confirmed, and its receipt tells whether it had waited",
        len(confirmed) == len(AGENTS) * mails
        and all(receipt.was_stored is (id not in live) for id, receipt in confirmed.items()),
        checked="receipts against what was sent when",
        figure=f"{waited} had waited, {len(confirmed) - waited} live",
    )
    left = sum(box.count() for box in boxes)
    stage.claim("no mailbox holds a mail any more", left == 0, checked="count of mails", figure=f"{left} left")


def _receipts(night: DemoContext) -> list[MailReceipt]:
    """All that the lead has."""
    found: list[MailReceipt] = []
    while page := night.plane.mailbox(LEAD).receipts(after=found[-1].sequence if found else -1):
        found += page
    return found
