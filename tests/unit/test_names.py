"""Names: which are valid, that they keep their case, and what a rejected one is told."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fastness
from fastness.errors import InvalidName
from fastness.limits import NAME_BYTES_MAX
from fastness.names import checked_agent, checked_key, checked_name
from tests.support.failures import Failures

ALPHABET = "abcxyzABCXYZ0189._@:+=-"
NAMES = st.text(ALPHABET, min_size=1, max_size=NAME_BYTES_MAX).filter(lambda name: name not in (".", ".."))


@given(NAMES)
@example("arn:aws:sqs:eu-central-1:1234:Jobs.fifo")
@example("x" * NAME_BYTES_MAX)
def test_a_valid_name_is_returned_unchanged(name: str) -> None:
    assert checked_name("queue", name) == name
    assert checked_key("lease", name) == name


@given(st.text(max_size=300))
@example(".")
@example("..")
@example("\N{KELVIN SIGN}")
@example("a\n")
@example("x" * (NAME_BYTES_MAX + 1))
def test_a_name_is_valid_if_and_only_if_it_follows_the_rule(name: str) -> None:
    valid = name not in (".", "..") and re.fullmatch(r"[A-Za-z0-9._@:+=-]{1,255}", name, re.ASCII) is not None
    if valid:
        assert checked_name("queue", name) == name
    else:
        with pytest.raises(InvalidName, match="use 1 to 255 letters"):
            checked_name("queue", name)


@given(st.lists(NAMES, min_size=1, max_size=6).map("/".join))
def test_a_key_joins_names_with_slashes(key: str) -> None:
    if len(key) <= NAME_BYTES_MAX:
        assert checked_key("state", key) == key
    else:
        with pytest.raises(InvalidName, match="255 characters in all"):
            checked_key("state", key)


def test_an_invalid_key_is_refused() -> None:
    failures = Failures()
    for key in ["", "/", "a//b", "/a", "a/", "a/./b", "../b", "a/..", "a b", None, 7, b"a"]:
        with failures.of(key), pytest.raises(InvalidName, match="Invalid lease key"):
            checked_key("lease", key)
    failures.check()


def test_an_address_names_an_agent_and_its_universe() -> None:
    assert checked_agent("Ada", "main") == "Ada"
    assert checked_agent("Ada@Main", "Main") == "Ada"
    with pytest.raises(InvalidName, match="mail stays within its universe"):
        checked_agent("Ada@main", "Main")
    with pytest.raises(InvalidName, match="Invalid agent name"):
        checked_agent("a b", "main")


def test_a_rejected_name_is_shown_shortened() -> None:
    with pytest.raises(InvalidName) as refused:
        checked_name("queue", "x" * 1_000_000)
    assert len(str(refused.value)) < 600


def test_the_holder_of_a_lease_with_capitals_writes_its_state() -> None:
    with fastness.open("memory:", universe="Team@A:b+c=d") as plane:
        with plane.lease("LockB").acquire("ada") as lease:
            plane.state("LockB").update({"n": 1}, lease=lease)
        document = plane.state("LockB").get()
        assert document is not None
        assert document.value == {"n": 1}
        assert plane.state("lockb").get() is None


def test_the_longest_names_work_in_every_part_of_a_plane(tmp_path: object) -> None:
    longest = "N" * NAME_BYTES_MAX
    with fastness.open(f"dir:{tmp_path}/data", universe=longest) as plane:
        queue = plane.queue("Q" * (NAME_BYTES_MAX - 4))
        queue.put(b"x" * 100_000, group=longest)
        message = queue.receive()
        assert message is not None
        message.reject("never")
        assert [letter.last_error for letter in queue.dead_letters()] == ["never"]
        world = plane.world(longest)
        world.create()
        world.append([{"n": 1}], expected_head=0)
        assert world.head() == 1
        plane.mailbox(longest).send(f"{longest}@{longest}", {"n": 1})
        assert plane.mailbox(longest).count() == 1
        plane.entities.write(longest, longest, {"status": "open"})
        plane.state(longest).update(1)
        assert plane.lease(longest).acquire(longest[:100]).fence == 1
