"""The parts of the key space that transactions lock: a queue, a world, a mailbox, a lease, an entity, and so on.

A part is named by the prefix of its keys. Keys that always change together with a part, such as those of an index,
belong to it wherever they are. A range that is not inside one part is locked with the whole key space.

    (u, universe, "q", queue, …)                  the queue; likewise "w", "mail", "states", "leases", "agents", "cas",
                                                  and "sqs-work", "sqs-tasks", "dead-letter-sources"
    (u, universe, "entities", kind, id)           the entity, and "entity-history"
    (u, universe, "collections", name, …)         the partition of a collection, and "collections-due"
    (u, universe, "locks", level, name, …)        the ordered lock; "lock-sessions" are single records
    (u, universe, "mail-due") | slot | agent      the mailbox of the agent
    (u, universe, "timers", "due", at, …, world)  the world, and "effects", "hosting", "runs", "segments", "w-deleted"
    (u, universe, "send-policy")                  itself, and "mail-policy": nearly all transactions only read it
    ("once", period) | key                        the key of a call, in any period
    ("nodes", …)                                  the records of nodes and their lease, written every few seconds
    anything else                                 one part, which is hardly ever written
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from fastness.errors import InvalidKey
from fastness.kv.keys import pack, prefix_range, unpack

EVERYTHING: Final = b""  # The whole key space: transactions that lock a part share it.
REST: Final = b"rest"
CALLERS: Final = b"callers"  # Shared by the transactions of callers, which do not lock everything that they write.

UNIVERSES: Final = pack(("u",))
_ONCE: Final = pack(("once",))
_NODES: Final = pack(("nodes",))
_AREAS: Final = tuple(prefix_range(prefix) for prefix in (UNIVERSES, _ONCE, _NODES))
_MAIL_SLOT_BYTES: Final = 8
_ZERO: Final = pack((0,))[0]  # The code of a positive number is higher by its length.
_NUMBER_BYTES_MAX: Final = 8

# Areas whose keys belong to a part of another area, which has the same name.
_BELONGS_TO: Final = {
    pack((area,)): pack((owner,))
    for area, owner in {
        "w-deleted": "w",
        "segments": "w",
        "cas-unreferenced": "cas",
        "cas-deleted": "cas",
        "entity-history": "entities",
        "collections-due": "collections",
    }.items()
}
_ENTITIES: Final = pack(("entities",))
_LOCKS: Final = pack(("locks",))
_WORLDS: Final = pack(("w",))
_EFFECTS: Final = pack(("effects",))
_EFFECTS_DUE: Final = pack(("due",))
_RUNS: Final = pack(("runs",))
_ENDS_WITH_WORLD: Final = frozenset((pack(("timers",)), pack(("hosting",))))  # Areas whose keys end with a world.
_WORLD_OF_DUE_EFFECT: Final = 3  # Its place in the key: state, kind, time, world, height, number.
_MAIL_DUE: Final = pack(("mail-due",))
_POLICIES: Final = (pack(("mail-policy",)), pack(("send-policy",)))  # Of a universe: each is one key.


def part_of(key: bytes) -> bytes:
    """The part that a key belongs to."""
    if not key.startswith(UNIVERSES):
        if key.startswith(_NODES):
            return _NODES
        return _ONCE + key[_number_end(key, len(_ONCE)) :] if key.startswith(_ONCE) else REST
    universe_end = _element_end(key, len(UNIVERSES))
    area_end = _element_end(key, universe_end)
    if area_end < 0:
        return REST
    universe, area = key[:universe_end], key[universe_end:area_end]
    if area == _MAIL_DUE:
        return _mailbox_of(universe, key[area_end + _MAIL_SLOT_BYTES :])
    if area in _ENDS_WITH_WORLD:
        return universe + _WORLDS + _element_at(key[area_end:], -1)
    if area in _POLICIES:
        return key
    name_end = _element_end(key, area_end)
    if area == _EFFECTS and key[area_end:name_end] == _EFFECTS_DUE:
        return universe + _WORLDS + _element_at(key[area_end:], _WORLD_OF_DUE_EFFECT)
    if area in (_EFFECTS, _RUNS) and name_end >= 0:
        world_end = _element_end(key, name_end)
        return universe + _WORLDS + key[name_end:world_end] if world_end >= 0 else REST
    if area in (_ENTITIES, _LOCKS) or _BELONGS_TO.get(area) == _ENTITIES:
        name_end = _element_end(key, name_end)
    if name_end < 0:
        return REST
    owner = _BELONGS_TO.get(area)
    return key[:name_end] if owner is None else universe + owner + key[area_end:name_end]


def part_of_range(begin: bytes, end: bytes) -> bytes:
    """The part that has every key with begin <= key < end; EVERYTHING if there is none."""
    if begin.startswith(_ONCE):  # Only expired keys are read and deleted by range, and no call uses those.
        return _ONCE if end <= prefix_range(_ONCE)[1] else EVERYTHING
    if begin.startswith(_NODES) and end <= prefix_range(_NODES)[1]:
        return _NODES
    if not begin.startswith(UNIVERSES):
        meets_area = any(begin < area_end and area_begin < end for area_begin, area_end in _AREAS)
        return EVERYTHING if meets_area else REST
    universe_end = _element_end(begin, len(UNIVERSES))
    area_end = _element_end(begin, universe_end)
    name_end = _element_end(begin, area_end)
    if name_end < 0:
        return EVERYTHING
    area = begin[universe_end:area_end]
    if area == _MAIL_DUE or area in _ENDS_WITH_WORLD:
        return EVERYTHING
    if area == _EFFECTS and begin[area_end:name_end] == _EFFECTS_DUE:
        return EVERYTHING
    if area in (_EFFECTS, _RUNS, _ENTITIES, _LOCKS) or _BELONGS_TO.get(area) == _ENTITIES:
        name_end = _element_end(begin, name_end)
    if name_end < 0 or end > begin[:name_end] + b"\xff":  # A name with an escaped zero byte goes on after it.
        return EVERYTHING
    return part_of(begin)


def is_read_often(part: bytes) -> bool:
    """Whether nearly all transactions only read the part, so that they share it until they write."""
    return part is REST or part.endswith(_POLICIES)


def is_lock(part: bytes) -> bool:
    """Whether the part is an ordered lock: a transaction that shares it excludes those that take the lock alone."""
    universe_end = _element_end(part, len(UNIVERSES)) if part.startswith(UNIVERSES) else -1
    return universe_end >= 0 and part.startswith(_LOCKS, universe_end)


@lru_cache(maxsize=65_536)
def lock_number(part: bytes) -> int:
    """The number of the advisory lock of a part. Parts that have the same number by chance wait for each other."""
    return int.from_bytes(blake2b(part, digest_size=8, person=b"fastness").digest(), "big", signed=True)


def _mailbox_of(universe: bytes, agent: bytes) -> bytes:
    return universe + pack(("mail", agent.decode(errors="replace")))


def _element_at(elements: bytes, place: int) -> bytes:
    try:
        return pack((unpack(elements)[place],))
    except (InvalidKey, IndexError):  # A key that no layer writes.
        return b""


def _element_end(key: bytes, begin: int) -> int:
    """Where the text or bytes element at `begin` ends; -1 if there is none, or if `begin` is negative."""
    if begin < 0 or key[begin : begin + 1] not in (b"\x01", b"\x02"):
        return -1
    end = key.find(b"\x00", begin + 1)
    while end >= 0 and key[end + 1 : end + 2] == b"\xff":  # An escaped zero byte.
        end = key.find(b"\x00", end + 2)
    return end + 1 if end >= 0 else -1


def _number_end(key: bytes, begin: int) -> int:
    """Where the positive number at `begin` ends; `begin` if there is none."""
    length = key[begin] - _ZERO if begin < len(key) else -1
    return begin + 1 + length if 0 <= length <= _NUMBER_BYTES_MAX else begin
