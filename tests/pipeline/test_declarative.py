"""Runs the declarative pipeline example."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from tests.pipeline import planes

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative"


@pytest.mark.nightly
def test_declarative_pipeline_example_runs(tmp_path: Path) -> None:
    built = planes.build(tmp_path / "data", worlds=3, entries=100)
    shutil.copytree(EXAMPLE, tmp_path / "example")
    spec = tmp_path / "example" / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///tmp/fastness-declarative", (tmp_path / "storage").as_uri()))
    python = Path(sys.executable)
    environment = {
        **os.environ,
        "FASTNESS_URL": built.url,
        "SPARK_HOME": pyspark.__path__[0],
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # Its Spark Connect uses a free port, not 15002.
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [str(python.parent / "spark-pipelines"), "run", "--spec", str(spec)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "Run is COMPLETED" in done.stdout, done.stdout + done.stderr
    rows = pq.read_table(tmp_path / "spark-warehouse" / "worlds").to_pylist()
    assert {(row["world"], row["head"]) for row in rows} == {(name, 101) for name in built.worlds}
    assert all(row["from_outside"] == 3 and row["baselines"] == 1 for row in rows)
