"""The records that the journal of a run has, beside the items of its inbox.

Each is an array: its word, the time in milliseconds, and what the word needs. `number` counts the calls of `run` in the
code, and `name` is that of the step, queue, signal and so on.

    [BEGIN, at_ms, seed]                                       the first turn; `seed` is that of its random numbers
    [STARTED, at_ms, number, name]                             a step may run from now on, so that its id is its own
    [STEP, at_ms, number, name, started_ms, result, blob]      a step has returned; a large result is in a blob instead
    [RETRY, at_ms, number, name, started_ms, error, due_ms]    an attempt has failed; the next one is due then
    [FAILED, at_ms, number, name, started_ms, error, attempts, inputs, blob]
                                                               a step or another call has failed for good
    [QUEUED, at_ms, number, name, queue, message_id]           a step is a task of a queue
    [SLEEP, at_ms, number, name, due_ms]                       the run sleeps until then
    [WAIT, at_ms, number, name, due_ms]                        it waits for a signal, until then or for ever (None)
    [CHILD, at_ms, number, workflow, id]                       it has started another run
    [PUT | SEND | MAIL | SIGNAL | STATE, at_ms, number, name]  it has put a message, sent an item or a mail, …
    [PATCH, at_ms, name]                                       the code was changed before it came here
    [CONTINUE, at_ms, seed, arguments, signals]                it starts again with [args, kwargs]; signals not consumed
    [END, at_ms, state, result, error]                         it has ended

An `error` is [type, message], or [type, message, traceback]. The `inputs` of a step are [args, kwargs]; the first RETRY
of a step has them, too, and large ones are in a blob. Results and arguments are values, not bytes; a blob is the hash
of their canonical CBOR, and is left out if there is none. What sets a timer has the intent hash
`<generation>.<number>`; CONTINUE starts the next generation, and the first one is 0.
"""

from typing import Final

BEGIN: Final = "begin"
STARTED: Final = "started"
STEP: Final = "step"
RETRY: Final = "retry"
FAILED: Final = "failed"
QUEUED: Final = "queued"
SLEEP: Final = "sleep"
WAIT: Final = "wait"
CHILD: Final = "child"
PUT: Final = "put"
SEND: Final = "send"
MAIL: Final = "mail"
SIGNAL: Final = "signal"
STATE: Final = "state"
PATCH: Final = "patch"
CONTINUE: Final = "continue"
END: Final = "end"

TIMER_DELAY_MS: Final = 1_000  # An attempt that is due later is started by a timer; an earlier one from memory.
OF_STEPS: Final = frozenset({STARTED, STEP, RETRY, FAILED, QUEUED})  # FAILED is of other calls, too.
SENT: Final = frozenset({PUT, SEND, MAIL, SIGNAL, STATE})  # What is done in the commit of its record.
