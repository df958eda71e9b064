"""Shell completion with the names in the selected plane: queues, worlds, runs, agents, locks, schedules and so on.

The shell runs `fastness` while its user waits, so this never waits long, never prints an error, and changes nothing: a
plane is not created, and a data directory is read without its lock, also while another process has it open.
"""

import atexit
import logging
import os
import string
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

if TYPE_CHECKING:
    from fastness.cli.connect import Target
    from fastness.client.transport import RemoteTransport
    from fastness.kv import Database
    from fastness.wire.requests import Request

    Call = Callable[[Request[Any]], Any]
    Opener = Callable[[], AbstractContextManager[Call]]

_SECONDS_MAX: Final = 1.0  # For the plane to answer.
_CONNECT_SECONDS_MAX: Final = 0.5  # For a server to accept the connection.
_NAMES_MAX: Final = 100
_CHARACTERS: Final = "".join(sorted(f"{string.ascii_letters}{string.digits}._@:+=-/"))  # Of names and keys.


class Lookup:
    """One completion: the plane to ask, and what was typed so far."""

    def __init__(self, call: "Call", universe: str, typed: str, arguments: dict[str, Any]) -> None:
        self.call = call
        self.universe = universe
        self.typed = typed
        self.arguments = arguments  # The arguments before this one.

    @property
    def page(self) -> tuple[str, int, str]:
        """The last possible name before those that begin with the typed text, how many to read, and the universe."""
        from fastness.limits import NAME_BYTES_MAX

        after, last = self.typed[:-1], self.typed[-1:]
        if (place := _CHARACTERS.find(last)) > 0:
            after = f"{after}{_CHARACTERS[place - 1]}".ljust(NAME_BYTES_MAX, _CHARACTERS[-1])
        return after, _NAMES_MAX, self.universe


Find = Callable[[Lookup], list[str]]


def queues(lookup: Lookup) -> list[str]:
    from fastness.wire.queues import ListQueues

    names: list[str] = lookup.call(ListQueues(*lookup.page)).names
    return names


def collections(lookup: Lookup) -> list[str]:
    from fastness.wire.collections import ListCollections

    names: list[str] = lookup.call(ListCollections(*lookup.page)).names
    return names


def worlds(lookup: Lookup) -> list[str]:
    from fastness.wire.worlds import ListWorlds

    names: list[str] = lookup.call(ListWorlds(*lookup.page)).names
    return names


def runs(lookup: Lookup) -> list[str]:
    from fastness.limits import RUN_ID_BYTES_MAX
    from fastness.wire.runs import ListRuns

    after, limit, universe = lookup.page
    after = after[:RUN_ID_BYTES_MAX]  # The padding of the page is as long as a name may be.
    return [each.id for each in lookup.call(ListRuns(after=after, limit=limit, universe=universe)).runs]


def workflows(lookup: Lookup) -> list[str]:
    """The workflows of the first runs: which ones hosts have is not known to the plane."""
    from fastness.wire.runs import ListRuns

    found = lookup.call(ListRuns(limit=_NAMES_MAX, universe=lookup.universe)).runs
    return sorted({each.workflow for each in found})


def agents(lookup: Lookup) -> list[str]:
    """Registered agents and mailboxes; a token may allow only one of the lists."""
    from fastness.errors import FastnessError
    from fastness.wire.agents import ListAgents
    from fastness.wire.mail import ListMailboxes

    names: set[str] = set()
    with suppress(FastnessError):
        names.update(each.name for each in lookup.call(ListAgents(*lookup.page)).agents)
    with suppress(FastnessError):
        names.update(each.agent for each in lookup.call(ListMailboxes(*lookup.page)).mailboxes)
    return sorted(names)


def leases(lookup: Lookup) -> list[str]:
    from fastness.wire.leases import ListLeases

    return [each.key for each in lookup.call(ListLeases(*lookup.page)).leases]


def lock_sessions(lookup: Lookup) -> list[str]:
    from fastness.wire.locks import ListLockSessions

    return [each.number for each in lookup.call(ListLockSessions(*lookup.page)).sessions]


def schedules(lookup: Lookup) -> list[str]:
    """The schedules of the queue that is given before them."""
    from fastness.wire.queues import ListSchedules

    found = lookup.call(ListSchedules(lookup.arguments["queue"], lookup.universe)).schedules
    return [each.name for each in found]


def tokens(lookup: Lookup) -> list[str]:
    """The names of tokens that are not revoked."""
    from fastness.wire.tokens import ListTokens

    return sorted({each.name for each in lookup.call(ListTokens()).tokens if each.revoked_ms is None})


def universes(lookup: Lookup) -> list[str]:
    from fastness.wire.universes import ListUniverses

    names: list[str] = lookup.call(ListUniverses(*lookup.page[:2])).names
    return names


def contexts(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of saved contexts, which are in a file of the user and not in the plane."""
    from fastness import context_file
    from fastness.errors import FastnessError

    try:
        return [name for name in context_file.load().contexts if name.startswith(incomplete)]
    except FastnessError:
        return []


class Names(StringParamType):
    """A text whose completions are names in the selected plane."""

    def __init__(self, find: Find) -> None:
        self._find = find

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from fastness.cli.connect import current_target
        from fastness.errors import FastnessError

        del param
        try:
            with ctx.scope(cleanup=False):
                target = current_target()
            open_plane = _opener(target)
        except FastnessError:
            return []
        names = _find_in_time(self._find, open_plane, target.universe, incomplete, dict(ctx.params))
        return [CompletionItem(name) for name in names[:_NAMES_MAX] if name.startswith(incomplete)]


def _find_in_time(find: Find, open_plane: "Opener", universe: str, typed: str, arguments: dict[str, Any]) -> list[str]:
    """What `find` returns; nothing if it fails or takes too long."""
    found: list[str] = []

    def run() -> None:
        with suppress(Exception), open_plane() as call:
            found.extend(find(Lookup(call, universe, typed, arguments)))

    disabled = logging.root.manager.disable
    logging.disable()  # A log line would appear in the middle of the user's command line.
    finding = threading.Thread(target=run, name="fastness-completion", daemon=True)
    finding.start()
    finding.join(_SECONDS_MAX)
    if finding.is_alive():
        _exit_without_waiting()
        return []
    logging.disable(disabled)
    return found


def _exit_without_waiting() -> None:
    """Let the process end although a thread of the storage engine or of the network still works."""

    def exit_now() -> None:
        sys.stdout.flush()
        os._exit(0)

    atexit.register(exit_now)


# The modules are imported before the time starts to count.


def _opener(target: "Target") -> "Opener":
    """A function that opens the plane to call it. Raises FastnessError if the target cannot be opened."""
    if target.is_server:
        from fastness.client.transport import RemoteTransport

        transport = RemoteTransport(
            target.url, token=target.token, tls=target.tls(), patience_seconds=_CONNECT_SECONDS_MAX
        )
        return lambda: _connected(transport)
    from fastness.names import folder_at
    from fastness.plane.open import open_database

    if target.is_exclusive:
        from fastness.backends.rocksdb import RocksReader

        path = folder_at(target.url) / "kv"
        return lambda: _reading(RocksReader(path, lock=False))
    return lambda: _reading(open_database(target.url, create=False))


@contextmanager
def _connected(transport: "RemoteTransport") -> "Iterator[Call]":
    try:
        yield transport.call
    finally:
        transport.close()


@contextmanager
def _reading(database: "Database") -> "Iterator[Call]":
    from fastness.plane.executor import execute

    with database:
        yield lambda request: database.read(execute, request)
