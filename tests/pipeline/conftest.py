"""One Spark session for all pipeline tests."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from fastness.pipeline import sessions


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark session as the CLI starts it, for the whole test run."""
    session = sessions.start(app="tests", conf={"spark.sql.shuffle.partitions": "2"})
    yield session
    session.stop()
