"""docs/relay.md is correct: its worked example, limits and codes."""

import json
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fastness import limits
from fastness.errors import FastnessError, rebuild
from fastness.runtime.relay import session as closing
from fastness.wire import relay

TEXT = (Path(__file__).parents[2] / "docs" / "relay.md").read_text()
FRAMES = [json.loads(found) for found in re.findall(r'^    (\{"type": "[^…]*?\})$', TEXT, re.MULTILINE | re.DOTALL)]


def frame(kind: str) -> dict[str, str]:
    return next(each for each in FRAMES if each["type"] == kind)


def test_the_worked_example_is_correct() -> None:
    challenge, answer = frame("challenge"), frame("authenticate")
    nonce = relay._body_of(relay.Body, challenge["nonce"])
    proof = relay.signed_bytes(challenge["host"], nonce)
    assert challenge["protocol"] == relay.PROTOCOL
    shown = re.search(r"^((?:    [0-9a-f]{8} [0-9a-f]+ .*\n){3})", TEXT, re.MULTILINE)
    assert shown is not None
    assert "".join(re.findall(r"\b[0-9a-f]{8,}\b", shown[0])) == proof.hex()
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert relay._body_of(relay.Body, answer["public_key"]) == key.public_key().public_bytes_raw()
    key.public_key().verify(relay._body_of(relay.Body, answer["signature"]), proof)
    [found] = relay.decode(json.dumps(answer))
    assert isinstance(found, relay.Authenticate)


def test_the_documented_frames_can_be_decoded() -> None:
    known = {each.__struct_config__.tag: each for each in relay.Frame.__subclasses__()}
    for kind in re.findall(r'"type": "(\w+)"', TEXT):
        assert kind in known
    for kind, frame in known.items():
        assert f"`{kind}`" in TEXT or f'"type": "{kind}"' in TEXT, kind
        for field in frame.__struct_encode_fields__:
            assert f"`{field}`" in TEXT or f'"{field}"' in TEXT, (kind, field)


def test_the_documented_limits_match_the_code() -> None:
    for number in (
        limits.FRAME_BYTES_MAX,
        limits.RELAY_FRAMES_MAX,
        limits.MAIL_BYTES_MAX,
        limits.MAIL_BATCH_MAX,
        limits.RELAY_IN_FLIGHT_MAX,
        limits.RECEIPTS_MAX,
        limits.MAIL_ID_CHARACTERS_MAX,
        limits.RELAY_BURST,
    ):
        assert f"{number:,}" in TEXT, number
    for seconds in (limits.RELAY_PING_SECONDS, limits.RELAY_PONG_SECONDS, limits.RELAY_AUTHENTICATE_SECONDS):
        assert f"{seconds:g} seconds" in TEXT


def test_the_documented_codes_match_the_code() -> None:
    table = TEXT[TEXT.index("| code | about") : TEXT.index("An error without a")]
    for code in re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:] if "|" in row)):
        assert code == "invalid_frame" or type(rebuild(code, "")) is not FastnessError, code
    for code in (closing.REPLACED, closing.NOT_ALLOWED, closing.TOO_SLOW, closing.STOPPING, closing.TOO_BIG):
        assert f"| {code} |" in TEXT
