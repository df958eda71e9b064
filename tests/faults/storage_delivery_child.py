"""A process that delivers messages while the storage recorder records its file operations.

    storage_delivery_child.py FOLDER MARKS

Deliveries are not synced. Each one, and each put and ack before and after it, is a mark.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

from fastness.backends.rocksdb import RocksDatabase, watermark
from fastness.errors import QueueMessageLeaseMismatch
from fastness.kv import Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueKey, message_leases
from fastness.testing.clock import ManualClock
from fastness.wire.queues import MessageLease, NewMessage

JOBS = QueueKey("main", "jobs")
ROUNDS = 12


def _closed_record(file: int, commit: int) -> bytes:
    """The record without the inode: the files of an image are copies, and must count as the originals."""
    del file
    return b"FNC1" + commit.to_bytes(28, "little")


def deliver(folder: Path, marks: int) -> None:
    """Put, deliver and settle in turns; close and open twice."""
    clock = ManualClock()
    for session in range(3):
        with RocksDatabase(folder / "kv", clock=clock) as database:
            for step in range(ROUNDS):
                begins = session > 0 and step < 6  # Only deliveries: everything since the opening may be lost.
                if session < 2 and not begins:
                    receipt = database.transact(queues.put, JOBS, [NewMessage(payload=b"x" * 200)])[0]
                    os.write(marks, f"put {receipt.id}".encode())
                limit = 1 if begins else 1 + step % 3
                batch = database.transact(queues.lease, JOBS, owner="ada", limit=limit, may_lose=True)
                for message in batch:
                    id = queues.format_id(message.id)
                    os.write(marks, f"got {id} {message.lease_id} {message.fence}".encode())
                if step % 4 == 3 and batch and not begins:
                    proof = MessageLease(queues.format_id(batch[0].id), batch[0].lease_id, batch[0].fence)
                    os.write(marks, f"acking {proof.id}".encode())
                    database.transact(queues.ack, JOBS, proof)
                    os.write(marks, f"acked {proof.id}".encode())
                if step % 5 == 4 and not begins:
                    proofs = [MessageLease(queues.format_id(each.id), each.lease_id, each.fence) for each in batch]
                    database.transact(queues.release_undelivered, JOBS, proofs, None)
            if session < 2:
                for receipt in database.transact(queues.put, JOBS, [NewMessage(payload=b"x") for _ in range(6)]):
                    os.write(marks, f"put {receipt.id}".encode())
        os.write(marks, b"closed -")


def check(folder: Path, marks: tuple[bytes, ...]) -> int:
    """Assert that no delivery before the power loss has a fence of one after it; returns how many were undone."""
    known: dict[str, list[str]] = defaultdict(list)
    for mark in marks:
        kind, _, rest = mark.decode().partition(" ")
        known[kind].append(rest)
    delivered = [MessageLease(id, lease, int(fence)) for id, lease, fence in map(str.split, known["got"])]
    clock = ManualClock()
    with (
        patch.object(watermark, "_closed_record", _closed_record),
        RocksDatabase(folder / "kv", clock=clock) as database,
    ):
        leased = {(queues.format_id(each.id), each.fence) for each in database.read(_leased)}
        ready = {queues.format_id(each.id) for each in database.read(queues.peek, JOBS, limit=100)}
        missing = {*known["put"]} - {*known["acking"]} - ready - {id for id, _ in leased}
        assert not missing, f"messages {missing} were put, and are lost"
        assert not {*known["acked"]} & ready, "an acknowledged message is back"
        last = {each.id: each for each in delivered if each.id not in known["acking"]}
        undone = [each for each in last.values() if (each.id, each.fence) not in leased and each.id in ready]
        for proof in undone:
            try:
                database.transact(queues.ack, JOBS, proof)
            except QueueMessageLeaseMismatch:
                continue
            raise AssertionError(f"{proof} was undone, and its ack was accepted")
        issued = {(each.id, each.fence) for each in delivered}
        highest = {id: max(each.fence for each in delivered if each.id == id) for id, _ in issued}
        for _ in range(2):
            batch = database.transact(queues.lease, JOBS, owner="bob", limit=100, may_lose=True)
            for message in batch:
                id = queues.format_id(message.id)
                assert message.fence > highest.get(id, 0), f"{id} has fence {message.fence} after {highest.get(id)}"
                assert id not in known["acked"], f"{id} was acknowledged, and is delivered again"
            clock.advance_ms(86_400_000)  # The leases of the process before have ended, and the back-off.
            database.transact(queues.sweep, JOBS)
            clock.advance_ms(86_400_000)
    return len(undone)


def _leased(tx: Transaction) -> list[queues.StoredMessage]:
    return list(message_leases.leased_messages(tx, queues.keys_of(JOBS)))


if __name__ == "__main__":
    watermark._closed_record = _closed_record
    deliver(Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT, 0o600))
