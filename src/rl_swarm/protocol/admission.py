"""Decides which peers may take part: the owner's access list, invitations, and the one rule for both.

The owner of a swarm, whose key signed the manifest, keeps a signed list of allowed and denied peers. In a swarm of
invited peers, an invitation admits a number of them: terms and a public key, signed by the owner. A token is an
invitation with the private key. A peer that has a token signs its own peer id with that key: a ticket, in its
introduction. So a reader of an introduction learns nothing that would admit another peer.
"""

import base64
import binascii
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta
from msgspec.structs import replace

from rl_swarm.errors import UserError
from rl_swarm.protocol.identity import Identity, animal_name, peer_id_of, verify
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rounds import MAX_TICKET, Member, RefusalReason
from rl_swarm.protocol.wire import Rejected, canonical, digest

_TERMS = struct.Struct(">IQ")  # of an invitation: uses, expires
MAX_LIST_ENTRIES = 10_000  # peers or invitations in one list


class AdmissionError(UserError):
    """Reports that a peer may not take part; the message says whom to ask for what."""


PeerList = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_LIST_ENTRIES)]


class AccessList(msgspec.Struct, frozen=True, kw_only=True):
    """Lists the peers that the owner allows and denies. A new list has a higher number than the one before."""

    peer_id: str = ""
    kind: Literal["access_list"] = "access_list"
    swarm: str
    number: Annotated[int, Meta(ge=0)] = 0
    timestamp: float = 0.0
    allowed: PeerList = []
    denied: PeerList = []
    revoked: PeerList = []  # invitations: peers that came by them are out, unless allowed

    def with_entry(self, name: str, allow: bool) -> "AccessList":
        """Return the list with one more peer or invitation allowed or denied."""
        allowed, denied, revoked = (set(names) - {name} for names in (self.allowed, self.denied, self.revoked))
        if is_invitation(name):
            revoked |= set() if allow else {name}
        else:
            (allowed if allow else denied).add(name)
        return replace(self, allowed=sorted(allowed), denied=sorted(denied), revoked=sorted(revoked))


@dataclass(frozen=True)
class Invitation:
    """Holds the terms that the owner signed."""

    key: bytes  # the invitation's own public key
    uses: int  # peers that it admits
    expires: int  # seconds since 1970

    def message(self, manifest: Manifest) -> bytes:
        return canonical(["invitation", manifest.swarm(), self.key.hex(), self.uses, self.expires])

    def name(self, manifest: Manifest) -> str:
        return digest(self.message(manifest))[:16]


def is_invitation(name: str) -> bool:
    """Tell whether a name is an invitation's (16 digits of its digest) and not a peer's."""
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def invite(manifest: Manifest, owner: Identity, uses: int, expires: int) -> tuple[str, str]:
    """Make an invitation; return its name and a token, which lets any peer join."""
    key = Ed25519PrivateKey.generate()
    invitation = Invitation(key.public_key().public_bytes_raw(), uses, expires)
    signature = owner.sign(invitation.message(manifest))
    return invitation.name(manifest), _encode(key.private_bytes_raw(), _TERMS.pack(uses, expires), signature)


def make_ticket(token: str, manifest: Manifest, peer_id: str) -> str:
    """Make the ticket by which a peer with a token joins, of no use to any other peer; raise `Rejected`."""
    data = _decode(token)
    key = Ed25519PrivateKey.from_private_bytes(data[:32])
    proof = key.sign(_claim(manifest, peer_id))
    ticket = _encode(key.public_key().public_bytes_raw(), data[32:44], proof, data[44:])
    check_ticket(peer_id, ticket, manifest)
    return ticket


def check_ticket(peer_id: str, ticket: str, manifest: Manifest) -> Invitation:
    """Return the invitation behind a ticket; raise `Rejected` if it is not this peer's or not the owner's."""
    data = _decode(ticket)
    invitation = Invitation(data[:32], *_TERMS.unpack(data[32:44]))
    if not verify(peer_id_of(invitation.key), _claim(manifest, peer_id), data[44:108]):
        raise Rejected(RejectReason.INVITATION, "another peer's")
    if not verify(manifest.peer_id, invitation.message(manifest), data[108:]):
        raise Rejected(RejectReason.INVITATION, "not signed by the owner of this swarm for this swarm")
    return invitation


def refusal_reason(
    manifest: Manifest, access_list: AccessList, peer_id: str, member: Member | None
) -> RefusalReason | None:
    """Return why a peer may not take part, by the access list and the state; None if it may."""
    if peer_id == manifest.peer_id:
        return None
    if peer_id in access_list.denied:
        return "denied"
    if peer_id in access_list.allowed:
        return None
    if member is not None and member.invitation in access_list.revoked:
        return "revoked"
    invited = member is not None and member.invitation != ""
    return None if manifest.admission == "open" or invited else "uninvited"


def admit(
    manifest: Manifest, access_list: AccessList, members: Mapping[str, Member], peer_id: str, ticket: str, now: float
) -> tuple[str, RefusalReason | None]:
    """Return the invitation by which a peer comes, if any, and why it may not take part."""
    member = members.get(peer_id)
    why = refusal_reason(manifest, access_list, peer_id, member)
    came_by = member.invitation if member else ""
    if why == "denied" or not ticket or (came_by and why is None):
        return came_by, why
    problem: RefusalReason | None = None
    try:
        invitation = check_ticket(peer_id, ticket, manifest)
    except Rejected:
        return "", why and "invalid"
    name = invitation.name(manifest)
    if name in access_list.revoked:
        problem = "revoked"
    elif now > invitation.expires:
        problem = "expired"
    elif sum(other.invitation == name for other in members.values()) >= invitation.uses:
        problem = "used up"
    return ("", why and problem) if problem else (name, None)


def refusal_message(why: RefusalReason, manifest: Manifest, peer_id: str, address: str) -> str:
    """Explain to a peer why it may not take part, and what would help."""
    owner = f"its owner, {animal_name(manifest.peer_id)} ({manifest.peer_id})"
    what = {
        "denied": "its owner has denied this node",
        "uninvited": "it takes invited peers only, and this node is not one of them",
        "invalid": "the invitation is not one for this node and this swarm",
        "revoked": "its owner has revoked the invitation by which this node came",
        "expired": "the invitation has expired",
        "used up": "as many peers as the invitation admits have come by it already",
        "full": "it has as many members as it can have; some will go",
    }[why]
    ask = (
        f"Ask {owner}, about it, or take part in another swarm."
        if why == "denied"
        else f"Ask {owner}, for an invitation (`rl-swarm invite {address}`) and join with --invitation, or to be "
        f"allowed by name (`rl-swarm allow {address} {peer_id}`)."
    )
    return f"The swarm {manifest.name} does not admit {peer_id}: {what}. {ask}"


def _claim(manifest: Manifest, peer_id: str) -> bytes:
    return canonical(["invited", manifest.swarm(), peer_id])


def _encode(*parts: bytes) -> str:
    return base64.urlsafe_b64encode(b"".join(parts)).decode().rstrip("=")


def _decode(text: str) -> bytes:
    """Decode a token or a ticket: a key, the terms, and signatures."""
    text = text.strip()
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise Rejected(RejectReason.INVITATION, "no invitation, or a part of one") from error
    if not 32 + _TERMS.size + 64 <= len(data) <= MAX_TICKET:
        raise Rejected(RejectReason.INVITATION, "no invitation, or a part of one")
    return data
