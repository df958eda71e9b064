"""The job `load` on a real Spark."""

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import fastness
from fastness.errors import InvalidArgument, InvalidName
from fastness.pipeline import jobs
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import load
from tests.pipeline import planes
from tests.support.http_server import serving


@pytest.fixture
def data(tmp_path: Path) -> Path:
    planes.build(tmp_path / "data", worlds=1, entries=10)
    return tmp_path / "data"


@pytest.fixture
def orders(tmp_path: Path) -> str:
    """A file of rows without queue columns."""
    file = tmp_path / "orders.jsonl"
    file.write_text("\n".join(json.dumps({"order": n, "total": n * 2, "priority": n % 10}) for n in range(50)))
    return str(file)


def test_file_is_loaded_once_and_again_after_forget(spark: SparkSession, data: Path, orders: str) -> None:
    config = Config(data=f"dir:{data}", lake="unused")

    def loaded() -> JobResult:
        return jobs.run("load", spark, config, source=orders, load="orders", key="order", queue="jobs")

    first, second = loaded(), loaded()
    assert (first.ok, first.rows, first.notes) == (True, {"queues": 50}, [])
    assert (second.rows, len(second.notes)) == ({"queues": 0}, 1)
    with planes.opened(f"dir:{data}") as plane:
        messages = plane.queue("jobs").peek(100)
    assert Counter(message.payload for message in messages) == Counter(
        b'{"order":%d,"total":%d}' % (n, n * 2) for n in range(50)
    )
    assert Counter(message.priority for message in messages) == dict.fromkeys(range(10), 5)
    assert load.forget(config, "orders") == 50
    assert load.forget(config, "orders") == 0
    assert loaded().rows == {"queues": 50}


def test_dataframe_is_loaded_into_mailboxes_through_a_server(spark: SparkSession, data: Path) -> None:
    frame = spark.range(30).selectExpr("id", "concat('bob-', id % 3) as recipient", "'ada' as sender", "id as n")
    with serving(f"dir:{data}") as server, fastness.connect(server.url) as plane:
        config = Config(data=server.url, lake="unused")
        result = load.run(spark, config, source=frame, target="mail", load="letters", key="id")
        assert result.rows == {"mail": 30}
        assert [plane.mailbox(f"bob-{n}").count() for n in range(3)] == [10, 10, 10]
        bodies = [json.loads(mail.body) for mail in plane.mailbox("bob-1").read()]
        assert sorted(bodies, key=lambda body: body["id"]) == [{"id": n, "n": n} for n in range(1, 30, 3)]


def test_tables_and_other_file_formats_are_loaded(spark: SparkSession, data: Path, tmp_path: Path) -> None:
    config = Config(data=f"dir:{data}", lake="unused", universes=("other",))
    frame = spark.range(4).selectExpr("id as key", "cast(id as string) as payload")
    frame.createOrReplaceTempView("rows_to_load")
    frame.write.csv(str(tmp_path / "rows.csv"), header=True)
    frame.write.parquet(str(tmp_path / "rows"))
    for source in ("rows_to_load", str(tmp_path / "rows.csv"), str(tmp_path / "rows")):
        assert load.run(spark, config, source=source, load=f"l{len(source)}", queue="jobs").rows == {"queues": 4}
    with planes.opened(f"dir:{data}", universe="other") as plane:
        assert Counter(message.payload for message in plane.queue("jobs").peek(100)) == dict.fromkeys(
            (b"0", b"1", b"2", b"3"), 3
        )


def test_csv_export_of_messages_is_loaded(spark: SparkSession, data: Path, tmp_path: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        for n in range(6):
            plane.queue("jobs").put({"n": n}, priority=n, correlation_id=f"c-{n}", group=f"g-{n}" if n % 2 else None)
    source = spark.read.format("fastness").options(url=f"dir:{data}", table="queues").load()
    columns = ("id", "queue", "priority", "group", "correlation_id", "content_type", "max_attempts")
    source.selectExpr(*(f"`{name}`" for name in columns), "cast(payload as string) as payload").write.csv(
        str(tmp_path / "export.csv"), header=True
    )
    config = Config(data=f"dir:{data}", lake="unused", universes=("copy",))
    assert load.run(spark, config, source=str(tmp_path / "export.csv"), load="copy", key="id").rows == {"queues": 6}
    found = []
    for universe in ("main", "copy"):
        with planes.opened(f"dir:{data}", universe=universe) as plane:
            messages = plane.queue("jobs").peek(100)
            found.append([(each.payload, each.priority, each.correlation_id, each.group) for each in messages])
    assert sorted(found[0], key=repr) == sorted(found[1], key=repr)
    assert len(found[0]) == 6


def test_invalid_load_is_rejected_before_anything_is_written(spark: SparkSession, data: Path, orders: str) -> None:
    config = Config(data=f"dir:{data}", lake="unused")
    with pytest.raises(InvalidArgument, match="lack the columns nothing"):
        load.run(spark, config, source=orders, load="orders", key="nothing", queue="jobs")
    with pytest.raises(InvalidArgument, match="Cannot load into"):
        load.run(spark, config, source=orders, target="worlds", load="orders", key="order")
    with pytest.raises(InvalidArgument, match="neither a table nor a file"):
        load.run(spark, config, source="nonsense", load="orders", queue="jobs")
    with pytest.raises(InvalidName):
        load.run(spark, config, source=orders, load="not a name", key="order", queue="jobs")
    with planes.opened(f"dir:{data}") as plane:
        assert plane.queues() == []
