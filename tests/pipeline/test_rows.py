"""Iteration over a plane's messages, mail, entities, blobs and references."""

import hashlib
from collections import Counter
from pathlib import Path

import cbor2
import pytest

from fastness import limits
from fastness.layers.blobs import hashes_in
from fastness.pipeline.config import Config
from fastness.pipeline.views import View, open_view
from fastness.tiers import Tier
from fastness.wire.inboxes import DomainEvent
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def view_of(data: Path) -> View:
    return open_view(Config(data=f"dir:{data}", lake="unused"))


def test_messages_are_listed_in_every_state(data: Path) -> None:
    large = b"x" * (limits.PAYLOAD_CARRIED_BYTES_MAX + 1)
    huge = b"x" * (limits.PAYLOAD_INLINE_BYTES_MAX + 1)
    with planes.opened(f"dir:{data}") as plane:
        queue = plane.queue("jobs")
        queue.set_policy(QueuePolicy(max_attempts=1))
        queue.put({"n": 1}, attributes={"a": "b"}, correlation_id="c-1", priority=9)
        leased = queue.receive()
        queue.put({"n": 2})
        queue.receive().nack(error="it broke", delay_seconds=0)
        queue.put(large, delay_seconds=60)
        queue.put(huge)
        queue.put({"n": 3}, group="g")
        queue.put({"n": 4}, group="g", ttl_seconds=1_000)
    with view_of(data) as view:
        rows = list(view.messages("main"))
        dead = list(view.dead_letters("main"))
    by_state = {(row.queue, row.state, row.size): row for row in rows}
    assert Counter((row.queue, row.state) for row in rows) == {
        ("jobs", "ready"): 2,
        ("jobs", "leased"): 1,
        ("jobs", "delayed"): 1,
        ("jobs", "blocked"): 1,
        ("jobs.dlq", "ready"): 1,
    }
    leased_row = by_state["jobs", "leased", 7]
    assert (leased_row.id, leased_row.payload, leased_row.attributes, leased_row.correlation_id) == (
        leased.id,
        b'{"n":1}',
        {"a": "b"},
        "c-1",
    )
    assert (leased_row.attempts, leased_row.priority) == (1, 9)
    assert leased_row.due_ms > leased_row.created_ms
    assert by_state["jobs", "delayed", len(large)].payload == large
    assert by_state["jobs", "ready", len(huge)].payload is None
    assert by_state["jobs", "ready", len(huge)].blob == hashlib.sha256(huge).hexdigest()
    assert by_state["jobs", "blocked", 7].ttl_at_ms > 0
    assert [(row.queue, row.origin, row.last_error) for row in dead] == [("jobs.dlq", "jobs", "it broke")]
    assert dead[0].died_ms > 0


def test_mail_is_listed_until_it_is_confirmed(data: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        for n in range(4):
            plane.mailbox("ada").send("bob", {"n": n}, id=f"mail-{n}")
        box = plane.mailbox("bob")
        (first, *_) = box.read(limit=2)
        box.confirm(first)
    with view_of(data) as view:
        rows = list(view.mails("main"))
    assert [(row.id, row.recipient, row.sender, row.delivered) for row in rows] == [
        ("mail-1", "bob@main", "ada@main", True),
        ("mail-2", "bob@main", "ada@main", False),
        ("mail-3", "bob@main", "ada@main", False),
    ]
    assert rows[0].body == b'{"n":1}'
    assert rows[0].expires_ms > rows[0].sent_ms


def test_entities_and_changes_include_deleted_ones(data: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        plane.entities.write("order", "o-1", {"total": 5})
        plane.entities.write("order", "o-1", {"total": 6, "paid": True})
        plane.entities.write("order", "o-2", {"total": 7})
        plane.entities.delete("order", "o-2")
        plane.entities.write("user", "u-1", {"name": "ada"})
    with view_of(data) as view:
        rows = list(view.entities("main"))
        changes = list(view.entity_changes("main"))
    assert [(row.kind, row.id, row.version, row.deleted) for row in rows] == [
        ("order", "o-1", 2, False),
        ("order", "o-2", 2, True),
        ("user", "u-1", 1, False),
    ]
    assert {name: cbor2.loads(value) for name, value in rows[0].fields.items()} == {"total": 6, "paid": True}
    assert [(each.id, each.version, each.deleted, each.removed) for each in changes] == [
        ("o-1", 1, False, []),
        ("o-1", 2, False, []),
        ("o-2", 1, False, []),
        ("o-2", 2, True, ["total"]),
        ("u-1", 1, False, []),
    ]
    assert changes[0].durability == Tier.IMPORTANT


def test_long_histories_are_complete(data: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        for n in range(5):
            plane.entities.write("order", "o-1", {"n": n})
    with view_of(data) as view:
        pages = [change.version for change in view.entity_changes("main")]
    assert pages == [1, 2, 3, 4, 5]


def test_blobs_and_references_are_listed(data: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        names = {what: plane.blobs.put(what.encode() * 10_000) for what in ("item", "entity", "blob", "mail", "sunk")}
        world = plane.world("alpha")
        world.create()
        world.inbox.put(DomainEvent(schema="s", payload_blob=names["item"]))
        plane.entities.write("order", "o-1", {"attachment": names["entity"]})
        plane.mailbox("ada").send("bob", {"see": names["mail"].upper()})
        world.append([{"file": names["sunk"]}], expected_head=0)
        state = world.snapshots.commit({"state": 1}, height=1).snapshot_ref
        plane.queue("jobs").put(b"m" * 20_000)
        plane.blobs.put(names["blob"].encode())  # References inside blobs are not included.
    with view_of(data) as view:
        blobs = {row.hash: row for row in view.blobs("main")}
        found = {(reference.hash, reference.area) for reference in view.references("main")}
    assert blobs[names["item"]].size == 40_000
    assert not blobs[names["item"]].inline
    assert blobs[state].inline
    for what, place in (("item", "w"), ("entity", "entities"), ("mail", "mail"), ("sunk", "w")):
        assert (names[what], place) in found
    assert (state, "w") in found
    assert (hashlib.sha256(b"m" * 20_000).hexdigest(), "q") in found
    assert names["blob"] in blobs
    assert names["blob"] not in {hash for hash, _ in found}


def test_hash_is_found_at_any_offset() -> None:
    hash = hashlib.sha256(b"").hexdigest()
    assert hashes_in(b"") == set()
    assert hashes_in(hash[:-1].encode()) == set()
    assert hashes_in(f"a{hash}".encode()) >= {hash}
    assert hashes_in(f"sha256:{hash.upper()} and {'0' * 64}".encode()) == {hash, "0" * 64}


def test_empty_plane_has_no_rows(data: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        plane.world("alpha").create()
    with view_of(data) as view:
        assert [*view.messages("main"), *view.mails("main"), *view.entities("main")] == []
        assert list(view.messages("other")) == []
