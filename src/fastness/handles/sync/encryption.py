"""Generated from handles/encryption.py by tools/make_twins.py; change that file instead."""

from fastness.wire import Transport
from fastness.wire.encryption import (
    EnableEncryption,
    EncryptionStatus,
    RewriteValues,
    Rewritten,
    RotateKey,
    ShowEncryption,
    UniverseEncryption,
)


class Encryption:
    """The encryption of the universes of a plane. See docs/how-to/encrypt-data.md."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def show(self) -> EncryptionStatus:
        """Which universes are encrypted."""
        return self._transport.call(ShowEncryption())

    def enable(self, universe: str) -> UniverseEncryption:
        """Encrypt the values and objects of a universe from now on. It cannot be turned off again.

        Raises:
            EncryptionKeyMissing: the plane was opened without a master key.
            Unsupported: the plane is in memory.
        """
        return self._transport.call(EnableEncryption(universe))

    def rotate(self, universe: str, *, master: bool = False) -> UniverseEncryption:
        """Encrypt new values of a universe with a new key. An empty name is for the plane's own key.

        With `master`, the data keys stay the same, and are wrapped with the newest master key.

        Raises:
            NotFound: the universe is not encrypted.
        """
        return self._transport.call(RotateKey(universe, master))

    def rewrite(self, universe: str) -> Rewritten:
        """Encrypt everything of a universe with the newest key that has an older one or none. It may take long.

        A rewrite that was interrupted goes on where it ended.

        Raises:
            NotFound: the universe is not encrypted.
        """
        values = objects = 0
        while True:
            done = self.rewrite_some(universe)
            values, objects = values + done.values, objects + done.objects
            if done.is_complete:
                return Rewritten(values, objects, True)

    def rewrite_some(self, universe: str) -> Rewritten:
        """One step of `rewrite`, which takes a second or so."""
        return self._transport.call(RewriteValues(universe))
