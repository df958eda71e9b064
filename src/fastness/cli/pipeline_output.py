"""Prints the results of jobs, and the status of a lake."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from fastness.cli import printing
from fastness.cli.commands import wants_json

if TYPE_CHECKING:
    from fastness.pipeline.config import JobResult
    from fastness.pipeline.observation.status import LakeStatus

_FINDINGS_SHOWN: Final = 20  # --json has them all.


def print_results(results: "Sequence[JobResult]", *, many: bool) -> None:
    if wants_json():
        found = [msgspec.to_builtins(each) for each in results]
        if many:
            printing.rows(found, ())
        else:
            printing.record(found[0])
        return
    printing.rows([_summary(each) for each in results], ("job", "verdict", "rows", "seconds"))
    for each in results:
        for note in each.notes:
            click.echo(printing.escape_control(f"{each.job}: {note}"))
        for finding in each.findings[:_FINDINGS_SHOWN]:
            click.echo(printing.escape_control(f"✗ {each.job}: {_finding_text(finding)}"))
        if (more := len(each.findings) - _FINDINGS_SHOWN) > 0:
            click.echo(f"  and {more:,} more; --json has them all")


def print_status(found: "LakeStatus") -> None:
    if wants_json():
        printing.record(msgspec.to_builtins(found))
        return
    runs = [
        {**msgspec.structs.asdict(run), "started": _time(run.started_at), "completed": _time(run.completed_at)}
        for run in found.runs
    ]
    printing.rows(runs, ("job", "state", "started", "completed", "seconds", "findings"), empty="No job has run yet.")
    for run in found.runs:
        if run.error is not None:
            click.echo(printing.escape_control(f"✗ {run.job}: {' '.join(run.error.split())}"))
    click.echo()
    tables = [
        {
            **msgspec.structs.asdict(table),
            "committed": _time(table.committed_at),
            "lag": table.lag and f"{table.lag.amount:,} {table.lag.unit}",
        }
        for table in found.tables
    ]
    printing.rows(
        tables, ("table", "rows", "files", "bytes", "committed", "marks", "quarantined", "lag"), empty="No tables yet."
    )


def _time(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S}Z"


def _summary(result: "JobResult") -> dict[str, Any]:
    rows = ", ".join(f"{table} {count:,}" for table, count in result.rows.items() if count)
    verdict = "ok" if result.ok else f"{len(result.findings):,} findings"
    return {"job": result.job, "verdict": verdict, "rows": rows or "nothing new", "seconds": round(result.seconds, 1)}


def _finding_text(finding: dict[str, Any]) -> str:
    """A finding as text: the location, the reason, then its other fields."""
    rest = {key: value for key, value in finding.items() if value is not None}
    location = "/".join(str(rest.pop(key)) for key in ("universe", "world") if key in rest)
    height = f" at {rest.pop('height')}" if "height" in rest else ""
    reason = f": {rest.pop('reason')}" if "reason" in rest else ""
    more = f" ({', '.join(f'{key} {value}' for key, value in rest.items())})" if rest else ""
    return f"{location}{height}{reason}{more}"
