"""The data pipeline: what a plane has kept, as tables of a lake, audits and answers. It runs on Spark.

    views ──► staging ──► codec, folds (no Spark in them) ──► lake tables ──► audit, rollup, report
    one moment of a plane        mapInArrow on executors       Delta, committed by the driver

A job is `run(spark, config)` in `jobs/`. Rows enter the lake exactly once: a commit names, for every world and log file
that it read, how far it came, and a commit that begins anywhere else than where the last one ended fails as a whole.
"""
