"""Agent keys: they authenticate an agent, and encrypt ("seal") mail so that only its recipient can read it.

    Ed25519      signs a relay's challenges
    Curve25519   derived from the same key; encrypts and authenticates, so the recipient can verify the sender

A server sees only encrypted bytes. It could still return a wrong public key for an agent. If you do not trust the
server, exchange public keys through another channel.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from holdfast.errors import InvalidArgument, SealBroken, Unsupported
from holdfast.folders import sync_folder

if TYPE_CHECKING:
    from nacl.public import Box

SEALED: Final = "application/vnd.holdfast.sealed"  # The content type of encrypted mail.
KEY_BYTES: Final = 32

_LENGTH_BYTES: Final = 2  # Length prefix of the content type, which is encrypted with the body.


class AgentKey:
    """The secret key of an agent. Keep it where only the agent can read it."""

    def __init__(self, secret: bytes) -> None:
        """The key with these 32 secret bytes.

        Raises:
            InvalidArgument: `secret` is not 32 bytes.
        """
        if secret.__class__ is not bytes or len(secret) != KEY_BYTES:
            raise InvalidArgument(f"An agent's secret key is {KEY_BYTES} bytes; make one with AgentKey.generate()")
        # Imported here: most programs never need a key, and this import takes longer than all of Holdfast's own.
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
            InvalidArgument: the file has no key, or cannot be read.
        """
        try:
            return cls(bytes.fromhex(Path(path).read_text(encoding="ascii").strip()))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{os.fspath(path)} holds no agent key ({error}); create one with save()") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read.

        Raises:
            InvalidArgument: the file exists, or cannot be written.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InvalidArgument(f"{os.fspath(path)} cannot be created ({error.strerror}); choose another") from None
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self._secret.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(Path(path).absolute().parent)

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`, 64 bytes."""
        return self._signing.sign(data)

    def seal(self, body: bytes, content_type: str, *, recipient: bytes) -> bytes:
        """The encrypted body, which only the owner of the public key `recipient` can decrypt.

        Raises:
            Unsupported: PyNaCl is not installed.
            InvalidArgument: `recipient` is not a public key.
        """
        kind = content_type.encode()
        return bytes(self._box(recipient).encrypt(len(kind).to_bytes(_LENGTH_BYTES, "big") + kind + body))

    def open(self, sealed: bytes, *, sender: bytes) -> tuple[bytes, str]:
        """The body and content type of a mail that the owner of the public key `sender` sealed for this key.

        Raises:
            SealBroken: another key sealed it, it was sealed for another key, or it was modified.
            Unsupported, InvalidArgument: as `seal`.
        """
        box = self._box(sender)  # Raises Unsupported if PyNaCl is missing.
        from nacl.exceptions import CryptoError

        try:
            opened = box.decrypt(sealed)
        except (CryptoError, ValueError, TypeError):
            raise SealBroken("The mail is not sealed by this sender for this key; do not trust it") from None
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
            peer_key = VerifyKey(public_key).to_curve25519_public_key()
        except (CryptoError, ValueError, TypeError) as error:
            raise InvalidArgument(f"This is not an agent's public key ({error}); get it from the agent") from None
        return Box(SigningKey(self._secret).to_curve25519_private_key(), peer_key)
