"""Who a node is: one key, kept; one peer id, checkable by anybody; one name."""

import base64
import functools
import hashlib
import json
import logging
import math
import os
import stat
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from processes import run

from rl_swarm.protocol.identity import (
    Identity,
    IdentityError,
    animal_name,
    base58,
    base58_decode,
    is_peer_id,
    peer_id_of,
    rsa_peer_id,
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
        "import sys; from pathlib import Path; from rl_swarm.protocol.identity import Identity; "
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
    winner = Identity.generate()
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
    alice, bob = Identity.generate(), Identity.generate()
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
    alice = Identity.generate()
    raw = base58_decode(alice.peer_id)
    signature = alice.sign(b"message")
    for wrong in (raw[1:], b"\0" + raw, raw + b"\0", raw[:-1], b"\1" + raw[1:], raw[:3] + b"\2" + raw[4:]):
        assert not verify(base58(wrong), b"message", signature)
    assert not verify("1" + alice.peer_id, b"message", signature)


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"\xff\xfe\x00", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_key_file_that_holds_no_key_is_explained_and_left_alone(tmp_path, content):
    path = tmp_path / "swarm.pem"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=f"IDENTITY_PATH={path}"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_of_another_kind_or_with_a_password_is_explained(tmp_path):
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec.pem").write_bytes(other.private_bytes(encoding, kind, serialization.NoEncryption()))
    locked = Identity.generate().key.private_bytes(encoding, kind, serialization.BestAvailableEncryption(b"secret"))
    (tmp_path / "locked.pem").write_bytes(locked)
    with pytest.raises(IdentityError, match="an Ed25519 or RSA key is needed"):
        Identity.load(tmp_path / "ec.pem")
    with pytest.raises(IdentityError, match=r"locked\.pem is not a private key this node can use"):
        Identity.load(tmp_path / "locked.pem")


@pytest.mark.parametrize("name", ["missing.pem", "directory"])
def test_a_key_file_that_cannot_be_read_is_explained(tmp_path, name):
    (tmp_path / "directory").mkdir()
    with pytest.raises(IdentityError, match=f"IDENTITY_PATH={tmp_path / name}"):
        Identity.load(tmp_path / name)


def test_a_name_is_three_words_and_never_changes():
    assert animal_name("12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu") == "exact black cougar"
    identity = Identity.generate()
    assert identity.name == animal_name(identity.peer_id)
    assert len(identity.name.split(" ")) == 3


def test_many_peers_have_many_names():
    names = [animal_name(f"peer {number}") for number in range(1000)]
    assert len(set(names)) > 950
    for position in range(3):
        assert len({name.split(" ")[position] for name in names}) > 20


def test_the_node_name_can_be_a_file_name_and_tells_peers_of_one_animal_name_apart():
    identity = Identity.generate()
    assert identity.node == f"{identity.name.replace(' ', '-')}-{identity.peer_id[-6:]}"
    assert all(character.isascii() and (character.isalnum() or character == "-") for character in identity.node)


# Keys of earlier systems, written as libp2p writes them.


@functools.cache
def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def protobuf(kind: int, data: bytes) -> bytes:
    return b"\x08" + varint(kind) + b"\x12" + varint(len(data)) + data


def pkcs1(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def pkix(key: rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def libp2p_rsa_id(key: rsa.RSAPrivateKey) -> str:
    """By the definition: base58 of a SHA-256 multihash of the public key's protobuf."""
    number = int.from_bytes(b"\x12\x20" + hashlib.sha256(protobuf(0, pkix(key))).digest(), "big")
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return text


def test_an_rsa_peer_id_is_the_one_libp2p_gives_to_the_key():
    """The public key and the multihash are from the tests of js-peer-id."""
    public = base64.b64decode(
        "CAASpgIwggEiMA0GCSqGSIb3DQEBAQUAA4IBDwAwggEKAoIBAQC2SKo/HMFZeBml1AF3XijzrxrfQXdJzjePBZAbdxqKR1Mc6juRHXij6HXYPjlA"
        "k01BhF1S3Ll4Lwi0cAHhggf457sMg55UWyeGKeUv0ucgvCpBwlR5cQ020i0MgzjPWOLWq1rtvSbNcAi2ZEVn6+Q2EcHo3wUvWRtLeKz+DZSZfw2P"
        "EDC+DGPJPl7f8g7zl56YymmmzH9liZLNrzg/qidokUv5u1pdGrcpLuPNeTODk0cqKB+OUbuKj9GShYECCEjaybJDl9276oalL9ghBtSeEv20kuga"
        "tTvYy590wFlJkkvyl+nPxIH0EEYMKK9XRWlu9XYnoSfboiwcv8M3SlsjAgMBAAE="
    )
    assert public[:5] == b"\x08\x00\x12\xa6\x02"
    peer_id = rsa_peer_id(public[5:])
    assert peer_id == "QmQ2zigjQikYnyYUSXZydNXrDRhBut2mubwJBaLXobMt3A"
    assert base58_decode(peer_id).hex() == "122019318b6e5e0cf93a2314bf01269a2cc23cd3dcd452d742cdb9379d8646f6e4a9"


def rsa_forms() -> dict[str, bytes]:
    raw = protobuf(0, pkcs1(rsa_key()))
    pem = [serialization.Encoding.PEM, None, serialization.NoEncryption()]
    return {
        "protobuf": raw,
        "base64": base64.b64encode(raw),
        "base64 in lines": base64.encodebytes(raw),
        "PEM, PKCS8": rsa_key().private_bytes(pem[0], serialization.PrivateFormat.PKCS8, pem[2]),
        "PEM, PKCS1": rsa_key().private_bytes(pem[0], serialization.PrivateFormat.TraditionalOpenSSL, pem[2]),
    }


@pytest.mark.parametrize("form", ["protobuf", "base64", "base64 in lines", "PEM, PKCS8", "PEM, PKCS1"])
def test_an_rsa_key_of_an_earlier_system_keeps_its_peer_id_and_signs(tmp_path, form):
    (tmp_path / "swarm.pem").write_bytes(rsa_forms()[form])
    identity = Identity.load_or_create(tmp_path / "swarm.pem")
    assert identity.peer_id == libp2p_rsa_id(rsa_key())
    assert identity.peer_id.startswith("Qm") and identity.kind == "RSA, 2048 bits"
    assert is_peer_id(identity.peer_id)
    signature = identity.sign(b"message")
    assert verify(identity.peer_id, b"message", signature)
    rsa_key().public_key().verify(signature[-256:], b"message", padding.PKCS1v15(), hashes.SHA256())
    assert Identity.from_bytes(identity.pem()).peer_id == identity.peer_id


@pytest.mark.parametrize("copies", [1, 2])
def test_an_ed25519_key_of_libp2p_keeps_its_peer_id(copies):
    """With the vector of rust-libp2p; old files hold the public key twice."""
    raw = base64.b64decode(
        "CAESQL6vdKQuznQosTrW7FWI9At+XX7EBf0BnZLhb6w+N+XSQSdfInl6c7U4NuxXJlhKcRBlBw9d0tj2dfBIVf6mcPA="
    )
    data = protobuf(1, raw[4:36] + copies * raw[36:])
    for form in (data, base64.b64encode(data)):
        assert Identity.from_bytes(form).peer_id == "12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu"


def test_an_rsa_signature_is_good_for_its_message_its_author_and_its_key_only():
    alice = Identity.from_bytes(protobuf(0, pkcs1(rsa_key())))
    mallory = Identity.from_bytes(protobuf(0, pkcs1(rsa_key(2056))))
    signature = alice.sign(b"message")
    length = int.from_bytes(signature[:2], "big")
    assert not verify(alice.peer_id, b"Message", signature)
    assert not verify(alice.peer_id, b"message", mallory.sign(b"message"))
    assert not verify(Identity.generate().peer_id, b"message", signature)
    own_key = signature[: 2 + length] + mallory.sign(b"message")[2 + len(pkix(rsa_key(2056))) :]
    assert not verify(alice.peer_id, b"message", own_key)
    for position in (0, 1, 2, 40, 2 + length, len(signature) - 1):
        forged = bytearray(signature)
        forged[position] ^= 1
        assert not verify(alice.peer_id, b"message", bytes(forged))
    for forged in (signature[:-1], signature + b"\0", signature[:2], signature[2 + length :], b"", b"\xff" * 10_000):
        assert not verify(alice.peer_id, b"message", forged)


def signed_with(key: rsa.RSAPrivateKey) -> tuple[str, bytes]:
    public = pkix(key)
    signature = key.sign(b"message", padding.PKCS1v15(), hashes.SHA256())
    return rsa_peer_id(public), len(public).to_bytes(2, "big") + public + signature


def test_weak_and_costly_rsa_keys_are_nobodys(tmp_path):
    """Below 2048 bits a key can be broken; above 8192, or with a huge exponent, checking it is an attack."""
    assert verify(signed_with(rsa_key())[0], b"message", signed_with(rsa_key())[1])
    small = rsa_key(1024)
    assert not verify(signed_with(small)[0], b"message", signed_with(small)[1])
    with pytest.raises(ValueError, match="2048 to 8192 bits"):
        Identity.from_bytes(protobuf(0, pkcs1(small)))
    costly = with_exponent(rsa_key(), 2**40 + 1)
    costly.public_key().verify(signed_with(costly)[1][-256:], b"message", padding.PKCS1v15(), hashes.SHA256())
    assert not verify(signed_with(costly)[0], b"message", signed_with(costly)[1])


def with_exponent(key: rsa.RSAPrivateKey, least: int) -> rsa.RSAPrivateKey:
    """The key with another public exponent, which fits it as well."""
    p, q = key.private_numbers().p, key.private_numbers().q
    e = next(e for e in range(least, least + 10_000, 2) if math.gcd(e, (p - 1) * (q - 1)) == 1)
    d = pow(e, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(e, p * q)
    crt = rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q)
    return rsa.RSAPrivateNumbers(p, q, d, *crt, public).private_key()


@given(st.binary(max_size=600), st.booleans())
def test_no_signature_whatever_raises(junk, framed):
    """Also when the peer id is the hash of the very junk that is given as its public key."""
    blob = len(junk).to_bytes(2, "big") + junk + junk if framed else junk
    for peer_id in (rsa_peer_id(junk), "Qm" + "1" * 44, "QmQ2zigjQikYnyYUSXZydNXrDRhBut2mubwJBaLXobMt3A"):
        assert not verify(peer_id, b"message", blob)


def test_a_public_key_of_another_kind_under_a_hashed_peer_id_signs_nothing():
    key = ec.generate_private_key(ec.SECP521R1())
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    signature = key.sign(b"message", ec.ECDSA(hashes.SHA256()))
    assert not verify(rsa_peer_id(public), b"message", len(public).to_bytes(2, "big") + public + signature)


@given(st.binary(max_size=200))
def test_no_key_file_raises_anything_but_a_value_error(data):
    with pytest.raises(ValueError):
        Identity.from_bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        protobuf(1, bytes(32)),  # a seed alone
        protobuf(1, bytes(64)),  # another's public key
        protobuf(2, bytes(32)),  # secp256k1
        protobuf(0, b"not DER"),
        protobuf(1, bytes(64))[:40],
        b"\x08" + b"\xff" * 40,
        b"",
    ],
)
def test_what_is_no_key_of_libp2p_is_refused(data):
    with pytest.raises(ValueError):
        Identity.from_bytes(data)


def test_a_key_that_others_can_read_is_warned_about(tmp_path, caplog):
    path = tmp_path / "swarm.pem"
    Identity.load_or_create(path)
    with caplog.at_level(logging.WARNING):
        Identity.load_or_create(path)
        assert not caplog.records
        path.chmod(0o644)
        Identity.load_or_create(path)
    assert f"chmod 600 {path}" in caplog.text and "0644" in caplog.text


# The commands.


def test_the_identity_commands_make_show_export_and_import_a_key(tmp_path):
    code, output = run(tmp_path, "identity", "show")
    assert code == 1 and "swarm.pem" in output and "identity new" in output
    assert not (tmp_path / "swarm.pem").exists()
    code, output = run(tmp_path, "identity", "new")
    assert code == 0 and stat.S_IMODE((tmp_path / "swarm.pem").stat().st_mode) == 0o600
    before = (tmp_path / "swarm.pem").read_bytes()
    for again in (["new"], ["import", "swarm.pem"], ["export", "swarm.pem"]):
        code, output = run(tmp_path, "identity", *again)
        assert code == 1 and "not overwritten" in output and "Traceback" not in output
    assert (tmp_path / "swarm.pem").read_bytes() == before
    shown = json.loads(run(tmp_path, "identity", "show", "--json")[1])
    mine = Identity.load(tmp_path / "swarm.pem")
    assert (shown["peer_id"], shown["name"], shown["key"]) == (mine.peer_id, mine.name, "Ed25519")
    assert shown["file"] == str(tmp_path / "swarm.pem")

    assert run(tmp_path, "identity", "export", "backup/mine.pem")[0] == 0
    assert stat.S_IMODE((tmp_path / "backup/mine.pem").stat().st_mode) == 0o600
    code, output = run(tmp_path, "identity", "import", "backup/mine.pem", IDENTITY_PATH="second.pem")
    assert code == 0 and mine.peer_id in output
    assert Identity.load(tmp_path / "second.pem").peer_id == mine.peer_id
    public = run(tmp_path, "identity", "export", "--public")[1]
    assert public.encode() == mine.public_pem() and "PRIVATE" not in public


def test_the_key_of_an_earlier_system_is_imported_signs_and_is_checked(tmp_path):
    (tmp_path / "old.pem").write_bytes(rsa_forms()["protobuf"])
    code, output = run(tmp_path, "identity", "import", "old.pem")
    peer_id = libp2p_rsa_id(rsa_key())
    assert code == 0 and peer_id in output
    (tmp_path / "file").write_bytes(b"hello")
    code, signature = run(tmp_path, "identity", "sign", "file")
    assert code == 0
    code, output = run(tmp_path, "identity", "verify", "file", signature.strip(), peer_id)
    assert code == 0 and output.startswith("Good")
    assert run(tmp_path, "identity", "verify", "file", signature.strip(), Identity.generate().peer_id)[0] == 1
    assert run(tmp_path, "identity", "verify", "file", "junk!", peer_id)[0] == 1
    (tmp_path / "file").write_bytes(b"Hello")
    code, output = run(tmp_path, "identity", "verify", "file", signature.strip(), peer_id)
    assert code == 1 and output.startswith("NOT good")


def test_a_signed_file_never_passes_for_a_message_of_a_swarm(tmp_path):
    """Or somebody could have a node sign, as a file, what it never said."""
    run(tmp_path, "identity", "new")
    message = b'{"kind":"roll"}'
    (tmp_path / "file").write_bytes(message)
    signature = base64.b64decode(run(tmp_path, "identity", "sign", "file")[1])
    assert not verify(Identity.load(tmp_path / "swarm.pem").peer_id, message, signature)


def test_what_is_no_key_is_not_imported(tmp_path):
    (tmp_path / "junk").write_bytes(b"junk")
    for name in ("junk", "missing"):
        code, output = run(tmp_path, "identity", "import", name)
        assert code == 1 and name in output and "Traceback" not in output
    assert not (tmp_path / "swarm.pem").exists()
