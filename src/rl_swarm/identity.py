"""Who a node is: a private key in `swarm.pem`, a peer id made from it, a friendly name made from that.

The peer id is the one libp2p gives to an Ed25519 key (`12D3KooW...`). It contains the public key, so
whoever reads a peer id can check that peer's signatures without asking anybody.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rl_swarm.errors import UserError
from rl_swarm.words import ADJECTIVES, ANIMALS, COLOURS

# An identity multihash (code 0, 36 bytes) around the protobuf {type: Ed25519, data: 32 bytes}.
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class IdentityError(UserError):
    """A key file that is missing, unreadable or not a key."""


@dataclass(frozen=True)
class Identity:
    key: Ed25519PrivateKey
    peer_id: str

    @property
    def name(self) -> str:
        return animal_name(self.peer_id)

    @property
    def node(self) -> str:
        """The node's name in files, unless the user gives it another."""
        return f"{self.name.replace(' ', '-')}-{self.peer_id[-6:]}"

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)

    @classmethod
    def new(cls) -> "Identity":
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> "Identity":
        public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return cls(key, peer_id_of(public))

    @classmethod
    def load(cls, path: Path) -> "Identity":
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(
                f"IDENTITY_PATH={path} is not a private key this node can use ({error}). "
                "Move it away to get a new identity, or restore it from your backup."
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(
                f"IDENTITY_PATH={path} holds a {type(key).__name__}; an Ed25519 key is needed."
            )
        return cls._of(key)

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The identity in `path`, made there at first use. An existing file is never overwritten."""
        if path.exists():
            return cls.load(path)
        identity = cls.new()
        pem = identity.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and linked into place: two processes that start together agree on one key,
        # and a crash leaves either no file or a whole one.
        descriptor, aside = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem)
            try:
                os.link(aside, path)
            except FileExistsError:
                raise
            except OSError:  # no hard links on this file system (a mounted Drive)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(pem)
        except FileExistsError:
            return cls.load(path)
        finally:
            os.unlink(aside)
        return identity


def peer_id_of(public_key: bytes) -> str:
    return base58(_PREFIX + public_key)


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether the peer signed the message; False for a peer id that is none."""
    raw = base58_decode(peer_id) if len(peer_id) <= 64 else None
    if raw is None or len(raw) != 38 or not raw.startswith(_PREFIX):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(raw[len(_PREFIX) :]).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def animal_name(peer_id: str) -> str:
    """A name people can say: `brave amber otter`. Not unique, so never used to decide anything."""
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
