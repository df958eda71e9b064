"""The frames of the relay: encoding, decoding and invalid frames."""

from typing import Any

import msgspec
import pytest

from fastness.limits import (
    RELAY_FLUSH_MAILS,
)
from fastness.wire import relay
from fastness.wire.relay import (
    Body,
    Error,
    Ping,
    Send,
)


def test_frames_survive_encoding_and_decoding() -> None:
    send = Send("id", "bob", Body(bytes(range(256))), correlation_id="c")
    cases: list[list[relay.Frame]] = [[send], [send, Ping()]]
    for frames in cases:
        assert relay.decode(relay.encode(frames, "msgpack")) == frames
        assert relay.decode(relay.encode(frames, "json").decode()) == frames
    assert b'"body":"-__-"' in relay.encode([Send("id", "bob", Body(b"\xfb\xff\xfe"))], "json")
    assert relay.decode('{"type":"send","message_id":"a","to":"b","body":"aGk="}') == [Send("a", "b", Body(b"hi"))]


@pytest.mark.parametrize("body", ["a+b/", "a", "not base64!", "ä", 7, None, ["a"]], ids=repr)
def test_an_invalid_base64url_body_is_an_error_with_the_message_id(body: Any) -> None:
    data = msgspec.json.encode(
        [{"type": "ping"}, {"type": "send", "message_id": "x", "to": "b", "body": body}]
    ).decode()
    ping, error = relay.decode(data)
    assert ping == Ping()
    assert isinstance(error, Error)
    assert (error.code, error.message_id) == ("invalid_frame", "x")


@pytest.mark.parametrize("frame", [{"type": "fly"}, {}, 7, {"type": "ping", "more": 1}, {"type": "mail"}], ids=repr)
def test_unknown_frames_are_errors(frame: Any) -> None:
    [error] = relay.decode(msgspec.msgpack.encode(frame))
    assert isinstance(error, Error)
    assert error.code == "invalid_frame"


def test_the_read_limit_is_fifty_mails() -> None:
    assert RELAY_FLUSH_MAILS == 50
