"""An Airflow DAG that runs the pipeline every hour, and publishes the lake for DuckDB.

Set FASTNESS_URL, FASTNESS_LAKE and FASTNESS_TOKEN in the environment of the workers. With FASTNESS_LINEAGE, jobs send
OpenLineage events; with Airflow's OpenLineage provider, add to `default_args` the environment variable that makes the
task their parent:

    "append_env": True,
    "env": {"OPENLINEAGE_PARENT_ID": "{{ macros.OpenLineageProviderPlugin.lineage_parent_id(task_instance) }}"},

Exit code 10 means damage: the task fails. `audit` is not retried, because it would find the same.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG(
    "fastness_pipeline",
    schedule="@hourly",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=5), "cwd": "/srv/fastness"},
):
    ingest = BashOperator(task_id="ingest", bash_command="fastness pipeline ingest")
    audit = BashOperator(task_id="audit", bash_command="fastness pipeline audit", retries=0)
    rollup = BashOperator(task_id="rollup", bash_command="fastness pipeline rollup")
    report = BashOperator(task_id="report", bash_command="fastness pipeline report")
    publish = BashOperator(task_id="publish", bash_command="fastness pipeline publish --duckdb lake.duckdb")
    status = BashOperator(task_id="status", bash_command="fastness pipeline status --json", trigger_rule="all_done")

    ingest >> [audit, rollup]
    rollup >> report >> publish
    [audit, publish] >> status
