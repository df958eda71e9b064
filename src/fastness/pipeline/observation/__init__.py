"""What others see of the pipeline: runs, the state of the lake, metrics, lineage and health.

observers.py   how a job reports its start and its end
runs.py        a record of each job's last run, in the lake
status.py      the lake's tables, and how far they are behind the plane
metrics.py     both as Prometheus metrics
lineage.py     OpenLineage events of each job
health.py      `/healthz`, `/readyz` and `/metrics` of `ingest --follow`
"""
