"""Encryption at rest: encrypts universes, and changes their keys."""

from fastness.wire import AsyncTransport
from fastness.wire.encryption import (
    EnableEncryption,
    EncryptionStatus,
    RewriteValues,
    Rewritten,
    RotateKey,
    ShowEncryption,
    UniverseEncryption,
)


class AsyncEncryption:
    """The encryption of the universes of a plane. See docs/how-to/encrypt-data.md."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def show(self) -> EncryptionStatus:
        """Which universes are encrypted."""
        return await self._transport.call(ShowEncryption())

    async def enable(self, universe: str) -> UniverseEncryption:
        """Encrypt the values and objects of a universe from now on. It cannot be turned off again.

        Raises:
            EncryptionKeyMissing: the plane was opened without a master key.
            Unsupported: the plane is in memory.
        """
        return await self._transport.call(EnableEncryption(universe))

    async def rotate(self, universe: str, *, master: bool = False) -> UniverseEncryption:
        """Encrypt new values of a universe with a new key. An empty name is for the plane's own key.

        With `master`, the data keys stay the same, and are wrapped with the newest master key.

        Raises:
            NotFound: the universe is not encrypted.
        """
        return await self._transport.call(RotateKey(universe, master))

    async def rewrite(self, universe: str) -> Rewritten:
        """Encrypt everything of a universe with the newest key that has an older one or none. It may take long.

        A rewrite that was interrupted goes on where it ended.

        Raises:
            NotFound: the universe is not encrypted.
        """
        values = objects = 0
        while True:
            done = await self.rewrite_some(universe)
            values, objects = values + done.values, objects + done.objects
            if done.is_complete:
                return Rewritten(values, objects, True)

    async def rewrite_some(self, universe: str) -> Rewritten:
        """One step of `rewrite`, which takes a second or so."""
        return await self._transport.call(RewriteValues(universe))
