"""A Spark of our own, and those of others."""

from pyspark.sql import SparkSession


def test_a_spark_of_our_own_listens_on_loopback_and_pushes_filters_down(spark: SparkSession) -> None:
    settings = dict(spark.sparkContext.getConf().getAll())
    assert settings["spark.driver.host"] == settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert settings["spark.ui.enabled"] == "false"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_its_workers_are_this_python(spark: SparkSession) -> None:
    import sys

    def executable(batches):
        import pyarrow as pa

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"path": [sys.executable]})

    assert {row.path for row in spark.range(1).mapInArrow(executable, "path string").collect()} == {sys.executable}
