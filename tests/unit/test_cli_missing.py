"""Commands on what is not there say so, instead of showing nothing or making it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import fastness
from fastness import QueuePolicy

Cli = Callable[..., Result]
QUEUE_COMMANDS = [
    ("stats", "imagse"),
    ("peek", "imagse"),
    ("dead", "imagse"),
    ("leased", "imagse"),
    ("policy", "imagse"),
    ("redrive", "imagse"),
    ("key", "imagse", "k"),
    ("schedule", "list", "imagse"),
    ("pause", "imagse"),
    ("resume", "imagse"),
    ("pause-key", "imagse", "k", "1m"),
    ("resume-key", "imagse", "k"),
    ("purge", "imagse", "--yes"),
    ("delete", "imagse", "--yes"),
]


@pytest.mark.parametrize("words", [("queue", *words) for words in QUEUE_COMMANDS] + [("message", "search", "imagse")])
def test_a_mistyped_queue_is_refused_with_the_nearest_name(cli: Cli, words: tuple[str, ...]) -> None:
    cli("queue", "put", "images", "1")
    problem = json.loads(cli(*words, "--json", code=4).stderr)
    assert problem["code"] == "queue_not_found"
    assert "Queue imagse does not exist; did you mean images?" in cli(*words, code=4).stderr
    assert [each["queue"] for each in json.loads(cli("queue", "list", "--json").stdout)] == ["images"]


def test_a_queue_that_resembles_none_is_refused_with_the_command_that_lists_them(cli: Cli) -> None:
    cli("queue", "put", "images", "1")
    assert (
        "Queue jobs does not exist; list them with: fastness queue list" in cli("queue", "peek", "jobs", code=4).stderr
    )


@pytest.mark.parametrize(
    "make",
    [
        ("queue", "policy", "jobs", "--max-attempts", "3"),
        ("queue", "schedule", "add", "jobs", "nightly", "0 3 * * *", "1"),
        ("queue", "put", "jobs", "1", "--delay", "1h"),
    ],
    ids=["policy", "schedule", "put"],
)
def test_a_queue_exists_once_it_has_a_policy_a_schedule_or_a_message(cli: Cli, make: tuple[str, ...]) -> None:
    cli(*make)
    for words in QUEUE_COMMANDS:
        cli("queue", words[0], *("jobs" if word == "imagse" else word for word in words[1:]))


def test_an_emptied_queue_still_exists(cli: Cli) -> None:
    cli("queue", "put", "jobs", "1")
    cli("queue", "purge", "jobs", "--yes")
    assert json.loads(cli("queue", "stats", "jobs", "--json").stdout)["ready"] == 0


def test_commands_that_wait_for_messages_accept_a_queue_that_does_not_exist_yet(cli: Cli) -> None:
    cli("queue", "put", "images", "1")
    cli("queue", "get", "jobs", code=3)
    assert json.loads(cli("queue", "watch", "jobs", "-n", "1", "--json").stdout)["ready"] == 0


def test_a_purge_makes_no_queue(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        assert plane.queue("jobs").purge() == 0
        assert plane.queues() == []
        with pytest.raises(fastness.errors.QueueNotFound):
            plane.queue("jobs").stats(must_exist=True)
        plane.queue("jobs").set_policy(QueuePolicy())
        assert plane.queue("jobs").stats(must_exist=True).ready == 0


@pytest.mark.parametrize("words", [("effect", "list", "wrold"), ("timer", "list", "wrold")], ids=" ".join)
def test_a_mistyped_world_is_refused(cli: Cli, words: tuple[str, ...]) -> None:
    cli("world", "create", "world")
    assert "There is no world wrold" in cli(*words, code=4).stderr
    cli(*words[:-1], "world")


def test_the_history_of_an_entity_that_never_existed_is_refused(cli: Cli) -> None:
    cli("entity", "set", "task", "t-1", "title=a")
    assert "task t-2 does not exist" in cli("entity", "history", "task", "t-2", code=4).stderr
    cli("entity", "delete", "task", "t-1")
    assert "title" in cli("entity", "history", "task", "t-1").stdout
    assert json.loads(cli("entity", "history", "task", "t-1", "--after", "9", "--json").stdout) == []
