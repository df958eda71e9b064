"""An agent's key: it proves who the agent is, and seals mail so that only its recipient can read it.

    Ed25519      signs what a relay asks to be signed
    Curve25519   made from the same key, seals: whoever opens a mail also knows that its sender's key sealed it

A server sees nothing but the sealed bytes. It could, however, name a wrong key for an agent that asks: whoever does not
trust it exchanges public keys by another way.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from holdfast.errors import InvalidArgument, SealBroken, Unsupported

if TYPE_CHECKING:
    from nacl.public import Box

SEALED: Final = "application/vnd.holdfast.sealed"  # The content type of a mail that is sealed.
KEY_BYTES: Final = 32

_LENGTH_BYTES: Final = 2  # Of the content type, which is sealed along with the body.


class AgentKey:
    """The secret key of an agent. Keep it where only the agent can read it."""

    def __init__(self, secret: bytes) -> None:
        """The key that these 32 bytes are.

        Raises:
            InvalidArgument: there are more of them, or fewer.
        """
        if secret.__class__ is not bytes or len(secret) != KEY_BYTES:
            raise InvalidArgument(f"An agent's secret key is {KEY_BYTES} bytes; make one with AgentKey.generate()")
        # Most programs never make a key, and these imports take longer than all of Holdfast's own.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._secret = secret
        self._signing = Ed25519PrivateKey.from_private_bytes(secret)
        self.public_key = self._signing.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """A new key."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The key in a file that `save` wrote.

        Raises:
            InvalidArgument: there is none.
        """
        try:
            return cls(bytes.fromhex(Path(path).read_text(encoding="ascii").strip()))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{os.fspath(path)} holds no agent's key ({error}); make one with save()") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read.

        Raises:
            InvalidArgument: the file is there already, or cannot be written.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InvalidArgument(f"{os.fspath(path)} cannot be made ({error.strerror}); choose another file") from None
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self._secret.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`, 64 bytes."""
        return self._signing.sign(data)

    def seal(self, body: bytes, content_type: str, *, recipient: bytes) -> bytes:
        """A body that only whoever has the secret key of `recipient`, a public key, can open.

        Raises:
            Unsupported: PyNaCl is not installed.
            InvalidArgument: `recipient` is no public key.
        """
        kind = content_type.encode()
        return bytes(self._box(recipient).encrypt(len(kind).to_bytes(_LENGTH_BYTES, "big") + kind + body))

    def open(self, sealed: bytes, *, sender: bytes) -> tuple[bytes, str]:
        """A body that `sender`, a public key, has sealed for this one, and its content type.

        Raises:
            SealBroken: somebody else sealed it, or for somebody else, or it was changed on its way.
            Unsupported, InvalidArgument: as `seal`.
        """
        box = self._box(sender)  # Says what is missing if PyNaCl is.
        from nacl.exceptions import CryptoError

        try:
            opened = box.decrypt(sealed)
        except (CryptoError, ValueError, TypeError):
            raise SealBroken("The seal is not that of its sender for this key; do not trust the mail") from None
        start = _LENGTH_BYTES + int.from_bytes(opened[:_LENGTH_BYTES], "big")
        return opened[start:], opened[_LENGTH_BYTES:start].decode(errors="replace")

    def _box(self, public_key: bytes) -> "Box":
        try:
            from nacl.exceptions import CryptoError
            from nacl.public import Box
            from nacl.signing import SigningKey, VerifyKey
        except ImportError:
            raise Unsupported("Sealing needs PyNaCl; install holdfast[seal]") from None
        try:
            theirs = VerifyKey(public_key).to_curve25519_public_key()
        except (CryptoError, ValueError, TypeError) as error:
            raise InvalidArgument(f"This is no agent's public key ({error}); ask the agent for it") from None
        return Box(SigningKey(self._secret).to_curve25519_private_key(), theirs)
