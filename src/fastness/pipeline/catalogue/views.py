"""Views over the tables of a lake. `docs/lake.md` documents them, and a test compares the two.

The SQL is the part that DuckDB, polars and Spark have in common: no function of one engine, and no column whose name is
a reserved word. `{journal}` is the name of the table `journal` in the catalogue.
"""

from typing import Final, NamedTuple

from fastness.pipeline.schemas import TABLES


class View(NamedTuple):
    """A view: its meaning, and its query."""

    name: str
    about: str
    query: str

    def sql(self, prefix: str = "") -> str:
        """The query, with table names behind `prefix`, such as `lake.`."""
        return self.query.format_map({name: f"{prefix}{name}" for name in TABLES})


VIEWS: Final = (
    View(
        "world_heads",
        "The number of records of each world in the lake, by kind of record.",
        "SELECT universe, world, COUNT(*) AS records, MAX(height) AS last_height, "
        "SUM(CASE WHEN kind = 'snapshot' THEN 1 ELSE 0 END) AS snapshots FROM {journal} GROUP BY universe, world",
    ),
    View(
        "damaged_worlds",
        "Worlds that failed the last audit, with the reason.",
        "SELECT universe, world, height, verdict, reason FROM {world_state} WHERE verdict <> 'ok'",
    ),
    View(
        "dead_letters",
        "Messages that are dead letters, with their last error.",
        "SELECT universe, queue, id, correlation_id, put_at, ended_at, attempts, error FROM {messages} "
        "WHERE outcome = 'dead'",
    ),
    View(
        "unfinished_mail",
        "Mails that were neither confirmed nor lost.",
        "SELECT universe, recipient, sender, id, stored_at, delivered_at, outcome FROM {mail} "
        "WHERE outcome IN ('waiting', 'delivered')",
    ),
    View(
        "queue_health",
        "Queues with their share of dead letters among finished messages; null if none has finished.",
        "SELECT universe, queue, messages, backlog, acked, dead, retries, "
        "CASE WHEN acked + dead > 0 THEN CAST(dead AS DOUBLE) / (acked + dead) ELSE NULL END AS dead_share, "
        "wait_p50_ms, wait_p99_ms, last_at FROM {rollup_queues}",
    ),
    View(
        "mail_pairs",
        "Mail traffic between two agents in both directions together.",
        "SELECT universe, CASE WHEN sender < recipient THEN sender ELSE recipient END AS first_agent, "
        "CASE WHEN sender < recipient THEN recipient ELSE sender END AS second_agent, SUM(mails) AS mails, "
        "SUM(rejected) AS rejected FROM {rollup_talk} GROUP BY universe, "
        "CASE WHEN sender < recipient THEN sender ELSE recipient END, "
        "CASE WHEN sender < recipient THEN recipient ELSE sender END",
    ),
    View(
        "reclaimable_bytes",
        "Blobs that nothing refers to, by universe, and how many of their bytes can be reclaimed.",
        "SELECT universe, COUNT(*) AS blobs, SUM(size) AS total_bytes, "
        "SUM(CASE WHEN reclaimable THEN size ELSE 0 END) AS reclaimable_total FROM {unreachable} GROUP BY universe",
    ),
)
