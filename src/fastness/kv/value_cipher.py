"""Encryption at rest: values are sealed where a backend writes them, and opened where it reads them.

    ("encryption", "generation")         ->  a number that grows with every change of the keys; the manifest's digest
    ("encryption", "keys", universe)     ->  Keyring: the wrapped data keys of a universe; "" is the plane's own
    ("encryption", "manifest")           ->  Manifest: the digests of all keyrings, authenticated with the plane's key
    ("encryption", "rewrite", universe)  ->  how far a rewrite is

These records are plain, and so are ("fastness", …), which a plane is opened with, and all keys of the key space. The
values of ("u", universe, …) are sealed with the key of the universe. All others are sealed with the plane's own key, as
soon as one universe is encrypted: answers of repeated calls, tokens, audit records, and the pairs that a caller names.

    sealed value:  c1 01 | key id 8 | salt 16 | counter 6 | ciphertext | tag 16        48 bytes more than the value
    plain value:   as it is; c1 00 | value for one that begins with c1, so that no plain value looks sealed

A process draws a salt, derives a key from the data key and the salt (HKDF-SHA256), and counts the nonces of AES-256-GCM
from 0. So no two values have the same key and nonce: not in two processes, not after a restart, and not in a forked
child, which draws a salt of its own. The key of the pair is authenticated with the value, so a value cannot be moved to
another key. An older value of the same key can be put back: a database has no memory outside of itself.

Values that were stored before their universe was encrypted stay readable until a rewrite has replaced the last one;
then they are refused. A sealed value whose key is missing is never taken for a plain one.

Removing the keys of a universe does not make its new values plain: a process never forgets a key, the manifest shows
that a keyring is missing or older than the others, and the key provider can name universes that must be encrypted.
"""

import hashlib
import hmac
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from fastness import limits
from fastness.encryption_keys import DATA_KEY_BYTES, KeyProvider, RequiresEncryption, provider_of_environment
from fastness.errors import DecryptionFailed, EncryptionKeyMissing, InvalidArgument
from fastness.kv.fork_safety import invalidate_in_children
from fastness.kv.keys import Subspace, pack, prefix_range
from fastness.kv.transactions import Pair

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PLANE: Final = ""  # The universe of the plane's own keyring.
SUBSPACE: Final = Subspace("encryption")
RECORDS: Final = prefix_range(SUBSPACE.prefix)
GENERATION: Final = SUBSPACE.key("generation")
MANIFEST: Final = SUBSPACE.key("manifest")
KEYRINGS: Final = SUBSPACE.at("keys")
REWRITES: Final = SUBSPACE.at("rewrite")
RECORDS_MAX: Final = 2 * limits.ENCRYPTION_UNIVERSES_MAX + 4

KEY_ID_BYTES: Final = 8
SALT_BYTES: Final = 16
TAG_BYTES: Final = 16
_COUNTER_BYTES: Final = 6
MARK: Final = b"\xc1"  # MessagePack never starts with it, so few values need an escape.
_MARK_CODE: Final = MARK[0]
_PLAIN: Final = MARK + b"\x00"
_SEALED: Final = MARK + b"\x01"
_ID_END: Final = len(_SEALED) + KEY_ID_BYTES
_SALT_END: Final = _ID_END + SALT_BYTES
_HEADER_BYTES: Final = _SALT_END + _COUNTER_BYTES
_NONCE_BYTES: Final = 12
_PADDING: Final = bytes(_NONCE_BYTES - _COUNTER_BYTES)
_UNIVERSES: Final = pack(("u",)) + b"\x02"
_NAME_START: Final = len(_UNIVERSES)
_NEVER_SEALED: Final = (SUBSPACE.prefix, pack(("fastness",)))
# The bounds of the keys whose values the plane's own key seals: before the universes, and after them.
OWN_RANGES: Final = ((b"", _UNIVERSES), (prefix_range(_UNIVERSES)[1], prefix_range(b"")[1]))


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    """A wrapped data key."""

    id: bytes
    wrapped: bytes
    created_ms: int
    check: bytes  # Shows that the key provider returned the right key.


class Keyring(msgspec.Struct, frozen=True, array_like=True):
    """The data keys of a universe, the newest last."""

    keys: tuple[StoredKey, ...]
    sealed_only: bool = False  # Whether all values are sealed, so that plain ones are refused.
    rewritten: bytes = b""  # The id of the key that all values had when the last rewrite ended, or a newer one.


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Which keyrings there are."""

    generation: int
    digests: dict[str, bytes]
    mac: bytes


class NewKey(msgspec.Struct, frozen=True):
    """A data key that is not stored yet."""

    key: bytes
    stored: StoredKey


class _Keys(msgspec.Struct, frozen=True):
    """The unwrapped data keys of a universe."""

    by_id: dict[bytes, bytes]
    newest: bytes
    sealed_from: int | None  # The generation from which all values are sealed; None if some may be plain.


class _Generation(msgspec.Struct, frozen=True, array_like=True):
    """The record of the generation. The digest tells apart changes that two processes made after a failover."""

    number: int
    manifest_digest: bytes


_generation: Final = msgspec.msgpack.Decoder(_Generation)
_keyring: Final = msgspec.msgpack.Decoder(Keyring)
_manifest: Final = msgspec.msgpack.Decoder(Manifest)
encode: Final = msgspec.msgpack.Encoder().encode


class Records(msgspec.Struct, frozen=True):
    """The stored records."""

    generation: int
    keyrings: dict[str, bytes]  # Universe to the encoded keyring.
    manifest: bytes | None
    generation_record: bytes | None

    @classmethod
    def of(cls, pairs: list[Pair]) -> "Records":
        """The records among these pairs, which are all pairs of `RECORDS`."""
        found = dict(pairs)
        keyrings = {KEYRINGS.unpack(key)[0]: value for key, value in found.items() if key.startswith(KEYRINGS.prefix)}
        record = found.get(GENERATION)
        return cls(decode_generation(record), keyrings, found.get(MANIFEST), record)


def decode_generation(stored: bytes | None) -> int:
    """The generation in the record; 0 if there is none."""
    try:
        return 0 if stored is None else _generation.decode(stored).number
    except msgspec.MsgspecError:
        raise _damaged_records() from None


def decode_keyring(stored: bytes) -> Keyring:
    """The keyring in its record."""
    try:
        found = _keyring.decode(stored)
    except msgspec.MsgspecError:
        raise _damaged_records() from None
    if not found.keys:
        raise _damaged_records()
    return found


def encode_generation(number: int, manifest: bytes) -> bytes:
    """The record of a generation whose manifest is this record."""
    return encode(_Generation(number, hashlib.sha256(manifest).digest()))


def signed_manifest(plane_key: bytes, generation: int, keyrings: Mapping[str, bytes]) -> bytes:
    """The record of the manifest. `plane_key` is the newest data key of the plane."""
    digests = {universe: hashlib.sha256(keyrings[universe]).digest() for universe in sorted(keyrings)}
    return encode(Manifest(generation, digests, _manifest_mac(plane_key, generation, digests)))


def universe_of(key: bytes) -> bytes | None:
    """The universe whose key seals the value of `key`, encoded; empty for the plane's own, None for none."""
    if key.startswith(_UNIVERSES):
        end = key.find(0, _NAME_START)
        return None if end <= _NAME_START else key[_NAME_START:end]  # A key of no layer may lack a name.
    return None if key.startswith(_NEVER_SEALED) else b""


def open_all(cipher: "ValueCipher", stored: list[Pair], generation: int) -> list[Pair]:
    """The pairs that are stored as these; `generation` as of `ValueCipher.open`."""
    # Each scan passes here: the list takes a third of the time of `any` and `startswith`.
    if cipher.is_on or [True for _, value in stored if value and value[0] == _MARK_CODE]:
        return [(key, cipher.open(key, value, generation)) for key, value in stored]
    return stored


class ValueCipher:
    """Seals and opens the values of one open key space. Safe to use from many threads."""

    is_raw = False

    def __init__(self, provider: KeyProvider | None = None) -> None:
        """Without a provider, a key space that has encrypted universes is refused."""
        self.provider = provider
        self.generation = 0
        self.generation_record: bytes | None = None
        self.is_on = False  # Whether any universe is encrypted. Until then, most values are stored as they are.
        self._keys: dict[bytes, _Keys] = {}
        self._writers: dict[bytes, _Writer] = {}
        self._unwrapped: dict[tuple[str, bytes], bytes] = {}
        self.skipped: Counter[tuple[str, str]] = Counter()  # Universe and task: how often maintenance skipped it.
        self._loading = threading.RLock()
        self._older: tuple[int, list[bytes]] | None = None  # The thread that notes older values, and their keys.
        self._noting = threading.Lock()
        self.derive = lru_cache(limits.ENCRYPTION_SALTS_CACHED)(_derive)
        invalidate_in_children(self)

    def invalidate_after_fork(self) -> None:
        self._loading, self._noting, self._older = threading.RLock(), threading.Lock(), None
        for writer in self._writers.values():
            writer.expire()

    def seal(self, key: bytes, value: bytes) -> bytes:
        """What is stored for this pair."""
        universe = universe_of(key)
        writer = None if universe is None else self._writers.get(universe)
        if writer is not None:
            return writer.seal(key, value)
        return _PLAIN + value if value.startswith(MARK) else value

    def open(self, key: bytes, stored: bytes, generation: int | None = None) -> bytes:
        """The value of a stored pair.

        `generation` is that of the keys when the view of the reader began. A view from before the end of a rewrite may
        have plain values. None is the newest.

        Raises:
            DecryptionFailed: it was changed, is the value of another key, or its data key is missing.
        """
        universe = universe_of(key)
        keys = None if universe is None else self._keys.get(universe)
        if keys is not None and self._older is not None:
            self._note_older(key, stored, keys)
        if not stored.startswith(_SEALED):
            sealed_from = None if keys is None else keys.sealed_from
            if sealed_from is not None and (generation is None or generation >= sealed_from):
                raise _unreadable(
                    key,
                    f"The value of a key of {_subject(universe)} is not encrypted with a key of it, although all "
                    "values are: it was not written by Fastness; restore a backup",
                )
            return stored[len(_PLAIN) :] if stored.startswith(_PLAIN) else stored
        data_key = None if keys is None else keys.by_id.get(stored[len(_SEALED) : _ID_END])
        if data_key is None or universe is None:
            raise _unreadable(
                key,
                f"A value of {_subject(universe)} is encrypted, and the plane does not have its key: the records of "
                "the encryption keys (keys that start with 'encryption') were removed, or the value was not written by "
                "Fastness. Restore the records from a backup, and write `require NAME` for each encrypted universe "
                "into the key file",
            )
        sealing = self.derive(data_key, stored[_ID_END:_SALT_END], b"value\0" + universe)
        try:
            return sealing.decrypt(_PADDING + stored[_SALT_END:_HEADER_BYTES], stored[_HEADER_BYTES:], key)
        except Exception as error:  # InvalidTag, or ValueError where the value is too short.
            raise _unreadable(
                key,
                f"A value of {_subject(universe)} cannot be decrypted: it was changed, or moved from another key; "
                "restore a backup",
            ) from error

    def load(self, pairs: list[Pair], *, forget: bool = False, oldest: int | None = None) -> None:
        """Use the keys of these records: all pairs of `RECORDS`.

        `forget` is for a key space that may have lost its last commits. `oldest` is for the records of a snapshot,
        which may be older than the known ones, but not than this generation; they are checked, and not used then.

        Raises:
            EncryptionKeyMissing: a key cannot be unwrapped.
            DecryptionFailed: the records were changed.
        """
        records = Records.of(pairs)
        with self._loading:
            keyrings = {universe: decode_keyring(stored) for universe, stored in records.keyrings.items()}
            if keyrings and self.provider is None:
                raise EncryptionKeyMissing(
                    f"The plane has encrypted universes ({_listed(keyrings)}), and no key was given; start with "
                    "--encryption-key-file FILE, or open it with encryption=FileKeys(FILE)"
                )
            keys = {
                universe: self._unwrap_all(universe, keyring, records.generation)
                for universe, keyring in keyrings.items()
            }
            self._check_manifest(records, keyrings, keys)
            if oldest is not None and oldest <= records.generation < self.generation:
                return
            if not forget:
                self._check_kept(keys)
            self._check_required(keys)
            self._install(keys, records)

    def new_key(self, universe: str, now_ms: int) -> NewKey:
        """A new data key. The provider has wrapped it, and unwrapped it again.

        Raises:
            EncryptionKeyMissing: there is no provider, or it fails.
        """
        if self.provider is None:
            raise EncryptionKeyMissing(
                "There is no master key; start the server with --encryption-key-file FILE, or open the plane with "
                "encryption=FileKeys(FILE)"
            )
        key, id = os.urandom(DATA_KEY_BYTES), os.urandom(KEY_ID_BYTES)
        return NewKey(key, StoredKey(id, self.wrap(key, universe), now_ms, _check_of(key, id, universe)))

    def wrap(self, key: bytes, universe: str) -> bytes:
        """The wrapped data key, after a check that it can be unwrapped.

        Raises:
            EncryptionKeyMissing: the provider fails, or returns another key.
        """
        assert self.provider is not None
        wrapped = self.provider.wrap(key, universe=universe)
        if not 0 < len(wrapped) <= limits.ENCRYPTION_WRAPPED_BYTES_MAX:
            raise InvalidArgument(
                f"The key provider returned a wrapped key of {len(wrapped)} bytes; it may have 1 to "
                f"{limits.ENCRYPTION_WRAPPED_BYTES_MAX} (ENCRYPTION_WRAPPED_BYTES_MAX)"
            )
        if not hmac.compare_digest(self.provider.unwrap(wrapped, universe=universe), key):
            raise EncryptionKeyMissing(
                f"The key provider wraps a key of {_subject(universe.encode())} and unwraps another one; nothing was "
                "changed. Correct the provider"
            )
        with self._loading:
            self._unwrapped[universe, wrapped] = key
        return wrapped

    def newest_key(self, universe: str) -> tuple[bytes, bytes] | None:
        """The id and the data key that seals new values of a universe; None if it is not encrypted."""
        keys = self._keys.get(universe.encode())
        return None if keys is None else (keys.newest, keys.by_id[keys.newest])

    @property
    def universes(self) -> list[str]:
        """The encrypted universes, and the plane's own empty name."""
        return [name.decode() for name in self._keys]

    def unwrapped(self, universe: str, stored: StoredKey) -> bytes:
        """The data key in a record that `load` or `wrap` has unwrapped before."""
        with self._loading:
            return self._unwrapped[universe, stored.wrapped]

    def key_of(self, universe: str, id: bytes) -> bytes | None:
        """The data key of a universe with this id."""
        keys = self._keys.get(universe.encode())
        return None if keys is None else keys.by_id.get(id)

    def data_keys(self, universe: str) -> dict[bytes, bytes]:
        """The data keys of a universe, by id."""
        keys = self._keys.get(universe.encode())
        return {} if keys is None else dict(keys.by_id)

    @contextmanager
    def older_values(self) -> Iterator[list[bytes]]:
        """The keys of values that this thread reads meanwhile, and that the newest key of their universe did not seal.

        A read that is repeated may add a key twice.
        """
        found: list[bytes] = []
        with self._noting:
            self._older = (threading.get_ident(), found)
            try:
                yield found
            finally:
                self._older = None

    def _note_older(self, key: bytes, stored: bytes, keys: _Keys) -> None:
        older = self._older
        is_newest = stored.startswith(_SEALED + keys.newest)
        if older is not None and older[0] == threading.get_ident() and not is_newest:
            older[1].append(key)

    def _unwrap_all(self, universe: str, keyring: Keyring, generation: int) -> _Keys:
        by_id: dict[bytes, bytes] = {}
        for stored in keyring.keys:
            known = self._unwrapped.get((universe, stored.wrapped))
            if known is None:
                assert self.provider is not None
                known = self.provider.unwrap(stored.wrapped, universe=universe)
            if not hmac.compare_digest(_check_of(known, stored.id, universe), stored.check):
                raise EncryptionKeyMissing(
                    f"The key provider returned another key than the one that {_subject(universe.encode())} is "
                    "encrypted with; use the master key of this plane"
                )
            self._unwrapped[universe, stored.wrapped] = known
            by_id[stored.id] = known
        loaded = self._keys.get(universe.encode())
        before = generation if loaded is None or loaded.sealed_from is None else loaded.sealed_from
        return _Keys(by_id, keyring.keys[-1].id, min(generation, before) if keyring.sealed_only else None)

    def _check_manifest(self, records: Records, keyrings: dict[str, Keyring], keys: dict[str, _Keys]) -> None:
        if not keyrings and records.manifest is None and not records.generation:
            return
        plane = keys.get(PLANE)
        try:
            found = None if records.manifest is None else _manifest.decode(records.manifest)
        except msgspec.MsgspecError:
            raise _damaged_records() from None
        if found is None or plane is None:
            raise _damaged_records()
        mac = _manifest_mac(plane.by_id[plane.newest], found.generation, found.digests)
        digests = {universe: hashlib.sha256(stored).digest() for universe, stored in records.keyrings.items()}
        assert records.manifest is not None
        is_whole = (
            found.digests == digests
            and found.generation == records.generation
            and records.generation_record == encode_generation(records.generation, records.manifest)
        )
        if not hmac.compare_digest(mac, found.mac) or not is_whole:
            raise _damaged_records()

    def _check_kept(self, keys: dict[str, _Keys]) -> None:
        for universe, known in self._keys.items():
            found = keys.get(universe.decode())
            is_sealed = found is not None and (known.sealed_from is None or found.sealed_from is not None)
            if found is None or not known.by_id.keys() <= found.by_id.keys() or not is_sealed:
                raise _older_records()

    def _check_required(self, keys: dict[str, _Keys]) -> None:
        if isinstance(self.provider, RequiresEncryption):
            missing = self.provider.required_universes() - keys.keys()
            if missing:
                raise DecryptionFailed(
                    f"The key provider requires that {_listed(missing)} is encrypted, and the plane has no key for it: "
                    "this is another plane, or its keys were removed. Restore a backup, or remove the requirement"
                )

    def _install(self, keys: dict[str, _Keys], records: Records) -> None:
        writers: dict[bytes, _Writer] = {}
        for universe, found in keys.items():
            name = universe.encode()
            writer = self._writers.get(name)
            if writer is None or writer.key_id != found.newest:
                writer = _Writer(name, found.newest, found.by_id[found.newest])
            writers[name] = writer
        # In this order: another thread must be able to open what this one seals.
        self._keys = {universe.encode(): found for universe, found in keys.items()}
        self._writers = writers
        self.is_on = bool(writers)
        self.generation, self.generation_record = records.generation, records.generation_record


@runtime_checkable
class _HasCipher(Protocol):
    cipher: ValueCipher


def cipher_of(database: object) -> ValueCipher | None:
    """The cipher of an open key space; None if it stores nothing on a disk."""
    return database.cipher if isinstance(database, _HasCipher) else None


def default_cipher() -> ValueCipher:
    """A cipher with the master keys that the environment names, for a key space that is opened without any."""
    return ValueCipher(provider_of_environment())


class RawValues(ValueCipher):
    """Stored values as they are, for tools that copy pairs and do not look into them."""

    is_raw = True

    def load(self, pairs: list[Pair], *, forget: bool = False, oldest: int | None = None) -> None:
        """Use no key."""
        del pairs, forget, oldest

    def seal(self, key: bytes, value: bytes) -> bytes:
        """The value as it is."""
        del key
        return value

    def open(self, key: bytes, stored: bytes, generation: int | None = None) -> bytes:
        """The value as it is."""
        del key, generation
        return stored


class _Writer:
    """Seals the values of one universe with a derived key, and counts them."""

    __slots__ = ("_data_key", "_state", "_universe", "key_id")

    def __init__(self, universe: bytes, key_id: bytes, data_key: bytes) -> None:
        self.key_id = key_id
        self._universe = universe
        self._data_key = data_key
        self._state = self._new_state()

    def seal(self, key: bytes, value: bytes) -> bytes:
        header, encrypt, next_number = self._state
        number = next_number()  # One step of C code, so no other thread gets the same.
        if number >= limits.ENCRYPTION_VALUES_PER_SALT:
            self._state = header, encrypt, next_number = self._new_state()
            number = next_number()
        nonce = number.to_bytes(_NONCE_BYTES, "big")
        return header + nonce[len(_PADDING) :] + encrypt(nonce, value, key)

    def expire(self) -> None:
        """Draw a new salt before the next value."""
        header, encrypt, _ = self._state
        self._state = header, encrypt, itertools.count(limits.ENCRYPTION_VALUES_PER_SALT).__next__

    def _new_state(self) -> "tuple[bytes, Callable[[bytes, bytes, bytes], bytes], Callable[[], int]]":
        salt = os.urandom(SALT_BYTES)
        sealing = _derive(self._data_key, salt, b"value\0" + self._universe)
        return _SEALED + self.key_id + salt, sealing.encrypt, itertools.count().__next__


def _derive(data_key: bytes, salt: bytes, purpose: bytes) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_derived(data_key, salt, purpose))


def _derived(data_key: bytes, salt: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt, b"fastness " + purpose).derive(data_key)


def _check_of(key: bytes, id: bytes, universe: str) -> bytes:
    return hmac.digest(_derived(key, b"", b"check\0" + universe.encode()), id, "sha256")


def _manifest_mac(plane_key: bytes, generation: int, digests: Mapping[str, bytes]) -> bytes:
    content = encode([generation, sorted(digests.items())])
    return hmac.digest(_derived(plane_key, b"", b"manifest\0"), content, "sha256")


def _subject(universe: bytes | None) -> str:
    return f"the universe {universe.decode(errors='replace')!r}" if universe else "the plane"


def _listed(universes: "Mapping[str, object] | frozenset[str]") -> str:
    names = sorted(name for name in universes if name)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _unreadable(key: bytes, message: str) -> DecryptionFailed:
    error = DecryptionFailed(message)
    error.key = key
    return error


def _damaged_records() -> DecryptionFailed:
    return DecryptionFailed(
        "The records of the encryption keys were changed or removed (keys that start with 'encryption'); nothing is "
        "read or written with them. Restore them from a backup"
    )


def _older_records() -> DecryptionFailed:
    return DecryptionFailed(
        "The records of the encryption keys (keys that start with 'encryption') lack a key that this process has used; "
        "nothing is read or written with them. If the database lost its last commits in a failover, restart this "
        "process; otherwise they were changed or removed: restore them from a backup"
    )
