"""Encryption at rest: nothing that is stored shows a payload, and nothing that was changed is taken for one."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import psycopg
import pytest
from click.testing import CliRunner

import fastness
from fastness import CommandKeys, FileKeys, Plane, PutRow, errors, limits
from fastness.backends.objects import open_objects
from fastness.backends.objects.encrypted import EncryptedObjects
from fastness.backends.objects.store import ObjectMeta, ObjectStore
from fastness.backends.rocksdb import RocksDatabase
from fastness.cli.main import root
from fastness.encryption_keys import new_master_key
from fastness.kv import Database, Pair, Transaction, pack, prefix_range, unpack
from fastness.kv.value_cipher import (
    GENERATION,
    KEYRINGS,
    MANIFEST,
    RECORDS,
    Keyring,
    RawValues,
    ValueCipher,
    cipher_of,
    signed_manifest,
)
from fastness.layers import inboxes, queues, snapshots, timers
from fastness.layers.queues import QueueKey
from fastness.layers.worlds import World
from fastness.plane.migrations import opened_source, opened_target, without_password
from fastness.plane.open import open_database
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance import retention
from fastness.runtime.maintenance.encryption import Encryption
from fastness.runtime.maintenance.migrations import Migrator
from fastness.runtime.maintenance.sweeper import Sweeper
from fastness.runtime.maintenance.timer_loop import TimerFiring
from fastness.server.encryption_metrics import EncryptionMetrics
from fastness.testing.clock import ManualClock
from fastness.wire.inboxes import DomainEvent, Effect, Timer
from fastness.wire.queues import NewMessage
from tests.support.forked import start_python
from tests.support.http_server import serving
from tests.support.populated import populate
from tests.support.waiting import eventually

SECRET = "SECRET-MARKER-7F3A"
EVERYTHING = prefix_range(b"")


class Site:
    """A plane on one of the backends, its key file, and its stored bytes."""

    def __init__(self, kind: str, folder: Path, url: str) -> None:
        self.folder = folder
        self.is_postgres = kind == "postgres"
        self.url = url if self.is_postgres else f"dir:{folder / 'data'}"
        self.keys = folder / "keys"
        self.keys.write_text(f"{new_master_key('first')}\n")
        self.keys.chmod(0o600)

    def open(self, **options: object) -> Plane:
        options.setdefault("encryption", FileKeys(self.keys))
        return fastness.open(self.url, objects=f"dir:{self.folder / 'objects'}", gc_every_seconds=None, **options)  # type: ignore[arg-type]

    def pairs(self) -> dict[bytes, bytes]:
        """The stored pairs, as they are stored."""
        if self.is_postgres:
            with psycopg.connect(self.url) as connection:
                return dict(connection.execute("SELECT key, value FROM fastness_kv").fetchall())
        with RocksDatabase(self.folder / "data" / "kv", cipher=RawValues()) as database:
            return dict(database.read(_all))

    def change(self, pairs: dict[bytes, bytes | None]) -> None:
        """Change stored pairs behind the back of the plane."""
        if self.is_postgres:
            with psycopg.connect(self.url) as connection:
                for key, value in pairs.items():
                    connection.execute("DELETE FROM fastness_kv WHERE key = %s", [key])
                    if value is not None:
                        connection.execute("INSERT INTO fastness_kv VALUES (%s, %s)", [key, value])
            return
        with RocksDatabase(self.folder / "data" / "kv", cipher=RawValues()) as database:
            database.transact(_write, pairs)

    def places_with(self, text: str) -> set[str]:
        """Which files and rows contain the text. Of a row the key counts too."""
        found = {
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and text.encode() in path.read_bytes()
        }
        if self.is_postgres:
            found |= {repr(key) for key, value in self.pairs().items() if text.encode() in key + value}
        return found


def _all(tx: Transaction) -> list[Pair]:
    return tx.scan(*EVERYTHING, limit=10_000)


def _write(tx: Transaction, pairs: dict[bytes, bytes | None]) -> None:
    for key, value in pairs.items():
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)


@pytest.fixture(params=["rocksdb", pytest.param("postgres", marks=pytest.mark.rotating)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    return Site(request.param, tmp_path, url)


@pytest.fixture
def directory(tmp_path: Path) -> Site:
    return Site("rocksdb", tmp_path, "")


@pytest.fixture
def shared(tmp_path: Path, postgres_url: str) -> Site:
    return Site("postgres", tmp_path, postgres_url)


def fill(plane: Plane, label: str) -> None:
    """Store the secret in every kind of data."""
    queue = plane.queue(f"jobs-{label}")
    queue.put({"text": SECRET})
    queue.put((SECRET * 500).encode())  # A body of its own.
    queue.put((SECRET * 20_000).encode())  # A blob.
    message = queue.receive()
    assert message is not None
    message.nack(error=SECRET, delay_seconds=3_600)
    plane.mailbox(f"ada-{label}").send(f"bob-{label}", {"text": SECRET})
    plane.state(f"state-{label}").update({"text": SECRET})
    world = plane.world(f"world-{label}")
    world.create()
    world.append([{"text": SECRET}] * 50, expected_head=0)
    world.snapshots.commit({"text": SECRET}, height=50, promote=True)
    world.compact(entries=20, margin=5)
    world.inbox.put(
        DomainEvent(
            schema="a@1",
            payload=SECRET.encode(),
            effects=(Effect("mail", SECRET.encode()),),
            timers=(Timer(2**62, SECRET.encode()),),
        )
    )
    plane.entities.write("order", label, {"note": SECRET})
    plane.blobs.put((SECRET * 9_000).encode())
    queue.schedule("nightly", "0 3 * * *", {"text": SECRET})
    plane.workflows.start(f"report-{label}", SECRET)
    plane.collection("notes").commit([PutRow(label, ("first",), SECRET.encode())])
    plane.pairs.put(f"raw {label}".encode(), SECRET.encode())
    plane.transact(_write, {pack(("mine", label)): SECRET.encode(), pack(("u", 7, label)): SECRET.encode()})


def check(plane: Plane, label: str) -> None:
    """What `fill` stored is there."""
    assert plane.state(f"state-{label}").get().value == {"text": SECRET}
    entries = [record for record in plane.world(f"world-{label}").read() if record.kind == "entry"]
    assert len(entries) == 50
    assert all(SECRET.encode() in entry.value for entry in entries)
    assert plane.entities.get("order", label).fields == {"note": SECRET}
    assert (SECRET * 500).encode() in [message.payload for message in plane.queue(f"jobs-{label}").peek(10)]
    for count in (9_000, 20_000):
        content = (SECRET * count).encode()
        assert plane.blobs.get(sha256(content).hexdigest()) == content
    mail = next(iter(plane.mailbox(f"bob-{label}").subscribe(wait_seconds=0)))
    assert mail.json() == {"text": SECRET}
    for key in (f"raw {label}".encode(), pack(("mine", label)), pack(("u", 7, label))):
        assert plane.pairs.get(key) == SECRET.encode()


def test_no_file_and_no_row_contains_a_payload(site: Site) -> None:
    with site.open() as plane:
        enabled = plane.encryption.enable("main")
        assert plane.encryption.enable("main") == enabled
        fill(plane, "new")
    assert site.places_with(SECRET) == set()
    with site.open() as plane:
        check(plane, "new")
        assert [each.universe for each in plane.encryption.show().universes] == ["", "main"]
    other = site.pairs()
    with site.open(universe="other") as plane:
        plane.state("plain").update({"text": SECRET})
    assert [key for key in site.pairs().keys() - other if b"plain" in key]
    if site.is_postgres:
        assert len(site.places_with(SECRET)) == 1, "another universe is not encrypted"


def test_values_from_before_stay_readable_and_are_rewritten(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with site.open() as plane:
        fill(plane, "old")
        plane.encryption.enable("main")
        fill(plane, "new")
        check(plane, "old")
    stored = site.pairs()
    key = next(key for key in stored if b"state-old" in key)
    plain = stored[key]
    assert SECRET.encode() in plain

    # A rewrite that is interrupted after each page goes on where it ended.
    monkeypatch.setattr("fastness.runtime.maintenance.encryption.ENCRYPTION_REWRITE_PAGE", 8)
    monkeypatch.setattr("fastness.runtime.maintenance.encryption.ENCRYPTION_REWRITE_OBJECTS", 1)
    from fastness.wire.encryption import RewriteValues

    calls = rewritten = 0
    is_complete = False
    while not is_complete:
        with site.open() as plane:
            done = plane._transport.call(RewriteValues("main", 16))
            calls, rewritten, is_complete = calls + 1, rewritten + done.values, done.is_complete
        assert calls < 100
    assert calls > 5
    assert rewritten >= sum(SECRET.encode() in value for value in stored.values())
    with site.open() as plane:
        again = plane.encryption.rewrite("main")
        assert (again.values, again.objects) == (0, 0)
        status = plane.encryption.show().universes[1]
        assert status.all_encrypted
        assert status.all_newest
        check(plane, "old")
    assert site.places_with(SECRET) == set()

    # From now on a plain value is not one of Fastness's: a forged one is refused.
    site.change({key: plain})
    with site.open() as plane, pytest.raises(errors.DecryptionFailed, match="not encrypted"):
        check(plane, "old")


def test_a_changed_or_moved_value_is_refused(directory: Site) -> None:
    with directory.open() as plane:
        plane.encryption.enable("main")
        plane.state("one").update({"text": "first"})
        plane.state("two").update({"text": "other"})
    stored = directory.pairs()
    one, two = (next(key for key in stored if b"states" in key and name in key) for name in (b"one", b"two"))
    assert b"first" not in stored[one]

    cipher = _loaded(_records(stored), directory.keys)
    sealed = stored[one]
    assert b"first" in cipher.open(one, sealed)
    attacks = [stored[two], b"\xc1\x01" + sealed[2:10]]
    attacks += [sealed[:at] + bytes((sealed[at] ^ 1,)) + sealed[at + 1 :] for at in range(10, len(sealed))]
    attacks += [sealed[:length] for length in range(10, len(sealed))]
    for attack in attacks:
        with pytest.raises(errors.DecryptionFailed):
            cipher.open(one, attack)
    directory.change({one: stored[two], two: stored[one]})
    with directory.open() as plane, pytest.raises(errors.DecryptionFailed, match="moved from another key"):
        plane.state("one").get()
    directory.change({one: stored[one], two: stored[two]})
    with directory.open() as plane:
        assert plane.state("one").get().value == {"text": "first"}


def test_only_the_records_that_a_plane_is_opened_with_are_plain(site: Site, clock: ManualClock) -> None:
    with site.open(clock=clock) as plane:
        populate(plane, clock)
        for universe in ("main", "other"):
            plane.encryption.enable(universe)
            plane.encryption.rewrite(universe)
        assert all(each.all_encrypted for each in plane.encryption.show().universes)
    plain = {unpack(key)[0] for key, value in site.pairs().items() if not value.startswith(b"\xc1\x01")}
    assert plain == {"encryption", "fastness"}


@pytest.mark.parametrize("mark", [b"\xc1", b"\xc1\x00", b"\xc1\x01", b"\xc1\x02"])
def test_a_value_that_looks_sealed_stays_as_it_is(site: Site, mark: bytes) -> None:
    value = mark + bytes(5_000)
    with site.open() as plane:
        plane.pairs.put(b"of no universe", value)
        plane.queue("jobs").put(value)

        def values() -> list[bytes | None]:
            (pair,) = plane.pairs.scan(b"of no", b"of np")
            return [plane.pairs.get(b"of no universe"), pair[1], plane.queue("jobs").peek(1)[0].payload]

        assert values() == [value] * 3
        plane.encryption.enable("main")
        assert values() == [value] * 3
        plane.encryption.rewrite("main")
        assert values() == [value] * 3


def test_a_plain_value_can_be_the_bytes_of_a_sealed_one(directory: Site) -> None:
    with directory.open() as plane:
        plane.encryption.enable("main")
        plane.state("a").update({"text": "sealed"})
    records, sealed = _records(directory.pairs()), directory.pairs()[_key_with(directory, b"a")]
    directory.change(dict.fromkeys(dict(records), None))
    key = pack(("u", "main", "b"))
    with directory.open() as plane:
        plane.pairs.put(key, sealed)
        assert plane.pairs.get(key) == sealed
    directory.change(dict(records))
    with directory.open() as plane:
        assert plane.pairs.get(key) == sealed


def test_a_sealed_value_is_refused_with_advice_if_the_records_of_all_keys_are_gone(site: Site) -> None:
    with site.open() as plane:
        plane.encryption.enable("main")
        plane.state("a").update({"text": SECRET})
        plane.pairs.put(b"raw", SECRET.encode())
        plane.queue("jobs").put(b"payload")
    records = _records(site.pairs())
    site.change(dict.fromkeys(dict(records), None))
    with pytest.raises(errors.DecryptionFailed, match="Restore the records from a backup, and write `require NAME`"):
        _read_everything(site)
    site.change(dict(records))
    assert _read_everything(site) == [{"text": SECRET}, SECRET.encode(), b"payload"]


def _read_everything(site: Site) -> list[object]:
    with site.open() as plane:
        return [plane.state("a").get().value, plane.pairs.get(b"raw"), plane.queue("jobs").peek(1)[0].payload]


def test_removed_and_replaced_keys_are_noticed(directory: Site) -> None:
    with directory.open() as plane:
        plane.encryption.enable("main")
        plane.encryption.enable("shop")
    before = directory.pairs()
    with directory.open() as plane:
        plane.encryption.rotate("main")
        plane.state("new").update({"text": SECRET})
    stored = directory.pairs()
    main, shop = KEYRINGS.key("main"), KEYRINGS.key("shop")
    for attack in (
        {main: None},  # As if the universe had never been encrypted.
        {main: before[main]},  # Back to the key before.
        {main: stored[shop]},
        {MANIFEST: None},
        {MANIFEST: before[MANIFEST]},
        {GENERATION: None},
        {KEYRINGS.key(""): None},
        {main: None, MANIFEST: signed_manifest(bytes(32), 3, {shop.decode(errors="replace"): stored[shop]})},
    ):
        directory.change(dict(attack))
        with pytest.raises((errors.DecryptionFailed, errors.EncryptionKeyMissing)):
            directory.open()
        directory.change(stored)  # type: ignore[arg-type]
    with directory.open() as plane:
        assert plane.state("new").get().value == {"text": SECRET}

    # All of them are gone: only the key file says that there were some.
    nothing = dict.fromkeys((key for key in stored if key.startswith(b"\x02encryption\x00")), None)
    directory.change(nothing)
    with directory.keys.open("a") as file:
        file.write("require shop\n")
    with pytest.raises(errors.DecryptionFailed, match="requires that shop is encrypted"):
        directory.open()
    directory.change(stored)  # type: ignore[arg-type]
    directory.open().close()


def test_a_running_process_never_forgets_a_key(shared: Site) -> None:
    with shared.open() as plane:
        plane.encryption.enable("main")
        plane.state("a").update({"text": "before"})
        stored = shared.pairs()
        shared.change({key: None for key in stored if key.startswith(RECORDS[0])})
        with pytest.raises(errors.DecryptionFailed, match="lack a key"):
            plane.state("a").update({"text": SECRET})
        assert shared.places_with(SECRET) == set()
        shared.change(stored)  # type: ignore[arg-type]
        plane.state("a").update({"text": SECRET})
        assert plane.state("a").get().value == {"text": SECRET}


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_nothing_is_sealed_with_a_key_that_the_database_has_lost(shared: Site, isolation: str) -> None:
    """A failover to a standby that lags loses the last commits, and with them perhaps a new key."""
    with shared.open() as plane:
        plane.encryption.enable("main")
        plane.state("a").update({"text": "before"})
        before = _records(shared.pairs())
        plane.encryption.rotate("main")
        plane.state("b").update({"text": "lost, too"})
        lost = _records(shared.pairs())
        shared.change({key: dict(before).get(key) for key, _ in lost} | {_key_with(shared, b"b"): None})

        for write in (
            lambda: plane.state("c").update({"text": SECRET}),
            lambda: _within(plane, shared, isolation),
            lambda: plane.state("a").get(),
        ):
            with pytest.raises(errors.DecryptionFailed, match="restart this process"):
                write()
        with shared.open() as restarted:
            restarted.encryption.rotate("main")  # To the same generation as the lost one, and another key.
            with pytest.raises(errors.DecryptionFailed, match="restart this process"):
                plane.state("c").update({"text": SECRET})
            restarted.state("d").update({"text": "after"})
    with shared.open() as plane:
        assert [plane.state(name).get().value for name in "ad"] == [{"text": "before"}, {"text": "after"}]


def _within(plane: Plane, site: Site, isolation: str) -> None:
    with psycopg.connect(site.url) as connection:
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        plane.within(connection).queue("jobs").put({"text": SECRET})


def _key_with(site: Site, name: bytes) -> bytes:
    """The key of the state with this name."""
    (found,) = [key for key in site.pairs() if b"\x02states\x00" in key and b"\x02" + name + b"\x00" in key]
    return found


def test_a_long_read_ends_although_a_rewrite_ends_meanwhile(site: Site) -> None:
    with _opened(site) as database:
        encryption = Encryption(database, None, None)
        keys = [pack(("u", "main", "states", number)) for number in range(20)]
        database.transact(_write, dict.fromkeys(keys, b"plain"))
        encryption.enable("main")
        begin, end = prefix_range(pack(("u", "main", "states")))
        steps = [partial(database.transact, _write, {pack(("other",)): b""}), partial(_rewrite, encryption, "main")]

        def read_in_two_steps(tx: Transaction) -> list[Pair]:
            first = tx.scan(begin, end, limit=5)
            if steps:  # RocksDB pins a view in the second run, because of the commit in the first one.
                _in_thread(steps.pop(0) if not site.is_postgres else steps.pop())
            return first + tx.scan(first[-1][0] + b"\x00", end, limit=100)

        assert database.read(read_in_two_steps) == [(key, b"plain") for key in keys]
        assert encryption.show().universes[1].all_encrypted
    site.change({keys[0]: b"plain"})
    with _opened(site) as database, pytest.raises(errors.DecryptionFailed, match="not encrypted with a key"):
        database.read(_all)


def _in_thread(work: Callable[[], object]) -> None:
    """Run it in another thread: a transaction within a transaction of the same thread is refused."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()


def test_a_rewrite_goes_on_while_a_caller_has_a_transaction_open(shared: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.runtime.maintenance.encryption.ENCRYPTION_LOCK_SECONDS", 0.1)
    monkeypatch.setattr("fastness.runtime.maintenance.encryption.ENCRYPTION_REWRITE_PAGE", 4)
    with shared.open() as plane, _opened(shared) as database, psycopg.connect(shared.url) as connection:
        encryption = Encryption(database, None, None)
        database.transact(_write, {pack(("u", "main", "states", number)): b"plain" for number in range(20)})
        encryption.enable("main")
        plane.within(connection).queue("jobs").put({"text": "b"})
        assert [encryption.rewrite("main", 4).is_complete for _ in range(4)] == [False] * 4
        assert sum(b"plain" in value for value in shared.pairs().values()) < 10
        with pytest.raises(errors.Busy, match="within"):  # The last step changes the keys.
            _rewrite(encryption, "main")
        connection.commit()
        _rewrite(encryption, "main")
        assert encryption.show().universes[1].all_encrypted


def _rewrite(encryption: Encryption, universe: str) -> None:
    while not encryption.rewrite(universe, 1_000).is_complete:
        pass


def test_opening_without_the_master_key_is_refused(site: Site) -> None:
    with site.open() as plane:
        plane.encryption.enable("main")
        plane.state("a").update({"text": SECRET})
    with pytest.raises(errors.EncryptionKeyMissing, match="--encryption-key-file"):
        fastness.open(site.url)
    master = site.keys.read_text()
    site.keys.write_text(f"{new_master_key('second')}\n")
    with pytest.raises(errors.EncryptionKeyMissing, match="'first'"):
        site.open()
    site.keys.write_text(f"{new_master_key('first')}\n")
    with pytest.raises(errors.EncryptionKeyMissing, match="another key with the same name"):
        site.open()

    # A new master key wraps the data keys again, and the old one can go.
    second = new_master_key("second")
    site.keys.write_text(f"{master}{second}\n")
    with site.open() as plane:
        for universe in ("main", ""):
            plane.encryption.rotate(universe, master=True)
    site.keys.write_text(f"{second}\n")
    with site.open() as plane:
        assert plane.state("a").get().value == {"text": SECRET}


def test_rotation_keeps_everything_readable_while_writers_run(site: Site) -> None:
    with site.open() as plane:
        writer = site.open() if site.is_postgres else plane
        plane.encryption.enable("main")
        stop = threading.Event()
        failures: list[Exception] = []
        written: list[str] = []

        def write(number: int) -> None:
            try:
                while not stop.is_set() and len(written) < 5_000:
                    key = f"s-{number}-{len(written)}"
                    writer.state(key).update({"text": SECRET})
                    assert writer.state(key).get().value == {"text": SECRET}
                    written.append(key)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            plane.encryption.rotate("main")
            plane.encryption.rewrite("main")
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert written
        assert plane.encryption.show().universes[1].keys == 5
        plane.encryption.rewrite("main")
        assert all(plane.state(key).get().value == {"text": SECRET} for key in written)
        if site.is_postgres:
            writer.close()
    assert site.places_with(SECRET) == set()
    newest = _newest_id(site)
    values = [value for key, value in site.pairs().items() if key.startswith(b"\x02u\x00\x02main\x00")]
    assert values
    assert {value[2:10] for value in values} == {newest}


def _newest_id(site: Site) -> bytes:
    return msgspec.msgpack.decode(site.pairs()[KEYRINGS.key("main")], type=Keyring).keys[-1].id


def test_a_server_without_the_key_is_refused_once_a_universe_is_encrypted(shared: Site) -> None:
    with shared.open() as plane, shared.open(encryption=None) as other:
        other.state("before").update({"text": "a"})
        plane.encryption.enable("main")
        with pytest.raises(errors.EncryptionKeyMissing):
            other.state("after").update({"text": SECRET})
        with pytest.raises(errors.EncryptionKeyMissing):
            other.state("before").get()
        assert plane.state("before").get().value == {"text": "a"}
        assert not [key for key in shared.pairs() if b"after" in key]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_callers_transaction_never_writes_plain_values_after_enable(
    shared: Site, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setattr("fastness.runtime.maintenance.encryption.ENCRYPTION_LOCK_SECONDS", 0.2)
    with shared.open() as plane, shared.open() as other, psycopg.connect(shared.url) as connection:
        other.queue("jobs").put({"text": "a"})
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        other.within(connection).queue("jobs").put({"text": "b"})
        with pytest.raises(errors.Busy, match="within"):
            plane.encryption.enable("main")
        connection.commit()
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        connection.execute("SELECT count(*) FROM fastness_kv")  # Takes the snapshot of the transaction.
        plane.encryption.enable("main")
        other.within(connection).queue("jobs").put({"text": SECRET})
        connection.commit()
        assert shared.places_with(SECRET) == set()
        assert SECRET.encode() in (plane.queue("jobs").peek(5)[-1].payload or b"")


def _records(pairs: dict[bytes, bytes]) -> list[Pair]:
    return [(key, value) for key, value in pairs.items() if key.startswith(b"\x02encryption\x00")]


def _loaded(records: list[Pair], keys: Path) -> ValueCipher:
    cipher = ValueCipher(FileKeys(keys))
    cipher.load(records)
    return cipher


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_nonces_never_repeat(directory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with directory.open() as plane:
        plane.encryption.enable("main")
    records = _records(directory.pairs())
    monkeypatch.setattr(limits, "ENCRYPTION_VALUES_PER_SALT", 64)
    key = b"\x02u\x00\x02main\x00a"
    first, second = _loaded(records, directory.keys), _loaded(records, directory.keys)
    seen: list[bytes] = []

    def seal() -> None:
        for _ in range(100):
            seen.extend(cipher.seal(key, b"x")[:32] for cipher in (first, second))

    threads = [threading.Thread(target=seal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover - Forked children are not measured.
        os.write(write, b"".join(first.seal(key, b"x")[:32] for _ in range(100)))
        os._exit(0)
    os.waitpid(child, 0)
    data = os.read(read, 65_536)
    os.close(read)
    os.close(write)
    seen += [data[at : at + 32] for at in range(0, len(data), 32)]
    seal()
    assert len(data) == 3_200
    assert len(set(seen)) == len(seen) == 1_100
    assert second.open(key, first.seal(key, b"value")) == b"value"


class CountingStore(ObjectStore):
    """Counts the bytes that are read."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store._store)
        self.bytes_read = 0

    def _parts(self, meta: ObjectMeta, start: int, length: int | None) -> Iterator[bytes]:
        for part in super()._parts(meta, start, length):
            self.bytes_read += len(part)
            yield part


def test_an_encrypted_object_has_its_content_and_no_other(directory: Site) -> None:
    with directory.open() as plane:
        plane.encryption.enable("main")
    records = _records(directory.pairs())
    stored = CountingStore(open_objects("memory:"))
    objects = EncryptedObjects(stored, _loaded(records, directory.keys), lambda: None)
    frame = limits.ENCRYPTION_FRAME_BYTES
    for size in (0, 1, frame - 1, frame, frame + 1, 2 * frame, 3 * frame + 7):
        path, content = f"cas/main/sha256/{size}", os.urandom(size)
        objects.write(path, [content[at : at + 50_000] for at in range(0, size, 50_000)])
        assert objects.get(path) == b"".join(objects.open(path)) == content
        assert objects.head(path).size == size
        for start, length in ((0, 10), (frame - 1, 2), (frame, frame), (size - 1, 5), (size, 1), (size + 9, 1)):
            assert objects.get_range(path, max(start, 0), length) == content[max(start, 0) :][:length]
        assert size < 64 or content[:64] not in stored.get(path)

    path, content = "cas/main/sha256/large", os.urandom(100 * frame)
    objects.put(path, content)
    stored.bytes_read = 0
    assert objects.get_range(path, 50 * frame + 5, 100) == content[50 * frame + 5 :][:100]
    assert stored.bytes_read < 2 * frame

    sealed = stored.get(path)
    whole = frame + 16
    attacks = {
        "cut off after a frame": sealed[: 32 + 3 * whole],
        "two frames exchanged": sealed[:32] + sealed[32 + whole : 32 + 2 * whole] + sealed[32 : 32 + whole],
        "a flipped bit": sealed[:100] + bytes((sealed[100] ^ 1,)) + sealed[101:],
        "another salt": sealed[:20] + bytes((sealed[20] ^ 1,)) + sealed[21:],
    }
    for attack in attacks.values():
        stored.put(path, attack)
        with pytest.raises(errors.DecryptionFailed):
            objects.get(path)
    stored.put("cas/main/sha256/other", sealed)
    with pytest.raises(errors.DecryptionFailed):
        objects.get("cas/main/sha256/other")
    objects.put("cas/other/sha256/plain", content)
    assert stored.get("cas/other/sha256/plain") == content


COMMAND = """
import base64, json, sys
asked = json.load(sys.stdin)
flip = lambda text: base64.b64encode(bytes(b ^ 0x5a for b in base64.b64decode(text))).decode()
mode = sys.argv[1]
if mode == "fails": sys.exit("the service does not answer")
if mode == "silent": sys.exit(0)
if asked["action"] == "wrap": print(json.dumps({"wrapped": flip(asked["key"])}))
else: print(json.dumps({"key": flip(asked["wrapped"]) if mode == "works" else base64.b64encode(bytes(32)).decode()}))
"""


def test_a_command_can_hold_the_master_key(directory: Site) -> None:
    def keys(mode: str) -> CommandKeys:
        return CommandKeys([sys.executable, "-c", COMMAND, mode])

    for mode in ("fails", "silent", "wrong"):
        with directory.open(encryption=keys(mode)) as plane:
            with pytest.raises(errors.EncryptionKeyMissing):
                plane.encryption.enable("main")
            assert not plane.encryption.show().universes
    with directory.open(encryption=keys("works")) as plane:
        plane.encryption.enable("main")
        plane.state("a").update({"text": SECRET})
    for mode in ("fails", "wrong"):
        with pytest.raises(errors.EncryptionKeyMissing):
            directory.open(encryption=keys(mode))
    with directory.open(encryption=keys("works")) as plane:
        assert plane.state("a").get().value == {"text": SECRET}
    assert directory.places_with(SECRET) == set()


def test_a_key_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(errors.PathUnusable):
        FileKeys(path)
    good = new_master_key("one")
    for text in ("", "one", "one AAAA", f"{good}\n{good}", f"one two {good}", "\xff" * 100):
        path.write_text(text)
        with pytest.raises(errors.InvalidArgument):
            FileKeys(path)
    with pytest.raises(errors.InvalidArgument):
        new_master_key("require")
    path.write_text(f"# The first key.\n\n{good}\n")
    path.chmod(0o600)
    keys = FileKeys(path)
    wrapped = keys.wrap(b"k" * 32, universe="main")
    assert keys.unwrap(wrapped, universe="main") == b"k" * 32
    with pytest.raises(errors.EncryptionKeyMissing):
        keys.unwrap(wrapped, universe="shop")
    with pytest.raises(errors.EncryptionKeyMissing):
        keys.unwrap(b"", universe="main")


def test_a_plane_without_a_master_key_or_a_disk_is_not_encrypted(directory: Site) -> None:
    with directory.open(encryption=None) as plane:
        with pytest.raises(errors.EncryptionKeyMissing, match="without a master key"):
            plane.encryption.enable("main")
        assert not plane.encryption.show().available
    with fastness.open("memory:") as plane, pytest.raises(errors.Unsupported):
        plane.encryption.enable("main")
    with directory.open() as plane:
        with pytest.raises(errors.NotFound, match="fastness encryption enable main"):
            plane.encryption.rotate("main")
        with pytest.raises(errors.NotFound):
            plane.encryption.rewrite("main")


def test_a_backup_has_no_payload_and_restores_with_the_key(
    directory: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a data directory, and of a running server. Both say once that restoring needs the master key."""
    run = CliRunner().invoke
    data, keys = directory.url, str(directory.keys)
    with fastness.open(data, encryption=FileKeys(keys)) as plane:
        plane.encryption.enable("main")
        fill(plane, "new")
    backup = tmp_path / "backup"
    assert run(root, ["--url", data, "backup", str(backup)]).exit_code == 9
    shutil.rmtree(backup, ignore_errors=True)
    monkeypatch.setenv("FASTNESS_ENCRYPTION_KEY_FILE", keys)
    with serving(data) as server:
        made = run(root, ["--url", server.url, "backup", str(tmp_path / "of-server")])
    for done in (made, run(root, ["--url", data, "backup", str(backup)])):
        assert done.exit_code == 0, done.output
        assert done.stderr.count("Restoring this backup needs the master key") == 1
    for number, source in enumerate((tmp_path / "of-server", backup)):
        restored = tmp_path / f"restored-{number}"
        for arguments in (
            ["restore", str(source), str(restored)],
            ["--url", f"dir:{restored}", "doctor", "--deep"],
        ):
            done = run(root, arguments)
            assert done.exit_code == 0, done.output
        with fastness.open(f"dir:{restored}") as plane:
            check(plane, "new")
    assert directory.places_with(SECRET) == set()


@pytest.mark.parametrize("way", ["to_postgres", "to_directory"])
def test_an_encrypted_plane_is_migrated_and_stays_encrypted(
    way: str, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master key may require universes that the target does not have at first."""
    monkeypatch.delenv("FASTNESS_ENCRYPTION_KEY_FILE", raising=False)
    kinds = ("rocksdb", "postgres") if way == "to_postgres" else ("postgres", "rocksdb")
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    source, target = (
        Site(kind, tmp_path / name, postgres_url) for kind, name in zip(kinds, ("from", "to"), strict=True)
    )
    with source.open() as plane:
        fill(plane, "old")
        plane.encryption.enable("main")
        fill(plane, "new")
        plane.encryption.rewrite("main")
        plane.encryption.rotate("main")
        plane.state("newest").update({"text": SECRET})
    with source.open(universe="plain") as plane:
        plane.state("open").update({"text": "not encrypted"})
    target.keys.write_text(f"{source.keys.read_text()}require main\n")
    command = ["migrate", source.url, target.url]
    command += [
        "--from-objects",
        f"dir:{source.folder / 'objects'}",
        "--to-objects",
        f"dir:{target.folder / 'objects'}",
    ]
    refused = CliRunner().invoke(root, command)
    assert refused.exit_code == 9, refused.output
    assert "--encryption-key-file FILE" in refused.output
    outputs: list[str] = []
    for _ in range(2):  # The second time there is nothing to do.
        done = CliRunner().invoke(root, [*command, "--encryption-key-file", str(target.keys)])
        assert done.exit_code == 0, done.output
        outputs.append(done.output)
    assert "already migrated" in outputs[1]
    assert target.places_with(SECRET) == set()
    stored = target.pairs()
    main = [value for key, value in stored.items() if key.startswith(b"\x02u\x00\x02main\x00")]
    assert {value[2:10] for value in main} == {_newest_id(target)}
    assert any(b"not encrypted" in value for key, value in stored.items() if b"plain" in key)
    with target.open() as plane:
        check(plane, "old")
        check(plane, "new")
        assert plane.state("newest").get().value == {"text": SECRET}
        assert plane.encryption.show().universes[1].all_encrypted
        assert plane.encryption.rewrite("main").values == 0


def test_a_plane_that_is_encrypted_between_two_runs_of_a_migration_leaves_nothing_plain(
    tmp_path: Path, postgres_url: str, directory: Site
) -> None:
    (tmp_path / "to").mkdir()
    target = Site("postgres", tmp_path / "to", postgres_url)
    objects = f"dir:{target.folder / 'objects'}"
    with fastness.open(directory.url) as plane:
        fill(plane, "old")
    with opened_source(directory.url) as source_side, opened_target(target.url, objects=objects) as target_side:
        interrupted = Migrator(source_side, target_side, without_password(directory.url))
        interrupted.begin()
        interrupted.copy_objects(lambda _steps: None)
        interrupted.copy_keys(lambda _steps: None)
    assert target.places_with(SECRET)
    with fastness.open(directory.url, encryption=FileKeys(directory.keys)) as plane:
        plane.encryption.enable("main")
        plane.encryption.rewrite("main")
    command = ["migrate", directory.url, target.url, "--to-objects", objects]
    done = CliRunner().invoke(root, [*command, "--encryption-key-file", str(directory.keys)])
    assert done.exit_code == 0, done.output
    assert target.places_with(SECRET) == set()
    target.keys = directory.keys
    with target.open() as plane:
        check(plane, "old")


def test_a_universe_that_cannot_be_decrypted_does_not_stop_the_maintenance_of_others(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even if the value of its first key is damaged, which is read to find the names of universes."""
    places = [World("damaged", "ada"), World("main", "ada")]
    with site.open() as plane:
        services = plane._transport.services  # type: ignore[attr-defined]
        for universe, name in places:
            plane.encryption.enable(universe)
            services.timers.job.pause()
            services.database.transact(snapshots.create_world, World(universe, name))
            services.database.transact(timers.set, World(universe, name), 0, Timer(1, b"wake", b""))
    due = {universe: QueueKey(universe, "jobs") for universe, _ in places}
    with _opened(site) as database:
        for queue in due.values():
            database.transact(queues.put, queue, [NewMessage(b"x", ttl_seconds=0.001)])
            eventually(lambda queue=queue: database.read(queues.due_in, queue) <= 0)  # type: ignore[misc]
    prefix = b"\x02u\x00\x02damaged\x00"
    site.change({k: v[:-1] + bytes((v[-1] ^ 1,)) for k, v in site.pairs().items() if k.startswith(prefix)})

    with _opened(site) as database:
        cipher = cipher_of(database)
        assert cipher is not None
        options, shared = ConsumerOptions(), site.is_postgres
        runner = BackgroundRunner()
        runner.add(Sweeper(database, options, shared=shared).job)
        runner.add(TimerFiring(database, options, shared=shared).job)
        try:
            eventually(lambda: database.read(queues.due_in, due["main"]) > 0)
            eventually(lambda: database.read(inboxes.read, places[1], after=None, limit=10))
            eventually(lambda: {task for _, task in cipher.skipped} >= {"the sweep of a queue", "the firing of timers"})
        finally:
            runner.stop()
        retention.delete_expired_rows(database)
        retention.delete_results(database)
        assert {universe for universe, _ in cipher.skipped} == {"damaged"}
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert sum("the sweep of a queue of damaged was skipped" in each for each in warnings) == 1
        assert not [each for each in caplog.records if each.exc_info]
        metrics = {
            sample.labels["universe"] for each in EncryptionMetrics(database).collect() for sample in each.samples
        }
        assert metrics == {"damaged"}


def _opened(site: Site) -> Database:
    return open_database(site.url, encryption=FileKeys(site.keys))


REWRITE = """
import sys, time, fastness
from fastness import FileKeys
from fastness.layers import encryption
from fastness.wire.encryption import RewriteValues
url, objects, keys = sys.argv[1:]
keep, pages = encryption.keep_progress, []
def keep_or_wait(*arguments):
    pages.append(arguments)
    if len(pages) == 4:
        print("in the middle", flush=True)  # The values of this page are written, and not yet how far it is.
        time.sleep(600)
    keep(*arguments)
encryption.keep_progress = keep_or_wait
with fastness.open(url, objects=objects, gc_every_seconds=None, encryption=FileKeys(keys)) as plane:
    while not plane._transport.call(RewriteValues("main", 8)).is_complete:
        pass
"""


def test_a_rewrite_that_is_killed_is_resumed(site: Site) -> None:
    with site.open() as plane:
        fill(plane, "old")
        for number in range(100):
            plane.state(f"s-{number}").update({"text": SECRET})
        plane.encryption.enable("main")
    arguments: list[str | Path] = ["-c", REWRITE, site.url, f"dir:{site.folder / 'objects'}", site.keys]
    with start_python(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    values = [value for key, value in site.pairs().items() if key.startswith(b"\x02u\x00\x02main\x00")]
    sealed = sum(value[2:10] == _newest_id(site) for value in values)
    assert 0 < sealed < len(values), "it was killed in the middle"
    with site.open() as plane:
        check(plane, "old")
        done = plane.encryption.rewrite("main")
        assert 0 < done.values <= len(values) - sealed + 16, "it goes on, and does not begin again"
        assert plane.encryption.show().universes[1].all_encrypted
        check(plane, "old")
    assert site.places_with(SECRET) == set()
