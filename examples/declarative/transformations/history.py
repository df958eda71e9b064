"""The length and composition of each world's journal, read from the plane at FASTNESS_URL."""

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812


@pipelines.materialized_view(comment="One row per world: records of each kind, and bytes.")
def worlds() -> DataFrame:
    journal = SparkSession.active().read.format("fastness").option("table", "journal").load()
    return journal.groupBy("universe", "world").agg(
        (F.max("height") + 1).alias("head"),
        F.sum(F.length("raw")).alias("bytes"),
        F.count_if(F.col("kind") == "ingress").alias("from_outside"),
        F.count_if(F.col("kind") == "baseline").alias("baselines"),
    )
