"""The cipher of stored values: what it seals and opens, and the records and key providers that it refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from fastness import limits
from fastness.errors import DecryptionFailed, EncryptionKeyMissing, FastnessError, InvalidArgument
from fastness.kv import Pair, pack
from fastness.kv.value_cipher import (
    GENERATION,
    KEYRINGS,
    MANIFEST,
    PLANE,
    Keyring,
    NewKey,
    RawValues,
    ValueCipher,
    cipher_of,
    default_cipher,
    encode,
    encode_generation,
    signed_manifest,
)

KEY = pack(("u", "main", "jobs", 1))


class Reversing:
    """Master keys that reverse a data key. What it returns can be replaced."""

    def __init__(self, required: frozenset[str] = frozenset()) -> None:
        self.wrapped: bytes | None = None
        self.unwrapped: bytes | None = None
        self._required = required

    def wrap(self, key: bytes, *, universe: str) -> bytes:
        del universe
        return key[::-1] if self.wrapped is None else self.wrapped

    def unwrap(self, wrapped: bytes, *, universe: str) -> bytes:
        del universe
        return wrapped[::-1] if self.unwrapped is None else self.unwrapped

    def required_universes(self) -> frozenset[str]:
        return self._required


class Stored:
    """The records of a plane whose universe `main` is encrypted. Each can be changed."""

    def __init__(self, *, sealed_only: bool = False, keys: int = 1) -> None:
        cipher = ValueCipher(Reversing())
        self.plane = cipher.new_key(PLANE, 0)
        self.keys = [cipher.new_key("main", number) for number in range(keys)]
        self.keyrings = {PLANE: _keyring([self.plane]), "main": _keyring(self.keys, sealed_only)}
        self.generation = 3
        self.records: dict[bytes, bytes] = {}
        self.sign()

    def sign(self) -> None:
        """Write all records, with a manifest that fits."""
        self.records = {KEYRINGS.key(universe): stored for universe, stored in self.keyrings.items()}
        manifest = signed_manifest(self.plane.key, self.generation, self.keyrings)
        self.records[GENERATION] = encode_generation(self.generation, manifest)
        self.records[MANIFEST] = manifest

    @property
    def pairs(self) -> list[Pair]:
        return sorted(self.records.items())


def _keyring(keys: list[NewKey], sealed_only: bool = False) -> bytes:
    return encode(Keyring(tuple(key.stored for key in keys), sealed_only))


def _loaded(stored: Stored) -> ValueCipher:
    cipher = ValueCipher(Reversing())
    cipher.load(stored.pairs)
    return cipher


def test_a_value_is_opened_by_another_process_with_the_same_records() -> None:
    stored = Stored()
    writer, reader = _loaded(stored), _loaded(stored)
    sealed = writer.seal(KEY, b"payload")
    assert b"payload" not in sealed
    assert reader.open(KEY, sealed) == b"payload"
    assert (reader.universes, reader.generation, reader.is_on) == ([PLANE, "main"], 3, True)


def test_a_universe_that_is_not_encrypted_is_stored_as_it_is() -> None:
    cipher, other = _loaded(Stored()), pack(("u", "other", "jobs", 1))
    assert cipher.open(other, cipher.seal(other, b"payload")) == cipher.seal(other, b"payload") == b"payload"
    assert (cipher.newest_key("other"), cipher.key_of("other", b"id"), cipher.data_keys("other")) == (None, None, {})


def test_the_keys_of_a_universe_are_known_by_their_ids() -> None:
    stored = Stored(keys=2)
    cipher = _loaded(stored)
    first, second = stored.keys
    assert cipher.newest_key("main") == (second.stored.id, second.key)
    assert cipher.key_of("main", first.stored.id) == first.key
    assert cipher.data_keys("main") == {first.stored.id: first.key, second.stored.id: second.key}
    assert cipher.unwrapped("main", first.stored) == first.key


def test_a_value_that_was_changed_moved_or_cut_is_refused() -> None:
    cipher = _loaded(Stored())
    sealed = cipher.seal(KEY, b"payload")
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for key, value in [(KEY, changed), (pack(("u", "main", "jobs", 2)), sealed), (KEY, sealed[:34])]:
        with pytest.raises(DecryptionFailed, match="restore a backup") as refused:
            cipher.open(key, value)
        assert refused.value.key == key


def test_a_plain_value_is_refused_once_all_values_are_sealed() -> None:
    assert _loaded(Stored()).open(KEY, b"plain") == b"plain"
    with pytest.raises(DecryptionFailed, match="not written by Fastness"):
        _loaded(Stored(sealed_only=True)).open(KEY, b"plain")


def test_values_of_older_keys_are_noted_for_the_thread_that_asks() -> None:
    stored = Stored(keys=2)
    older = Stored()
    older.plane, older.keyrings = stored.plane, {**stored.keyrings, "main": _keyring(stored.keys[:1])}
    older.sign()
    cipher = _loaded(stored)
    old, new = _loaded(older).seal(KEY, b"old"), cipher.seal(KEY, b"new")
    with cipher.older_values() as found:
        assert [cipher.open(KEY, old), cipher.open(KEY, new), cipher.open(KEY, b"plain")] == [b"old", b"new", b"plain"]
    assert found == [KEY, KEY]


def test_a_new_salt_is_drawn_after_enough_values_and_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENCRYPTION_VALUES_PER_SALT", 2)
    cipher = _loaded(Stored())
    salts = [cipher.seal(KEY, b"x")[10:26] for _ in range(5)]
    assert [salts[0] == salts[1], salts[1] == salts[2], salts[2] == salts[3], salts[3] == salts[4]] == [
        True,
        False,
        True,
        False,
    ]
    cipher.invalidate_after_fork()
    assert cipher.seal(KEY, b"x")[10:26] not in salts


def _without_keys(stored: Stored) -> None:
    stored.keyrings["main"] = _keyring([])
    stored.sign()


DAMAGES: dict[str, Callable[[Stored], Any]] = {
    "an unreadable generation": lambda stored: stored.records.update({GENERATION: b"\xc1"}),
    "an older generation": lambda stored: stored.records.update(
        {GENERATION: encode_generation(2, stored.records[MANIFEST])}
    ),
    "a generation of another manifest": lambda stored: stored.records.update({GENERATION: encode_generation(3, b"")}),
    "an unreadable keyring": lambda stored: stored.records.update({KEYRINGS.key("main"): b"\xc1"}),
    "a keyring without keys": _without_keys,
    "another keyring": lambda stored: stored.records.update({KEYRINGS.key("main"): _keyring(Stored().keys)}),
    "a removed keyring": lambda stored: stored.records.pop(KEYRINGS.key("main")),
    "a removed keyring of the plane": lambda stored: stored.records.pop(KEYRINGS.key(PLANE)),
    "an unreadable manifest": lambda stored: stored.records.update({MANIFEST: b"\xc1"}),
    "a removed manifest": lambda stored: stored.records.pop(MANIFEST),
    "a manifest of another plane": lambda stored: stored.records.update({MANIFEST: Stored().records[MANIFEST]}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_records_are_refused(damage: Callable[[Stored], Any]) -> None:
    stored = Stored()
    damage(stored)
    with pytest.raises(DecryptionFailed, match="Restore them from a backup"):
        _loaded(stored)


def test_a_key_that_a_process_knows_is_never_forgotten() -> None:
    stored = Stored(keys=2)
    cipher = _loaded(stored)
    fewer = Stored()
    fewer.plane, fewer.keyrings = stored.plane, {**stored.keyrings, "main": _keyring(stored.keys[:1])}
    fewer.sign()
    for records in (fewer.pairs, []):
        with pytest.raises(DecryptionFailed, match="lack a key that this process has used"):
            cipher.load(records)
    assert cipher.is_on
    cipher.load([], forget=True)
    assert not cipher.is_on


def test_older_records_of_a_snapshot_are_checked_and_not_used() -> None:
    older, newer = Stored(keys=1), Stored(keys=2)
    older.plane, older.keyrings, older.generation = newer.plane, {**newer.keyrings, "main": _keyring(newer.keys[:1])}, 2
    older.sign()
    cipher = _loaded(newer)
    cipher.load(older.pairs, oldest=2)
    assert cipher.generation == 3
    assert cipher.data_keys("main").keys() == {key.stored.id for key in newer.keys}
    with pytest.raises(DecryptionFailed, match="lack a key that this process has used"):
        cipher.load(older.pairs, oldest=3)  # The snapshot began after generation 3 was known.
    older.records[MANIFEST] = newer.records[MANIFEST]
    with pytest.raises(DecryptionFailed, match="Restore them from a backup"):
        cipher.load(older.pairs, oldest=0)


def test_a_view_from_before_the_end_of_a_rewrite_has_plain_values() -> None:
    stored = Stored()
    cipher = _loaded(stored)
    stored.keyrings["main"], stored.generation = _keyring(stored.keys, sealed_only=True), 4
    stored.sign()
    cipher.load(stored.pairs)
    assert cipher.open(KEY, b"plain", 3) == b"plain"
    for generation in (None, 4, 5):
        with pytest.raises(DecryptionFailed, match="not written by Fastness"):
            cipher.open(KEY, b"plain", generation)


def test_a_universe_that_the_key_provider_requires_must_be_encrypted() -> None:
    ValueCipher(Reversing(frozenset({"main"}))).load(Stored().pairs)
    names = frozenset(f"tenant-{number}" for number in range(7))
    with pytest.raises(DecryptionFailed, match=r"tenant-0, .*tenant-4 and 2 more is encrypted"):
        ValueCipher(Reversing(names)).load(Stored().pairs)


def _load_without_provider(_: ValueCipher) -> None:
    ValueCipher().load(Stored().pairs)


def _load_with_another_key(cipher: ValueCipher) -> None:
    assert isinstance(cipher.provider, Reversing)
    cipher.provider.unwrapped = bytes(32)
    cipher.load(Stored().pairs)


def _wrap_as(wrapped: bytes) -> Callable[[ValueCipher], None]:
    def wrap(cipher: ValueCipher) -> None:
        assert isinstance(cipher.provider, Reversing)
        cipher.provider.wrapped = wrapped
        cipher.new_key("main", 0)

    return wrap


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (_load_without_provider, EncryptionKeyMissing, "start with --encryption-key-file FILE"),
        (lambda _: ValueCipher().new_key("main", 0), EncryptionKeyMissing, "--encryption-key-file FILE"),
        (_load_with_another_key, EncryptionKeyMissing, "use the master key of this plane"),
        (_wrap_as(b""), InvalidArgument, "it may have 1 to"),
        (_wrap_as(bytes(limits.ENCRYPTION_WRAPPED_BYTES_MAX + 1)), InvalidArgument, "it may have 1 to"),
        (_wrap_as(bytes(32)), EncryptionKeyMissing, "Correct the provider"),
    ],
)
def test_a_missing_or_wrong_key_provider_is_refused(
    act: Callable[[ValueCipher], Any], error: type[FastnessError], says: str
) -> None:
    with pytest.raises(error, match=says):
        act(ValueCipher(Reversing()))


def test_tools_that_copy_pairs_load_no_key() -> None:
    raw = RawValues()
    raw.load(Stored().pairs)
    assert (raw.seal(KEY, b"x"), raw.open(KEY, b"x"), raw.is_on) == (b"x", b"x", False)


def test_a_key_space_without_a_disk_has_no_cipher() -> None:
    class OnDisk:
        cipher = default_cipher()

    assert cipher_of(object()) is None
    assert cipher_of(OnDisk()) is OnDisk.cipher
