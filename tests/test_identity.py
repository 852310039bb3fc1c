"""Who a node is: one key, kept; one peer id, checkable by anybody; one name."""

import base64
import os
import stat
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from rl_swarm.identity import (
    Identity,
    IdentityError,
    animal_name,
    base58,
    base58_decode,
    peer_id_of,
    verify,
)

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def test_a_new_key_is_readable_by_its_owner_only(tmp_path):
    previous = os.umask(0)
    try:
        Identity.load_or_create(tmp_path / "keys" / "swarm.pem")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "keys" / "swarm.pem").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["swarm.pem"]


def test_an_identity_is_the_same_after_a_restart(tmp_path):
    first = Identity.load_or_create(tmp_path / "swarm.pem")
    content = (tmp_path / "swarm.pem").read_bytes()
    again = Identity.load_or_create(tmp_path / "swarm.pem")
    assert again.peer_id == first.peer_id
    assert verify(first.peer_id, b"hello", again.sign(b"hello"))
    assert (tmp_path / "swarm.pem").read_bytes() == content


def test_two_identities_differ(tmp_path):
    assert Identity.load_or_create(tmp_path / "a").peer_id != Identity.load_or_create(tmp_path / "b").peer_id


def test_processes_that_start_together_agree_on_one_key(tmp_path):
    script = (
        "import sys; from pathlib import Path; from rl_swarm.identity import Identity; "
        "print('ready', flush=True); sys.stdin.readline(); "
        "print(Identity.load_or_create(Path(sys.argv[1])).peer_id)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "swarm.pem")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = {process.communicate()[0].strip() for process in started}
    assert found == {Identity.load(tmp_path / "swarm.pem").peer_id}
    assert [path.name for path in tmp_path.iterdir()] == ["swarm.pem"]


def test_whoever_loses_the_race_takes_the_winners_key(tmp_path, monkeypatch):
    """The other process writes its key after we looked and before we could."""
    path = tmp_path / "swarm.pem"
    winner = Identity.new()
    pem = winner.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    link = os.link

    def late(source, target):
        path.write_bytes(pem)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert Identity.load_or_create(path).peer_id == winner.peer_id
    assert path.read_bytes() == pem


@pytest.mark.parametrize("raced", [False, True])
def test_a_file_system_without_hard_links_does_too(tmp_path, monkeypatch, raced):
    path = tmp_path / "swarm.pem"
    winner = Identity.load_or_create(tmp_path / "winner")

    def refused(source, target):
        if raced:
            path.write_bytes((tmp_path / "winner").read_bytes())
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    made = Identity.load_or_create(path)
    assert (made.peer_id == winner.peer_id) is raced
    assert Identity.load(path).peer_id == made.peer_id
    assert raced or stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["swarm.pem", "winner"]


def test_what_a_crashed_start_left_behind_does_not_stop_the_next(tmp_path):
    """In a container every start may have the same process id."""
    (tmp_path / f"swarm.pem.{os.getpid()}").write_bytes(b"half a k")
    assert Identity.load_or_create(tmp_path / "swarm.pem").peer_id.startswith("12D3KooW")


def test_a_peer_id_is_the_one_libp2p_gives_to_the_key():
    """The vector is from the tests of rust-libp2p: protobuf header, private key, public key."""
    protobuf = base64.b64decode(
        "CAESQL6vdKQuznQosTrW7FWI9At+XX7EBf0BnZLhb6w+N+XSQSdfInl6c7U4NuxXJlhKcRBlBw9d0tj2dfBIVf6mcPA="
    )
    assert protobuf[:4] == bytes([0x08, 0x01, 0x12, 64])
    key = Ed25519PrivateKey.from_private_bytes(protobuf[4:36])
    assert key.public_key().public_bytes_raw() == protobuf[36:]
    assert peer_id_of(protobuf[36:]) == "12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu"


@given(st.binary(max_size=64))
def test_base58_is_the_number_in_base_58_with_leading_zeros_kept(data):
    text = base58(data)
    assert base58_decode(text) == data
    zeros = len(data) - len(data.lstrip(b"\0"))
    digits = text.removeprefix("1" * zeros)
    value = sum(58**place * ALPHABET.index(digit) for place, digit in enumerate(reversed(digits)))
    assert value == int.from_bytes(data, "big")
    assert not digits.startswith("1")


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "12D3 ", "é"])
def test_text_that_is_not_base58_decodes_to_nothing(text):
    assert base58_decode(text) is None


def test_a_signature_is_good_for_its_message_and_its_author_only():
    alice, bob = Identity.new(), Identity.new()
    signature = alice.sign(b"message")
    assert verify(alice.peer_id, b"message", signature)
    assert not verify(alice.peer_id, b"Message", signature)
    assert not verify(bob.peer_id, b"message", signature)
    for position in (0, 31, 32, 63):
        forged = bytearray(signature)
        forged[position] ^= 1
        assert not verify(alice.peer_id, b"message", bytes(forged))
    assert not verify(alice.peer_id, b"message", signature[:-1])
    assert not verify(alice.peer_id, b"message", b"")


@given(st.text(max_size=80))
def test_a_peer_id_that_is_none_signs_nothing(text):
    assert not verify(text, b"message", bytes(64))


def test_a_key_in_another_wrapping_is_not_a_peer_id():
    alice = Identity.new()
    raw = base58_decode(alice.peer_id)
    signature = alice.sign(b"message")
    for wrong in (raw[1:], b"\0" + raw, raw + b"\0", raw[:-1], b"\1" + raw[1:], raw[:3] + b"\2" + raw[4:]):
        assert not verify(base58(wrong), b"message", signature)
    assert not verify("1" + alice.peer_id, b"message", signature)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a key",
        b"\xff\xfe\x00",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    ],
)
def test_a_key_file_that_holds_no_key_is_explained_and_left_alone(tmp_path, content):
    path = tmp_path / "swarm.pem"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=f"IDENTITY_PATH={path}"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_of_another_kind_or_with_a_password_is_explained(tmp_path):
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (tmp_path / "rsa.pem").write_bytes(other.private_bytes(encoding, kind, serialization.NoEncryption()))
    locked = Identity.new().key.private_bytes(
        encoding, kind, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    with pytest.raises(IdentityError, match="an Ed25519 key is needed"):
        Identity.load(tmp_path / "rsa.pem")
    with pytest.raises(IdentityError, match=r"locked\.pem is not a private key this node can use"):
        Identity.load(tmp_path / "locked.pem")


@pytest.mark.parametrize("name", ["missing.pem", "directory"])
def test_a_key_file_that_cannot_be_read_is_explained(tmp_path, name):
    (tmp_path / "directory").mkdir()
    with pytest.raises(IdentityError, match=f"IDENTITY_PATH={tmp_path / name}"):
        Identity.load(tmp_path / name)


def test_a_name_is_three_words_and_never_changes():
    assert animal_name("12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu") == "exact black cougar"
    identity = Identity.new()
    assert identity.name == animal_name(identity.peer_id)
    assert len(identity.name.split(" ")) == 3


def test_many_peers_have_many_names():
    names = [animal_name(f"peer {number}") for number in range(1000)]
    assert len(set(names)) > 950
    for position in range(3):
        assert len({name.split(" ")[position] for name in names}) > 20


def test_the_node_name_can_be_a_file_name_and_tells_peers_of_one_animal_name_apart():
    identity = Identity.new()
    assert identity.node == f"{identity.name.replace(' ', '-')}-{identity.peer_id[-6:]}"
    assert all(
        character.isascii() and (character.isalnum() or character == "-") for character in identity.node
    )
