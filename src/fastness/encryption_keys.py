"""Master keys: they encrypt ("wrap") the data keys of universes, and are never stored in the plane.

    master key  ──wraps──►  data key of a universe  ──derives──►  one key per writing process  ──encrypts──►  values

A key file has one master key on a line, as `NAME BASE64`. The last one wraps; all of them unwrap. So a new master key
is added as the last line, and an older one is removed after `fastness encryption rotate --master`. A line `require
NAME` says that the universe is encrypted: a plane where it is not is refused, because its keys were removed.
"""

import base64
import binascii
import json
import logging
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from fastness import limits
from fastness.errors import EncryptionKeyMissing, InvalidArgument, PathUnusable

__all__ = ["CommandKeys", "FileKeys", "KeyProvider", "RequiresEncryption", "new_master_key"]

DATA_KEY_BYTES: Final = 32  # AES-256.
KEY_FILE_VARIABLE: Final = "FASTNESS_ENCRYPTION_KEY_FILE"
COMMAND_VARIABLE: Final = "FASTNESS_ENCRYPTION_COMMAND"

_log = logging.getLogger("fastness.encryption")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REQUIRE: Final = "require"
_NONCE_BYTES: Final = 12
_PURPOSE: Final = b"fastness data key\0"


class KeyProvider(Protocol):
    """Wraps and unwraps data keys: with a key file, or by a key management service."""

    def wrap(self, key: bytes, *, universe: str) -> bytes:
        """The data key, encrypted, in at most `ENCRYPTION_WRAPPED_BYTES_MAX` bytes."""
        ...

    def unwrap(self, wrapped: bytes, *, universe: str) -> bytes:
        """The data key that `wrap` was given for the same universe.

        Raises:
            EncryptionKeyMissing: the master key that wrapped it is not known here.
        """
        ...


@runtime_checkable
class RequiresEncryption(Protocol):
    """A key provider that knows which universes must be encrypted."""

    def required_universes(self) -> frozenset[str]:
        """The universes that a plane must have data keys for."""
        ...


class _KeyFile(NamedTuple):
    keys: dict[str, bytes]  # In the order of the file.
    required: frozenset[str]


class FileKeys:
    """Master keys in a file that only the server can read. The file is read at each use, so it can be extended."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """The master keys in the file at `path`.

        Raises:
            PathUnusable: it cannot be read.
            InvalidArgument: it is not a key file.
        """
        self._path = Path(path)
        self._load()
        if self._path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            _log.warning("other users can read the key file %s; run: chmod 600 %s", path, shlex.quote(str(path)))

    @staticmethod
    def in_memory() -> "FileKeys":
        """A new master key that is in no file."""
        return _MemoryKeys()

    def wrap(self, key: bytes, *, universe: str) -> bytes:
        """The data key, encrypted with the last master key of the file."""
        keys = self._load().keys
        name = list(keys)[-1]
        nonce = os.urandom(_NONCE_BYTES)
        label = name.encode()
        return bytes((len(label),)) + label + nonce + _encrypt(keys[name], nonce, key, universe)

    def unwrap(self, wrapped: bytes, *, universe: str) -> bytes:
        """The data key of a universe.

        Raises:
            EncryptionKeyMissing: the file does not have the master key that wrapped it.
        """
        start = 1 + wrapped[0] if wrapped else 0
        name = wrapped[1:start].decode(errors="replace")
        master = self._load().keys.get(name)
        if master is None:
            raise EncryptionKeyMissing(
                f"The key file {self._path} has no master key {name!r}, which wraps the key of {_subject(universe)}; "
                "add its line to the file again"
            )
        nonce, sealed = wrapped[start : start + _NONCE_BYTES], wrapped[start + _NONCE_BYTES :]
        key = _decrypt(master, nonce, sealed, universe)
        if key is None:
            raise EncryptionKeyMissing(
                f"The master key {name!r} of {self._path} does not unwrap the key of {_subject(universe)}: it is "
                "another key with the same name; use the file with which the universe was encrypted"
            )
        return key

    def required_universes(self) -> frozenset[str]:
        """The universes of the lines `require NAME`."""
        return self._load().required

    def _load(self) -> _KeyFile:
        try:
            with self._path.open("rb") as file:
                data = file.read(limits.ENCRYPTION_KEY_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise PathUnusable(
                f"The key file {self._path} cannot be read ({error.strerror}); name the file that "
                "`fastness encryption new-key` wrote"
            ) from error
        return _parse(data, self._path)


class _MemoryKeys(FileKeys):
    def __init__(self) -> None:
        self._path = Path("memory")  # For error messages.
        self._file = _KeyFile({"memory": os.urandom(DATA_KEY_BYTES)}, frozenset())

    def _load(self) -> _KeyFile:
        return self._file


class CommandKeys:
    """Master keys in a key management service, which a command of yours calls.

    The command gets one JSON object on its standard input, and answers with one on its standard output:

        {"action": "wrap", "universe": "shop", "key": "BASE64"}        ->  {"wrapped": "BASE64"}
        {"action": "unwrap", "universe": "shop", "wrapped": "BASE64"}  ->  {"key": "BASE64"}

    It has to end with code 0 within `ENCRYPTION_COMMAND_SECONDS`.
    """

    def __init__(self, command: str | Sequence[str], *, require: Sequence[str] = ()) -> None:
        """The command, as in a shell or as a list of words. `require` names universes that must be encrypted.

        Raises:
            InvalidArgument: it has no words, or an open quotation mark.
        """
        try:
            self._words = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise InvalidArgument(f"The command for keys is not valid ({error}); correct {command!r}") from None
        if not self._words:
            raise InvalidArgument("The command for keys is empty; name a program")
        self._required = frozenset(require)

    def wrap(self, key: bytes, *, universe: str) -> bytes:
        """The data key, as the command encrypts it."""
        return self._run("wrap", universe, "key", key, "wrapped")

    def unwrap(self, wrapped: bytes, *, universe: str) -> bytes:
        """The data key, as the command decrypts it.

        Raises:
            EncryptionKeyMissing: the command fails.
        """
        return self._run("unwrap", universe, "wrapped", wrapped, "key")

    def required_universes(self) -> frozenset[str]:
        """The universes of `require`."""
        return self._required

    def _run(self, action: str, universe: str, given: str, data: bytes, wanted: str) -> bytes:
        question = {"action": action, "universe": universe, given: base64.b64encode(data).decode()}
        try:
            done = subprocess.run(
                self._words,
                input=json.dumps(question).encode(),
                capture_output=True,
                timeout=limits.ENCRYPTION_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._error(action, universe, f"no answer in {limits.ENCRYPTION_COMMAND_SECONDS:.0f} s") from None
        except OSError as error:
            raise self._error(action, universe, error.strerror or "it cannot be started") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-200:]
            raise self._error(action, universe, f"code {done.returncode}: {said}")
        try:
            return base64.b64decode(json.loads(done.stdout)[wanted], validate=True)
        except (ValueError, KeyError, TypeError, RecursionError):  # Its output may be a key: it is not shown.
            raise self._error(action, universe, f"its answer has no {wanted!r} in base64") from None

    def _error(self, action: str, universe: str, why: str) -> EncryptionKeyMissing:
        return EncryptionKeyMissing(
            f"The command for keys {self._words[0]} could not {action} the key of {_subject(universe)} ({why}); run it "
            "by hand to see why"
        )


def provider_of(key_file: str | None, command: str | None) -> "FileKeys | CommandKeys | None":
    """The provider that the settings name; None if they name none.

    Raises:
        InvalidArgument: they name two.
        PathUnusable: the key file cannot be read.
    """
    if key_file and command:
        raise InvalidArgument("Both a key file and a command for keys are given; leave one of them out")
    if key_file:
        return FileKeys(key_file)
    return CommandKeys(command) if command else None


def provider_of_environment() -> "FileKeys | CommandKeys | None":
    """The provider that `FASTNESS_ENCRYPTION_KEY_FILE` or `FASTNESS_ENCRYPTION_COMMAND` names; None without these."""
    return provider_of(os.environ.get(KEY_FILE_VARIABLE), os.environ.get(COMMAND_VARIABLE))


def new_master_key(name: str) -> str:
    """A new line of a key file.

    Raises:
        InvalidArgument: the name is not valid.
    """
    if not _NAME.fullmatch(name) or name == _REQUIRE:
        raise InvalidArgument(
            f"The name {name!r} is not that of a master key; use 1 to 64 letters, digits, points, hyphens or "
            f"underscores, and not {_REQUIRE!r}"
        )
    return f"{name} {base64.b64encode(os.urandom(DATA_KEY_BYTES)).decode()}"


def _parse(data: bytes, path: Path) -> _KeyFile:
    keys: dict[str, bytes] = {}
    required: set[str] = set()
    if len(data) > limits.ENCRYPTION_KEY_FILE_BYTES_MAX:
        raise InvalidArgument(f"{path} is too long for a key file; name the right file")
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) == 2 and words[0] == _REQUIRE:
            required.add(words[1])
            continue
        key = _decoded(words[1]) if len(words) == 2 and _NAME.fullmatch(words[0]) else b""
        if len(key) != DATA_KEY_BYTES:  # The line may be a key: it is not shown.
            raise InvalidArgument(
                f"Line {number} of the key file {path} is not NAME BASE64 with a key of {DATA_KEY_BYTES} bytes; make "
                "one with: fastness encryption new-key"
            )
        if words[0] in keys:
            raise InvalidArgument(f"The key file {path} has two master keys {words[0]!r}; give each a name of its own")
        keys[words[0]] = key
    if not keys:
        raise InvalidArgument(f"The key file {path} has no key; make one with: fastness encryption new-key")
    return _KeyFile(keys, frozenset(required))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def _encrypt(master: bytes, nonce: bytes, key: bytes, universe: str) -> bytes:
    # Imported here: most programs never need it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(master).encrypt(nonce, key, _PURPOSE + universe.encode())


def _decrypt(master: bytes, nonce: bytes, sealed: bytes, universe: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(master).decrypt(nonce, sealed, _PURPOSE + universe.encode())
    except (InvalidTag, ValueError):
        return None


def _subject(universe: str) -> str:
    return f"the universe {universe!r}" if universe else "the plane"
