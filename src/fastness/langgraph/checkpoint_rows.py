"""Checkpoints and their writes as rows of a collection.

    partition          key                      value
    thread:<thread>    (ns, id)                 StoredCheckpoint
    thread:<thread>    (ns, id, task, n)        StoredWrites, of which the first has the number n
    thread:<thread>    (0, run)                 empty: a run has written to the thread
    thread:<thread>    (1, ns)                  empty: its version grows with each change of the namespace's history
    run:<run>          (thread,)                the same, to find the threads of a run

Ids of checkpoints grow, so a scan backwards reads the newest one first, its writes before it. Deleting the rows of a
prefix (ns, id) deletes a checkpoint with its writes. Integers come after all texts, so rows before (0,) are history.

A saver that deletes old checkpoints requires the version of (1, ns) that it knows, so it does not delete what a
checkpoint of another process is rebuilt from. The row is written with checkpoints that have delta channels, and by
retentions.

A large value is a blob, and its row has the hash as text. The garbage collector keeps blobs whose hashes it finds in
rows, so hashes are never inside of what a serializer returns, which may be encrypted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from fastness.plane_access import decoded

RUNS: Final = 0
VERSIONS: Final = 1
HISTORY_END: Final = (RUNS,)
THREAD_PREFIX: Final = "thread:"


class Serialized(msgspec.Struct, frozen=True, array_like=True):
    """What a serializer has returned: a type and bytes, or the hash of the blob that has the bytes."""

    kind: str
    data: bytes = b""
    blob: str = ""


class StoredCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint without its large channel values, which are blobs."""

    parent: str | None
    run: str | None
    checkpoint: Serialized
    metadata: Serialized
    channels: dict[str, Serialized] = {}
    needs: list[str] = []  # Delta channels without a value here: they are rebuilt from ancestors.
    snapshots: list[str] = []  # Delta channels with a value here.
    has_delta_channels: bool = False


class StoredWrite(msgspec.Struct, frozen=True, array_like=True):
    """A value that a task has written to a channel."""

    number: int
    channel: str
    value: Serialized


class StoredWrites(msgspec.Struct, frozen=True, array_like=True):
    """Writes of a task; with very many, those of a row are a list in a blob."""

    task_path: str
    writes: list[StoredWrite]
    blob: str = ""


encode: Final = msgspec.msgpack.Encoder().encode
decode_checkpoint: Final = partial(decoded, "A stored checkpoint", msgspec.msgpack.Decoder(StoredCheckpoint).decode)
decode_writes: Final = partial(decoded, "A stored write", msgspec.msgpack.Decoder(StoredWrites).decode)
decode_write_list: Final = partial(decoded, "A list of writes", msgspec.msgpack.Decoder(list[StoredWrite]).decode)


def thread_partition(thread: str) -> str:
    return THREAD_PREFIX + thread


def run_partition(run: str) -> str:
    return f"run:{run}"


class Ancestry(msgspec.Struct, frozen=True):
    """What decides whether a checkpoint is needed by a later one."""

    id: str
    parent: str | None
    needs: Sequence[str] = ()
    snapshots: Sequence[str] = ()


def kept_ids(history: Sequence[Ancestry], newest: int) -> set[str]:
    """The ids of the newest checkpoints of a namespace, and of what their delta channels are rebuilt from.

    Args:
        history: in the order of ids.
    """
    kept = {found.id for found in history[-newest:]}
    if not any(found.needs for found in history[-newest:]):
        return kept
    by_id = {found.id: found for found in history}
    for found in history[-newest:]:
        needs = set(found.needs)
        ancestor = by_id.get(found.parent) if found.parent and needs else None
        while needs and ancestor is not None:
            kept.add(ancestor.id)
            needs.difference_update(ancestor.snapshots)
            ancestor = by_id.get(ancestor.parent) if ancestor.parent else None
    return kept
