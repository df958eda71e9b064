"""The audit finds every damaged byte that anything reads: in the plane, in its object store, and in the lake."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from fastness.backends.objects import open_objects
from fastness.errors import Corrupt, FastnessError
from fastness.kv import fence_floor, prefix_range
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import audit, ingest
from fastness.pipeline.lake import Lake, Move, watermark_files
from fastness.pipeline.schemas import ACTIVITY, JOURNAL, TABLES
from fastness.pipeline.views import open_view
from fastness.runtime.activity import rotation
from fastness.runtime.maintenance.scan import scan_range
from tests.pipeline import planes

LARGE = 40_000


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plane with everything that has a hash, and its lake, after an audit."""
    root: Path = tmp_path_factory.mktemp("undamaged")
    planes.build(root / "data", worlds=3, entries=120, segment=32, messages=30, mails=10, entities=4, activity=90)
    with planes.opened(f"dir:{root / 'data'}") as plane:
        plane.blobs.put(b"a" * LARGE)
        plane.queue("orders").put(b"b" * LARGE)
        plane.world("large").create()
        plane.world("large").append([{"text": "c" * 100}] * 8, expected_head=0)
    ingest.run(None, config_of(root))
    planes.extend(root / "data", ["world-0001"], 5)
    ingest.run(None, config_of(root))
    assert audit.run(None, config_of(root)).findings == []
    return root


@pytest.fixture
def root(undamaged: Path, tmp_path: Path) -> Path:
    shutil.copytree(undamaged, tmp_path / "root")
    return tmp_path / "root"


def config_of(root: Path) -> Config:
    return Config(data=f"dir:{root / 'data'}", lake=str(root / "lake"))


def details(result: JobResult) -> str:
    return "\n".join(f"{each['world']} {each['reason']}: {each['detail']}" for each in result.findings)


def flip(file: Path, at: int, mask: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= mask
    file.write_bytes(data)


def blob(root: Path) -> Path:
    return max((root / "data" / "objects" / "cas" / "main" / "sha256").iterdir())


def metrics_log(root: Path) -> Path:
    return max((root / "data" / "objects" / "activity").rglob("*_metrics_*.jsonl"), key=str)


def manifest_of(root: Path, log: Path) -> Path:
    short = log.stem.rpartition("_")[2][:16]
    (found,) = (root / "data" / "objects" / "activity-manifest").rglob(f"*_{short}.json")
    return found


def lake_file(root: Path, name: str) -> Path:
    return Path(Lake(str(root / "lake")).table(TABLES[name]).files()[0])


def flip_blob(root: Path) -> str:
    flip(blob(root), 500)
    return r"checksum: the blob [0-9a-f]{64} does not match its hash; (it is named in: queues|nothing in the key space)"


def delete_blob(root: Path) -> str:
    blob(root).unlink()
    return r"missing: the blob [0-9a-f]{64} is missing"


def change_log_into_other_json(root: Path) -> str:
    file = metrics_log(root)
    data = file.read_bytes()
    assert b'"step":' in data
    file.write_bytes(data.replace(b'"step":', b'"stop":', 1))
    return r"checksum: the session log activity/main/.* does not match its hash; affects 30 lines of session session-\d"


def delete_log(root: Path) -> str:
    metrics_log(root).unlink()
    return r"missing: the session log .*affects 30 lines of session session-\d, kind metrics"


def delete_manifest(root: Path) -> str:
    manifest_of(root, metrics_log(root)).unlink()
    return r"manifest: the session log .*has no manifest entry; 30 lines of session-\d_metrics are read without it"


def change_manifest(root: Path) -> str:
    file = manifest_of(root, metrics_log(root))
    data = file.read_bytes()
    assert b'"records":30' in data
    file.write_bytes(data.replace(b'"records":30', b'"records":31'))
    return r"manifest: The manifest entry activity-manifest/main/.* is damaged \(its checksum does not match\)"


def flip_lake_file(root: Path) -> str:
    flip(lake_file(root, "activity"), 300)
    return (
        r"checksum: .*/activity/universe=main/.*parquet does not match its hash; affects \d+ rows of the table activity"
    )


def delete_lake_file(root: Path) -> str:
    lake_file(root, "entity_changes").unlink()
    return r"missing: .*/entity_changes/.*parquet is missing; affects \d+ rows of the table entity_changes"


def flip_commit(root: Path) -> str:
    log = root / "lake" / "activity" / "_delta_log" / f"{1:020}.json"
    data = log.read_bytes()
    at = data.index(b'"version":', data.index(b'{"txn"')) + 10
    flip(log, at)  # A watermark.
    return r"log: .*/activity/_delta_log/0+1.json: it does not match its recorded hash; affects all rows of the table"


def delete_last_commit(root: Path) -> str:
    log = root / "lake" / "journal" / "_delta_log"
    max(log.glob("*.json")).unlink()
    return r"log: .*/journal/_delta_log/0+2.json: it is missing; affects all rows of the table journal"


def watermarks_of(root: Path, name: str) -> Path:
    """The oldest file that has watermarks of a table's last version."""
    table = Lake(str(root / "lake")).table(TABLES[name])
    *_, base = watermark_files.chain(table.location, table.newest_watermark_file())
    return Path(table.location.url, watermark_files.path_of(base.fingerprint))


def flip_watermarks(root: Path) -> str:
    flip(watermarks_of(root, "journal"), 30)
    return (
        r"watermarks: .*/journal/_watermarks/[0-9a-f]{15}.parquet do not match their hash; restore .*; "
        "affects the positions of all sources of the table journal"
    )


def delete_watermarks(root: Path) -> str:
    watermarks_of(root, "activity").unlink()
    return r"watermarks: .*/activity/_watermarks/[0-9a-f]{15}.parquet are missing; restore .* of the table activity"


DAMAGES = [
    flip_blob,
    delete_blob,
    change_log_into_other_json,
    delete_log,
    delete_manifest,
    change_manifest,
    flip_lake_file,
    delete_lake_file,
    flip_commit,
    delete_last_commit,
    flip_watermarks,
    delete_watermarks,
]


@pytest.mark.rotating
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_with_what_it_affects(root: Path, damage: Callable[[Path], str]) -> None:
    expected = damage(root)
    result = audit.run(None, config_of(root))
    assert not result.ok
    assert len(result.findings) == 1, details(result)
    assert re.search(expected, details(result)), details(result)


def test_log_whose_rotation_was_interrupted_is_not_damaged(root: Path) -> None:
    """Its body is in the object store, its manifest entry is not, and the local file is still there, torn."""
    file = planes.leave_log(root / "data", 5, torn=True)
    objects = open_objects(f"dir:{root / 'data' / 'objects'}")
    manifest = rotation.copy(file, objects)
    assert manifest is not None
    entry = manifest_of(root, Path(manifest.path))
    entry.unlink()
    assert audit.run(None, config_of(root)).findings == []
    file.unlink()
    assert "has no manifest entry; 4 lines of crashed_metrics" in details(audit.run(None, config_of(root)))


def test_damaged_file_of_the_lake_is_a_typed_error_for_readers(root: Path) -> None:
    flip_lake_file(root)
    with pytest.raises(Corrupt, match=r"activity/universe=main/.*is damaged.*fastness pipeline audit"):
        Lake(str(root / "lake")).table(ACTIVITY).rows()


def test_spark_verifies_the_checksums_of_pages(spark: SparkSession, root: Path) -> None:
    table = Lake(str(root / "lake")).table(ACTIVITY)
    (file, *_) = table.files()
    rows = table.count()
    assert table.read(spark).where("record is not null").count() == rows
    flip(Path(file), 300)
    with pytest.raises((PySparkException, Py4JJavaError), match=r"(?i)checksum|crc"):
        table.read(spark).where("record is not null").collect()


@pytest.mark.rotating
def test_hashes_of_a_long_log_survive_checkpoints_and_cleanup(tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    for n in range(120):
        table.append([], {"a": Move(n, n + 1)})
    log = tmp_path / "journal" / "_delta_log"
    assert list(table.log_hashes.damage()) == []
    checkpoint = max(log.glob("*.checkpoint.parquet"))
    removed = [commit for commit in log.glob("*.json") if commit.stem < checkpoint.name[:20]]
    for commit in removed:
        commit.unlink()
    assert list(table.log_hashes.damage()) == []
    table.log_hashes.delete_stale()
    assert not any((tmp_path / "_hashes" / "journal" / commit.name).exists() for commit in removed)
    flip(checkpoint, 200)
    assert [path for path, _ in table.log_hashes.damage()] == [f"_delta_log/{checkpoint.name}"]
    flip(checkpoint, 200)
    flip(log / "_last_checkpoint", (log / "_last_checkpoint").read_text().index('version":') + 9)
    assert [path for path, _ in table.log_hashes.damage()] == ["_delta_log/_last_checkpoint"]


def content(root: Path) -> list[Any]:
    """Everything that can be read of the plane and the lake."""
    found: list[Any] = []
    with open_view(config_of(root)) as view:
        pairs = scan_range(view.database, *prefix_range(b""))
        found.append([pair for pair in pairs if pair[0] != fence_floor.KEY])  # Opening a copy raises it.
        for universe in view.universes():
            found += [(file.id, file.session, file.kind, view.log_body(file)) for file in view.logs(universe)]
    for name, table in TABLES.items():
        stored = Lake(str(root / "lake")).table(table)
        if name != "world_state":  # Every audit writes it.
            found += [name, stored.watermarks(), sorted(map(repr, stored.rows().to_pylist()))]
    return found


def audit_or_error(root: Path) -> str:
    """The findings, or the error."""
    try:
        return details(audit.run(None, config_of(root)))
    except FastnessError as error:
        return f"{error.code}: {error}"


def is_readable_as_before(root: Path, before: list[Any]) -> bool:
    try:
        return content(root) == before
    except FastnessError:
        return False


def identity(root: Path, file: Path) -> str:
    """The words by which a finding names a damaged file."""
    parts = file.relative_to(root).parts
    if parts[:3] == ("data", "objects", "segments"):
        return parts[4]  # The world.
    if parts[:3] == ("data", "objects", "cas"):
        return file.stem
    if parts[:2] == ("lake", "_hashes"):
        return f"{parts[2]}/_delta_log/{parts[3]}"
    return file.name.removesuffix(".json")


def group(root: Path, file: Path) -> str:
    """At most one file of a group is damaged at a time, so that no damage hides another."""
    parts = file.relative_to(root).parts
    if parts[0] == "lake":
        return parts[2] if parts[1] == "_hashes" else parts[1]
    if parts[:3] == ("data", "objects", "segments"):
        return parts[4]
    return parts[2].removesuffix("-manifest") if parts[2].startswith("activity") else str(file)


def check_objects_and_lake(root: Path, dice: random.Random, damages: int) -> None:
    before = content(root)
    paths = [path for folder in ("data/objects", "lake") for path in (root / folder).rglob("*") if path.is_file()]
    paths = sorted(path for path in paths if path.stat().st_size and "world_state" not in path.parts)
    done = 0
    while done < damages:
        chosen = {group(root, path): path for path in dice.sample(paths, 12)}
        flips = [(path, dice.randrange(path.stat().st_size), 1 << dice.randrange(8)) for path in chosen.values()]
        for damage in flips:
            flip(*damage)
        said = audit_or_error(root)
        for damage in flips:
            flip(*damage)
        for path, at, mask in flips:
            if identity(root, path) not in said:
                flip(path, at, mask)  # An error about another file can hide it.
                said_alone = audit_or_error(root)
                assert identity(root, path) in said_alone or is_readable_as_before(root, before), (path, at, mask)
                flip(path, at, mask)
        done += len(flips)
    assert audit_or_error(root) == ""


def check_key_space(undamaged: Path, tmp_path: Path, dice: random.Random, damages: int) -> None:
    before = content(undamaged)
    for n in range(damages):
        root = tmp_path / f"{n}"
        shutil.copytree(undamaged, root)  # Opening a key space changes its files.
        files = sorted(path for path in (root / "data" / "kv").iterdir() if path.is_file() and path.stat().st_size)
        data = [path for path in files if path.suffix in (".sst", ".log") or path.name.startswith("MANIFEST")]
        path = dice.choice(data if n % 4 else files)  # Most other files are text for people.
        at, mask = dice.randrange(path.stat().st_size), 1 << dice.randrange(8)
        flip(path, at, mask)
        if audit_or_error(root) == "":
            assert is_readable_as_before(root, before), (path, at, mask)
        shutil.rmtree(root)


@pytest.mark.rotating
def test_random_damage_of_objects_and_lake_is_found(root: Path) -> None:
    check_objects_and_lake(root, random.Random(1), 160)


@pytest.mark.rotating
def test_random_damage_of_the_key_space_is_found(undamaged: Path, tmp_path: Path) -> None:
    check_key_space(undamaged, tmp_path, random.Random(1), 40)


@pytest.mark.nightly
def test_more_random_damage_is_found(root: Path, undamaged: Path, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    check_objects_and_lake(root, random.Random(seed), 1_600)
    check_key_space(undamaged, tmp_path, random.Random(seed), 400)
