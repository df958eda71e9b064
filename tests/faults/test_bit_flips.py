"""Flipped bits in every kind of file: reported or harmless, never silent, never a hang, never an untyped error.

A child process examines each damaged file, with a deadline. The bits are chosen so that every class of positions of a
kind of file gets its share: each field of a record header, each field of a JSON file, the parts of a table.
"""

import json
import os
import random
import re
import select
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

import fastness
from fastness import limits
from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.log_records import LogWalk, fragments
from fastness.cli.main import root
from fastness.kv import Transaction
from fastness.tiers import Tier
from tests.support.depth import Depth
from tests.support.forked import start_python

CHILD = Path(__file__).parent / "flip_child.py"
PAIRS = 260  # The log has two blocks, and a record that extends over both.
SMALL_PAIRS = 16
DEADLINE_SECONDS = 60  # Far above the usual few milliseconds; a hang inside RocksDB never ends.
FOOTER_BYTES = 53  # Of a table.
TAIL_BYTES = 2_048  # The end of a table has its filter, index and properties.
JSON_TOKEN = re.compile(rb'"[^"\n]*":|"[^"\n]*"|[0-9]+|\n|[^"0-9\n]+')

Spans = dict[str, list[tuple[int, int]]]  # The parts of a file by class, with begin and end.


def whole_file(data: bytes) -> Spans:
    return {"all": [(0, len(data))]}


def log_spans(data: bytes, *, batches: bool) -> Spans:
    """The fields of the fragments of a log or a manifest, and the filler between blocks."""
    spans: Spans = {name: [] for name in ("checksum", "length", "type", "sequence", "count", "body")}
    last = 0
    for record in LogWalk(data, batches=batches):
        for begin, end in fragments(data, record):
            if begin > last:
                spans.setdefault("filler", []).append((last, begin))
            last = end
            fields = {"checksum": (0, 4), "length": (4, 6), "type": (6, 7)}
            if begin == record.offset and batches:
                fields |= {"sequence": (7, 15), "count": (15, 19)}
            fields["body"] = (19 if "count" in fields else 7, end - begin)
            for name, (first, past) in fields.items():
                spans[name].append((begin + first, min(begin + past, end)))
    return {name: [span for span in found if span[0] < span[1]] for name, found in spans.items() if found}


def table_spans(data: bytes) -> Spans:
    footer, tail = len(data) - FOOTER_BYTES, len(data) - TAIL_BYTES
    return {"blocks": [(0, tail)], "tail": [(tail, footer)], "footer": [(footer, len(data))]}


def watermark_spans(data: bytes) -> Spans:
    fields = {"mark": (0, 4), "checksum": (4, 8), "commit": (8, 16), "unused": (16, 512)}
    return {name: [(slot + begin, slot + end) for slot in (0, 512)] for name, (begin, end) in fields.items()}


def segment_spans(data: bytes) -> Spans:
    spans: Spans = {"length": [], "record": []}
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 8], "big")
        spans["length"].append((position, position + 8))
        spans["record"].append((position + 8, position + 8 + size))
        position += 8 + size
    return spans


def json_spans(data: bytes) -> Spans:
    """The tokens of a JSON file, with a class for the value of each field."""
    spans: Spans = {}
    field = ""
    for match in JSON_TOKEN.finditer(data):
        token = match.group()
        if token.endswith(b'":'):
            field = token.decode(errors="replace")
            name = "names"
        elif token == b"\n":
            name = "line ends"
        elif token[:1] == b'"' or token.isdigit():
            name = field
        else:
            name = "punctuation"
        spans.setdefault(name, []).append(match.span())
    return spans


class Kind(NamedTuple):
    """A kind of file: where it is, how it is examined, and how many bits are flipped in `make test-all`."""

    name: str
    folder: str  # Of the fixture.
    files: str
    examine: str
    spans: Callable[[bytes], Spans]
    flips: int


KINDS = [
    Kind("log", "kv", "*.log", "key_space", lambda data: log_spans(data, batches=True), 420),
    Kind("log, unsynced", "unsynced", "*.log", "key_space", lambda data: log_spans(data, batches=True), 200),
    Kind("table", "kv", "*.sst", "key_space", table_spans, 300),
    Kind("MANIFEST", "kv", "MANIFEST-*", "key_space", lambda data: log_spans(data, batches=False), 200),
    Kind("CURRENT", "kv", "CURRENT", "key_space", whole_file, 100),
    Kind("IDENTITY", "kv", "IDENTITY", "key_space", whole_file, 50),
    Kind("OPTIONS", "kv", "OPTIONS-*", "key_space", whole_file, 50),
    Kind("rocksdict-config.json", "kv", "rocksdict-config.json", "key_space", json_spans, 50),
    Kind("WATERMARK", "kv", "WATERMARK", "key_space", watermark_spans, 120),
    Kind("object", "data", "objects/cas/**/*.*", "blob", whole_file, 200),
    Kind("segment", "data", "objects/segments/**/*.log", "segment", segment_spans, 200),
    Kind("open session log", "data", "activity/**/*.jsonl", "open_log", json_spans, 300),
    Kind("rotated session log", "data", "objects/activity/**/*.jsonl", "rotated_log", json_spans, 200),
    Kind("entry of a session log", "data", "objects/activity-manifest/**/*.json", "rotated_log", json_spans, 200),
    Kind("backup: key space", "backup", "keyspace/*", "backup", whole_file, 100),
    Kind("backup: objects", "backup", "objects/**/*.*", "backup", whole_file, 60),
    Kind("backup: session logs", "backup", "activity/**/*.jsonl", "backup", whole_file, 60),
    Kind("backup: manifest.jsonl", "backup", "manifest.jsonl", "backup", json_spans, 120),
    Kind("backup: backup.json", "backup", "backup.json", "backup", json_spans, 200),
    Kind("fastness.json", "data", "fastness.json", "marker", json_spans, 96),
]
BY_NAME = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def put_number(tx: Transaction, number: int) -> None:
    tx.put(b"key %06d" % number, random.Random(number).randbytes(240))  # It cannot be compressed.


def make_key_space(folder: Path, pairs: int) -> None:
    """A small directory as a crash leaves it: a half in a table, and a half in the log, all synced."""
    with RocksDatabase(folder / "live") as database:
        for number in range(pairs):
            database.transact(put_number, number)
            if number == pairs // 2:
                database.flush_tables()
        shutil.copytree(folder / "live", folder / "kv")
    with pytest.MonkeyPatch.context() as patch, RocksDatabase(folder / "live") as database:
        patch.setattr(limits, "WATERMARK_WRITE_SECONDS", 0.0)  # As below.
        for number in range(pairs, 2 * pairs):
            database.transact(put_number, number, tier=Tier.IMPORTANT if number > pairs * 3 // 2 else Tier.CRITICAL)
        shutil.copytree(folder / "live", folder / "unsynced")


def make_data(folder: Path, pairs: int, *, blob_bytes: int) -> None:
    """A data directory with a blob, cold segments, rotated session logs and open ones, and a backup of it."""
    with fastness.open(f"dir:{folder / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append(list(range(90)), expected_head=0)
        world.snapshots.commit({"n": 1}, height=90, promote=False)
        world.snapshots.commit({"n": 2}, height=91)
        assert world.compact(entries=16, margin=10).segments > 0
        plane.blobs.put(random.Random(0).randbytes(blob_bytes))
        for session in ("a", "b_c"):
            for number in range(12):
                plane.activity.log(session, {"n": number, "said": f"{session} {number}", "é": [1.5, None]})
            plane.activity.end(session)
        for number in range(12):
            plane.activity.log("open", {"n": number, "said": "x" * number})
        plane.activity.read(session="open")  # It writes what was accepted.
        left = folder / "activity"
        shutil.copytree(folder / "data" / "activity", left)
    shutil.rmtree(folder / "data" / "activity")  # As a crash leaves it, the open log was not rotated.
    for path in (folder / "data" / "objects").rglob("*open_activity_*"):
        path.unlink()
    left.rename(folder / "data" / "activity")
    done = CliRunner().invoke(root, ["--url", f"dir:{folder / 'data'}", "backup", str(folder / "backup")])
    assert done.exit_code == 0, done.output
    shutil.copytree(folder / "data", folder / "used")
    with pytest.MonkeyPatch.context() as patch, RocksDatabase(folder / "used" / "kv") as database:
        # The watermark is written with every sync, not only every few milliseconds: a cut must be found anywhere.
        patch.setattr(limits, "WATERMARK_WRITE_SECONDS", 0.0)
        for number in range(pairs):  # It has tables, now also a log.
            database.transact(put_number, number)
        shutil.copytree(folder / "used", folder / "any")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with key spaces, data directories and a backup, which no test changes."""
    with memory_folder() as name:
        make_key_space(Path(name), PAIRS)
        make_data(Path(name), PAIRS, blob_bytes=40_000)
        yield Path(name)


@pytest.fixture(scope="module")
def small_folder() -> Iterator[Path]:
    """The same with fewer bits."""
    with memory_folder() as name:
        make_key_space(Path(name), SMALL_PAIRS)
        make_data(Path(name), SMALL_PAIRS, blob_bytes=17_000)
        yield Path(name)


def memory_folder() -> "tempfile.TemporaryDirectory[str]":
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


@pytest.fixture(scope="module")
def examiners() -> Iterator["Examiners"]:
    found: Examiners = {}
    yield found
    for examiner in found.values():
        examiner.close()


class Examiner:
    """A child process that examines damaged directories. It is replaced when it does not answer in time."""

    def __init__(self, what: str, undamaged: Path) -> None:
        self._command: list[str | Path] = [CHILD, what]
        self._undamaged = undamaged
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=self._undamaged.parent)
        copy = shutil.copytree(self._undamaged, Path(self._folder.name) / self._undamaged.name)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        self.path = Path(copy)
        self._child = start_python(
            [*self._command, copy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._answer() == "ready", "nothing is damaged yet"

    def _answer(self) -> str:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], DEADLINE_SECONDS)
        return (self._child.stdout.readline().strip() or "crash") if ready else "hang"

    def examine(self, path: Path) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{path}\n")
        self._child.stdin.flush()
        answer = self._answer()
        if answer in ("crash", "hang"):
            self.close()
            self._start()
        return answer

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()
        self._folder.cleanup()


Examiners = dict[tuple[str, Path], Examiner]  # One for all kinds of file that are examined in the same way.


def examiner_of(examiners: Examiners, what: str, undamaged: Path) -> Examiner:
    found = examiners.get((what, undamaged))
    if found is None:
        found = examiners[what, undamaged] = Examiner(what, undamaged)
    return found


class Flip(NamedTuple):
    file: str
    bit: int
    where: str


def flip_and_examine(folder: Path, kind: Kind, flips: Iterable[Flip], examiners: Examiners) -> None:
    """Examine the directory with each of the bits flipped."""
    answers: Counter[str] = Counter()
    failures = []
    undamaged = folder / kind.folder
    examiner = examiner_of(examiners, kind.examine, undamaged)
    for flip in flips:
        path = examiner.path
        if kind.examine == "key_space":  # Opening it changes it.
            path = Path(shutil.copytree(undamaged, examiner.path.with_name("damaged")))
        data = bytearray((undamaged / flip.file).read_bytes())
        data[flip.bit // 8] ^= 1 << flip.bit % 8
        (path / flip.file).write_bytes(data)
        answer = examiner.examine(path)
        answers[answer.split(" ")[0].rstrip(":")] += 1
        if answer.split(" ")[0] not in ("harmless", "detected"):
            failures.append(f"bit {flip.bit % 8} of byte {flip.bit // 8} of {flip.file} ({flip.where}): {answer}")
        if kind.examine == "key_space":
            shutil.rmtree(path, ignore_errors=True)
        elif path.exists():
            shutil.copyfile(undamaged / flip.file, path / flip.file)
    print(f"counted {json.dumps({'kind': kind.name, 'flips': answers.total(), **answers})}")
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:20]])


def files_of(folder: Path, kind: Kind) -> list[Path]:
    found = sorted(file for file in (folder / kind.folder).glob(kind.files) if file.is_file() and file.stat().st_size)
    assert found, kind
    return found


def random_flips(folder: Path, kind: Kind, share: float, rng: random.Random) -> list[Flip]:
    """The same number of bits in each class of positions of each file, at least one."""
    found = []
    files = [(file, kind.spans(file.read_bytes())) for file in files_of(folder, kind)]
    classes = len(files) * max(len(spans) for _, spans in files)
    for index in range(max(round(kind.flips * share), classes)):
        file, spans = files[index % len(files)]
        where = list(spans)[index // len(files) % len(spans)]
        begin, end = rng.choice(spans[where])
        bit = rng.randrange(begin * 8, end * 8)
        found.append(Flip(str(file.relative_to(folder / kind.folder)), bit, where))
    return found


@BY_NAME
def test_a_flipped_bit_is_reported_or_harmless(
    folder: Path, kind: Kind, examiners: Examiners, depth: Depth, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--flip-seed") or random.randrange(1 << 32)
    print(f"reproduce it with: --flip-seed {seed}")
    flip_and_examine(folder, kind, random_flips(folder, kind, depth.flips, random.Random(seed)), examiners)


def test_the_options_of_the_last_time_are_not_used(small_folder: Path, examiners: Examiners) -> None:
    """RocksDB ends the process when it writes a table with `parallel_threads=0`, which is one bit from 1."""
    [kind] = [kind for kind in KINDS if kind.name == "OPTIONS"]
    flips = [
        Flip(str(file.relative_to(small_folder / kind.folder)), 8 * (found.end() - 1), "parallel_threads")
        for file in files_of(small_folder, kind)
        for found in re.finditer(rb"parallel_threads=1", file.read_bytes())
    ]
    assert flips
    flip_and_examine(small_folder, kind, flips, examiners)


# Nothing else knows of an open session log, whose records were never durable. Doctor reports the marker, and opening
# writes it again, because a process that is killed may leave a new directory without it.
UNNOTICED = {"open session log", "fastness.json"}


@BY_NAME
def test_a_removed_file_is_reported_or_harmless(folder: Path, kind: Kind, examiners: Examiners) -> None:
    undamaged, failures = folder / kind.folder, []
    examiner = examiner_of(examiners, kind.examine, undamaged)
    for file in files_of(undamaged.parent, kind):
        path = examiner.path
        if kind.examine == "key_space":  # Opening it changes it.
            path = Path(shutil.copytree(undamaged, examiner.path.with_name("damaged")))
        (path / file.relative_to(undamaged)).unlink()
        answer = examiner.examine(path)
        print(f"{file.name}: {answer}")
        if (answer.split(" ")[0] in ("harmless", "detected")) is (kind.name in UNNOTICED):
            failures.append(f"{file.name}: {answer}")
        if kind.examine == "key_space":
            shutil.rmtree(path, ignore_errors=True)
        elif path.exists():
            shutil.copyfile(file, path / file.relative_to(undamaged))
    assert not failures, "\n".join(failures)


def test_the_bits_are_of_every_class_of_positions(folder: Path, depth: Depth) -> None:
    for kind in KINDS:
        chosen = {flip.where for flip in random_flips(folder, kind, depth.flips, random.Random(0))}
        there = {name for file in files_of(folder, kind) for name in kind.spans(file.read_bytes())}
        assert chosen == there, kind.name
    assert sum(kind.flips for kind in KINDS) >= 2_000


@pytest.mark.nightly
@BY_NAME
def test_every_flipped_bit_is_reported_or_harmless(small_folder: Path, kind: Kind, examiners: Examiners) -> None:
    """Every bit of a small plane; every ninth bit where the whole file has a single hash."""
    step = 9 if kind.examine in ("blob", "backup") else 1  # Coprime to 8, so every bit has its turn.
    flips = (
        Flip(str(file.relative_to(small_folder / kind.folder)), bit, "all")
        for file in files_of(small_folder, kind)
        for bit in range(0, file.stat().st_size * 8, step)
    )
    flip_and_examine(small_folder, kind, flips, examiners)


ANY_FILES = {
    "log": "kv/*.log",
    "table": "kv/*.sst",
    "MANIFEST": "kv/MANIFEST-*",
    "CURRENT": "kv/CURRENT",
    "IDENTITY": "kv/IDENTITY",
    "OPTIONS": "kv/OPTIONS-*",
    "rocksdict-config.json": "kv/rocksdict-config.json",
    "WATERMARK": "kv/WATERMARK",
    "object": "objects/cas/**/*.*",
    "segment": "objects/segments/**/*.log",
    "open session log": "activity/**/*.jsonl",
    "rotated session log": "objects/activity/**/*.jsonl",
    "entry of a session log": "objects/activity-manifest/**/*.json",
    "fastness.json": "fastness.json",
}
CONTENTS: dict[str, Callable[[bytes, bytes, random.Random], bytes | None]] = {
    "removed": lambda *_: None,
    "garbage": lambda data, _, rng: rng.randbytes(len(data)),
    "much garbage": lambda _, __, rng: rng.randbytes(rng.randrange(1 << 20)),
    "zeros": lambda data, _, __: bytes(len(data)),
    "ones": lambda data, _, __: b"\xff" * len(data),
    "empty": lambda *_: b"",
    "truncated": lambda data, _, rng: data[: rng.randrange(len(data))],
    "twice": lambda data, *_: data + data,
    "garbage at the end": lambda data, _, rng: data + rng.randbytes(5_000),
    "zeros at the end": lambda data, *_: data + bytes(5_000),
    "garbage inside": lambda data, _, rng: data[: len(data) // 2] + rng.randbytes(700) + data[len(data) // 2 + 700 :],
    "another file": lambda _, other, __: other,
    "before another file": lambda data, other, _: data + other,
    "after another file": lambda data, other, _: other + data,
}


@pytest.mark.parametrize("kind", ANY_FILES)
def test_opening_and_checking_any_bytes_ends(
    folder: Path, kind: str, examiners: Examiners, depth: Depth, request: pytest.FixtureRequest
) -> None:
    """`open`, `doctor` and `doctor --salvage` end with a typed error or a readable plane, in time."""
    seed = request.config.getoption("--flip-seed") or random.randrange(1 << 32)
    print(f"reproduce it with: --flip-seed {seed}")
    rng = random.Random(seed)
    undamaged = folder / "any"
    [file, *_] = sorted(undamaged.glob(ANY_FILES[kind]), key=lambda each: -each.stat().st_size)
    others = [each for each in undamaged.rglob("*") if each.is_file() and each.name not in (file.name, "LOCK")]
    # Each kind of file has others, and together they have all.
    first = depth.contents * list(ANY_FILES).index(kind) + seed
    names = [list(CONTENTS)[number % len(CONTENTS)] for number in range(first, first + depth.contents)]
    failures = []
    examiner = examiner_of(examiners, "doctor", undamaged)
    for name in names:
        path = Path(shutil.copytree(undamaged, examiner.path.with_name("damaged")))
        other = rng.choice(others)
        damaged = path / file.relative_to(undamaged)
        content = CONTENTS[name](file.read_bytes(), other.read_bytes(), rng)
        damaged.unlink()
        if content is not None:
            damaged.write_bytes(content)
        answer = examiner.examine(path)
        print(f"{name} ({other.name}): {answer}")
        if answer.split(" ")[0] not in ("harmless", "detected"):
            failures.append(f"{name} ({other.name}): {answer}")
        shutil.rmtree(path, ignore_errors=True)
    assert not failures, "\n".join(failures)
