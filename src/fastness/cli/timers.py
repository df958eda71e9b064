"""`fastness timer`: the times at which worlds want an item."""

from fastness.cli import completion, printing
from fastness.cli.commands import CommandGroup
from fastness.cli.operations import operation
from fastness.wire.timers import ListTimers

timer = CommandGroup(completions={"world": completion.worlds})

operation(
    timer,
    "list",
    ListTimers,
    columns=("due_at", "world", "timer_id", "height"),
    show=lambda found: printing.fields(found, deliver_at_ms="due_at"),
    arguments={"world": "[WORLD]"},
)
