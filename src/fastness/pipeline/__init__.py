"""The data pipeline: copies a plane's data into the tables of a lake, audits it and reports on it. It runs on Spark.

    views ──► staging ──► codec, folds (no Spark)     ──► lake tables ──► audit, rollup, report
    a snapshot of a plane         mapInArrow on executors       Delta, committed by the driver

A job is `run(spark, config)` in `jobs/`. Rows enter the lake exactly once: a commit records, for every world and log
file it read, the position it reached (a watermark). A commit that does not start at the current watermark fails as
a whole."""
