"""The app of tasks that name none. Its plane is that of the command line: `connect` says which."""

from collections.abc import Callable
from typing import Any, Final, Unpack, overload

from fastness.tasks.app import Parameters, Result, Task, TaskApp, TaskOptions

DEFAULT_APP: Final = TaskApp()


@overload
def task(function: Callable[Parameters, Result], /) -> Task[Parameters, Result]: ...


@overload
def task(
    function: None = None, /, **options: Unpack[TaskOptions]
) -> Callable[[Callable[Parameters, Result]], Task[Parameters, Result]]: ...


def task(function: Callable[..., Any] | None = None, /, **options: Unpack[TaskOptions]) -> Any:
    """Make a function a task of the default app, which uses the plane of the command line: `@task`, `@task(queue=…)`.

    Args:
        name: its name in messages; by default the module and name of the function. Workers find it by that.
        queue: the queue of its calls; `tasks` by default.
        max_attempts: how often it may fail before its message is a dead letter.
        retry_delay_seconds: the delay after the first failure, from which the back-off of the queue grows.
        visibility_seconds: how soon a call is delivered again whose worker has crashed.
        priority: 0 to 9; 9 is delivered first.
        ttl_seconds: how long a call is kept.
        concurrency_key: the name of an argument, or a function of the arguments that returns text. Calls with the same
            key share `concurrency_per_key` and `rate_per_key` of the queue's policy, and take turns if it is `fair`.
        unique: the same for `unique_key`: while a call with the key is not done, another one is not put.
        keep_result: whether the result, or the failure, is kept for the receipt; True by default.
    """
    return DEFAULT_APP.task(**options) if function is None else DEFAULT_APP.task(function)
