"""How long the journal of each world is, and what it is made of. The plane is the one that HOLDFAST_URL names."""

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812


@pipelines.materialized_view(comment="One row a world: records of each kind, and bytes.")
def worlds() -> DataFrame:
    journal = SparkSession.active().read.format("holdfast").option("table", "journal").load()
    return journal.groupBy("universe", "world").agg(
        (F.max("height") + 1).alias("head"),
        F.sum(F.length("raw")).alias("bytes"),
        F.count_if(F.col("kind") == "ingress").alias("from_outside"),
        F.count_if(F.col("kind") == "baseline").alias("baselines"),
    )
