"""The serializer of checkpoints. A stored value is data: it does not decide which code its reader runs.

LangGraph stores an object as the names of its module and class, and what to call the class with. Its own serializer
imports and calls by default what a checkpoint names, so that who can write a row runs code where the row is read.
`StrictSerializer` creates the types of LangGraph that are known to be safe, and those that it was given.
"""

import copy
from collections.abc import Iterable
from typing import Any, Final

import ormsgpack
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_METHODS, SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import EXT_METHOD_SINGLE_ARG, EXT_PYDANTIC_V2, JsonPlusSerializer

from fastness.errors import InvalidArgument, UnreadableValue

AllowedType = type | tuple[str, str]
_Names = tuple[str, ...]

_MSGPACK: Final = "msgpack"
_KINDS: Final = (_MSGPACK, "null", "bytes", "bytearray")  # The ones that are written.


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer for values that others may have written.

    Args:
        allowed_types: classes, or pairs of the names of a module and a class, that may be created besides safe ones.
    """

    def __init__(self, allowed_types: Iterable[AllowedType] = ()) -> None:
        own = frozenset(map(_names_of, allowed_types))
        super().__init__(allowed_msgpack_modules=own or None)
        self._allowed: frozenset[_Names] = SAFE_MSGPACK_TYPES | own

    def with_msgpack_allowlist(self, extra_allowlist: Iterable[Any]) -> "StrictSerializer":
        """A serializer that allows these types too: LangGraph adds the types of a graph's state in its strict mode."""
        return StrictSerializer([*self._allowed, *extra_allowlist])  # type: ignore[list-item]

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """The kind and the bytes of a value.

        Raises:
            InvalidArgument: it has an object of a type that is not allowed, which could not be read again.
        """
        kind, data = super().dumps_typed(obj)
        refused = self._refused(data) if kind == _MSGPACK else []
        if refused:
            raise InvalidArgument(
                f"The checkpoint has objects of types that are not allowed: {_listed(refused)}. Allow types of your "
                "own with FastnessSaver(…, allowed_types=[…]), or store what JSON has"
            )
        return kind, data

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """The value of a kind and bytes.

        Raises:
            UnreadableValue: it names a type that is not allowed; nothing of it was run. Or it is no stored value.
        """
        kind, stored = data
        if kind not in _KINDS:
            raise UnreadableValue(
                f"A stored checkpoint has a value of the kind {kind[:50]!r}, which Fastness does not write; nothing of "
                "it was run. Delete the thread, or store it again from the saver that wrote it"
            )
        try:
            refused = self._refused(stored) if kind == _MSGPACK else []
            found = None if refused else super().loads_typed(data)
        except ValueError as error:  # Of ormsgpack.
            raise UnreadableValue(
                f"A stored checkpoint cannot be decoded ({error}): another program wrote it. Delete the thread"
            ) from error
        if refused:
            raise UnreadableValue(
                f"A stored checkpoint names types that are not allowed: {_listed(refused)}; nothing of it was run. If "
                "they are types of your own, allow them with FastnessSaver(…, allowed_types=[…]); if not, another "
                "program wrote the checkpoint: delete the thread, and replace the token that could write it"
            )
        return found

    def _refused(self, data: bytes) -> list[_Names]:
        """What an encoded value names and may not be created. Creates nothing."""
        refused: dict[_Names, None] = {}

        def look_at(code: int, encoded: bytes) -> None:
            found = ormsgpack.unpackb(encoded, ext_hook=look_at, option=ormsgpack.OPT_NON_STR_KEYS)
            if code > EXT_PYDANTIC_V2:
                return  # An array of numbers, or a value of a channel, which was looked at.
            if code == EXT_METHOD_SINGLE_ARG:
                is_allowed = (found[0], found[1], found[3]) in SAFE_MSGPACK_METHODS
            else:
                is_allowed = (found[0], found[1]) in self._allowed
            if not is_allowed:
                refused[str(found[0]), str(found[1])] = None

        ormsgpack.unpackb(data, ext_hook=look_at, option=ormsgpack.OPT_NON_STR_KEYS)
        return list(refused)


def strict(serde: SerializerProtocol | None, allowed_types: Iterable[AllowedType]) -> SerializerProtocol:
    """The serializer of a saver that was given these arguments.

    LangGraph's own one is replaced by a strict one, also inside of an `EncryptedSerializer`: that reads what is not
    encrypted, too. A serializer of another class is used as it is.

    Raises:
        InvalidArgument: a subclass of LangGraph's serializer was given, which may create anything; or types for a
            serializer that does not use them.
    """
    allowed = list(allowed_types)
    inner = serde.serde if isinstance(serde, EncryptedSerializer) else serde
    if inner is None or type(inner) is JsonPlusSerializer:
        found = StrictSerializer(allowed)
        if not isinstance(serde, EncryptedSerializer):
            return found
        encrypted = copy.copy(serde)
        encrypted.serde = found
        return encrypted
    if allowed or isinstance(inner, JsonPlusSerializer):
        raise InvalidArgument(
            f"serde is {type(inner).__name__}, and a saver can restrict only LangGraph's own JsonPlusSerializer; leave "
            "serde out and name the types of your own with allowed_types=[…], or give a serializer that is no "
            "JsonPlusSerializer, without allowed_types"
        )
    assert serde is not None
    return serde


def _names_of(allowed: object) -> _Names:
    if isinstance(allowed, type):
        return allowed.__module__, allowed.__name__
    if isinstance(allowed, tuple) and len(allowed) == 2 and all(isinstance(name, str) for name in allowed):
        return allowed
    raise InvalidArgument(f"allowed_types has {allowed!r}; give classes, or pairs such as ('shop.orders', 'Order')")


def _listed(names: Iterable[_Names]) -> str:
    return ", ".join(sorted(".".join(each) for each in names)[:5])
