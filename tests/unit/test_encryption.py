"""An agent's key: signing, sealing, and what is refused."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

import holdfast
from holdfast import AgentKey, Plane
from holdfast.encryption import SEALED
from holdfast.errors import InvalidArgument, SealBroken


@pytest.fixture
def plane() -> Iterator[Plane]:
    with holdfast.open("memory:") as plane:
        yield plane


@pytest.fixture
def ada() -> AgentKey:
    return AgentKey(bytes(range(32)))


@pytest.fixture
def bob() -> AgentKey:
    return AgentKey(bytes(range(1, 33)))


def test_what_is_sealed_is_opened_by_its_recipient_with_its_content_type(ada: AgentKey, bob: AgentKey) -> None:
    sealed = ada.seal(b"meet at nine", "text/plain", recipient=bob.public_key)
    assert b"meet" not in sealed
    assert b"text/plain" not in sealed
    assert bob.open(sealed, sender=ada.public_key) == (b"meet at nine", "text/plain")


def test_the_same_body_is_sealed_differently_each_time(ada: AgentKey, bob: AgentKey) -> None:
    assert ada.seal(b"x", "text/plain", recipient=bob.public_key) != ada.seal(
        b"x", "text/plain", recipient=bob.public_key
    )


def test_nobody_else_opens_it_and_nobody_else_can_have_sealed_it(ada: AgentKey, bob: AgentKey) -> None:
    eve = AgentKey.generate()
    sealed = ada.seal(b"x", "text/plain", recipient=bob.public_key)
    with pytest.raises(SealBroken):
        eve.open(sealed, sender=ada.public_key)
    with pytest.raises(SealBroken):
        bob.open(sealed, sender=eve.public_key)


@pytest.mark.parametrize("place", [0, 23, 24, -1])
def test_a_changed_byte_breaks_the_seal(ada: AgentKey, bob: AgentKey, place: int) -> None:
    sealed = bytearray(ada.seal(b"x" * 100, "text/plain", recipient=bob.public_key))
    sealed[place] ^= 1
    with pytest.raises(SealBroken):
        bob.open(bytes(sealed), sender=ada.public_key)


@pytest.mark.parametrize("sealed", [b"", b"x", b"x" * 24, b"x" * 40])
def test_what_was_never_sealed_is_no_sealed_body(ada: AgentKey, bob: AgentKey, sealed: bytes) -> None:
    with pytest.raises(SealBroken):
        bob.open(sealed, sender=ada.public_key)


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 33, b"\xff" * 32])
def test_a_public_key_must_be_one(ada: AgentKey, key: bytes) -> None:
    with pytest.raises(InvalidArgument, match="public key"):
        ada.seal(b"x", "text/plain", recipient=key)


def test_a_signature_is_ed25519(ada: AgentKey) -> None:
    Ed25519PublicKey.from_public_bytes(ada.public_key).verify(ada.sign(b"nonce"), b"nonce")


def test_a_saved_key_is_its_owners_alone_and_never_overwritten(ada: AgentKey, tmp_path: Path) -> None:
    path = tmp_path / "ada.key"
    ada.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert AgentKey.load(path).public_key == ada.public_key
    with pytest.raises(InvalidArgument, match="another file"):
        ada.save(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(InvalidArgument):
        AgentKey.load(tmp_path / "key")


def test_a_sealed_mail_is_opaque_on_its_way_and_opened_at_its_end(plane: Plane, ada: AgentKey, bob: AgentKey) -> None:
    plane.agents.register("ada", public_key=ada.public_key)
    plane.agents.register("bob", public_key=bob.public_key)
    plane.mailbox("ada", key=ada).send("bob", {"secret": 7}, seal=True)
    mailbox = plane.mailbox("bob", key=bob)
    [mail] = mailbox.read()
    assert mail.content_type == SEALED
    assert b"secret" not in mail.body
    assert mailbox.unseal(mail).json() == {"secret": 7}


def test_a_plain_mail_stays_as_it_is(plane: Plane, bob: AgentKey) -> None:
    plane.mailbox("ada").send("bob", b"plain")
    mailbox = plane.mailbox("bob", key=bob)
    [mail] = mailbox.read()
    assert mailbox.unseal(mail) == mail


def test_contacts_are_believed_instead_of_the_server(plane: Plane, ada: AgentKey, bob: AgentKey) -> None:
    """A server that names its own key for an agent learns nothing, and cannot pass for the agent."""
    eve = AgentKey.generate()
    plane.agents.register("bob", public_key=eve.public_key)
    plane.agents.register("ada", public_key=eve.public_key)
    plane.mailbox("ada", key=ada, contacts={"bob": bob.public_key}).send("bob", b"x", seal=True)
    [mail] = plane.mailbox("bob").read()
    with pytest.raises(SealBroken):
        eve.open(mail.body, sender=ada.public_key)
    mailbox = plane.mailbox("bob", key=bob, contacts={"ada@main": ada.public_key})
    assert mailbox.unseal(mail).body == b"x"


def test_sealing_asks_for_both_keys(plane: Plane, ada: AgentKey) -> None:
    with pytest.raises(InvalidArgument, match="key="):
        plane.mailbox("ada").send("bob", b"x", seal=True)
    with pytest.raises(InvalidArgument, match="bob"):
        plane.mailbox("ada", key=ada).send("bob", b"x", seal=True)
    assert plane.mailbox("bob").count() == 0
