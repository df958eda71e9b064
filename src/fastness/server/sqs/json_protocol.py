"""The AWS JSON 1.0 protocol: a JSON object as body, the action in the header `X-Amz-Target`."""

from functools import cache
from typing import Any, Final

import msgspec

from fastness.server.sqs.errors import SqsError, missing_parameter
from fastness.server.sqs.model import Action, ListOf, MapOf, Shape, Structure, json_type
from fastness.server.sqs.shapes import ACTIONS, TARGET_PREFIX

MEDIA_TYPE: Final = "application/x-amz-json-1.0"


def action_of(target: str) -> Action:
    """The action that the header `X-Amz-Target` names.

    Raises:
        SqsError: there is no such action.
    """
    action = ACTIONS.get(target.removeprefix(TARGET_PREFIX)) if target.startswith(TARGET_PREFIX) else None
    if action is None:
        raise SqsError("UnknownOperationException", f"The action {target[:100]!r} is not valid for this endpoint.")
    return action


def decode(action: Action, body: bytes) -> dict[str, Any]:
    """The parameters of a request. Unknown members are ignored.

    Raises:
        SqsError: the body is not a JSON object, a value has the wrong type, or a required parameter is missing.
    """
    try:
        return _decoder(action.name).decode(body or b"{}")
    except msgspec.ValidationError:
        return _decode_exactly(action, body or b"{}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_json(error) from None


def encode(output: dict[str, Any]) -> bytes:
    """The body of a response. Blobs are base64."""
    return msgspec.json.encode(output)


def encode_error(error: SqsError) -> tuple[bytes, dict[str, str]]:
    """The body of an error response, and the header by which clients of the Query protocol's time know the error."""
    fault = "Sender" if error.sender_fault else "Receiver"
    body = {"__type": error.code, "message": error.message} | ({"hint": error.hint} if error.hint else {})
    return msgspec.json.encode(body), {"x-amzn-query-error": f"{error.query_code};{fault}"}


@cache
def _decoder(action: str) -> msgspec.json.Decoder[dict[str, Any]]:
    return msgspec.json.Decoder(json_type(ACTIONS[action].input))


def _decode_exactly(action: Action, body: bytes) -> dict[str, Any]:
    """Decode what the fast way has refused: members that are null are absent, and errors name the member."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_json(error) from None
    converted: dict[str, Any] = _converted(action.input, given, "")
    return converted


def _converted(shape: Shape, given: Any, path: str) -> Any:
    if isinstance(shape, Structure):
        return _structure(shape, given, path)
    if isinstance(shape, ListOf):
        return [_converted(shape.item, item, f"{path}.{number}") for number, item in enumerate(_list(given, path), 1)]
    if isinstance(shape, MapOf):
        return {key: _converted(shape.value, value, f"{path}.{key[:80]}") for key, value in _dict(given, path).items()}
    try:
        return msgspec.convert(given, json_type(shape))
    except msgspec.ValidationError as error:
        raise SqsError("SerializationException", f"The parameter {path} has a wrong type: {error}") from None


def _structure(shape: Structure, given: Any, path: str) -> dict[str, Any]:
    values = _dict(given, path)
    found = {}
    for member in shape.members:
        member_path = f"{path}.{member.name}" if path else member.name
        value = values.get(member.name)
        if value is not None:
            found[member.name] = _converted(member.shape, value, member_path)
        elif member.required:
            raise missing_parameter(member_path)
    return found


def _dict(given: Any, path: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SqsError("SerializationException", f"{_named(path)} is not a JSON object; send one")
    return given


def _list(given: Any, path: str) -> list[Any]:
    if not isinstance(given, list):
        raise SqsError("SerializationException", f"{_named(path)} is not a JSON array; send one")
    return given


def _named(path: str) -> str:
    return f"The parameter {path}" if path else "The body"


def _not_json(error: Exception) -> SqsError:
    return SqsError("SerializationException", f"The body is not valid JSON: {error}")
