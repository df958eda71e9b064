"""The mark of a job or a run that a tool has started: who owns the task, and which tool it is of.

    mcp:<owner>:<number>:<tool>    the correlation id of a job
    mcp-<owner>-<number>-<tool>    the id of a run

Both are kept with the outcome, so that a task has its owner in every state. Attributes of a message are not.
"""

import hashlib
from typing import Final, NamedTuple

_OWNER_CHARACTERS: Final = 32
_JOB: Final = "mcp:"
_RUN: Final = "mcp-"
TASK_WORLD: Final = f"run:{_RUN}"  # The worlds of runs that are tasks begin so.


class Mark(NamedTuple):
    """What a mark says."""

    owner: str
    tool: str


def job_mark(owner: str, number: str, tool: str) -> str:
    """The correlation id of a new job."""
    return f"{_JOB}{owner}:{number}:{tool}"


def run_mark(owner: str, number: str, tool: str) -> str:
    """The id of a new run."""
    return f"{_RUN}{owner}-{number}-{tool}"


def mark_of_job(correlation_id: str) -> Mark | None:
    """The mark of a job; None if no tool has put it."""
    return _mark(correlation_id, _JOB)


def mark_of_run(id: str) -> Mark | None:
    """The mark of a run; None if no tool has started it."""
    return _mark(id, _RUN)


def owner_of(universe: str, agent: str, target: str) -> str:
    """What marks the jobs of an agent in a queue, or its runs of a workflow. A name may be too long for a mark."""
    text = f"{universe}/{agent}/{target}"
    return hashlib.sha256(text.encode()).hexdigest()[:_OWNER_CHARACTERS]


def is_task_of_another(mark: Mark | None, universe: str, agent: str, target: str) -> bool:
    """Whether a job or a run is the task of another agent."""
    return mark is not None and mark.owner != owner_of(universe, agent, target)


def _mark(text: str, kind: str) -> Mark | None:
    parts = text.removeprefix(kind).split(kind[-1], 2)
    return Mark(parts[0], parts[2]) if text.startswith(kind) and len(parts) == 3 else None
