"""The bodies of task messages: which function to call, with which arguments, and what follows.

    {"task": "shop.send_email", "args": ["ada@example.com"], "kwargs": {"subject": "Hello"}}

`then` has the steps that follow. A step is a call, or a group of chains that run side by side. A chain of a group knows
its `join`: the state document that collects the results of the group until the last chain has finished.
"""

from typing import Any, Final, Union

import msgspec

TASK_ATTRIBUTE: Final = "fastness-task"  # The attribute of a message that has the name of its task.


class TaskCall(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="step", tag="call"):
    """A step that calls a task: a message of `queue` with these options."""

    task: str
    queue: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    options: dict[str, Any] = {}  # As in `MessageOptions`.
    takes_result: bool = False  # The result of the step before is its first argument.
    keys_from_result: bool = False  # Its keys depend on that result, so its caller has to know the task.
    on_failure: list[list["Step"]] = []  # Chains that are put when its message becomes a dead letter.


class TaskGroup(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="step", tag="group"):
    """A step of several chains. Its result is the list of theirs."""

    members: list[list["Step"]]
    takes_result: bool = False  # The first step of each chain gets the result of the step before.


Step = Union[TaskCall, TaskGroup]  # noqa: UP007


class Join(msgspec.Struct, frozen=True):
    """Where the result of a chain of a group goes."""

    key: str  # The state document of the group.
    member: int


class TaskMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a task message."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    then: list[Step] = []
    on_failure: list[list[Step]] = []
    join: Join | None = None
    drops_result: bool = False  # Its result is passed to the next step only.


class GroupDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state document of a group that has not finished: the results of its chains so far, by their numbers."""

    members: int
    result_bytes_max: int
    then: list[Step] = []
    join: Join | None = None  # Where the result of the group goes, if it is part of another group.
    correlation_id: str | None = None
    results: dict[int, Any] = {}
