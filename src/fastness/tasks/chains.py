"""Chains and groups of task calls.

a.s(1).then(b.s()).then(c.s())                  b gets the result of a, and c that of b
group(a.s(1), a.s(2)).then(c.s())               c gets the list of both results
a.s(1).on_failure(undo.s(1))                    undo is put when a has failed for good
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from fastness.errors import BatchTooLarge, EmptyBatch, InvalidArgument
from fastness.handles.receipts import AsyncPutReceipt
from fastness.handles.sync.receipts import PutReceipt
from fastness.handles.task_flow import nesting_of, step_count
from fastness.limits import TASK_GROUP_MEMBERS_MAX, TASK_NESTING_MAX, TASK_STEPS_MAX
from fastness.wire.tasks import Step, TaskCall, TaskGroup


class Sender(Protocol):
    """Puts the first messages of chains."""

    def put(self, steps: list[Step]) -> list[PutReceipt]: ...

    async def put_async(self, steps: list[Step]) -> list[AsyncPutReceipt]: ...


class Chainable(ABC):
    """What can be a step: a call, a chain or a group."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def then(self, step: "Chainable", *, pass_result: bool = True) -> "Chain":
        """Continue with a step, which gets the result as its first argument unless `pass_result` is False.

        The result, and the message of the next step, are one commit.
        """
        return Chain(self._sender, self, [*_checked_step(step).steps(takes_result=pass_result)])

    def steps(self, *, takes_result: bool) -> list[Step]:
        """The steps, the first of which gets the result of the step before if `takes_result`.

        Raises:
            InvalidArgument: arguments do not fit a task, or steps are nested too deep.
            BatchTooLarge: there are too many steps.
        """
        steps = self._steps(takes_result=takes_result)
        if step_count(steps) > TASK_STEPS_MAX:
            raise BatchTooLarge(f"A chain has at most {TASK_STEPS_MAX} calls and groups; let a task send the rest")
        if nesting_of(steps) > TASK_NESTING_MAX:
            raise InvalidArgument(
                f"Groups and steps of on_failure are nested at most {TASK_NESTING_MAX} deep; let a task send the rest"
            )
        return steps

    @abstractmethod
    def _steps(self, *, takes_result: bool) -> list[Step]: ...


class Signature(Chainable):
    """A call of a task that was not sent yet."""

    def __init__(self, sender: Sender, call: Callable[[bool], TaskCall], on_failure: Sequence[list[Step]] = ()) -> None:
        super().__init__(sender)
        self._call = call
        self._on_failure = list(on_failure)

    def on_failure(self, step: Chainable) -> "Signature":
        """The call with a step, or a chain, that is put when the message becomes a dead letter after its last attempt.

        Both are one commit. The step gets exactly its own arguments.
        """
        return Signature(self._sender, self._call, [*self._on_failure, _checked_step(step).steps(takes_result=False)])

    def send(self) -> PutReceipt:
        """Put its message. Raises what `send` of its task raises."""
        return self._sender.put(self.steps(takes_result=False))[0]

    async def send_async(self) -> AsyncPutReceipt:
        """`send` for asyncio."""
        return (await self._sender.put_async(self.steps(takes_result=False)))[0]

    def _steps(self, *, takes_result: bool) -> list[Step]:
        return [msgspec.structs.replace(self._call(takes_result), on_failure=self._on_failure)]


class _Several(Chainable):
    """What may put several messages."""

    def send(self) -> list[PutReceipt]:
        """Put what comes first: one message, or those of a group, in one commit. Their receipts, in order."""
        return self._sender.put(self.steps(takes_result=False))

    async def send_async(self) -> list[AsyncPutReceipt]:
        """`send` for asyncio."""
        return await self._sender.put_async(self.steps(takes_result=False))


class Chain(_Several):
    """Steps that run one after the other."""

    def __init__(self, sender: Sender, first: Chainable, rest: list[Step]) -> None:
        super().__init__(sender)
        self._first = first
        self._rest = rest

    def then(self, step: Chainable, *, pass_result: bool = True) -> "Chain":
        """The chain with another step, which gets the last result as its first argument unless `pass_result` is False.

        The result, and the message of the next step, are one commit.
        """
        return Chain(self._sender, self._first, [*self._rest, *_checked_step(step).steps(takes_result=pass_result)])

    def on_failure(self, step: Chainable) -> "Chain":
        """The chain with a step that is put when any of its calls has failed for good. The calls after it do not run.

        Raises:
            InvalidArgument: the chain has a group, several members of which may fail; give it to its members.
        """
        chain = _checked_step(step).steps(takes_result=False)
        if not isinstance(self._first, Signature) or any(isinstance(each, TaskGroup) for each in self._rest):
            raise InvalidArgument(
                "Several members of a group may fail, and each would start this step; call on_failure on its members"
            )
        rest: list[Step] = [
            msgspec.structs.replace(call, on_failure=[*call.on_failure, chain])
            for call in self._rest
            if isinstance(call, TaskCall)
        ]
        return Chain(self._sender, self._first.on_failure(step), rest)

    def _steps(self, *, takes_result: bool) -> list[Step]:
        return [*self._first.steps(takes_result=takes_result), *self._rest]


class Group(_Several):
    """Calls and chains that run side by side. The result is the list of their results, in their order."""

    def __init__(self, sender: Sender, members: Sequence[Chainable]) -> None:
        super().__init__(sender)
        self._members = list(members)

    def _steps(self, *, takes_result: bool) -> list[Step]:
        return [TaskGroup([each.steps(takes_result=takes_result) for each in self._members], takes_result)]


def group(*members: Chainable) -> Group:
    """Calls and chains that run side by side.

    Raises:
        EmptyBatch, BatchTooLarge: there are none, or more than a group may have.
    """
    if not members:
        raise EmptyBatch("A group needs at least one member: group(task.s(…), …)")
    if len(members) > TASK_GROUP_MEMBERS_MAX:
        raise BatchTooLarge(f"A group has at most {TASK_GROUP_MEMBERS_MAX} members; let a task send the rest")
    return Group(_checked_step(members[0])._sender, [_checked_step(member) for member in members])


def _checked_step(step: object) -> Chainable:
    if isinstance(step, Chainable):
        return step
    raise InvalidArgument(f"{step!r} is not a step; write task.s(…), a chain of them, or group(…)")
