"""Deduplication matches a model that is an ordered dictionary."""

from collections import OrderedDict

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.errors import Busy
from fastness.runtime.ingress.dedupe import Dedupe, Reservation, Stage
from fastness.testing.clock import ManualClock

MOST = 4
TTL_MS = 1_000
keys = st.sampled_from([number.to_bytes(16, "big") for number in range(8)])


class Keys(RuleBasedStateMachine):
    """The model: kept keys in order, with their times and whether their push is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.real = Dedupe(self.clock, seconds=TTL_MS / 1_000, keys_max=MOST)
        self.model: OrderedDict[bytes, tuple[int, bool, Reservation]] = OrderedDict()
        self.pending: list[Reservation] = []  # Including those whose key was evicted since.

    def keeps(self, key: bytes) -> bool:
        return key in self.model and self.clock.now_ms() - self.model[key][0] < TTL_MS

    @rule(key=keys)
    def push(self, key: bytes) -> None:
        """A kept key is a duplicate; any other is reserved. No key is reserved twice at a time."""
        found = self.real.find(key)
        assert (found is not None) == self.keeps(key)
        if found is not None:
            assert found is self.model[key][2]
            return
        made = self.real.reserve(key)
        self.model.pop(key, None)
        self.model[key] = (self.clock.now_ms(), False, made)
        if len(self.model) > MOST:
            self.model.popitem(last=False)
        self.pending.append(made)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), stored=st.booleans())
    def flush(self, data: st.DataObject, stored: bool) -> None:
        made = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        mine = made.key in self.model and self.model[made.key][2] is made
        if stored:
            self.real.settle(made)
            if mine:
                self.model[made.key] = (self.model[made.key][0], True, made)
        else:
            self.real.release(made, Busy("lost"))
            if mine:
                del self.model[made.key]
        assert made.stage is (Stage.STORED if stored else Stage.LOST)

    @rule(milliseconds=st.integers(0, TTL_MS))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    @rule()
    def prune(self) -> None:
        self.real.prune()
        for key in [key for key in self.model if not self.keeps(key)]:
            del self.model[key]

    @rule()
    def restart(self) -> None:
        """Saved keys of stored pushes are kept; pending ones are lost with the process."""
        written = self.real.stored()
        assert written == [(key, at_ms) for key, (at_ms, stored, _) in self.model.items() if stored]
        self.real = Dedupe(self.clock, seconds=TTL_MS / 1_000, keys_max=MOST)
        self.real.restore(written)
        self.model = OrderedDict((key, at) for key, at in self.model.items() if at[1] and self.keeps(key))
        for key, (at_ms, _, _) in self.model.items():
            found = self.real.find(key)
            assert found is not None
            assert found.at_ms == at_ms
            self.model[key] = (at_ms, True, found)
        self.pending = []

    @invariant()
    def dedupe_equals_the_model(self) -> None:
        assert list(self.real._known) == list(self.model)
        assert len(self.real) <= MOST
        for number in range(8):
            key = number.to_bytes(16, "big")
            assert (self.real.find(key) is not None) == self.keeps(key)


TestKeys = Keys.TestCase
