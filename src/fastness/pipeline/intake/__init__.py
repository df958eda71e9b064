"""The parts of the `ingest` job: copy rows from a view of a plane into the lake, each exactly once.

    journal_ingest   records of worlds, and a check of each segment: the driver's side
    journal_tasks    the executor's side of the same: read, decode and write
    log_ingest       lines of session logs
    entity_ingest    changes of entities; the driver writes them itself, from the key space
    history_ingest   durable histories of queues; by the driver, too
    quarantine       rows for data that could not be read, with a reason
    repair           retries of quarantined data that may be readable now

The position of a world or a log file in the lake is a watermark of the table with its rows (`fastness.pipeline.lake`).
Rows and watermarks are one commit. If a run fails, the next one continues from the last commit.

**A watermark may move past damage, but nothing is lost silently.** The quarantine rows are committed before the
watermark moves. Obsolete quarantine rows are deleted after it has moved, by the run that moved it. So if two runs read
the same data at once and see different damage, the quarantine ends up with the damage seen by the run whose watermarks
were committed.
"""
