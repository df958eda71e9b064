"""AgentKey: signing, sealing, and invalid input."""

import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec.structs import replace

import fastness
from fastness import AgentKey, Plane
from fastness.encryption import _FORMAT, SEALED, SealBinding
from fastness.errors import InvalidArgument, SealBroken, Unreachable
from fastness.plane.embedded import EmbeddedTransport
from fastness.wire.agents import GetAgent
from fastness.wire.mail import Envelope, Mails, ReadMail
from tests.support.failures import Failures

BINDING = SealBinding("ada@main", "bob@main", "first", 1)


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


@pytest.fixture
def ada() -> AgentKey:
    return AgentKey(bytes(range(32)))


@pytest.fixture
def bob() -> AgentKey:
    return AgentKey(bytes(range(1, 33)))


def test_a_recipient_opens_a_sealed_body_with_its_content_type(ada: AgentKey, bob: AgentKey) -> None:
    sealed = ada.seal(b"meet at nine", "text/plain", recipient=bob.public_key, binding=BINDING)
    assert b"meet" not in sealed
    assert b"text/plain" not in sealed
    assert bob.open(sealed, sender=ada.public_key) == (b"meet at nine", "text/plain")


def test_the_same_body_is_sealed_differently_each_time(ada: AgentKey, bob: AgentKey) -> None:
    assert ada.seal(b"x", "text/plain", recipient=bob.public_key, binding=BINDING) != ada.seal(
        b"x", "text/plain", recipient=bob.public_key, binding=BINDING
    )


def test_only_the_recipient_opens_it_and_only_the_sender_can_have_sealed_it(ada: AgentKey, bob: AgentKey) -> None:
    eve = AgentKey.generate()
    sealed = ada.seal(b"x", "text/plain", recipient=bob.public_key, binding=BINDING)
    with pytest.raises(SealBroken):
        eve.open(sealed, sender=ada.public_key)
    with pytest.raises(SealBroken):
        bob.open(sealed, sender=eve.public_key)


@pytest.mark.parametrize("position", [0, 23, 24, -1])
def test_a_changed_byte_breaks_the_seal(ada: AgentKey, bob: AgentKey, position: int) -> None:
    sealed = bytearray(ada.seal(b"x" * 100, "text/plain", recipient=bob.public_key, binding=BINDING))
    sealed[position] ^= 1
    with pytest.raises(SealBroken):
        bob.open(bytes(sealed), sender=ada.public_key)


@pytest.mark.parametrize("sealed", [b"", b"x", b"x" * 24, b"x" * 40])
def test_a_body_that_was_not_sealed_is_refused(ada: AgentKey, bob: AgentKey, sealed: bytes) -> None:
    with pytest.raises(SealBroken):
        bob.open(sealed, sender=ada.public_key)


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 33, b"\xff" * 32])
def test_an_invalid_public_key_is_refused(ada: AgentKey, key: bytes) -> None:
    with pytest.raises(InvalidArgument, match="public key"):
        ada.seal(b"x", "text/plain", recipient=key, binding=BINDING)


_FIELD = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826


def weak_keys() -> list[bytes]:
    """Every encoding of a point of small order, and every encoding that is not canonical, with both signs."""
    ys = {0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8, *range(_FIELD, 2**255)}
    return [(y | sign << 255).to_bytes(32, "little") for y in sorted(ys) for sign in (0, 1)]


def test_the_listed_points_have_order_8() -> None:
    curve = -121665 * pow(121666, -1, _FIELD) % _FIELD
    for y in (_ORDER_8, _FIELD - _ORDER_8):
        # The double of a point of order 8 has y = 0, so x squared is minus y squared.
        assert (curve * y**4 + 2 * y**2 - 1) % _FIELD == 0


def test_a_weak_public_key_is_refused_wherever_it_is_given(plane: Plane, ada: AgentKey) -> None:
    failures = Failures()
    for key in weak_keys():
        with failures.of(key):
            for use in (
                partial(plane.agents.register, "eve", public_key=key),
                partial(plane.mailbox, "ada", key=ada, contacts={"eve": key}),
                partial(ada.seal, b"x", "text/plain", recipient=key, binding=BINDING),
                partial(ada.open, b"x" * 80, sender=key),
            ):
                with pytest.raises(InvalidArgument, match="weak"):
                    use()
            assert plane.agents.get("eve") is None
    failures.check()


def test_one_signature_with_a_weak_key_is_valid_for_any_data() -> None:
    """Why weak keys are refused: the library that verifies signatures accepts them."""
    identity = (1).to_bytes(32, "little")
    for data in (b"nonce", b"another nonce"):
        Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), data)


def test_a_signature_is_ed25519(ada: AgentKey) -> None:
    Ed25519PublicKey.from_public_bytes(ada.public_key).verify(ada.sign(b"nonce"), b"nonce")


def test_a_saved_key_is_private_and_never_overwritten(ada: AgentKey, tmp_path: Path) -> None:
    path = tmp_path / "ada.key"
    ada.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert AgentKey.load(path).public_key == ada.public_key
    with pytest.raises(InvalidArgument, match="choose another"):
        ada.save(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(InvalidArgument):
        AgentKey.load(tmp_path / "key")


def test_a_sealed_mail_is_opaque_until_its_recipient_opens_it(plane: Plane, ada: AgentKey, bob: AgentKey) -> None:
    plane.agents.register("ada", public_key=ada.public_key)
    plane.agents.register("bob", public_key=bob.public_key)
    plane.mailbox("ada", key=ada).send("bob", {"secret": 7}, seal=True)
    [mail] = plane.mailbox("bob").read()
    assert mail.content_type == SEALED
    assert b"secret" not in mail.body
    mailbox = plane.mailbox("bob", key=bob)
    unsealed = mailbox.unseal(mail)
    assert (unsealed.json(), unsealed.content_type) == ({"secret": 7}, "application/json")
    assert mailbox.read() == mailbox.read(peek=True) == list(mailbox.subscribe(wait_seconds=0)) == [unsealed]


def test_mail_that_cannot_be_unsealed_is_delivered_with_the_reason(
    plane: Plane, ada: AgentKey, bob: AgentKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[str] = []
    call = EmbeddedTransport.call

    def record_lookup(transport: EmbeddedTransport, request: Any, *args: Any) -> Any:
        if isinstance(request, GetAgent):
            lookups.append(request.name)
        return call(transport, request, *args)

    monkeypatch.setattr(EmbeddedTransport, "call", record_lookup)
    plane.agents.register("ada", public_key=ada.public_key)

    def seal(id: str, sender: str = "ada", recipient: AgentKey = bob) -> bytes:
        binding = SealBinding(f"{sender}@main", "bob@main", id, 1)
        return ada.seal(b"fine", "text/plain", recipient=recipient.public_key, binding=binding)

    mails = [
        ("ada", seal("0"), SEALED),
        ("ada", b"plain", "text/plain"),
        ("ada", b"x" + seal("2"), SEALED),
        ("ada", seal("3", recipient=ada), SEALED),
        ("eve", seal("4", "eve"), SEALED),
        ("eve", seal("5", "eve"), SEALED),
        ("ada", seal("6"), SEALED),
    ]
    for number, (sender, body, kind) in enumerate(mails):
        plane.mailbox(sender).send("bob", body, content_type=kind, id=str(number))
    mailbox = plane.mailbox("bob", key=bob)
    read = mailbox.read()
    assert lookups == ["ada", "eve"], "once for each sender"
    assert [mail.body for mail in read if mail.seal_error is None] == [b"fine", b"plain", b"fine"]
    broken = [mail for mail in read if mail.seal_error is not None]
    assert [mail.content_type for mail in broken] == [SEALED] * 4
    assert [mail.body for mail in broken] == [body for _, body, _ in mails[2:6]]
    assert ["not sealed by this sender" in (mail.seal_error or "") for mail in broken] == [True, True, False, False]
    assert "public key of eve is unknown; register" in str(broken[2].seal_error)
    plane.agents.register("eve", public_key=ada.public_key)
    assert (mailbox.unseal(broken[2]).body, mailbox.unseal(broken[2]).seal_error) == (b"fine", None)
    assert len(list(mailbox.subscribe(wait_seconds=0))) == len(read)
    assert mailbox.count() == 0


def test_mail_is_not_delivered_sealed_if_its_senders_key_can_be_read_later(
    plane: Plane, ada: AgentKey, bob: AgentKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.agents.register("ada", public_key=ada.public_key)
    plane.agents.register("bob", public_key=bob.public_key)
    plane.mailbox("ada", key=ada).send("bob", b"x", seal=True)
    mailbox = plane.mailbox("bob", key=bob)

    def fail(transport: EmbeddedTransport, request: Any, *args: Any) -> Any:
        if isinstance(request, GetAgent):
            raise Unreachable("the server does not answer")
        return call(transport, request, *args)

    call = EmbeddedTransport.call
    with monkeypatch.context() as patch, pytest.raises(Unreachable):
        patch.setattr(EmbeddedTransport, "call", fail)
        next(iter(mailbox))
    assert [mail.body for mail in mailbox.subscribe(wait_seconds=0)] == [b"x"]


def test_unsealing_a_plain_mail_returns_it_unchanged(plane: Plane, bob: AgentKey) -> None:
    plane.mailbox("ada").send("bob", b"plain")
    mailbox = plane.mailbox("bob", key=bob)
    [mail] = mailbox.read()
    assert mailbox.unseal(mail) == mail


@pytest.fixture
def boxes(plane: Plane, ada: AgentKey, bob: AgentKey) -> tuple[Any, Any]:
    """The mailboxes of ada and bob, opened with their keys."""
    plane.agents.register("ada", public_key=ada.public_key)
    plane.agents.register("bob", public_key=bob.public_key)
    return plane.mailbox("ada", key=ada), plane.mailbox("bob", key=bob)


def test_a_sealed_mail_says_who_sealed_it_and_when(plane: Plane, boxes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = boxes
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    ours.send("bob", {"n": 1}, seal=True, id="one")
    ours.send("bob@main", {"n": 2}, seal=True)
    ours.send("bob", {"n": 3})
    sealed, other, plain = theirs.read()
    assert [mail.json()["n"] for mail in (sealed, other, plain)] == [1, 2, 3]
    assert [mail.sealed_by for mail in (sealed, other, plain)] == ["ada@main", "ada@main", None]
    assert sealed.sealed_ms == 1_700_000_000_123
    assert plain.sealed_ms is None
    assert sealed.id == "one"


def test_a_mail_that_is_sent_back_is_not_mail_of_its_recipient(plane: Plane, boxes: Any) -> None:
    ours, _ = boxes
    ours.send("bob", b"pay me 10", seal=True, id="bill")
    [stored] = plane.mailbox("bob").read()
    plane.mailbox("bob").send("ada", stored.body, content_type=SEALED, id="bill")
    [reflected] = ours.read()
    assert (reflected.body, reflected.sealed_by) == (stored.body, None)
    assert "sealed by ada@main for bob@main as mail bill" in str(reflected.seal_error)
    with pytest.raises(SealBroken, match="do not trust it"):
        ours.unseal(reflected)
    with pytest.raises(SealBroken):
        reflected.json()


def test_a_sealed_mail_is_valid_under_its_own_id_only(plane: Plane, boxes: Any) -> None:
    ours, theirs = boxes
    ours.send("bob", b"pay 10", seal=True, id="first")
    [stored] = plane.mailbox("bob").read()
    plane.mailbox("ada").send("bob", stored.body, content_type=SEALED, id="second")
    first, replayed = theirs.read()
    assert (first.sealed_by, first.seal_error) == ("ada@main", None)
    assert ("as mail first" in str(replayed.seal_error), replayed.sealed_by) == (True, None)


ATTACKS: dict[str, Callable[[Envelope], Envelope]] = {
    "another sender, registered with the key of ada": lambda mail: replace(mail, sender="eve@main"),
    "another id": lambda mail: replace(mail, id="second"),
    "truncated": lambda mail: replace(mail, body=mail.body[:-1]),
    "only its nonce": lambda mail: replace(mail, body=mail.body[:24]),
    "empty": lambda mail: replace(mail, body=b""),
    "extended": lambda mail: replace(mail, body=mail.body + b"x"),
    "nonce changed": lambda mail: replace(mail, body=bytes(24) + mail.body[24:]),
    "presented as plain": lambda mail: replace(mail, content_type="text/plain"),
}


def deliver(monkeypatch: pytest.MonkeyPatch, change: Callable[[Envelope], Envelope]) -> None:
    """Let the server change every mail that is read."""
    call = EmbeddedTransport.call

    def changed(transport: EmbeddedTransport, request: Any, *args: Any) -> Any:
        answer = call(transport, request, *args)
        if isinstance(answer, Mails):
            return replace(answer, mails=[change(mail) for mail in answer.mails])
        return answer

    monkeypatch.setattr(EmbeddedTransport, "call", changed)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_mail_that_a_server_has_changed_is_not_taken_for_sealed(
    plane: Plane,
    bob: AgentKey,
    boxes: Any,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[Envelope], Envelope],
) -> None:
    ours, theirs = boxes
    plane.agents.register("eve", public_key=ours._key.public_key)
    ours.send("bob", b"pay 10", content_type="text/plain", seal=True, id="first")
    deliver(monkeypatch, attack)
    for mailbox in (theirs, plane.mailbox("bob", key=bob, require_sealed=True)):
        [mail] = mailbox.read()
        assert (mail.sealed_by, mail.sealed_ms) == (None, None)
        assert mail.body != b"pay 10"
        assert mail.seal_error is not None or (mailbox is theirs and mail.content_type == "text/plain")


def test_a_sealed_mail_is_valid_for_its_recipient_only(plane: Plane, bob: AgentKey, boxes: Any) -> None:
    """Also if another agent has the same key."""
    ours, _ = boxes
    ours.send("bob", b"pay 10", seal=True, id="first")
    [stored] = plane.mailbox("bob").read()
    plane.mailbox("ada").send("carol", stored.body, content_type=SEALED, id="first")
    [mail] = plane.mailbox("carol", key=bob).read()
    assert (mail.sealed_by, "for bob@main" in str(mail.seal_error)) == (None, True)


def test_times_and_content_type_of_the_envelope_do_not_change_the_sealed_ones(
    boxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = boxes
    ours.send("bob", b"pay 10", content_type="text/plain", seal=True)
    [before] = theirs.read()
    deliver(monkeypatch, lambda mail: replace(mail, sent_ms=1, expires_ms=2**62, sequence=7))
    [mail] = theirs.read()
    assert mail.sealed_ms == before.sealed_ms
    assert (mail.body, mail.content_type, mail.sealed_by) == (b"pay 10", "text/plain", "ada@main")


def test_a_sealed_content_that_nests_too_deep_is_delivered_with_the_reason(
    plane: Plane, ada: AgentKey, bob: AgentKey, boxes: Any
) -> None:
    """A sender has full control of what it seals: one mail must not keep the others from being read."""
    ours, theirs = boxes
    fields = msgspec.msgpack.encode(["ada@main", "bob@main", "x", 1, "text/plain", b""])
    nested = b"\x97" + fields[1:] + b"\x91" * 10_000 + b"\xc0"
    box = ada._box(bob.public_key)
    plane.mailbox("ada").send("bob", bytes(box.encrypt(_FORMAT + nested)), content_type=SEALED, id="x")
    ours.send("bob", b"fine", seal=True)
    bad, fine = theirs.read()
    assert "not sealed by this sender" in str(bad.seal_error)
    assert fine.body == b"fine"


def test_mail_that_is_sealed_in_another_format_is_not_opened(
    plane: Plane, ada: AgentKey, bob: AgentKey, boxes: Any
) -> None:
    _, theirs = boxes
    for content in (b"fastness-sealed-2\0new", b""):
        body = bytes(ada._box(bob.public_key).encrypt(content))
        plane.mailbox("ada").send("bob", body, content_type=SEALED)
    for mail in theirs.read():
        assert "a format that this version does not know; upgrade" in str(mail.seal_error)
        assert mail.sealed_by is None


def test_a_mailbox_can_require_sealed_mail(plane: Plane, bob: AgentKey, boxes: Any) -> None:
    ours, _ = boxes
    strict = plane.mailbox("bob", key=bob, require_sealed=True)
    ours.send("bob", {"n": 1}, seal=True)
    ours.send("bob", {"n": 2})
    sealed, plain = strict.read()
    assert (sealed.json(), sealed.seal_error) == ({"n": 1}, None)
    assert "not sealed" in str(plain.seal_error)
    with pytest.raises(SealBroken, match="requires"):
        plain.json()
    sealed, plain = plane.mailbox("bob").read()
    assert strict.unseal(sealed).sealed_by == "ada@main"
    with pytest.raises(SealBroken):
        strict.unseal(plain)
    with pytest.raises(InvalidArgument, match="key="):
        plane.mailbox("bob", require_sealed=True)


def test_what_a_server_claims_about_a_seal_is_ignored(
    plane: Plane, bob: AgentKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.mailbox("ada").send("bob", b"plain")
    call = EmbeddedTransport.call

    def claim(transport: EmbeddedTransport, request: Any, *args: Any) -> Any:
        answer = call(transport, request, *args)
        if isinstance(answer, Mails):
            claims = {"sealed_by": "ada@main", "sealed_ms": 1, "seal_error": "nonsense"}
            mails = [msgspec.structs.replace(mail, **claims) for mail in answer.mails]
            return msgspec.structs.replace(answer, mails=mails)
        return answer

    monkeypatch.setattr(EmbeddedTransport, "call", claim)
    for mailbox in (plane.mailbox("bob"), plane.mailbox("bob", key=bob)):
        [mail] = mailbox.read()
        assert (mail.sealed_by, mail.sealed_ms, mail.seal_error) == (None, None, None)
        [claimed] = plane._transport.call(ReadMail("bob")).mails
        assert mailbox.unseal(claimed).sealed_by is None
    [mail] = plane.mailbox("bob", key=bob, require_sealed=True).read()
    assert "not sealed" in str(mail.seal_error)


def test_contacts_take_precedence_over_the_server(plane: Plane, ada: AgentKey, bob: AgentKey) -> None:
    """A server that returns its own key for an agent cannot read its mail or impersonate it."""
    eve = AgentKey.generate()
    plane.agents.register("bob", public_key=eve.public_key)
    plane.agents.register("ada", public_key=eve.public_key)
    plane.mailbox("ada", key=ada, contacts={"bob": bob.public_key}).send("bob", b"x", seal=True)
    [mail] = plane.mailbox("bob").read()
    with pytest.raises(SealBroken):
        eve.open(mail.body, sender=ada.public_key)
    mailbox = plane.mailbox("bob", key=bob, contacts={"ada@main": ada.public_key})
    assert mailbox.unseal(mail).body == b"x"


def test_sealing_needs_both_keys(plane: Plane, ada: AgentKey) -> None:
    with pytest.raises(InvalidArgument, match="key="):
        plane.mailbox("ada").send("bob", b"x", seal=True)
    with pytest.raises(InvalidArgument, match="bob"):
        plane.mailbox("ada", key=ada).send("bob", b"x", seal=True)
    assert plane.mailbox("bob").count() == 0
