"""All jobs on a cluster, through Spark Connect and on S3: finds what cannot be pickled or exists only on the driver."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pyspark
import pytest
from pyspark.sql import SparkSession

from fastness.pipeline import java_runtime, jobs
from fastness.pipeline.config import Config
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import JOURNAL, TABLES
from tests.pipeline import planes
from tests.support.waiting import POLLS_MAX_SPARK, eventually

SPARK_HOME = Path(pyspark.__file__).parent
DEFAULTS = """
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.executor.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.sql.shuffle.partitions 2
spark.ui.enabled false
"""
KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}


def environment(folder: Path) -> dict[str, str]:
    """The environment of a cluster, where nothing is discovered automatically."""
    java = java_runtime.find(os.environ)
    home = {} if java.home is None else {"JAVA_HOME": java.home}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    (folder / "spark-defaults.conf").write_text(DEFAULTS)
    given = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_CONF_DIR": str(folder), "PYSPARK_PYTHON": sys.executable}
    return {**kept, **home, **given}


def pipeline(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run `fastness pipeline` in its own process; returns the job results."""
    command = [sys.executable, "-W", "error", "-m", "fastness.cli", "pipeline", *words, "--json"]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return results if isinstance(results, list) else [results]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def server_process(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server in its own process, and wait until it listens."""
    env = environment(log.parent)
    with log.open("wb") as said, subprocess.Popen(command, env=env, stdout=said, stderr=said) as server:
        try:
            eventually(lambda: listens(port) or server.poll() is not None, log.read_text, polls_max=POLLS_MAX_SPARK)
            assert server.poll() is None, log.read_text()
            yield
        finally:
            server.terminate()


def build(folder: Path) -> Any:
    """Build a small plane with all kinds of data."""
    return planes.build(folder / "data", worlds=3, entries=200, messages=100, mails=40, entities=10, activity=30)


@pytest.fixture
def built(tmp_path: Path) -> Any:
    return build(tmp_path)


def run_on(folder: Path, *args: str) -> tuple[list[dict[str, Any]], int, int]:
    """Run all jobs; returns their results, and the number of records in the lake and in the plane."""
    folder.mkdir()
    built, lake = build(folder), str(folder / "lake")
    results = pipeline(folder, "run", "--data", built.url, "--lake", lake, *args)
    return results, Lake(lake).table(JOURNAL).count(), built.entries


def run_on_a_cluster(folder: Path) -> tuple[list[dict[str, Any]], int, int]:
    work = SPARK_HOME / "work"  # The log folder of its workers.
    before = set(work.glob("*"))
    try:
        return run_on(folder, "--master", "local-cluster[2,1,1024]")
    finally:
        for each in set(work.glob("*")) - before:
            subprocess.run(["rm", "-rf", each], check=True)


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server in its own process; yields its URL."""
    port = free_port()
    server = [
        str(SPARK_HOME / "bin" / "spark-submit"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2]"),
        *("--conf", "spark.connect.grpc.binding.address=127.0.0.1"),
        *("--conf", f"spark.connect.grpc.binding.port={port}"),
        *("--conf", f"spark.sql.warehouse.dir={folder / 'warehouse'}"),
        "spark-internal",
    ]
    with server_process(server, port, folder / "connect.log"):
        yield f"sc://127.0.0.1:{port}"


def run_through_connect(folder: Path) -> tuple[list[dict[str, Any]], int, int]:
    with connect_server(folder.parent) as remote:
        return run_on(folder, "--remote", remote)


REUSE = """
import sys
from pyspark.sql import SparkSession, functions as F

remote, url, entries = sys.argv[1], sys.argv[2], int(sys.argv[3])
spark = SparkSession.builder.remote(remote).getOrCreate()
for pushdown in ("false", "true"):
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
    journal = spark.read.format("fastness").options(url=url).load()
    low = journal.where("height < 5")
    for _ in range(2):
        assert journal.count() == entries
        assert low.count() == 15, low.count()
        assert low.union(journal).count() == entries + 15
        assert journal.join(low, ["world", "height"], "left_anti").count() == entries - 15
        pairs = journal.alias("a").join(journal.alias("b"), F.expr("a.world = b.world and a.height = b.height + 1"))
        assert pairs.where("a.height < 5").count() == 3 * 4
    cached = journal.where("height < 9").cache()
    assert (cached.count(), cached.where("height < 2").count(), journal.count()) == (27, 6, entries)
    assert spark.read.format("fastness").options(url=url, worlds="world-0001", fromHeight="50").load().where(
        "height < 53"
    ).count() == 3
spark.stop()
"""


@pytest.mark.thorough
def test_one_frame_gives_the_same_rows_in_every_query_through_connect(tmp_path: Path, built: Any) -> None:
    with connect_server(tmp_path) as remote:
        command = [sys.executable, "-W", "error", "-c", REUSE, remote, built.url, str(built.entries)]
        done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_on_a_cluster, marks=pytest.mark.thorough),
        pytest.param(run_through_connect, marks=pytest.mark.rotating),
    ],
)
def test_all_jobs_run_on_a_cluster_and_through_connect(
    run: Callable[[Path], tuple[list[dict[str, Any]], int, int]], tmp_path: Path
) -> None:
    results, in_lake, in_plane = run(tmp_path / "run")
    assert [each["job"] for each in results] == list(jobs.FULL_RUN)
    assert all(each["ok"] for each in results)
    assert in_lake == in_plane


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An object store in its own process: delta-rs holds the GIL while it waits for a response."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    options = {"aws_endpoint": endpoint, "aws_region": "us-east-1", "aws_allow_http": "true", **KEYS}
    for name, value in options.items():
        monkeypatch.setenv(name.upper(), value)  # For the plane, whose URL does not contain them.
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with server_process(command, port, tmp_path / "moto.log"):
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **KEYS).create_bucket(Bucket="bucket")
        yield options


@pytest.mark.thorough
def test_jobs_run_with_segments_and_lake_on_s3(spark: SparkSession, s3: dict[str, str], tmp_path: Path) -> None:
    objects = "s3://bucket/objects"
    built = planes.build(tmp_path / "data", worlds=3, entries=200, messages=50, mails=20, activity=10, objects=objects)
    config = Config(data=built.url, lake="s3://bucket/lake", objects=objects, storage=s3)
    results = list(jobs.run_all(spark, config))
    assert [each.findings for each in results] == [[]] * len(results)
    reports = boto3.client("s3", endpoint_url=s3["aws_endpoint"], region_name="us-east-1", **KEYS)
    types = [
        reports.head_object(Bucket="bucket", Key=f"lake/reports/latest.{kind}")["ContentType"]
        for kind in ("html", "json")
    ]
    assert types == ["text/html; charset=utf-8", "application/json"]
    lake = Lake(config.lake, s3)
    journal = lake.table(JOURNAL)
    assert journal.count() == journal.read(spark).count() == built.entries
    assert any(row["segment"] for row in journal.read(spark).select("segment").distinct().collect())
    counts = {name: lake.table(table).count() for name, table in TABLES.items()}
    assert jobs.run("ingest", spark, config).rows["journal"] == 0
    assert jobs.run("vacuum", spark, config).ok
    assert {name: lake.table(table).count() for name, table in TABLES.items()} == counts
