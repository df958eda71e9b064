"""The Query protocol: form fields in the request, XML in the response.

    Action=SendMessage&MessageBody=hello&MessageAttribute.1.Name=lang&MessageAttribute.1.Value.DataType=String&…

Fields are sorted into parameters by the action's shapes, so that a field costs no more than its own length: indexes of
lists may have gaps and be large, and names that the action does not have are ignored.
"""

import binascii
import re
from binascii import a2b_qp
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from fastness.limits import SQS_FORM_FIELDS_MAX, SQS_MALFORMED_ESCAPES_MAX
from fastness.server.sqs.errors import QUEUE_DOES_NOT_EXIST, SqsError, missing_parameter
from fastness.server.sqs.model import INTEGER_MAX, LONG_MAX, Action, ListOf, MapOf, Member, Scalar, Shape, Structure
from fastness.server.sqs.shapes import ACTIONS, NAMESPACE

MEDIA_TYPE: Final = "text/xml"
FORM: Final = "application/x-www-form-urlencoded"

_INDEX: Final = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_MALFORMED_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ENTRIES: Final = "Entries"  # The member of a batch that has its entries.
_PARTS_MAX: Final = 16  # Of a field's name. The deepest one of SQS has 7.
_BOOLEANS: Final = {"true": True, "false": False}
_SHOWN_CHARACTERS: Final = 100  # Of a value in an error message.
_QUEUE_DOES_NOT_EXIST: Final = (
    "The specified queue does not exist for this wsdl version."  # AWS's text of this protocol.
)

Fields = dict[str, str]


def parse_form(*sources: str) -> Fields:
    """The fields of a query string and of a body.

    Raises:
        SqsError: there are too many fields, or one is there twice with different values, or is not UTF-8; or too many
            percent signs begin no escape. Each stands for itself, and costs ten times as much as an escape.
    """
    fields: Fields = {}
    if sum(source.count("&") + bool(source) for source in sources) > SQS_FORM_FIELDS_MAX:
        raise SqsError("MalformedQueryString", f"A request has at most {SQS_FORM_FIELDS_MAX} fields; send fewer")
    for source in sources:
        text, malformed = _MALFORMED_ESCAPE.subn("%25", source, SQS_MALFORMED_ESCAPES_MAX + 1)
        if malformed > SQS_MALFORMED_ESCAPES_MAX:
            raise SqsError("MalformedQueryString", "The request has many percent signs; encode each of them as %25")
        for field in text.split("&"):
            name, _, value = field.partition("=")
            name, value = _unquoted(name), _unquoted(value)
            if fields.setdefault(name, value) != value:
                raise SqsError("ConflictingQueryParameter", f"The parameter {_shown(name)} is there twice")
    return fields


def _unquoted(text: str) -> str:
    """The text without percent encoding: as `urllib.parse.unquote_plus`, by a decoder that is written in C.

    A message of 1 MiB may have a million escapes, of which `unquote` decodes one at a time while all other requests
    wait: 200 ms instead of 10 ms. Quoted-printable is the same encoding with another sign. The text has no percent
    signs but those of escapes.
    """
    if "+" in text:
        text = text.replace("+", " ")
    if "%" not in text:
        return text
    try:
        return a2b_qp(text.replace("=", "=3D").replace("%", "=").encode()).decode()
    except UnicodeError:
        raise SqsError("MalformedQueryString", "A field of the request is not UTF-8; encode it so") from None


def action_of(fields: Fields) -> Action:
    """The action that the fields name.

    Raises:
        SqsError: there is none, or no such action.
    """
    name = fields.get("Action")
    if not name:
        raise SqsError("MissingAction", "The request must contain the parameter Action.")
    action = ACTIONS.get(name)
    if action is None:
        raise SqsError("InvalidAction", f"The action {_shown(name)} is not valid for this endpoint.")
    return action


def decode(action: Action, fields: Fields) -> dict[str, Any]:
    """The parameters of a request. Fields that the action does not have are ignored.

    Raises:
        SqsError: a value has the wrong type, a required parameter is missing, or a name is malformed.
    """
    tree: dict[str, Any] = {}
    members = action.input.by_query_name
    for name, value in fields.items():
        first, point, rest = name.partition(".")
        member = members.get(first)
        if member is None:
            continue
        if point:
            _insert(tree.setdefault(first, {}), rest, name, value)
        elif tree.setdefault(first, value) is not value:
            raise _conflicting(name)
    return _structure(action.input, tree, "")


def _insert(tree: Any, rest: str, name: str, value: str) -> None:
    """Put a value at the end of the path `rest`."""
    parts = rest.split(".", _PARTS_MAX)
    if len(parts) > _PARTS_MAX:
        raise _malformed(name)
    for part in parts[:-1]:
        if not isinstance(tree, dict):
            break
        tree = tree.setdefault(part, {})
    if not isinstance(tree, dict) or tree.setdefault(parts[-1], value) is not value:
        raise _conflicting(name)


def _value(shape: Shape, node: Any, path: str) -> Any:
    if isinstance(shape, Structure):
        return _structure(shape, _tree(node, path), path)
    if isinstance(shape, ListOf):
        return [_value(shape.item, item, item_path) for item, item_path in _items(node, path)]
    if isinstance(shape, MapOf):
        return _map(shape, node, path)
    if not isinstance(node, str):
        raise _malformed(path)
    return node if shape is Scalar.STRING else _scalar(shape, node, path)


def _structure(shape: Structure, tree: dict[str, Any], path: str) -> dict[str, Any]:
    found = {}
    for member in shape.members:
        node = tree.get(member.query_name)
        if node is not None:
            found[member.name] = _value(member.shape, node, _joined(path, member))
        elif member.name == _ENTRIES:
            found[member.name] = []  # A form has no other way to say that a batch is empty.
        elif member.required:
            raise missing_parameter(_joined(path, member))
    return found


def _joined(path: str, member: Member) -> str:
    return f"{path}.{member.query_name}" if path else member.query_name


def _map(shape: MapOf, node: Any, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry, entry_path in _items(node, path):
        tree = _tree(entry, entry_path)
        key, value = tree.get(shape.key_name), tree.get(shape.value_name)
        if key is None:
            raise missing_parameter(f"{entry_path}.{shape.key_name}")
        if value is None:
            raise missing_parameter(f"{entry_path}.{shape.value_name}")
        if not isinstance(key, str):
            raise _malformed(f"{entry_path}.{shape.key_name}")
        if key in found:
            raise SqsError("InvalidParameterValue", f"{path} has the name {_shown(key)} twice; names must be unique")
        found[key] = _value(shape.value, value, f"{entry_path}.{shape.value_name}")
    return found


def _items(node: Any, path: str) -> list[tuple[Any, str]]:
    """The items of a list in the order of their indexes, which may have gaps, each with its path."""
    if node == "":
        return []  # `AttributeName=` is an empty list.
    tree = _tree(node, path)
    for index in tree:
        if not _INDEX.fullmatch(index):
            raise _malformed(f"{path}.{index}")
    if len(tree) == 1:
        return [(item, f"{path}.{index}") for index, item in tree.items()]
    return [(tree[index], f"{path}.{index}") for index in sorted(tree, key=int)]


def _tree(node: Any, path: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise _malformed(path)
    return node


def _scalar(shape: Scalar, text: str, path: str) -> Any:
    if shape is Scalar.BLOB:
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except (binascii.Error, ValueError):
            raise _invalid(text, path, "Must be base64") from None
    if shape is Scalar.BOOLEAN:
        if text not in _BOOLEANS:
            raise _invalid(text, path, "Must be true or false")
        return _BOOLEANS[text]
    bound = INTEGER_MAX if shape is Scalar.INTEGER else LONG_MAX
    if not _NUMBER.fullmatch(text) or not -bound - 1 <= int(text) <= bound:
        raise _invalid(text, path, "Must be an integer")
    return int(text)


def _invalid(text: str, path: str, reason: str) -> SqsError:
    message = f"Value {_shown(text)} for parameter {_shown(path)} is invalid. Reason: {reason}."
    return SqsError("InvalidParameterValue", message)


def _malformed(name: str) -> SqsError:
    return SqsError("InvalidQueryParameter", f"The query parameter {_shown(name)} is malformed.")


def _conflicting(name: str) -> SqsError:
    message = f"The query parameter {_shown(name)} is invalid. Its structure conflicts with that of another parameter."
    return SqsError("ConflictingQueryParameter", message)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# Responses.

_SPECIAL: Final = re.compile("[&<>\r\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_ESCAPES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"}  # Parsers turn a plain \r into \n.
Write = Callable[[Any, list[str]], None]


def encode(action: Action, output: dict[str, Any], request_id: str) -> bytes:
    """The body of a response."""
    parts: list[str] = []
    if action.output is not None:
        _writer(action.name)(output, parts)
    return (
        f'<?xml version="1.0"?><{action.name}Response xmlns="{NAMESPACE}">{"".join(parts)}'
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{action.name}Response>"
    ).encode()


def encode_error(error: SqsError, request_id: str) -> bytes:
    """The body of an error response."""
    fault = "Sender" if error.sender_fault else "Receiver"
    message = _QUEUE_DOES_NOT_EXIST if error.message == QUEUE_DOES_NOT_EXIST else error.message
    detail = f"<Detail>{escape(error.hint)}</Detail>" if error.hint else "<Detail/>"
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{fault}</Type>'
        f"<Code>{escape(error.query_code)}</Code><Message>{escape(message)}</Message>{detail}</Error>"
        f"<RequestId>{request_id}</RequestId></ErrorResponse>"
    ).encode()


def escape(text: str) -> str:
    """Text as the content of an XML element. Characters that XML does not allow are replaced."""
    return _SPECIAL.sub(_escaped, text) if _SPECIAL.search(text) else text


def _escaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0], "\ufffd")


@cache
def _writer(action: str) -> Write:
    output = ACTIONS[action].output
    assert output is not None, "only actions with an output have a writer"
    return _element(output.name, output)


def _element(name: str, shape: Shape) -> Write:
    """A function that writes a value as elements with this name. Items of lists and maps are elements of their own."""
    opening, closing = f"<{name}>", f"</{name}>"
    if isinstance(shape, ListOf):
        write_item = _element(name, shape.item)

        def write_list(values: list[Any], parts: list[str]) -> None:
            for value in values:
                write_item(value, parts)

        return write_list
    if isinstance(shape, MapOf):
        write_key, write_value = _element(shape.key_name, Scalar.STRING), _element(shape.value_name, shape.value)

        def write_map(values: dict[str, Any], parts: list[str]) -> None:
            for key, value in values.items():
                parts.append(opening)
                write_key(key, parts)
                write_value(value, parts)
                parts.append(closing)

        return write_map
    if isinstance(shape, Structure):
        members = [(member.name, _element(member.query_name, member.shape)) for member in shape.members]

        def write_structure(values: dict[str, Any], parts: list[str]) -> None:
            parts.append(opening)
            for member, write in members:
                value = values.get(member)
                if value is not None:
                    write(value, parts)
            parts.append(closing)

        return write_structure
    to_text = _TO_TEXT[shape]

    def write_scalar(value: Any, parts: list[str]) -> None:
        parts.append(f"{opening}{to_text(value)}{closing}")

    return write_scalar


_TO_TEXT: Final[dict[Scalar, Callable[[Any], str]]] = {
    Scalar.STRING: escape,
    Scalar.INTEGER: str,
    Scalar.LONG: str,
    Scalar.BOOLEAN: lambda value: "true" if value else "false",
    Scalar.BLOB: lambda value: binascii.b2a_base64(value, newline=False).decode(),
}
