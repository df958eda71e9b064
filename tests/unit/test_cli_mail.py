"""`fastness mail` and `fastness agent`, in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Cli = Callable[..., Result]


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)


def pending(cli: Cli, agent: str) -> int:
    return int(parsed(cli("mail", "count", agent, "--json"))["pending"])


def test_mail_is_read_in_order_and_stays_until_it_is_confirmed(cli: Cli) -> None:
    first = cli("mail", "send", "ada", "bob", '{"n": 1}').stdout.strip()
    cli("mail", "send", "ada", "bob", "-", input="plain text")
    found = parsed(cli("mail", "read", "bob", "--json"))
    assert [each["payload"] for each in found] == [{"n": 1}, "plain text"]
    assert {each["from"] for each in found} == {"ada@main"}
    assert pending(cli, "bob") == 2
    assert parsed(cli("mail", "confirm", "bob", first, "--json"))["count"] == 1
    assert [each["payload"] for each in parsed(cli("mail", "read", "bob", "--confirm", "--json"))] == ["plain text"]
    assert pending(cli, "bob") == 0
    assert "No mail" in cli("mail", "read", "bob").stderr


def test_watch_confirms_printed_mail_unless_keep_is_given(cli: Cli) -> None:
    for body in "abc":
        cli("mail", "send", "ada", "bob", body)
    assert cli("mail", "watch", "bob", "-n", "1", "--keep").stdout.endswith(" ada@main a\n")
    assert pending(cli, "bob") == 3
    lines = cli("mail", "watch", "bob", "-n", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["payload"] for line in lines] == ["a", "b"]
    assert pending(cli, "bob") == 1


def test_receipts_are_listed_after_a_sequence_number(cli: Cli) -> None:
    cli("mail", "send", "ada", "bob", "x", "--id", "m-1")
    cli("mail", "read", "bob", "--confirm")
    found = parsed(cli("mail", "receipts", "ada", "--json"))
    assert [(each["id"], each["state"]) for each in found] == [
        ("m-1", "stored"),
        ("m-1", "delivered"),
        ("m-1", "confirmed"),
    ]
    later = parsed(cli("mail", "receipts", "ada", "--after", str(found[1]["sequence"]), "--json"))
    assert [each["state"] for each in later] == ["confirmed"]


def test_a_peek_sends_no_receipts(cli: Cli) -> None:
    cli("mail", "send", "ada", "bob", "x")
    cli("mail", "read", "bob", "--peek")
    assert [each["state"] for each in parsed(cli("mail", "receipts", "ada", "--json"))] == ["stored"]


def test_the_same_id_is_stored_once(cli: Cli) -> None:
    cli("mail", "send", "ada", "bob", "x", "--id", "m-1")
    again = cli("mail", "send", "ada", "bob", "x", "--id", "m-1", "--json")
    assert parsed(again)["duplicate"] is True
    assert "not stored again" in again.stderr
    assert pending(cli, "bob") == 1


def test_a_full_mailbox_and_a_block_have_their_own_exit_codes(cli: Cli) -> None:
    assert parsed(cli("mail", "policy", "--max", "1", "--ttl", "1d", "--json")) == {
        "pending_max": 1,
        "ttl_seconds": 86_400.0,
    }
    cli("mail", "send", "ada", "bob", "x")
    full = cli("mail", "send", "ada", "bob", "y", "--json", code=7)
    assert json.loads(full.stderr)["code"] == "queue_full"
    cli("mail", "block", "bob", "ada")
    blocked = cli("mail", "send", "ada", "bob", "y", "--json", code=8)
    assert json.loads(blocked.stderr)["code"] == "sender_blocked"
    assert parsed(cli("mail", "block", "bob", "--json")) == [{"sender": "ada@main"}]
    cli("mail", "block", "bob", "ada", "--off")
    assert parsed(cli("mail", "block", "bob", "--json")) == []


def test_mailboxes_are_listed_with_their_pending_mail(cli: Cli) -> None:
    cli("mail", "send", "ada", "bob", "x")
    ada, bob = parsed(cli("mail", "list", "--json"))
    assert ada == {"agent": "ada", "pending": 0, "oldest_at": None, "joined": False}
    assert bob.pop("oldest_at").startswith("20")
    assert bob == {"agent": "bob", "pending": 1, "joined": False}


def test_agents_are_registered_with_a_generated_key(cli: Cli, tmp_path: Path) -> None:
    key = tmp_path / "ada.key"
    made = cli("agent", "register", "ada", "--key", str(key), "--json")
    assert str(key) in made.stderr
    public = parsed(made)["public_key"]
    assert parsed(cli("agent", "register", "ada", "--key", str(key), "--json"))["public_key"] == public
    assert parsed(cli("agent", "show", "ada", "--json"))["public_key"] == public
    assert [each["name"] for each in parsed(cli("agent", "list", "--json"))] == ["ada"]
    other = "11" * 32
    refused = cli("agent", "register", "ada", "--public-key", other, "--json", code=5)
    assert json.loads(refused.stderr)["code"] == "agent_exists"
    cli("agent", "register", "ada", "--public-key", other, "--replace")
    assert parsed(cli("agent", "show", "ada", "--json"))["public_key"] == other
    cli("agent", "show", "missing", code=4)
    cli("agent", "register", "ada", "--public-key", "zz", code=2)


def test_sealed_mail_is_read_only_with_the_recipients_key(cli: Cli, tmp_path: Path) -> None:
    ada, bob, eve = (str(tmp_path / f"{name}.key") for name in ("ada", "bob", "eve"))
    for name, key in (("ada", ada), ("bob", bob), ("eve", eve)):
        cli("agent", "register", name, "--key", key)
    cli("mail", "send", "ada", "bob", "meet at nine", "--seal", "--key", ada)
    [sealed] = parsed(cli("mail", "read", "bob", "--json"))
    assert sealed["content_type"] == "application/vnd.fastness.sealed"
    assert "payload" not in sealed
    [decrypted] = parsed(cli("mail", "read", "bob", "--key", bob, "--json"))
    assert (decrypted["payload"], decrypted["content_type"]) == ("meet at nine", "text/plain; charset=utf-8")
    assert decrypted["sealed_by"] == "ada@main"
    cli("mail", "send", "ada", "bob", "not sealed")
    refused = cli("mail", "read", "bob", "--key", eve, "--confirm", "--json", code=10)
    assert json.loads(refused.stderr)["code"] == "seal_broken"
    broken, plain = parsed(refused)
    assert (broken["seal_error"], plain["payload"]) == (
        "The mail is not sealed by this sender for this key; do not trust it",
        "not sealed",
    )
    [left] = parsed(cli("mail", "read", "bob", "--key", bob, "--json"))
    assert left["payload"] == "meet at nine", "only the mail that could be read was confirmed"
    cli("mail", "send", "ada", "bob", "not sealed")
    strict = cli("mail", "read", "bob", "--key", bob, "--require-sealed", "--confirm", "--json", code=10)
    assert [each.get("seal_error", "")[:22] for each in parsed(strict)] == ["", "The mail is not sealed"]
    [left] = parsed(cli("mail", "read", "bob", "--key", bob, "--json"))
    assert (left["payload"], left["sealed_by"]) == ("not sealed", None)
    cli("mail", "read", "bob", "--require-sealed", code=2)


def test_mail_for_the_agent_of_a_world_enters_its_inbox(cli: Cli) -> None:
    cli("world", "create", "plans")
    cli("agent", "register", "planner", "--world", "plans")
    cli("mail", "send", "ada", "planner", "think")
    assert pending(cli, "planner") == 0
    assert [each["state"] for each in parsed(cli("mail", "receipts", "ada", "--json"))] == ["confirmed"]


@pytest.mark.parametrize(
    "words",
    [
        ("mail", "send", "ada", "bob@elsewhere", "x"),
        ("mail", "send", "A B", "bob", "x"),
        ("mail", "send", "ada", "bob", "x", "--id", "\n"),
        ("mail", "send", "ada", "bob", "x" * 65_537),
        ("mail", "read", "bob", "--key", "/nowhere"),
        ("mail", "policy", "--max", "0"),
    ],
)
def test_invalid_mail_is_rejected_and_not_stored(cli: Cli, words: tuple[str, ...]) -> None:
    cli("mail", "send", "ada", "eve", "x")
    assert cli(*words, code=2).stderr.startswith("fastness: ")
    assert pending(cli, "bob") == 0
