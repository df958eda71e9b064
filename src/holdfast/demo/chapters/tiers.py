"""Entities: each field as durable as it needs to be."""

from typing import Any, Final

from holdfast.demo.chapters import poison
from holdfast.demo.context import DemoContext
from holdfast.errors import VersionConflict
from holdfast.layers.field_tiers import LOG_KIND
from holdfast.tiers import Tier

KIND: Final = "task"
_ID: Final = "ticket-007"
_PAGE: Final = 100


def tell(night: DemoContext) -> None:
    stage, entities = night.stage, night.plane.entities
    stage.chapter("Three promises, field by field")
    stage.say(
        "Every ticket has a task. Its status must survive a power cut, its priority a crash, and what a model guessed "
        "about it need not survive anything. One write carries all three, and each is kept as its tier asks."
    )
    tasks = all_tasks(night)
    stage.claim(
        "every ticket has its task, with the two durable fields in its row and no other",
        set(tasks) == poison.names() and all(set(fields) == {"status", "priority"} for fields in tasks.values()),
        checked="scan of all tasks",
        figure=f"{len(tasks)} tasks",
    )
    logged = night.cast.until(lambda: _guesses(night, len(tasks)), "The arrival of session logs")
    stage.claim(
        "what a model guessed is in the session log, once for each ticket",
        logged == len(tasks),
        checked="records of the session log",
        figure=f"{logged} records",
    )
    kept = entities.write(KIND, _ID, {"priority": 1})
    with entities.transaction() as tx:
        tx.write(KIND, _ID, "status", "closed")
        tx.write(KIND, _ID, "priority", 2)
    loose = entities.write(KIND, _ID, {"ml_confidence": 0.42})
    history = entities.history(KIND, _ID)
    promises = [change.durability for change in history]
    stage.claim(
        "each answer says which promise it carries, and the history remembers it",
        (kept.durability, loose.durability) == (Tier.IMPORTANT, Tier.BEST_EFFORT)
        and promises == [Tier.CRITICAL, Tier.IMPORTANT, Tier.CRITICAL]
        and loose.versions == [None],
        checked="answers, and history of one task",
        figure=", ".join(promises),
    )
    _race(night)


def _race(night: DemoContext) -> None:
    stage, entities = night.stage, night.plane.entities
    seen = entities.get(KIND, _ID)
    version = 0 if seen is None else seen.version
    entities.put_if_version(KIND, _ID, {"status": "reopened", "priority": 2}, expected_version=version)
    try:
        entities.put_if_version(KIND, _ID, {"status": "deleted", "priority": 2}, expected_version=version)
    except VersionConflict as error:
        refused = error.code
    else:
        refused = "nobody was refused"
    after = entities.get(KIND, _ID)
    stage.claim(
        "of two agents that saw the same version, one writes and one is told",
        refused == VersionConflict.code and after is not None and after["status"] == "reopened",
        checked="two writes over one version, then a read",
        figure=refused,
    )


def all_tasks(night: DemoContext) -> dict[str, dict[str, Any]]:
    """The durable fields of every task."""
    found: dict[str, dict[str, Any]] = {}
    after = ""
    while page := night.plane.entities.scan(KIND, after=after, limit=_PAGE):
        found |= {task.id: task.fields for task in page}
        after = page[-1].id
    return found


def _guesses(night: DemoContext, enough: int) -> int | None:
    """How many records of best effort there are, once there are enough: they reach their file a moment later."""
    count, after = 0, None
    while True:
        page = night.plane.activity.read(kind=LOG_KIND, after=after)
        count += len(page.records)
        after = page.next
        if after is None or not page.records:
            return count if count >= enough else None
