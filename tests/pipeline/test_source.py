"""The data source `fastness` on a real Spark."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.testing import assertDataFrameEqual

import fastness
from fastness.pipeline.source import FastnessSource
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes
from tests.support.http_server import serving
from tests.support.waiting import POLLS_MAX_SPARK, eventually


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> planes.Built:
    """A plane that these tests only read."""
    path = tmp_path_factory.mktemp("source") / "data"
    return planes.build(path, worlds=4, entries=300, messages=60, mails=30, entities=10, activity=40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def table(spark: SparkSession, url: str, name: str = "journal", **options: str) -> DataFrame:
    return spark.read.format("fastness").options(url=url, table=name, **options).load()


@pytest.mark.always
def test_journal_is_read_completely(spark: SparkSession, built: planes.Built) -> None:
    rows = table(spark, built.url, rowsPerPartition="300").select("world", "height", "raw", "hash").collect()
    found: dict[str, dict[int, bytes]] = {}
    for row in rows:
        found.setdefault(row.world, {})[row.height] = bytes(row.raw)
    histories = {name: [records[height] for height in range(len(records))] for name, records in found.items()}
    expected = planes.truth(Path(built.path))
    assert len(rows) == built.entries
    assert planes.digest(histories) == planes.digest(expected)


@pytest.mark.parametrize("pushdown", ["false", pytest.param("true", marks=pytest.mark.rotating)])
def test_one_frame_gives_the_same_rows_in_every_query(spark: SparkSession, built: planes.Built, pushdown: str) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)  # A session may have it for other sources.
    try:
        journal = table(spark, built.url)
        low, high = journal.where("height < 5"), journal.where("height = 7 and world = 'world-0001'")
        for _ in range(2):
            assert journal.count() == built.entries
            assert (low.count(), high.count()) == (4 * 5, 1)
            assert low.union(high).union(journal).count() == built.entries + 21
            assert journal.join(low, ["world", "height"], "left_anti").count() == built.entries - 20
            pairs = journal.alias("a").join(journal.alias("b"), F.expr("a.world = b.world and a.height = b.height + 1"))
            assert pairs.where("a.height < 5").count() == 4 * 4
        cached = journal.where("height < 9").cache()
        try:
            assert cached.count() == 4 * 9
            assert cached.where("height < 2").count() == 4 * 2
            assert journal.count() == built.entries
        finally:
            cached.unpersist()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.always
def test_options_select_rows(spark: SparkSession, built: planes.Built) -> None:
    chosen = table(spark, built.url, worlds="world-0001,world-0002", fromHeight="60", kinds="entry")
    expected = table(spark, built.url).where(
        "world in ('world-0001', 'world-0002') and height >= 60 and kind = 'entry'"
    )
    assertDataFrameEqual(chosen.select("world", "height", "hash"), expected.select("world", "height", "hash"))
    assert chosen.where("height = 61").count() == 2
    assert chosen.count() == expected.count()
    activity = table(spark, built.url, "activity", kinds="metrics")
    times = sorted(row.logged_at for row in activity.select("logged_at").collect())
    assert len(times) == 40
    later = table(spark, built.url, "activity", kinds="metrics", since=f"{times[20].isoformat()}Z")
    assert later.count() == sum(moment >= times[20] for moment in times)
    with pytest.raises(PySparkException, match="since does not apply to the table journal"):
        table(spark, built.url, since="2026-11-15")


def test_other_tables_are_read_with_their_types(spark: SparkSession, built: planes.Built) -> None:
    segments = table(spark, built.url, "segments")
    assert segments.groupBy("world").count().orderBy("world").collect() == [(f"world-{n:04}", 3) for n in range(1, 4)]
    queues = table(spark, built.url, "queues")
    assert dict(queues.dtypes)["attributes"] == "map<string,string>"
    (large,) = queues.where("size = 20000").collect()
    assert (large.attributes, large.payload, large.queue) == ({"large": "yes"}, None, "orders")
    dead = queues.where("origin is not null").collect()
    assert dead
    assert all(row.last_error and row.died_at > row.created_at for row in dead)
    mail = table(spark, built.url, "mail").where("recipient = 'agent-1@main'")
    assert all(row.expires_at > row.sent_at for row in mail.collect())
    entities = table(spark, built.url, "entities")
    fields = entities.where("not deleted").select(F.get_json_object("fields", "$.total").cast("int").alias("total"))
    assertDataFrameEqual(fields, spark.createDataFrame([(n,) for n in range(10) if n % 5 != 4], "total int"))


def test_running_server_is_read(spark: SparkSession, built: planes.Built, cache: None) -> None:
    with serving(built.url) as server, fastness.connect(server.url) as plane:
        assert table(spark, server.url).count() == built.entries
        plane.world("fresh").create()
        plane.world("fresh").append([{"n": 1}, {"n": 2}], expected_head=0)
        fresh = table(spark, server.url, objects=f"dir:{built.path}/objects").where("world = 'fresh'")
        assert [row.payload for row in fresh.orderBy("height").collect()] == ['{"n":1}', '{"n":2}']
        plane.world("fresh").archive()
        plane.world("fresh").delete()


def test_invalid_options_are_reported(spark: SparkSession, built: planes.Built, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="nonsense"):
        table(spark, built.url, "nonsense")
    with pytest.raises(PySparkException, match="There is no plane in"):
        table(spark, f"dir:{tmp_path / 'nowhere'}").count()
    with pytest.raises(PySparkException, match="inboxes cannot be read"):
        spark.read.format("fastness").schema("world string").options(url=built.url, table="inboxes").load().count()
    with pytest.raises(PySparkException, match="read as a stream"):
        spark.readStream.format("fastness").options(url=built.url, table="queues").load().writeStream.format(
            "noop"
        ).option("checkpointLocation", str(tmp_path / "checkpoint")).start().processAllAvailable()


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    planes.build(tmp_path / "data", worlds=2, entries=100, activity=10)
    return tmp_path / "data"


def run_query(start: Callable[[], StreamingQuery]) -> None:
    """Run a query to its end, and again from its checkpoint if a Python process was late.

    Spark gives such a process 10 s to start, which no setting changes. A busy machine can take longer.
    """
    for attempt in range(5):
        try:
            wait = partial(start().awaitTermination, 0.1)  # type: ignore[arg-type]
            eventually(wait, "the end of the query", polls_max=POLLS_MAX_SPARK)
            return
        except StreamingQueryException as error:
            if attempt == 4 or "Python worker failed to connect back" not in str(error):
                raise


def streamed(spark: SparkSession, data: Path, name: str, columns: list[str], **options: str) -> list[tuple[Any, ...]]:
    """All rows that a query has written so far, after reading all available data; each run resumes the last one."""
    out, checkpoint = data.parent / f"{name}-out", data.parent / f"{name}-checkpoint"
    stream = spark.readStream.format("fastness").options(url=f"dir:{data}", table=name, **options).load()
    rows = stream.select(*columns)

    writer = rows.writeStream.format("json").option("checkpointLocation", str(checkpoint))
    run_query(lambda: writer.trigger(availableNow=True).start(str(out)))
    return [tuple(row) for row in spark.read.schema(rows.schema).json(str(out)).collect()]


def test_journal_stream_resumes(spark: SparkSession, growing: Path) -> None:
    columns = ["world", "height", "hash"]
    first = streamed(spark, growing, "journal", columns, maxRowsPerBatch="128")
    assert len(first) == len(set(first)) == sum(map(len, planes.truth(growing).values()))
    assert Counter(streamed(spark, growing, "journal", columns)) == Counter(first)
    planes.extend(growing, ["world-0000", "world-0001"], 30)
    with planes.opened(f"dir:{growing}") as plane:
        plane.world("new").create()
        plane.world("new").append([{"n": 0}], expected_head=0)
    rows = streamed(spark, growing, "journal", columns)
    assert len(rows) == len(set(rows)) == len(first) + 61
    assert Counter(row[0] for row in rows) == {
        name: len(records) for name, records in planes.truth(growing).items() if records
    }
    batches = sorted((growing.parent / "journal-checkpoint" / "offsets").glob("[0-9]*"))
    assert len(batches) > 2  # The first run read 128 rows at a time.
    offset = json.loads(batches[-1].read_text().splitlines()[-1])
    assert offset["main/new"] == 1


@pytest.mark.rotating
def test_session_log_stream_reads_appended_lines(spark: SparkSession, growing: Path) -> None:
    columns = ["session", "file", "n"]
    file = planes.leave_log(growing, 5, torn=True)
    first = streamed(spark, growing, "activity", columns)
    assert Counter(row[0] for row in first)["crashed"] == 4
    whole = planes.leave_log(growing, 8, session="whole").read_bytes()
    start = whole.split(b"\n", 1)[0]
    torn = file.read_bytes()
    rest = whole[len(start) + 1 :].split(b"\n")
    file.write_bytes(torn[: torn.rfind(b"\n") + 1] + b"\n".join(rest[4:]))
    rows = streamed(spark, growing, "activity", columns)
    assert len(rows) == len(set(rows))
    assert Counter(row[0] for row in rows)["crashed"] == 8
    assert Counter(row[0] for row in rows)["whole"] == 8


@pytest.mark.rotating
def test_stream_can_start_at_the_latest_offset(spark: SparkSession, growing: Path) -> None:
    assert streamed(spark, growing, "journal", ["world", "height"], startingOffsets="latest") == []
    planes.extend(growing, ["world-0001"], 5)
    assert len(streamed(spark, growing, "journal", ["world", "height"], startingOffsets="latest")) == 5


@pytest.mark.parametrize(
    ("damaged", "expected_message"),
    [
        ('{"main/world-0001":"7"}', "checkpoint of the stream"),
        ("[]", "checkpoint of the stream"),
        ("{", "JSONDecode"),
    ],
)
@pytest.mark.rotating
def test_edited_checkpoint_is_reported(spark: SparkSession, growing: Path, damaged: str, expected_message: str) -> None:
    streamed(spark, growing, "journal", ["height"])
    folder = growing.parent / "journal-checkpoint" / "offsets"
    offset = max(folder.glob("[0-9]*"), key=lambda path: int(path.name))
    head, _, _ = offset.read_text().rpartition("\n")
    offset.write_text(f"{head}\n{damaged}")
    (folder / f".{offset.name}.crc").unlink()
    with pytest.raises(PySparkException, match=expected_message):
        streamed(spark, growing, "journal", ["height"])


def test_latest_stream_loses_nothing_if_its_first_batch_fails(spark: SparkSession, growing: Path) -> None:
    class Slow(FastnessSource):
        """Writes something between Spark's requests for the start and the end of a new stream."""

        def streamReader(self, schema: Any) -> Any:
            reader, url = super().streamReader(schema), self.options["url"]
            began = reader.initialOffset

            def slow() -> dict[str, int]:
                offset: dict[str, int] = began()
                with fastness.open(url) as plane:
                    plane.world("world-0000").append([{"n": 0}], expected_head=plane.world("world-0000").head())
                return offset

            reader.initialOffset = slow  # type: ignore[method-assign]
            return reader

    spark.dataSource.register(Slow)
    out: list[int] = []

    def run(*, fails: bool) -> None:
        def write(batch: DataFrame, number: int) -> None:
            heights = [row.height for row in batch.collect()]
            if fails:
                raise RuntimeError("the power fails")
            out.extend(heights)

        stream = spark.readStream.format("fastness").options(url=f"dir:{growing}", startingOffsets="latest").load()
        to = stream.writeStream.option("checkpointLocation", str(growing.parent / "checkpoint")).foreachBatch(write)
        # An available-now query requests its end before its start, so its first batch is empty anyway.
        run_query((to.trigger(processingTime="0 seconds") if fails else to.trigger(availableNow=True)).start)

    height = len(planes.truth(growing)["world-0000"])
    try:
        with pytest.raises(PySparkException, match="the power fails"):
            run(fails=True)
        assert (growing.parent / "checkpoint" / "offsets" / "0").exists()
        assert not (growing.parent / "checkpoint" / "commits" / "0").exists()
        run(fails=False)
        run(fails=False)
    finally:
        spark.dataSource.register(FastnessSource)
    assert out == list(range(height, len(planes.truth(growing)["world-0000"])))
    assert len(out) >= 2


def jobs(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).select(
        F.col("id").cast("string").alias("key"),
        F.to_json(F.struct("id")).alias("payload"),
        (F.col("id") % 10).cast("int").alias("priority"),
        F.create_map(F.lit("n"), F.col("id").cast("string")).alias("attributes"),
    )


def save(frame: DataFrame, url: str, name: str, **options: str) -> None:
    frame.write.format("fastness").options(url=url, table=name, **options).mode("append").save()


def test_dataframe_is_written_to_a_directory_once(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    planes.build(data, worlds=1, entries=10)
    for count in (300, 300, 400):
        save(jobs(spark, count).repartition(3), f"dir:{data}", "queues", queue="jobs", load="monday")
    with planes.opened(f"dir:{data}") as plane:
        assert plane.queue("jobs").stats().put_total == 400
        messages = plane.queue("jobs").peek(1_000)
    assert Counter(message.payload for message in messages) == Counter(b'{"id":%d}' % n for n in range(400))
    assert {(message.priority, message.attributes["n"][-1]) for message in messages} == {(n, str(n)) for n in range(10)}
    assert not list((data / ".staged").rglob("load/*.arrow"))


def test_dataframe_is_written_through_a_server_once_despite_failed_tasks(
    spark: SparkSession, tmp_path: Path, cache: None
) -> None:
    data, fails = tmp_path / "data", tmp_path / "failed"
    planes.build(data, worlds=1, entries=10)

    def once_broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, 100)
            if not fails.exists():
                fails.touch()
                raise RuntimeError("the executor is gone")
            yield batch.slice(100)

    frame = jobs(spark, 300).drop("attributes").coalesce(1)
    broken = frame.mapInArrow(once_broken, frame.schema)
    with serving(f"dir:{data}") as server, fastness.connect(server.url) as plane:
        save(broken, server.url, "queues", queue="jobs", load="monday")  # Spark repeats the task.
        assert fails.exists()
        save(broken, server.url, "queues", queue="jobs", load="monday")
        assert plane.queue("jobs").stats().put_total == 300
        letters = spark.range(20).selectExpr("id as key", "'ada' as sender", "'bob' as recipient", "'hi' as body")
        save(letters, server.url, "mail", load="letters")
        assert plane.mailbox("bob").count() == 20
        events = spark.range(5).selectExpr("id as key", "'alpha' as world", "'made' as schema", "'{}' as payload")
        plane.world("alpha").create()
        for _ in range(2):
            save(events, server.url, "inboxes", load="events")
        assert len(plane.world("alpha").inbox.read()) == 5


def test_stream_is_written_once(spark: SparkSession, growing: Path) -> None:
    with planes.opened(f"dir:{growing}") as plane:
        plane.queue("jobs").set_policy(QueuePolicy())
    head = sum(map(len, planes.truth(growing).values()))
    target = growing.parent / "target"
    planes.build(target, worlds=1, entries=1)
    for run in range(2):  # The second run has lost its checkpoint, and starts from the beginning.
        stream = spark.readStream.format("fastness").options(url=f"dir:{growing}", table="journal").load()
        rows = stream.select(F.concat_ws("/", "world", "height").alias("key"), "payload")
        copy = (
            rows.writeStream.format("fastness")
            .options(url=f"dir:{target}", table="queues", queue="copies", load="copy")
            .option("checkpointLocation", str(growing.parent / f"copy-{run}"))
            .trigger(availableNow=True)
        )
        run_query(copy.start)
    with planes.opened(f"dir:{target}") as plane:
        assert plane.queue("copies").stats().put_total == head


def test_incomplete_write_options_are_reported(spark: SparkSession, built: planes.Built) -> None:
    with pytest.raises(PySparkException, match="lack the columns key"):
        save(spark.range(1).selectExpr("'x' as payload"), built.url, "queues", queue="jobs", load="monday")
    with pytest.raises(PySparkException, match="Name the load"):
        save(jobs(spark, 1), built.url, "queues", queue="jobs")
    with pytest.raises(PySparkException, match="cannot be written to"):
        save(jobs(spark, 1), built.url, "journal", load="monday")
    with pytest.raises(PySparkException, match="append"):
        jobs(spark, 1).write.format("fastness").options(
            url=built.url, table="queues", queue="jobs", load="monday"
        ).mode("overwrite").save()
