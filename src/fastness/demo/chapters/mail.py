"""Mail to agents that are offline: stored before it is acknowledged, and read when they connect."""

from typing import Any, Final

from fastness.demo.context import DemoContext
from fastness.tiers import Tier
from fastness.wire.mail import CONFIRMED, STORED, MailReceipt

LEAD: Final = "mira"
AGENTS: Final = ("ada", "ben", "cleo", "dov", "esme", "finn")
_STORED: Final = 8  # Mails to each agent while it is offline.
_LIVE: Final = 2  # Mails to each agent while it reads.


def run(context: DemoContext) -> None:
    output = context.output
    output.chapter("Mail to offline agents")
    output.say(
        f"Mira leads {len(AGENTS)} support agents. All of them are offline: no process reads their mail. She sends "
        "notes about the shift to each of them."
    )
    lead = context.plane.mailbox(LEAD)
    sent = []
    with output.bar("mira sends", len(AGENTS) * _STORED) as done:
        for n in range(_STORED):
            for agent in AGENTS:
                sent.append(lead.send(agent, {"n": n, "plan": f"Shift note {n + 1} for {agent}"}))
                done(len(sent))
    pending = sum(context.plane.mailbox(agent).count() for agent in AGENTS)
    output.claim(
        "each send was acknowledged as `critical` (synced to disk), and every mail is pending",
        pending == len(sent) and all(mail.durability is Tier.CRITICAL for mail in sent),
        checked="durability of each answer; count of mails",
        figure=f"{pending} mails",
    )
    stored = _receipts(context)
    output.claim(
        "mira has a `stored` receipt for each mail",
        [receipt.id for receipt in stored] == [mail.id for mail in sent]
        and {receipt.state for receipt in stored} == {STORED},
        checked="receipts against answers, id by id",
        figure=f"{len(stored)} receipts",
    )
    _run_agents(context)


def _run_agents(context: DemoContext) -> None:
    output, lead = context.output, context.plane.mailbox(LEAD)
    output.say("The agents connect, each as a separate process, and Mira sends more mail while they read.")
    mails = _STORED + _LIVE
    readers = {agent: context.processes.agent("reader", context.server.url, agent, str(mails)) for agent in AGENTS}
    boxes = [context.plane.mailbox(agent) for agent in AGENTS]
    # An agent's first read fetches all stored mail, so mail sent from now on is delivered live.
    read: dict[str, list[dict[str, Any]]] = {agent: [reader.read_event("read")] for agent, reader in readers.items()}
    live = {
        lead.send(agent, {"n": _STORED + n, "plan": f"Welcome back, {agent}"}).id
        for n in range(_LIVE)
        for agent in AGENTS
    }
    with output.bar("agents read", len(AGENTS) * mails) as done:
        for agent, reader in readers.items():
            for _ in range(mails - 1):
                read[agent].append(reader.read_event("read"))
                done(sum(map(len, read.values())))
    context.processes.wait_for(*readers.values())
    output.claim(
        "each agent read all its mail in order: the stored mails first, then the live ones",
        all([mail["n"] for mail in each] == list(range(mails)) for each in read.values()),
        checked="mails that each process reported",
        figure=f"{sum(map(len, read.values()))} mails, {len(AGENTS)} processes",
    )
    confirmed = {receipt.id: receipt for receipt in _receipts(context) if receipt.state == CONFIRMED}
    stored = sum(receipt.was_stored for receipt in confirmed.values())
    output.claim(
        "every mail is confirmed, and its receipt shows whether it was stored first",
        len(confirmed) == len(AGENTS) * mails
        and all(receipt.was_stored is (id not in live) for id, receipt in confirmed.items()),
        checked="receipts against the time of each send",
        figure=f"{stored} stored, {len(confirmed) - stored} live",
    )
    left = sum(box.count() for box in boxes)
    output.claim("every mailbox is empty", left == 0, checked="count of mails", figure=f"{left} left")


def _receipts(context: DemoContext) -> list[MailReceipt]:
    """All receipts of the lead."""
    found: list[MailReceipt] = []
    while page := context.plane.mailbox(LEAD).receipts(after=found[-1].sequence if found else -1):
        found += page
    return found
