"""The state of a key of messages, one record for each key that has any."""

import msgspec


class KeyState(msgspec.Struct, array_like=True):
    """What is known of a key. Not frozen: a transaction changes it several times and writes it once."""

    leased: int = 0
    waiting: int = 0
    front: bytes = b""  # No message of the key waits before this place.
    ready_place: bytes = b""  # The place of the ready message among those of its key; empty: none is ready.
    ready_at: bytes = b""  # Where it is among the ready messages of all keys.
    budget: float = 0.0  # Deliveries that the rate of the key allowed at `budget_ms`.
    budget_ms: int = 0  # 0: the budget is full.
    paused_until_ms: int = 0
    due_ms: int = 0  # The time of its entry in the due index; 0: it has none.

    @property
    def is_busy(self) -> bool:
        """Whether the key has messages that are ready, waiting or leased."""
        return bool(self.leased or self.waiting or self.ready_place)

    @property
    def is_needed(self) -> bool:
        """Whether the record must be kept."""
        return self.is_busy or self.due_ms > 0


decode_state = msgspec.msgpack.Decoder(KeyState).decode
