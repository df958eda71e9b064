"""One Spark for all tests of the pipeline."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from holdfast.pipeline import sessions


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark of our own, as the CLI starts it; it lives as long as the run."""
    session = sessions.start(app="tests", conf={"spark.sql.shuffle.partitions": "2"})
    yield session
    session.stop()
