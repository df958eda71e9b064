"""Entities: each field has its own durability tier."""

from typing import Any, Final

from fastness.demo.chapters import dead_letters
from fastness.demo.context import DemoContext
from fastness.errors import VersionConflict
from fastness.layers.field_tiers import LOG_KIND
from fastness.tiers import Tier

KIND: Final = "task"
_ID: Final = "ticket-007"
_PAGE: Final = 100


def run(context: DemoContext) -> None:
    output, entities = context.output, context.plane.entities
    output.chapter("Three durability tiers, field by field")
    output.say(
        "Every ticket has a task. Its status must survive a power failure, its priority a process crash, and the "
        "model's confidence may be lost. One write sets all three, each with the durability of its tier."
    )
    tasks = all_tasks(context)
    output.claim(
        "every ticket has a task, which stores exactly the two durable fields",
        set(tasks) == dead_letters.names() and all(set(fields) == {"status", "priority"} for fields in tasks.values()),
        checked="scan of all tasks",
        figure=f"{len(tasks)} tasks",
    )
    logged = context.processes.until(lambda: _best_effort_records(context, len(tasks)), "Writing the session log")
    output.claim(
        "the model's confidence is in the session log, once per ticket",
        logged == len(tasks),
        checked="records of the session log",
        figure=f"{logged} records",
    )
    important = entities.write(KIND, _ID, {"priority": 1})
    with entities.transaction() as tx:
        tx.write(KIND, _ID, "status", "closed")
        tx.write(KIND, _ID, "priority", 2)
    best_effort = entities.write(KIND, _ID, {"ml_confidence": 0.42})
    history = entities.history(KIND, _ID)
    durabilities = [change.durability for change in history]
    output.claim(
        "each answer names its durability, and the history records it",
        (important.durability, best_effort.durability) == (Tier.IMPORTANT, Tier.BEST_EFFORT)
        and durabilities == [Tier.CRITICAL, Tier.IMPORTANT, Tier.CRITICAL]
        and best_effort.versions == [None],
        checked="answers, and history of one task",
        figure=", ".join(durabilities),
    )
    _check_conflict(context)


def _check_conflict(context: DemoContext) -> None:
    output, entities = context.output, context.plane.entities
    seen = entities.get(KIND, _ID)
    version = 0 if seen is None else seen.version
    entities.put_if_version(KIND, _ID, {"status": "reopened", "priority": 2}, expected_version=version)
    try:
        entities.put_if_version(KIND, _ID, {"status": "deleted", "priority": 2}, expected_version=version)
    except VersionConflict as error:
        error_code = error.code
    else:
        error_code = "no conflict"
    after = entities.get(KIND, _ID)
    output.claim(
        "of two writers that read the same version, one succeeds and one gets a conflict",
        error_code == VersionConflict.code and after is not None and after["status"] == "reopened",
        checked="two writes to one version, then a read",
        figure=error_code,
    )


def all_tasks(context: DemoContext) -> dict[str, dict[str, Any]]:
    """The durable fields of every task."""
    found: dict[str, dict[str, Any]] = {}
    after = ""
    while page := context.plane.entities.scan(KIND, after=after, limit=_PAGE):
        found |= {task.id: task.fields for task in page}
        after = page[-1].id
    return found


def _best_effort_records(context: DemoContext, enough: int) -> int | None:
    """The number of BEST_EFFORT records, once there are `enough`; None before. They are written with a delay."""
    count, after = 0, None
    while True:
        page = context.plane.activity.read(kind=LOG_KIND, after=after)
        count += len(page.records)
        after = page.next
        if after is None or not page.records:
            return count if count >= enough else None
