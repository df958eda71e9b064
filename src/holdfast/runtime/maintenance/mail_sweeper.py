"""The mail sweeper: forgets mail whose time is over, although nobody reads it.

    every five minutes, universe by universe:  sweep ──► sweep ──► … until nothing is over

Readers pass over what is over and a full mailbox makes room by itself, so nothing but space depends on this. A universe
that has more to forget than a bounded number of transactions can waits for the next time. Where several nodes share a
key space all of them sweep: each transaction forgets what is over when it runs, so another one finds it gone.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from holdfast.errors import Closed, HoldfastError
from holdfast.kv import Database, Transaction
from holdfast.layers import mailboxes, worlds
from holdfast.layers.mailboxes import Address
from holdfast.limits import MAIL_SWEEP_SECONDS, MAIL_SWEEPS_MAX
from holdfast.tiers import Tier

_log = logging.getLogger("holdfast.mail")
_PAGE = 100
_JITTER = 0.1  # Of the time between two sweeps: spreads those of several nodes.

Publish = Callable[[list[tuple[Any, ...]]], None]


class MailSweeper:
    """A thread that sweeps all universes, then rests; one that fails is logged and does not stop the others."""

    def __init__(self, database: Database, publish: Publish, *, shared: bool) -> None:
        self._database = database
        self._publish = publish
        self._jitter = _JITTER if shared else 0.0
        self._random = Random()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-mail-sweeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the transaction at hand, then end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        rest_seconds = 0.0  # What was over while nobody ran goes first.
        while not self._stopping.wait(rest_seconds):
            rest_seconds = MAIL_SWEEP_SECONDS * (1 + self._random.random() * self._jitter)
            try:
                for universe in self._universes():
                    self._sweep(universe)
            except Closed:
                return
            except HoldfastError as error:
                _log.warning("mail could not be swept, and will be in %.0f s: %s", rest_seconds, error)
            except Exception:
                _log.exception("mail could not be swept, and will be in %.0f s", rest_seconds)

    def _sweep(self, universe: str) -> None:
        cleaned: Counter[str] = Counter()
        try:
            for _ in range(MAIL_SWEEPS_MAX):
                if self._stopping.is_set():
                    break
                # A power loss may take it back: what is over is over, and is forgotten again.
                counts, more, events = self._database.transact(_sweep, universe, tier=Tier.IMPORTANT)
                cleaned.update(counts)
                self._publish(events)
                if not more:
                    break
        except Closed:
            raise
        except HoldfastError as error:
            _log.warning("the mail of %s could not be swept, and will be the next time: %s", universe, error)
        except Exception:  # One universe must not keep all others from being swept.
            _log.exception("the mail of %s could not be swept; that of others is", universe)
        for agent, count in sorted(cleaned.items()):
            mails = "mail" if count == 1 else "mails"
            _log.info("cleaned %s expired %s for %s", count, mails, Address(universe, agent))

    def _universes(self) -> Iterator[str]:
        universe = ""
        while found := self._database.read(worlds.universes, after=universe, limit=_PAGE):
            universe = found[-1]
            yield from found


def _sweep(tx: Transaction, universe: str) -> tuple[dict[str, int], bool, list[tuple[Any, ...]]]:
    counts, more = mailboxes.sweep(tx, universe)
    return counts, more, tx.events
