"""Encrypts universes, gives them new keys, and rewrites what older keys encrypted."""

import time
from collections.abc import Callable

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.backends.objects.encrypted import EncryptedObjects
from fastness.clock import Clock, SystemClock
from fastness.errors import Busy, DecryptionFailed, EncryptionKeyMissing, NotFound, Unsupported
from fastness.kv import Database, Pair, Transaction
from fastness.kv.value_cipher import PLANE, Keyring, Records, ValueCipher, cipher_of, decode_keyring
from fastness.layers import encryption
from fastness.layers.encryption import Progress
from fastness.limits import (
    ENCRYPTION_LOCK_SECONDS,
    ENCRYPTION_REWRITE_BYTES,
    ENCRYPTION_REWRITE_OBJECTS,
    ENCRYPTION_REWRITE_PAGE,
)
from fastness.wire.encryption import EncryptionStatus, Rewritten, UniverseEncryption

_ATTEMPTS_MAX = 20  # Of a change that those of other processes overtake.
_PAUSE_SECONDS = 0.1

Keyrings = dict[str, Keyring]


class Encryption:
    """The encryption of one open plane."""

    def __init__(self, database: Database, objects: ObjectStore | None, clock: Clock | None) -> None:
        self._database = database
        self._objects = objects
        self._clock = clock or SystemClock()

    def show(self) -> EncryptionStatus:
        """Which universes are encrypted."""
        cipher = cipher_of(self._database)
        keyrings = _decoded(self._database.read(encryption.load))
        return EncryptionStatus(
            cipher is not None and cipher.provider is not None,
            [_status(universe, keyrings[universe]) for universe in sorted(keyrings)],
        )

    def enable(self, universe: str) -> UniverseEncryption:
        """Encrypt a universe from now on. Returns after a value was encrypted, stored, read and decrypted.

        Raises:
            EncryptionKeyMissing: the plane was opened without a master key.
            Unsupported: nothing is stored.
        """
        cipher = self._cipher()

        def enabled(keyrings: Keyrings) -> Keyrings:
            missing = [name for name in (PLANE, universe) if name not in keyrings]
            return {name: Keyring((cipher.new_key(name, self._clock.now_ms()).stored,)) for name in missing}

        keyrings = self._change(cipher, enabled)
        self._check(cipher, universe)
        return _status(universe, keyrings[universe])

    def rotate(self, universe: str) -> UniverseEncryption:
        """Give a universe a new key. Older values stay readable.

        Raises:
            NotFound: the universe is not encrypted.
        """
        cipher = self._cipher()

        def rotated(keyrings: Keyrings) -> Keyrings:
            keyring = _found(keyrings, universe)
            new = cipher.new_key(universe, self._clock.now_ms()).stored
            return {universe: msgspec.structs.replace(keyring, keys=(*keyring.keys, new))}

        return _status(universe, self._change(cipher, rotated)[universe])

    def rewrap(self, universe: str) -> UniverseEncryption:
        """Wrap the data keys of a universe with the newest master key. The data keys stay the same.

        Raises:
            NotFound: the universe is not encrypted.
        """
        cipher = self._cipher()

        def rewrapped(keyrings: Keyrings) -> Keyrings:
            keyring, keys = _found(keyrings, universe), cipher.data_keys(universe)
            stored = tuple(
                msgspec.structs.replace(key, wrapped=cipher.wrap(keys[key.id], universe)) for key in keyring.keys
            )
            return {universe: msgspec.structs.replace(keyring, keys=stored)}

        return _status(universe, self._change(cipher, rewrapped)[universe])

    def rewrite(self, universe: str, limit: int) -> Rewritten:
        """Look at about `limit` values of a universe, and encrypt those with the newest key that have none or another.

        It goes on where the last call ended, of any process. After the last value come the objects, and in the first
        rewrite of a plane the values of no universe, which may have been stored before any universe was encrypted.

        Raises:
            NotFound: the universe is not encrypted.
        """
        cipher = self._cipher()
        self._database.read(_nothing)  # Another process may have changed the keys.
        newest = cipher.newest_key(universe)
        if newest is None:
            raise _not_encrypted(universe)
        ranges = encryption.ranges_of(universe)
        found = self._database.read(encryption.progress_of, universe)
        if found is None or found.key != newest[0]:
            found = Progress(newest[0], "values", ranges[0][0])
        values = objects = 0
        if found.phase == "done":
            found = self._objects_again(universe, found)
        if found.phase == "values":
            found, values = self._rewrite_values(cipher, universe, found, limit)
        elif found.phase == "objects":
            found, objects = self._rewrite_objects(universe, found)
        is_complete = found.phase == "done"
        if is_complete and universe != PLANE and not _decoded(self._database.read(encryption.load))[PLANE].sealed_only:
            values += self.rewrite(PLANE, limit).values
            is_complete = False
        if is_complete:
            self._finish(cipher, universe, newest[0])
        self._database.transact(encryption.keep_progress, universe, found)
        return Rewritten(values, objects, is_complete)

    def _objects_again(self, universe: str, found: Progress) -> Progress:
        """Look at the objects once more: one may have been uploaded while another process did not know the key yet."""
        if isinstance(self._objects, EncryptedObjects) and universe != PLANE:
            return Progress(found.key, "objects", b"")
        return found

    def _rewrite_values(self, cipher: ValueCipher, universe: str, at: Progress, limit: int) -> tuple[Progress, int]:
        position, count = at.position, 0
        left = [bounds for bounds in encryption.ranges_of(universe) if position < bounds[1]]
        for _ in range(0, limit, ENCRYPTION_REWRITE_PAGE):
            position, end = max(position, left[0][0]), left[0][1]
            with cipher.older_values() as older:
                page: list[Pair] = self._database.read(_page, position, end, min(limit, ENCRYPTION_REWRITE_PAGE))
            sizes = {key: len(value) for key, value in page}
            for keys in _batches([key for key in dict.fromkeys(older) if key in sizes], sizes):
                self._database.transact(encryption.rewrite_values, keys)
                count += len(keys)
            if len(page) == min(limit, ENCRYPTION_REWRITE_PAGE):
                position = page[-1][0] + b"\x00"
                continue
            position = left.pop(0)[1]
            if not left:
                has_objects = isinstance(self._objects, EncryptedObjects) and universe != PLANE
                return Progress(at.key, "objects" if has_objects else "done", b""), count
        return Progress(at.key, "values", position), count

    def _rewrite_objects(self, universe: str, at: Progress) -> tuple[Progress, int]:
        assert isinstance(self._objects, EncryptedObjects)
        after, count = self._objects.rewrite(universe, at.position.decode() or None, ENCRYPTION_REWRITE_OBJECTS)
        return Progress(at.key, "done" if after is None else "objects", (after or "").encode()), count

    def _finish(self, cipher: ValueCipher, universe: str, key: bytes) -> None:
        """All values have the key, or a newer one. Plain ones are refused from now on."""

        def finished(keyrings: Keyrings) -> Keyrings:
            keyring = _found(keyrings, universe)
            done = msgspec.structs.replace(keyring, sealed_only=True, rewritten=key)
            return {} if done == keyring else {universe: done}

        self._change(cipher, finished)
        for begin, end in encryption.ranges_of(universe):
            self._database.erase_replaced(begin, end)

    def _cipher(self) -> ValueCipher:
        cipher = cipher_of(self._database)
        if cipher is None:
            raise Unsupported("This plane stores nothing on a disk; encrypt one at dir:PATH or postgresql://")
        if cipher.provider is None:
            raise EncryptionKeyMissing(
                "The plane was opened without a master key; start the server with --encryption-key-file FILE, or open "
                "the plane with encryption=FileKeys(FILE)"
            )
        return cipher

    def _change(self, cipher: ValueCipher, changed: Callable[[Keyrings], Keyrings]) -> Keyrings:
        """Change keyrings; returns all of them after that. `changed` returns those that differ."""
        deadline = time.monotonic() + ENCRYPTION_LOCK_SECONDS
        for _ in range(_ATTEMPTS_MAX):
            records: Records = self._database.read(encryption.load)
            keyrings = _decoded(records)
            new = changed(keyrings)
            if not new:
                return keyrings
            keyrings |= new
            newest = keyrings[PLANE].keys[-1]
            plane_key = cipher.unwrapped(PLANE, newest)
            if self._commit(new, plane_key, records.generation, deadline):
                self._database.read(_nothing)  # Loads the keys, where a commit does not.
                return keyrings
        raise Busy("Other processes keep changing the keys; nothing was changed. Try again later")

    def _commit(self, new: Keyrings, plane_key: bytes, generation: int, deadline: float) -> bool:
        while True:
            try:
                return self._database.transact(encryption.change, new, plane_key=plane_key, generation=generation)
            except Busy:  # A transaction of `plane.within` is open.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _check(self, cipher: ValueCipher, universe: str) -> None:
        self._database.transact(encryption.put_check, universe)
        with cipher.older_values() as older:
            is_same = self._database.read(encryption.has_check, universe)
        self._database.transact(encryption.delete_check, universe)
        if not is_same or older:
            raise DecryptionFailed(
                f"A value of the universe {universe!r} was encrypted and not decrypted again; do not use it"
            )


def _page(tx: Transaction, begin: bytes, end: bytes, limit: int) -> list[Pair]:
    return tx.scan(begin, end, limit=limit)


def _nothing(tx: Transaction) -> None:
    tx.get(b"\x00")


def _batches(keys: list[bytes], sizes: dict[bytes, int]) -> list[list[bytes]]:
    batches: list[list[bytes]] = []
    room = 0
    for key in keys:
        room -= sizes[key]
        if not batches or room < 0:
            batches.append([])
            room = ENCRYPTION_REWRITE_BYTES - sizes[key]
        batches[-1].append(key)
    return batches


def _decoded(records: Records) -> Keyrings:
    return {universe: decode_keyring(stored) for universe, stored in records.keyrings.items()}


def _found(keyrings: Keyrings, universe: str) -> Keyring:
    keyring = keyrings.get(universe)
    if keyring is None:
        raise _not_encrypted(universe)
    return keyring


def _not_encrypted(universe: str) -> NotFound:
    return NotFound(f"The universe {universe!r} is not encrypted; run: fastness encryption enable {universe or 'NAME'}")


def _status(universe: str, keyring: Keyring) -> UniverseEncryption:
    newest = keyring.keys[-1]
    return UniverseEncryption(
        universe, len(keyring.keys), newest.created_ms, keyring.sealed_only, keyring.rewritten == newest.id
    )
