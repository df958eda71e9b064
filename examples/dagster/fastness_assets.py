"""Dagster assets for the lake: one run of the pipeline, and a DuckDB file of its tables, every hour.

Set FASTNESS_URL, FASTNESS_LAKE and FASTNESS_TOKEN in the environment of the code location.
"""

import json
import subprocess
from typing import Final

import dagster

RUN: Final = ["fastness", "pipeline", "run", "--json"]
PUBLISH: Final = ["fastness", "pipeline", "publish", "--duckdb", "lake.duckdb", "--json"]
DAMAGED: Final = 10  # The exit code if an audit found damage; all jobs have run.


@dagster.asset(
    description="The tables of the lake, up to date with the plane.",
    check_specs=[dagster.AssetCheckSpec("undamaged", asset="lake")],
)
def lake() -> dagster.MaterializeResult:
    done = subprocess.run(RUN, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, DAMAGED):
        raise dagster.Failure(f"fastness pipeline run ended with exit code {done.returncode}; see its log")
    results = {result["job"]: result for result in json.loads(done.stdout)}
    return dagster.MaterializeResult(
        metadata={
            "rows": dagster.MetadataValue.json(results["ingest"]["rows"]),
            "findings": len(results["audit"]["findings"]),
        },
        check_results=[dagster.AssetCheckResult(passed=done.returncode == 0, check_name="undamaged")],
    )


@dagster.asset(deps=[lake], description="A DuckDB file with a view for each table.")
def catalogue() -> None:
    subprocess.run(PUBLISH, check=True)


pipeline = dagster.define_asset_job("fastness_pipeline", selection=[lake, catalogue])
definitions = dagster.Definitions(
    assets=[lake, catalogue],
    jobs=[pipeline],
    schedules=[dagster.ScheduleDefinition(job=pipeline, cron_schedule="0 * * * *")],
)
