"""SIGKILL during sends, reads and confirmations: acknowledged mail is kept, confirmed mail stays removed."""

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import fastness
from fastness import Plane
from fastness.limits import MAIL_TTL_SECONDS
from fastness.testing.histories import History, Operation, Outcome
from fastness.testing.histories.mail import MailboxEntry, check_mailbox
from tests.faults import mail_child
from tests.support.depth import Depth
from tests.support.forked import start_python

CHILD = Path(__file__).parent / "mail_child.py"
MAILS = 400  # Per sender, of which there are three.


def kill_after(folder: Path, run: int, lines: int) -> list[bytes]:
    """Run the child, kill it after that many lines of output, and return its output."""
    arguments: list[str | Path] = [CHILD, f"dir:{folder}", f"run{run}", str(MAILS)]
    with start_python(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    return [line for line in said if line.endswith(b"\n")]


def waiting(plane: Plane, agent: str) -> list[MailboxEntry]:
    """The mail in a mailbox; checks that the count agrees."""
    entries: list[MailboxEntry] = []
    while mails := plane.mailbox(agent).read(after=entries[-1].sequence if entries else -1, limit=256, peek=True):
        entries += [MailboxEntry(mail.sequence, mail.id, mail.sent_ms, mail.expires_ms) for mail in mails]
    assert plane.mailbox(agent).count() == len(entries)
    return entries


def check(plane: Plane, history: History) -> int:
    """Check the history, and that a new reader gets the remaining mail in order; returns how much."""
    now_ms, total = time.time_ns() // 1_000_000, 0
    for agent in mail_child.READERS:
        left = waiting(plane, agent)
        check_mailbox(history, agent, left=left, end_ms=now_ms, ttl_ms=round(MAIL_TTL_SECONDS * 1_000))
        read = [MailboxEntry(mail.sequence, mail.id, mail.sent_ms, mail.expires_ms) for mail in subscribe(plane, agent)]
        assert read == left
        assert plane.mailbox(agent).count() == 0
        total += len(left)
    return total


def subscribe(plane: Plane, agent: str) -> Any:
    return plane.mailbox(agent).subscribe(wait_seconds=0)


def sends(history: History) -> list[Operation]:
    return [each for each in history.operations if each.kind == "send" and each.outcome is Outcome.OK]


def check_receipts(plane: Plane, history: History) -> None:
    """Check that each sender has the receipts for its acknowledged mail."""
    for sender in mail_child.SENDERS:
        receipts: list[Any] = []
        while found := plane.mailbox(sender).receipts(after=receipts[-1].sequence if receipts else -1, limit=1_000):
            receipts += found
        first = receipts[0].sequence if receipts else 0
        assert [receipt.sequence for receipt in receipts] == list(range(first, first + len(receipts)))
        known = {(receipt.state, receipt.id) for receipt in receipts}
        sent = [each.argument["id"] for each in sends(history) if each.argument["from"] == sender]
        while first and ("stored", sent[0]) not in known:  # The oldest receipts are deleted at the limit.
            del sent[0]
        assert all((state, id) in known for state in ("stored", "confirmed") for id in sent), "by now all was read"
        read = {id for each in history.operations if each.kind == "read" for _, id, *_ in (each.result or [[]])[0]}
        assert all(("delivered", id) in known for id in read & {*sent})
        stored = [receipt.id for receipt in receipts if receipt.state == "stored"]
        assert len(set(stored)) == len(stored)


def test_a_killed_process_loses_no_mail_and_revives_none(tmp_path: Path, depth: Depth) -> None:
    """Mail is removed only after its confirmation, and commits are synced before they are acknowledged."""
    kills = max(1, depth.kills // 6)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    said: list[bytes] = []
    for run in range(kills):
        said += kill_after(tmp_path, run, chance.randrange(1, 1_500))
    history = mail_child.history_of(said)
    with fastness.open(f"dir:{tmp_path}") as plane:
        left = check(plane, history)
        check_receipts(plane, history)
    errors = mail_child.errors_of(said)
    assert set(errors) <= {"queue_full"}, errors
    counts = {
        kind: sum(each.kind == kind and each.outcome is Outcome.OK for each in history.operations)
        for kind in ("send", "read", "confirm")
    }
    cut_off = {each.kind for each in history.operations if each.outcome is Outcome.UNKNOWN}
    print(f"{kills} kills, {counts} acknowledged, {left} left; cut off in the middle: {sorted(cut_off)}; {errors}")
    assert counts["send"] >= kills
