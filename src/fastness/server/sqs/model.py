"""What an API is described with: `shapes` has the description of SQS, and the two protocols read and write by it.

Action ── input, output ──► Structure ── members ──► Scalar, ListOf, MapOf or Structure
"""

from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Final, NotRequired, Required, TypedDict

import msgspec
from msgspec import Meta

INTEGER_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1


class Scalar(Enum):
    """The type of a single value."""

    STRING = "string"
    INTEGER = "integer"  # Of 32 bits.
    LONG = "long"  # Of 64 bits.
    BOOLEAN = "boolean"
    BLOB = "blob"


class ListOf(msgspec.Struct, frozen=True):
    """A list. The Query protocol writes each item under the name of the member that has the list."""

    item: "Shape"


class MapOf(msgspec.Struct, frozen=True):
    """A map with strings as keys. The Query protocol writes each entry as two fields with these names."""

    key_name: str
    value_name: str
    value: "Shape"


class Member(msgspec.Struct, frozen=True):
    """A member of a structure, with its names in the JSON and the Query protocol."""

    name: str
    shape: "Shape"
    query_name: str
    required: bool = False


class Structure(msgspec.Struct, frozen=True, dict=True):
    """A structure: a dict with the names of its members."""

    name: str
    members: tuple[Member, ...]

    @cached_property
    def by_query_name(self) -> dict[str, Member]:
        """The members by their names in the Query protocol."""
        return {member.query_name: member for member in self.members}

    @cached_property
    def by_name(self) -> dict[str, Member]:
        return {member.name: member for member in self.members}


Shape = Scalar | ListOf | MapOf | Structure


class Action(msgspec.Struct, frozen=True, dict=True):
    """An action of the API."""

    name: str
    input: Structure
    output: Structure | None
    errors: tuple[str, ...]  # Names of its error shapes.

    @cached_property
    def takes_queue_url(self) -> bool:
        """Whether the path of the request may name the queue."""
        return "QueueUrl" in self.input.by_name


class ErrorShape(msgspec.Struct, frozen=True):
    """An error, with its name in the JSON protocol, its code in the Query protocol, and its HTTP status."""

    name: str
    query_code: str
    status: int = 400
    namespace: str = "com.amazonaws.sqs"


def json_type(shape: Shape) -> Any:
    """The type by which msgspec decodes and checks a shape: it makes plain dicts, and bytes of base64."""
    if isinstance(shape, ListOf):
        return list[json_type(shape.item)]  # type: ignore[misc]
    if isinstance(shape, MapOf):
        return dict[str, json_type(shape.value)]  # type: ignore[misc]
    if isinstance(shape, Structure):
        members = {
            member.name: Required[json_type(member.shape)] if member.required else NotRequired[json_type(member.shape)]
            for member in shape.members
        }
        return TypedDict(shape.name, members)  # type: ignore[operator]
    return _JSON_TYPES[shape]


_JSON_TYPES: Final = {
    Scalar.STRING: str,
    Scalar.INTEGER: Annotated[int, Meta(ge=-INTEGER_MAX - 1, le=INTEGER_MAX)],
    Scalar.LONG: Annotated[int, Meta(ge=-LONG_MAX - 1, le=LONG_MAX)],
    Scalar.BOOLEAN: bool,
    Scalar.BLOB: bytes,
}
