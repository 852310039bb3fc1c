"""Identifies a node: a private key in `swarm.pem`, a peer id made from it, a friendly name made from that.

The peer id is the one that libp2p gives to the key. That of an Ed25519 key (`12D3KooW...`) contains the public key, so
every reader of a peer id can check that peer's signatures. Keys of earlier systems are RSA keys, and their peer ids
(`Qm...`) are hashes; their signatures bring the public key along.
"""

import base64
import binascii
import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey

from rl_swarm.errors import UserError
from rl_swarm.protocol.words import ADJECTIVES, ANIMALS, COLOURS

log = logging.getLogger(__name__)

# An identity multihash (code 0, 36 bytes) around the protobuf {type: Ed25519, data: 32 bytes}.
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_HASHED = bytes([0x12, 0x20])  # a SHA-256 multihash: of the protobuf {type: RSA, data: the key as PKIX DER}
_RSA, _ED25519 = 0, 1  # libp2p's numbers of the kinds of key
RSA_BITS = range(2048, 8192 + 1)
MAX_EXPONENT = 2**31 - 1  # beyond that, checking one signature takes long
MAX_SIGNATURE = 2 + 1100 + 1024  # length, public key and signature of 8192 bits
KEY_FILE_BYTES = 64 << 10
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class IdentityError(UserError):
    """Reports a key file that is missing, unreadable or not a key."""


@dataclass(frozen=True)
class Identity:
    key: Ed25519PrivateKey | RSAPrivateKey
    peer_id: str

    @property
    def name(self) -> str:
        return animal_name(self.peer_id)

    @property
    def node(self) -> str:
        """Name the node in documents, unless the user gives it another name."""
        return f"{self.name.replace(' ', '-')}-{self.peer_id[-6:]}"

    @property
    def kind(self) -> str:
        return f"RSA, {self.key.key_size} bits" if isinstance(self.key, RSAPrivateKey) else "Ed25519"

    def sign(self, message: bytes) -> bytes:
        """Return the signature; with an RSA key, the length of the public key, the public key and the signature."""
        if isinstance(self.key, Ed25519PrivateKey):
            return self.key.sign(message)
        public = _pkix(self.key.public_key())
        signature = self.key.sign(message, padding.PKCS1v15(), hashes.SHA256())
        return len(public).to_bytes(2, "big") + public + signature

    @classmethod
    def generate(cls) -> "Identity":
        return cls._from_key(Ed25519PrivateKey.generate())

    @classmethod
    def derived(cls, *parts: str | int) -> "Identity":
        """Derive an identity that every machine can derive again, for nodes of experiments, which have no secrets."""
        return cls._from_key(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(repr(parts).encode()).digest()))

    @classmethod
    def _from_key(cls, key: Ed25519PrivateKey | RSAPrivateKey) -> "Identity":
        if isinstance(key, RSAPrivateKey):
            check_rsa(key.public_key())
            return cls(key, rsa_peer_id(_pkix(key.public_key())))
        public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return cls(key, peer_id_of(public))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Identity":
        """Read a private key: PEM, libp2p's protobuf, or base64 of that; raise `ValueError` if it is none."""
        if b"-----BEGIN" in data:
            key: object = serialization.load_pem_private_key(data, password=None)
        else:
            with contextlib.suppress(binascii.Error):
                data = base64.b64decode(b"".join(data.split()), validate=True)
            key = libp2p_key(data)
        if not isinstance(key, Ed25519PrivateKey | RSAPrivateKey):
            raise ValueError(f"it holds a {type(key).__name__}; an Ed25519 or RSA key is needed")
        return cls._from_key(key)

    @classmethod
    def load(cls, path: Path) -> "Identity":
        try:
            with path.open("rb") as file:
                return cls.from_bytes(file.read(KEY_FILE_BYTES))
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(
                f"IDENTITY_PATH={path} is not a private key this node can use ({error}). "
                "Move it away to get a new identity, or restore it from your backup."
            ) from error

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Return the identity in `path`, made there at first use. An existing file is never overwritten."""
        if not path.exists():
            identity = cls.generate()
            try:
                write_new(path, identity.pem())
                return identity
            except FileExistsError:  # another process was first
                pass
            except OSError as error:
                raise IdentityError(
                    f"The key IDENTITY_PATH={path} cannot be written ({error.strerror}). Start in a directory that can "
                    "be written, or set IDENTITY_PATH to a file in one."
                ) from error
        warn_if_readable(path)
        return cls.load(path)

    def pem(self) -> bytes:
        """Return the private key as it stands in files."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def libp2p(self) -> bytes:
        """Return the private key in libp2p's form: a protobuf {1: kind, 2: key}."""
        if isinstance(self.key, RSAPrivateKey):
            form = serialization.PrivateFormat.TraditionalOpenSSL
            data = self.key.private_bytes(serialization.Encoding.DER, form, serialization.NoEncryption())
        else:
            data = self.key.private_bytes_raw() + self.key.public_key().public_bytes_raw()
        kind = _RSA if isinstance(self.key, RSAPrivateKey) else _ED25519
        size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) if len(data) >= 0x80 else bytes([len(data)])
        return bytes([0x08, kind, 0x12]) + size + data

    def public_pem(self) -> bytes:
        return self.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that was not there, for its owner's eyes; raise `FileExistsError` if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and linked into place: two processes that start together agree on one key,
    # and a crash leaves either no file or a whole one.
    descriptor, aside = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if mode != 0o600:
            os.chmod(aside, mode)
        try:
            os.link(aside, path)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this file system (a mounted Drive)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
    finally:
        os.unlink(aside)


def warn_if_readable(path: Path) -> None:
    """Warn of a private key that other users can read, and so act as this node."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            log.warning(
                "IDENTITY_PATH=%s is a private key, and other users of this machine can open it (mode %04o). "
                "Close it with: chmod 600 %s",
                path, mode, path,
            )  # fmt: skip


def libp2p_key(data: bytes) -> object:
    """Read the private key in libp2p's protobuf {1: kind, 2: key}; raise `ValueError` if it is none."""
    kind, key, at = -1, b"", 0
    while at < len(data):
        tag = data[at]
        number, at = _varint(data, at + 1)
        if tag == 0x08:
            kind = number
        elif tag == 0x12 and at + number <= len(data):
            key = data[at : at + number]
            at += number
        else:
            raise ValueError("neither PEM nor a key of libp2p")
    if not key:
        raise ValueError("neither PEM nor a key of libp2p")
    if kind == _RSA:
        return serialization.load_der_private_key(key, password=None)
    # The seed and, once or in old files twice, the public key.
    if kind == _ED25519 and len(key) in (64, 96):
        seed = Ed25519PrivateKey.from_private_bytes(key[:32])
        if key[32:] != seed.public_key().public_bytes_raw() * (len(key) // 32 - 1):
            raise ValueError("its public key does not belong to its private key")
        return seed
    raise ValueError(f"a libp2p key of kind {kind}; Ed25519 or RSA is needed")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a protobuf number and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("neither PEM nor a key of libp2p")


def peer_id_of(public_key: bytes) -> str:
    return base58(_PREFIX + public_key)


def rsa_peer_id(public_key: bytes) -> str:
    """Return the peer id of an RSA key, given as PKIX DER."""
    length = len(public_key)
    protobuf = bytes([0x08, _RSA, 0x12, length & 0x7F | 0x80, length >> 7]) + public_key
    return base58(_HASHED + hashlib.sha256(protobuf).digest())


def _pkix(key: RSAPublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_rsa(key: RSAPublicKey) -> None:
    exponent = key.public_numbers().e
    if key.key_size not in RSA_BITS or not 3 <= exponent <= MAX_EXPONENT:
        raise ValueError(
            f"an RSA key of {key.key_size} bits with exponent {exponent}; "
            f"{RSA_BITS[0]} to {RSA_BITS[-1]} bits and an exponent below 2^31 are accepted"
        )


def is_peer_id(text: str) -> bool:
    """Tell whether a text has the form of a peer id of a key that nodes use."""
    raw = base58_decode(text) if len(text) <= 64 else None
    return raw is not None and (
        (len(raw) == 38 and raw.startswith(_PREFIX)) or (len(raw) == 34 and raw.startswith(_HASHED))
    )


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Tell whether the peer signed the message; False for a text that is no peer id."""
    raw = base58_decode(peer_id) if len(peer_id) <= 64 else None
    try:
        if raw is not None and len(raw) == 38 and raw.startswith(_PREFIX):
            Ed25519PublicKey.from_public_bytes(raw[len(_PREFIX) :]).verify(signature, message)
            return True
        if raw is not None and len(raw) == 34 and raw.startswith(_HASHED):
            return _verify_rsa(peer_id, message, signature)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return False


def _verify_rsa(peer_id: str, message: bytes, signature: bytes) -> bool:
    length = int.from_bytes(signature[:2], "big")
    public = signature[2 : 2 + length]
    if len(signature) > MAX_SIGNATURE or length < 128 or rsa_peer_id(public) != peer_id:
        return False
    key = serialization.load_der_public_key(public)
    if not isinstance(key, RSAPublicKey):
        return False
    check_rsa(key)
    key.verify(signature[2 + length :], message, padding.PKCS1v15(), hashes.SHA256())
    return True


def animal_name(peer_id: str) -> str:
    """Return a name that people can pronounce, `brave amber otter`. It is not unique, so it decides nothing."""
    pick = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:8], "big")
    words = []
    for choices in (ADJECTIVES, COLOURS, ANIMALS):
        pick, index = divmod(pick, len(choices))
        words.append(choices[index])
    return " ".join(words)


def base58(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def base58_decode(text: str) -> bytes | None:
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            return None
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
