"""The mail checkers accept the answers of correct mailboxes, and find each kind of violation."""

from typing import Any

import pytest

from fastness.testing.histories import History, Operation, Violation
from fastness.testing.histories.mail import MailboxEntry, check_mailbox, check_receipts, check_was_stored

TTL_MS = 1_000


@pytest.fixture
def history() -> History:
    return History()


def done(history: History, kind: str, argument: Any, result: Any = None, key: str = "bob") -> Operation:
    """An operation that returned before anything else was invoked."""
    return history.ok(history.invoke("ada", kind, key, argument), result)


def send(history: History, id: str = "m", sent_ms: int | None = 0, *, duplicate: bool = False) -> Operation:
    return done(history, "send", {"id": id, "from": "ada"}, [id, duplicate, sent_ms])


def send_lost(history: History, id: str = "m") -> Operation:
    return history.unknown(history.invoke("ada", "send", "bob", {"id": id, "from": "ada"}))


def mails(*numbers: int, sent_ms: int = 0) -> list[list[Any]]:
    """Mails with the ids m0, m1 and so on, at these sequences."""
    return [[number, f"m{number}", sent_ms, sent_ms + TTL_MS] for number in numbers]


def read(
    history: History,
    found: list[list[Any]],
    *,
    session: str | None = "s",
    after: int = -1,
    limit: int = 10,
    live_from: int | None = None,
    now_ms: int = 1,
) -> Operation:
    return done(history, "read", [session, after, limit], [found, live_from, now_ms])


def confirm(history: History, *ids: str) -> Operation:
    return done(history, "confirm", list(ids), len(ids))


def check(history: History, *left: MailboxEntry, end_ms: int = 1) -> dict[int, MailboxEntry]:
    return check_mailbox(history, "bob", left=left, end_ms=end_ms, ttl_ms=TTL_MS)


def entry(number: int) -> MailboxEntry:
    return MailboxEntry(*mails(number)[0])


# Valid histories.


def test_an_empty_history_passes(history: History) -> None:
    assert check(history) == {}


def test_read_and_confirmed_mail_passes(history: History) -> None:
    for number in range(3):
        send(history, f"m{number}")
    done(history, "join", "s")
    read(history, mails(0, 1), limit=2)
    read(history, mails(2), limit=2, after=1, live_from=3)
    confirm(history, "m2", "m0", "m1")
    assert sorted(check(history)) == [0, 1, 2]


def test_stored_or_expired_mail_passes(history: History) -> None:
    send(history, "m0", 100)
    send(history, "m1")
    check(history, entry(0), end_ms=TTL_MS)


def test_mail_with_a_lost_answer_may_or_may_not_be_stored(history: History) -> None:
    send_lost(history, "m0")
    check(history)
    read(history, mails(0))
    check(history, entry(0))


def test_mail_may_be_sent_again_after_it_was_confirmed(history: History) -> None:
    send_lost(history, "m")
    read(history, [[0, "m", 0, TTL_MS]])
    confirm(history, "m")
    send(history, "m", 5)
    read(history, [[1, "m", 5, 5 + TTL_MS]], now_ms=6)
    confirm(history, "m")
    check(history)


def test_possibly_confirmed_mail_need_not_be_read(history: History) -> None:
    send(history, "m0")
    send(history, "m1")
    history.unknown(history.invoke("ada", "confirm", "bob", ["m0"]))
    read(history, mails(1), live_from=2)
    check(history, entry(1))


def test_concurrently_sent_mail_need_not_be_read(history: History) -> None:
    sending = history.invoke("ada", "send", "bob", {"id": "m0", "from": "ada"})
    read(history, [], live_from=0)
    history.ok(sending, ["m0", False, 0])
    read(history, mails(0), live_from=0)
    check(history, entry(0))


def test_a_read_after_a_lost_answer_passes(history: History) -> None:
    send(history, "m0")
    send(history, "m1")
    history.unknown(history.invoke("bob", "read", "bob", ["s", -1, 10]))
    read(history, mails(0), limit=1, live_from=2)
    read(history, mails(1), limit=1, after=0, live_from=2)
    check(history, entry(0), entry(1))


# Violations.


def test_lost_mail_is_found(history: History) -> None:
    send(history)
    with pytest.raises(Violation, match="m was acknowledged to its sender and is lost"):
        check(history)


@pytest.mark.parametrize("sent_ms", [0, None])
def test_mail_removed_by_its_delivery_is_found(history: History, sent_ms: int | None) -> None:
    send(history, "m0", sent_ms)
    read(history, mails(0))
    with pytest.raises(Violation, match="is lost"):
        check(history)


def test_mail_that_was_never_sent_is_found(history: History) -> None:
    read(history, mails(0))
    with pytest.raises(Violation, match="sent 0 times"):
        check(history, entry(0))


def test_stored_mail_of_a_failed_send_is_found(history: History) -> None:
    history.failed(history.invoke("ada", "send", "bob", {"id": "m0", "from": "ada"}))
    with pytest.raises(Violation, match="sent 0 times"):
        check(history, entry(0))


def test_mail_stored_twice_is_found(history: History) -> None:
    send_lost(history, "m")
    send(history, "m", 3, duplicate=True)
    read(history, [[0, "m", 0, TTL_MS]], limit=1)
    read(history, [[1, "m", 3, TTL_MS]], limit=1, after=0)
    check(history, MailboxEntry(1, "m", 3, TTL_MS))
    with pytest.raises(Violation, match="Two mails of one id"):
        check(history, MailboxEntry(0, "m", 0, TTL_MS), MailboxEntry(1, "m", 3, TTL_MS))


def test_a_sequence_with_two_mails_is_found(history: History) -> None:
    send(history, "m0")
    send(history, "other")
    read(history, mails(0))
    read(history, [[0, "other", 0, TTL_MS]], session="t")
    with pytest.raises(Violation, match="was assigned to m0 and other"):
        check(history)


@pytest.mark.parametrize(("found", "after"), [((1, 0), -1), ((0, 0), -1), ((0, 1), 0)])
def test_mail_out_of_order_is_found(history: History, found: tuple[int, ...], after: int) -> None:
    send(history, "m0")
    send(history, "m1")
    read(history, mails(*found), after=after)
    with pytest.raises(Violation, match="out of order"):
        check(history, entry(0), entry(1))


def test_skipped_mail_is_found(history: History) -> None:
    for number in range(3):
        send(history, f"m{number}")
    read(history, mails(0, 2), limit=2)
    with pytest.raises(Violation, match="m1 was skipped"):
        check(history, *map(entry, range(3)))


def test_mail_that_is_never_returned_is_found(history: History) -> None:
    send(history, "m0")
    read(history, [], live_from=1)
    with pytest.raises(Violation, match="did not return it"):
        check(history, entry(0))


def test_a_read_after_the_confirmation_is_found(history: History) -> None:
    send(history, "m0")
    read(history, mails(0))
    confirm(history, "m0")
    read(history, mails(0), session="t")
    with pytest.raises(Violation, match="read again after it was confirmed"):
        check(history)


def test_a_read_of_expired_mail_is_found(history: History) -> None:
    send(history, "m0")
    read(history, mails(0), now_ms=TTL_MS)
    with pytest.raises(Violation, match="and expired at 1000"):
        check(history, end_ms=TTL_MS)


def test_a_reader_that_is_live_too_early_is_found(history: History) -> None:
    send(history, "m0")
    send(history, "m1")
    read(history, mails(0), limit=1, live_from=2)
    with pytest.raises(Violation, match="live from 2 and has not read m1"):
        check(history, entry(0), entry(1))


def test_a_reader_whose_live_position_changes_is_found(history: History) -> None:
    send(history, "m0")
    read(history, mails(0), live_from=1)
    read(history, [], after=0, live_from=2)
    with pytest.raises(Violation, match="live from 1, and then from 2"):
        check(history, entry(0))


def test_a_read_of_a_replaced_session_is_found(history: History) -> None:
    done(history, "join", "s")
    done(history, "join", "t")
    read(history, [])
    with pytest.raises(Violation, match="although another session joined"):
        check(history)


# The was_stored flag.


def deliver_and_confirm(history: History, *, live: bool, leaves: bool = False, joins: bool = False) -> None:
    done(history, "join", "s")
    if live:
        read(history, [], live_from=0)
    send(history, "m0")
    read(history, mails(0), live_from=0 if live else 1)
    if leaves:
        done(history, "leave", "s")
    if joins:
        done(history, "join", "t")
    confirm(history, "m0")


def test_mail_for_a_live_reader_did_not_wait(history: History) -> None:
    deliver_and_confirm(history, live=True)
    check_was_stored(history, "bob", {"m0": False})
    with pytest.raises(Violation, match="was_stored=True, but s was live"):
        check_was_stored(history, "bob", {"m0": True})


def test_mail_without_a_live_reader_waited(history: History) -> None:
    deliver_and_confirm(history, live=False)
    check_was_stored(history, "bob", {"m0": True})
    with pytest.raises(Violation, match="no reader was live"):
        check_was_stored(history, "bob", {"m0": False})


@pytest.mark.parametrize("changes", [{"leaves": True}, {"joins": True}])
def test_mail_whose_reader_left_may_have_either_flag(history: History, changes: dict[str, bool]) -> None:
    deliver_and_confirm(history, live=True, **changes)
    check_was_stored(history, "bob", {"m0": True})
    check_was_stored(history, "bob", {"m0": False})


# Receipts.


def read_receipts(
    history: History, *sequences: int, after: int = -1, limit: int = 10, state: str = "stored", now_ms: int = 1
) -> None:
    receipts = [[number, f"m{number}", "bob", state, 0, False] for number in sequences]
    done(history, "receipts", [after, limit], [receipts, now_ms], key="ada")


def read_states(history: History, *states: str) -> None:
    receipts = [[number, "m", "bob", state, 0, False] for number, state in enumerate(states)]
    done(history, "receipts", [-1, 10], [receipts, 1], key="ada")


def check_receipt_sequences(history: History) -> list[int]:
    return list(check_receipts(history, "ada", ttl_ms=TTL_MS))


def test_receipts_in_order_pass(history: History) -> None:
    read_receipts(history, 0, 1, limit=2)
    read_receipts(history, 2, after=1)
    read_receipts(history, after=2)
    assert check_receipt_sequences(history) == [0, 1, 2]


def test_expired_receipts_may_be_missing(history: History) -> None:
    read_receipts(history, 0, 1)
    read_receipts(history, 1, now_ms=TTL_MS)
    assert check_receipt_sequences(history) == [0, 1]


@pytest.mark.parametrize("second", [(0, 2), (1, 2), ()])
def test_a_missing_receipt_is_found(history: History, second: tuple[int, ...]) -> None:
    read_receipts(history, 0, 1, 2)
    read_receipts(history, *second)
    with pytest.raises(Violation, match=r"missing after -1|have the sequences"):
        check_receipt_sequences(history)


def test_a_repeated_receipt_is_found(history: History) -> None:
    read_receipts(history, 0, 1, after=0)
    with pytest.raises(Violation, match="have the sequences"):
        check_receipt_sequences(history)


def test_a_changed_receipt_is_found(history: History) -> None:
    read_receipts(history, 0)
    read_receipts(history, 0, state="confirmed")
    with pytest.raises(Violation, match="has changed"):
        check_receipt_sequences(history)


@pytest.mark.parametrize("states", [("stored", "delivered", "confirmed", "stored", "confirmed"), ("confirmed",)])
def test_possible_states_of_a_mail_pass(history: History, states: tuple[str, ...]) -> None:
    read_states(history, *states)
    check_receipt_sequences(history)


@pytest.mark.parametrize("states", [("delivered", "delivered"), ("confirmed", "delivered"), ("confirmed", "confirmed")])
def test_impossible_states_of_a_mail_are_found(history: History, states: tuple[str, ...]) -> None:
    read_states(history, "stored", *states)
    with pytest.raises(Violation, match="repeats that"):
        check_receipt_sequences(history)
