"""The mail sweeper removes expired mail from mailboxes that are not read.

    every five minutes, universe by universe:  sweep ──► sweep ──► … until nothing is expired

Readers skip expired mail and a full mailbox removes its own, so only disk space depends on this. A universe with more
expired mail than a bounded number of transactions can remove continues at the next interval. Where several nodes share
a key space, the one on duty sweeps. Each transaction removes what is expired when it runs, so two at once are harmless.
"""

import logging
from collections import Counter
from random import Random

from fastness.errors import Closed, DecryptionFailed, FastnessError
from fastness.kv import Database
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.limits import MAIL_SWEEP_SECONDS, MAIL_SWEEPS_MAX
from fastness.runtime.background import Job, Steps
from fastness.runtime.maintenance.every import every_universe
from fastness.runtime.maintenance.skipping import skip_undecryptable
from fastness.tiers import Tier

_log = logging.getLogger("fastness.mail")
_JITTER = 0.1  # Share of the interval: spreads the sweeps of several nodes.


class MailSweeper:
    """A job that sweeps all universes at an interval; an error in one is logged, and the others continue."""

    def __init__(self, database: Database, *, shared: bool) -> None:
        self._database = database
        self._jitter = _JITTER if shared else 0.0
        self._random = Random()
        # The first sweep removes what expired while no process ran.
        self.job = Job("the removal of expired mail", self._run, only_on_duty=True)

    def _run(self) -> Steps:
        while True:
            for universe in every_universe(self._database):
                with skip_undecryptable(self._database, universe, "the removal of expired mail"):
                    yield from self._sweep(universe)
            yield MAIL_SWEEP_SECONDS * (1 + self._random.random() * self._jitter)

    def _sweep(self, universe: str) -> Steps:
        cleaned: Counter[str] = Counter()
        try:
            for _ in range(MAIL_SWEEPS_MAX):
                entries = self._database.read(mailboxes.due_entries, universe)
                if not entries:
                    break
                # A power loss may undo this; the next sweep removes it again.
                cleaned.update(self._database.transact(mailboxes.sweep, universe, entries, tier=Tier.IMPORTANT))
                yield 0.0
        except (Closed, DecryptionFailed):
            raise
        except FastnessError as error:
            _log.warning("expired mail of %s could not be removed; retrying at the next sweep: %s", universe, error)
        except Exception:  # An error in one universe must not stop the sweep of the others.
            _log.exception(
                "unexpected error while removing expired mail of %s; continuing with the other universes", universe
            )
        for agent, count in sorted(cleaned.items()):
            mails = "mail" if count == 1 else "mails"
            _log.info("cleaned %s expired %s for %s", count, mails, Address(universe, agent))
