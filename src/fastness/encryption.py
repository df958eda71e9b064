"""Agent keys: they authenticate an agent, and encrypt ("seal") mail so that only its recipient can read it.

    Ed25519      signs a relay's challenges
    Curve25519   derived from the same key; encrypts and authenticates, so the recipient can verify the sender

Sealed mail is a box of PyNaCl with this content:

    "fastness-sealed-1" 00 | MessagePack [sender, recipient, id, sealed_ms, content type, body]

The key of a box is the same in both directions, so the content names its sender and recipient. Otherwise a mail could
be sent back to its sender as mail of its recipient. The id prevents that it is delivered again as another mail.

A server sees only encrypted bytes. It could still return a wrong public key for an agent. If you do not trust the
server, exchange public keys through another channel.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec

from fastness.errors import InvalidArgument, SealBroken, Unsupported
from fastness.extras import how_to_install
from fastness.folders import sync_folder
from fastness.limits import AGENT_KEY_BYTES, CONTENT_TYPE_CHARACTERS_MAX

if TYPE_CHECKING:
    from nacl.public import Box

SEALED: Final = "application/vnd.fastness.sealed"  # The content type of encrypted mail.

_FORMAT: Final = b"fastness-sealed-1\0"


class SealBinding(msgspec.Struct, frozen=True, array_like=True):
    """The mail that a sealed body belongs to. It cannot be used as the body of another one."""

    sender: str  # Addresses, as in `ada@main`.
    to: str
    id: str
    sealed_ms: int  # By the sender's clock.


class Unsealed(NamedTuple):
    """The content of a sealed body."""

    body: bytes
    content_type: str
    binding: SealBinding


class _Content(SealBinding, frozen=True, array_like=True):
    """The content of a sealed body, as it is encoded."""

    content_type: str
    body: bytes


_decode_content: Final = msgspec.msgpack.Decoder(_Content).decode

# The points of small order of Ed25519, by their y coordinate. With such a key one signature is valid for any data, and
# the secret that it shares with any other key is zero.
_FIELD: Final = 2**255 - 19
_ORDER_8: Final = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_WEAK: Final = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})


def checked_public_key(key: object) -> bytes:
    """The public key of an agent, if it has the right size and is not weak. Whether it is on the curve is not checked.

    Raises:
        InvalidArgument: it is not 32 bytes, has a small order, or is not encoded canonically.
    """
    if not isinstance(key, bytes | bytearray | memoryview) or len(key) != AGENT_KEY_BYTES:
        found = f"{len(key)} bytes" if isinstance(key, bytes | bytearray | memoryview) else type(key).__name__
        raise InvalidArgument(f"An agent's public key has {AGENT_KEY_BYTES} bytes (Ed25519), not {found}")
    y = int.from_bytes(key, "little") & (2**255 - 1)  # Without the sign of x.
    if y >= _FIELD or y in _WEAK:
        raise InvalidArgument(
            "This public key is weak (its order is small, or its encoding not canonical): signatures would prove "
            "nothing; use the public_key of AgentKey.generate()"
        )
    return bytes(key)


class AgentKey:
    """The secret key of an agent. Keep it where only the agent can read it."""

    def __init__(self, secret: bytes) -> None:
        """The key with these 32 secret bytes.

        Raises:
            InvalidArgument: `secret` is not 32 bytes.
        """
        if secret.__class__ is not bytes or len(secret) != AGENT_KEY_BYTES:
            raise InvalidArgument(
                f"An agent's secret key is {AGENT_KEY_BYTES} bytes; make one with AgentKey.generate()"
            )
        # Imported here: most programs never need a key, and this import takes longer than all of Fastness's own.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._secret = secret
        self._signing = Ed25519PrivateKey.from_private_bytes(secret)
        self.public_key = self._signing.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """A new key."""
        return cls(os.urandom(AGENT_KEY_BYTES))

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

    def seal(self, body: bytes, content_type: str, *, recipient: bytes, binding: SealBinding) -> bytes:
        """The encrypted body, which only the owner of the public key `recipient` can decrypt.

        `binding` names the mail that it is for, so that it is not taken for another one.

        Raises:
            Unsupported: PyNaCl is not installed.
            InvalidArgument: `recipient` is not a public key, or the content type is too long.
        """
        if len(content_type) > CONTENT_TYPE_CHARACTERS_MAX:
            raise InvalidArgument(
                f"The content type has {len(content_type)} characters, of at most {CONTENT_TYPE_CHARACTERS_MAX} "
                "(CONTENT_TYPE_CHARACTERS_MAX); shorten it"
            )
        content = _Content(**msgspec.structs.asdict(binding), content_type=content_type, body=body)
        return bytes(self._box(recipient).encrypt(_FORMAT + msgspec.msgpack.encode(content)))

    def open(self, sealed: bytes, *, sender: bytes) -> tuple[bytes, str]:
        """The body and content type of `unseal`."""
        opened = self.unseal(sealed, sender=sender)
        return opened.body, opened.content_type

    def unseal(self, sealed: bytes, *, sender: bytes) -> Unsealed:
        """The content of a body that the owner of the public key `sender` sealed for this key, and its binding.

        The caller must compare the binding with the mail: the same key opens what this key sealed for `sender`.

        Raises:
            SealBroken: another key sealed it, it was sealed for another key, it was modified, or it has a format that
                this version does not know.
            Unsupported, InvalidArgument: as `seal`.
        """
        box = self._box(sender)  # Raises Unsupported if PyNaCl is missing.
        from nacl.exceptions import CryptoError

        try:
            opened = box.decrypt(sealed)
            content = _decode_content(opened[len(_FORMAT) :]) if opened.startswith(_FORMAT) else None
        except (CryptoError, msgspec.MsgspecError, ValueError, TypeError, AttributeError, RecursionError):
            raise SealBroken("The mail is not sealed by this sender for this key; do not trust it") from None
        if content is None:
            raise SealBroken("The mail is sealed in a format that this version does not know; upgrade Fastness")
        *binding, content_type, body = msgspec.structs.astuple(content)
        return Unsealed(body, content_type, SealBinding(*binding))

    def _box(self, public_key: bytes) -> "Box":
        try:
            from nacl.exceptions import CryptoError
            from nacl.public import Box
            from nacl.signing import SigningKey, VerifyKey
        except ImportError:
            raise Unsupported(f"Sealing needs PyNaCl; {how_to_install('seal')}") from None
        try:
            peer_key = VerifyKey(checked_public_key(public_key)).to_curve25519_public_key()
        except (CryptoError, ValueError, TypeError) as error:
            raise InvalidArgument(f"This is not an agent's public key ({error}); get it from the agent") from None
        return Box(SigningKey(self._secret).to_curve25519_private_key(), peer_key)
