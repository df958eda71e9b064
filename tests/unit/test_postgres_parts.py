"""The parts of the key space that transactions on PostgreSQL lock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness.backends.postgres.parts import (
    EVERYTHING,
    REST,
    is_lock,
    is_read_often,
    lock_number,
    part_of,
    part_of_range,
)
from fastness.kv import Subspace, fence_floor, pack, value_cipher
from fastness.kv.keys import prefix_range
from fastness.layers import audit, idempotency, maintenance, nodes, quotas, worlds
from fastness.layers.collections import partition_of
from fastness.layers.lock_records import LockKeys, SessionKey, record_key
from fastness.layers.mailboxes.keys import Address, due_prefix
from fastness.layers.mailboxes.keys import keys_of as mailbox_keys
from fastness.layers.queues.keys import QueueKey
from fastness.layers.queues.keys import keys_of as queue_keys
from fastness.limits import KEY_BYTES_MAX
from fastness.lock_rules import Mode

QUEUE = queue_keys(QueueKey("main", "jobs"))
WORLD = worlds.subspace(worlds.World("main", "earth"))
BOX = mailbox_keys(Address("main", "ada"))
ID = bytes(16)


def test_every_key_of_a_queue_is_in_its_part() -> None:
    for key in (
        QUEUE.policy,
        QUEUE.own_counters,
        QUEUE.counters_key("node"),
        QUEUE.ready_key_at(4, ID),
        QUEUE.due_key(1, ID),
    ):
        assert part_of(key) == QUEUE.prefix


def test_every_range_of_a_queue_is_in_its_part() -> None:
    ranges = (QUEUE.ready_range(), QUEUE.priority_range(4, b""), QUEUE.due_range(0), QUEUE.all_counters.range())
    for begin, end in (*ranges, Subspace("u", "main", "q", "jobs").range()):
        assert part_of_range(begin, end) == QUEUE.prefix


def test_an_audit_log_is_one_part() -> None:
    log = audit.log_of("main")
    for key in (log.prefix, log.key(17, "id")):
        assert part_of(key) == log.prefix
    assert part_of_range(*log.range()) == part_of_range(log.key(3), log.key(17)) == log.prefix
    assert part_of(audit.PLANE.key(17, "id")) == part_of_range(*audit.PLANE.range()) == REST


def test_quotas_are_in_the_part_that_is_read_by_many() -> None:
    """They are hardly ever written, and every node reads their version every few seconds."""
    quota = quotas.SUBSPACE
    assert {part_of(quota.key("version")), part_of(quota.key("universe", "main"))} == {REST}
    assert part_of_range(*quota.at("universe").range()) == part_of_range(*quota.range()) == REST


def test_indexes_belong_to_what_they_index() -> None:
    universe = Subspace("u", "main")
    assert part_of(due_prefix("main") + bytes(8) + b"ada") == part_of(BOX.box)
    for key in (
        universe.key("timers", "due", 17, "hash", "earth"),
        universe.key("effects", "pending", "earth", 3, 0),
        universe.key("effects", "due", "mars", 17, "earth", 3, 0),
        universe.key("hosting", "ready", "program", 17, "earth"),
        universe.key("hosting", "wake", "owner", "earth"),
        universe.key("runs", "waiting", "earth"),
        universe.key("segments", "earth", 4),
        universe.key("w-deleted", "earth"),
    ):
        assert part_of(key) == WORLD.prefix
    pending = universe.at("effects", "pending")
    assert part_of_range(*pending.range("earth")) == WORLD.prefix
    assert part_of(universe.key("entity-history", "user", "7", 1)) == part_of(universe.key("entities", "user", "7"))
    assert part_of(universe.key("entities", "user", "7")) != part_of(universe.key("entities", "user", "8"))
    assert part_of(universe.key("cas-unreferenced", b"digest")) == part_of(universe.key("cas", b"digest"))


@pytest.mark.parametrize("name", ["thread-7", "a\0", "a\0b", "\0", "é"])
def test_a_partition_of_a_collection_is_one_part(name: str) -> None:
    partition = partition_of("main", "notes", name)
    for key in (pack(("a",)), pack(("a\0", 7)), pack((-1, "x")), pack((1, 2, 3))):
        row = partition.rows + key
        assert part_of(row) == part_of(partition.due + pack((1_700_000_000_000,)) + key) == partition.rows
        for begin in (partition.rows, row, row + b"\x00"):
            assert part_of_range(begin, partition.rows + b"\xff") == partition.rows
        assert part_of_range(row, row + b"\xff") == partition.rows
    for end in (partition.due + b"\xff", partition.due + pack((1_700_000_000_000,))):
        assert part_of_range(partition.due, end) == partition.rows
    assert part_of(partition_of("main", "notes", f"{name}\0").rows + pack(("a",))) != partition.rows
    assert part_of_range(partition.rows, partition.rows + b"\xff\x00") == EVERYTHING


def test_every_key_of_an_ordered_lock_is_in_its_part() -> None:
    row, table = (LockKeys("main", key) for key in ((2, "task/1"), (1, "task")))
    for key in (row.fence, row.place(7), row.holder(Mode.EXCLUSIVE, "ada"), row.holder(Mode.INTENT_SHARED, "ada")):
        assert part_of(key) == row.prefix
    ranges = [row.line_range, *(row.nearby(mode) for mode in Mode), *row.conflicts(Mode.EXCLUSIVE)]
    assert {part_of_range(*bounds) for bounds in ranges} == {row.prefix}
    assert part_of(table.fence) == table.prefix != row.prefix
    session = record_key(SessionKey("main", "0a"))
    assert part_of(session) == session
    assert [is_lock(part) for part in (row.prefix, table.prefix, session, QUEUE.prefix, REST, EVERYTHING)] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_records_of_nodes_have_a_part_of_their_own() -> None:
    """They are written every few seconds, and no other transaction should wait for that."""
    part = part_of(nodes.SUBSPACE.key("a"))
    assert part not in (REST, EVERYTHING)
    assert {part_of(maintenance.RELEASED), part_of_range(*nodes.SUBSPACE.range())} == {part}
    assert part_of(Subspace("nodes-of-a-caller").key("a")) == REST
    assert part_of_range(b"", part + b"\x00") == part_of_range(part, b"\xff") == EVERYTHING


def test_a_keyed_call_has_one_part_in_every_period() -> None:
    parts = {part_of(Subspace("once").key(period) + b"call") for period in (1, 255, 256, 2_900_000)}
    assert len(parts) == 1
    assert parts != {part_of(Subspace("once").key(1) + b"other")}
    assert part_of_range(Subspace("once").range()[0], Subspace("once").key(7)) == idempotency.PREFIX


def test_what_is_hardly_ever_written_is_read_by_many() -> None:
    assert part_of(fence_floor.KEY) == REST
    assert is_read_often(REST)
    for policy in ("mail-policy", "send-policy"):
        part = part_of(Subspace("u", "main").key(policy))
        assert is_read_often(part)
        assert part != part_of(Subspace("u", "other").key(policy))
    assert not is_read_often(QUEUE.prefix)


@pytest.mark.parametrize(
    "bounds",
    [
        (b"", b"\xff" * (KEY_BYTES_MAX + 1)),
        Subspace("u").range(),
        Subspace("u", "main").range(),
        Subspace("u", "main", "q").range(),
        Subspace("u", "main", "entities", "user").range(),
        Subspace("u", "main", "locks", "record_id").range(),
        Subspace("u", "main", "lock-sessions").range(),
        Subspace("u", "main", "timers", "due").range(),
        Subspace("u", "main", "effects", "due", "mail").range(),
        Subspace("u", "main", "hosting", "ready", "program").range(),
        Subspace("u", "main", "hosting", "wake", "owner").range(),
        Subspace("u", "main", "runs", "waiting").range(),
        (due_prefix("main"), due_prefix("main") + bytes(8)),
        (QUEUE.prefix, WORLD.prefix),
        (pack(("a",)), pack(("z",))),
    ],
)
def test_a_range_over_several_parts_is_everything(bounds: tuple[bytes, bytes]) -> None:
    assert part_of_range(*sorted(bounds)) == EVERYTHING


def test_numbers_of_locks_are_the_same_in_every_process() -> None:
    """Processes of different versions lock the same parts."""
    assert lock_number(b"part") == 902884864958064566


names = st.text(alphabet="ab\x00é", max_size=3)
elements = st.one_of(names, st.binary(max_size=3), st.integers(0, 300), st.booleans(), st.none())
areas = st.one_of(
    st.sampled_from(["q", "w", "mail", "leases", "states", "entities", "entity-history", "segments", "cas", "locks"]),
    st.sampled_from(["effects", "timers", "hosting", "runs", "collections", "collections-due"]),
)
indexes = st.sampled_from([("effects", "due"), ("effects", "pending"), ("timers", "due"), ("hosting", "ready")])
layer_keys = st.one_of(
    st.tuples(names, areas, st.lists(elements, max_size=4)).map(lambda t: pack(("u", t[0], t[1], *t[2]))),
    st.tuples(names, indexes, st.lists(elements, max_size=6)).map(lambda t: pack(("u", t[0], *t[1], *t[2]))),
)
keys = st.one_of(
    layer_keys,
    st.binary(min_size=1, max_size=6),
    layer_keys.flatmap(lambda key: st.binary(max_size=2).map(key.__add__)),
)


@given(keys, keys, keys)
def test_every_key_of_a_range_is_in_the_part_of_the_range(first: bytes, middle: bytes, last: bytes) -> None:
    begin, key, end = sorted((first, middle, last))
    part = part_of_range(begin, end)
    if key < end and part != EVERYTHING:
        assert part_of(key) == part


@given(layer_keys, st.binary(max_size=4))
def test_a_range_below_a_key_of_a_layer_is_in_one_part_or_everything(key: bytes, suffix: bytes) -> None:
    begin, end = prefix_range(key)
    part = part_of_range(begin, end)
    if part != EVERYTHING:
        assert part_of(key + suffix) == part


def test_parts_of_leases_and_entities_are_single_records() -> None:
    lease = Subspace("u", "main", "leases")
    assert part_of(lease.key("a")) != part_of(lease.key("b"))


def test_changes_of_encryption_keys_lock_everything() -> None:
    """The lock that every other transaction shares: those that run are over before, and later ones see the keys."""
    assert part_of(value_cipher.GENERATION) == part_of_range(*value_cipher.RECORDS) == REST
    assert part_of_range(*prefix_range(b"")) == EVERYTHING
