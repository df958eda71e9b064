"""Secrets of SQS access keys: encrypted in the plane with a key that is not stored in it.

    master key in a file  ──encrypts──►  secret of an access key, in the record of its token

A server has to know the secret itself, because a signature is computed from it; of all other secrets a hash is enough.
To use a secret from the plane or its backups, one needs the file, too. It has the form of a key file of encryption at
rest: `NAME BASE64` on a line, the last line encrypts, all of them decrypt.

    dir:PATH        PATH/sqs.key, or the file that is named; made with the first access key
    postgresql://   the file that is named, which every node needs; it is not made, as nodes would make different ones
    memory:         a key in memory
"""

import os
from pathlib import Path
from typing import Final, Protocol

from fastness.encryption_keys import FileKeys, KeyProvider, new_master_key
from fastness.errors import EncryptionKeyMissing, FastnessError, PathUnusable
from fastness.folders import sync_folder
from fastness.names import folder_at
from fastness.private_files import open_private

KEY_FILE_VARIABLE: Final = "FASTNESS_SQS_KEY_FILE"

_DEFAULT_FILE: Final = "sqs.key"
_FIRST_KEY: Final = "sqs-1"


class AccessKeySecrets(Protocol):
    """Encrypts and decrypts the secrets of access keys."""

    def prepare(self, *, has_access_keys: bool) -> None:
        """Make sure that there is a key to encrypt with. `has_access_keys`: the plane has encrypted secrets already.

        Raises:
            EncryptionKeyMissing, PathUnusable, InvalidArgument: the key is missing or cannot be used.
        """
        ...

    def encrypt(self, secret: str, *, binding: str) -> bytes:
        """The encrypted secret. `binding` names the token, so that it cannot be moved to another one."""
        ...

    def decrypt(self, encrypted: bytes, *, binding: str) -> str:
        """The secret that `encrypt` was given with the same binding.

        Raises:
            EncryptionKeyMissing: the key that encrypted it is not known here.
        """
        ...


class FileSecrets:
    """Encrypts with the keys of a file, which is read at each use."""

    def __init__(self, path: Path, *, may_create: bool) -> None:
        """`may_create`: `prepare` makes the file if it does not exist. No other process may use the plane then."""
        self._path = path
        self._may_create = may_create

    def prepare(self, *, has_access_keys: bool) -> None:
        if self._path.exists():
            FileKeys(self._path)  # Raises what is wrong with it, and warns if other users can read it.
            return
        if has_access_keys:
            raise self._missing()
        if not self._may_create:
            raise EncryptionKeyMissing(
                f"The key file {self._path} does not exist; write the line that `fastness encryption new-key` prints "
                "to it, with mode 600, and copy it to every node"
            )
        self._create()

    def encrypt(self, secret: str, *, binding: str) -> bytes:
        return _encrypt(FileKeys(self._path), secret, binding)

    def decrypt(self, encrypted: bytes, *, binding: str) -> str:
        if not self._path.exists():
            raise self._missing()
        try:
            return _decrypt(FileKeys(self._path), encrypted, binding)
        except FastnessError as error:
            raise EncryptionKeyMissing(
                f"The key file {self._path} does not decrypt the secret of an access key; name the file that it was "
                f"created with by --sqs-key-file or {KEY_FILE_VARIABLE}, or revoke its token and create another"
            ) from error

    def _missing(self) -> EncryptionKeyMissing:
        return EncryptionKeyMissing(
            f"The key file {self._path} is missing, and the plane has access keys that it encrypts; restore the file, "
            f"or name it with --sqs-key-file or {KEY_FILE_VARIABLE}. If it is lost, revoke the tokens that "
            "`fastness token list` shows with an access key, and create others"
        )

    def _create(self) -> None:
        """Write a new key to the file, unless it exists by now."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with open(draft, "w", encoding="ascii", opener=open_private) as file:
                file.write(new_master_key(_FIRST_KEY) + "\n")
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, self._path)  # A rename would replace the key of a process that was faster.
            except FileExistsError:
                pass
            finally:
                draft.unlink()
            sync_folder(self._path.absolute().parent)
        except OSError as error:
            raise PathUnusable(
                f"The key file {self._path} cannot be made ({error.strerror}); name another by --sqs-key-file or "
                f"{KEY_FILE_VARIABLE}"
            ) from error


class MemorySecrets:
    """Encrypts with a key that ends with the process, as a plane in memory does."""

    def __init__(self) -> None:
        self._keys = FileKeys.in_memory()

    def prepare(self, *, has_access_keys: bool) -> None:
        del has_access_keys

    def encrypt(self, secret: str, *, binding: str) -> bytes:
        return _encrypt(self._keys, secret, binding)

    def decrypt(self, encrypted: bytes, *, binding: str) -> str:
        return _decrypt(self._keys, encrypted, binding)


class NoSecrets:
    """Refuses access keys: no key file is named."""

    def prepare(self, *, has_access_keys: bool) -> None:
        del has_access_keys
        raise EncryptionKeyMissing(
            f"Access keys need a key file on PostgreSQL; name one with --sqs-key-file or {KEY_FILE_VARIABLE}, the same "
            "on every node"
        )

    def encrypt(self, secret: str, *, binding: str) -> bytes:
        del secret, binding
        raise AssertionError("prepare has refused it")

    def decrypt(self, encrypted: bytes, *, binding: str) -> str:
        del encrypted, binding
        raise EncryptionKeyMissing(
            f"No key file decrypts the secret of an access key; name one with --sqs-key-file or {KEY_FILE_VARIABLE}"
        )


def secrets_of(url: str, key_file: str | None) -> AccessKeySecrets:
    """The secrets of the plane at `url`. Without a `key_file`, the environment names it, or it is beside the data."""
    scheme, _, rest = url.partition(":")
    named = key_file or os.environ.get(KEY_FILE_VARIABLE)
    if named:
        return FileSecrets(folder_at(named), may_create=scheme == "dir")
    if scheme == "dir":
        return FileSecrets(folder_at(rest) / _DEFAULT_FILE, may_create=True)
    return MemorySecrets() if url == "memory:" else NoSecrets()


def _encrypt(keys: KeyProvider, secret: str, binding: str) -> bytes:
    return keys.wrap(secret.encode(), universe=_subject(binding))


def _decrypt(keys: KeyProvider, encrypted: bytes, binding: str) -> str:
    return keys.unwrap(encrypted, universe=_subject(binding)).decode()


def _subject(binding: str) -> str:
    # No universe has a slash in its name: a secret cannot be taken for the data key of a universe.
    return f"sqs/{binding}"
