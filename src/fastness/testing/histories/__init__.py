"""Histories of concurrent operations, and checkers that decide whether a correct system could produce them.

    OK        invoked ──o──── returned      it happened once, in between
    FAILED    invoked ─────── returned      it never happened
    UNKNOWN   invoked ─────────?──── ···    the answer was lost: it happens once, at any later time, or never

`invoked` and `returned` are positions from one counter, so a seed always gives the same history and digest. An
operation that never returned is UNKNOWN. Keys, arguments and results are plain data that msgspec can encode;
two values are the same if they encode to the same bytes (a tuple equals a list, and 1 is not True).

    checker              kinds: argument -> result                             guarantee
    check_register       read: -> value; write: value; cas: (old, new) -> bool   strictly serializable
    check_counter        increment: amount -> value after                      each counted once, in real-time order
    check_fences         acquire: -> fence                                     a later grant has a higher fence
    check_nothing_lost   write, cas                                            acknowledged writes are stored

`queues`, `leases`, `locks`, `journals` and `mail` have the checkers of these resources, each with the kinds that it
knows.
"""

from fastness.testing.histories.counters import check_all_fences, check_counter, check_fences, check_nothing_lost
from fastness.testing.histories.record import NEVER, History, Operation, Outcome, Violation
from fastness.testing.histories.registers import STATES_MAX, Undecided, check_register, check_registers

__all__ = [
    "NEVER",
    "STATES_MAX",
    "History",
    "Operation",
    "Outcome",
    "Undecided",
    "Violation",
    "check_all_fences",
    "check_counter",
    "check_fences",
    "check_nothing_lost",
    "check_register",
    "check_registers",
]
