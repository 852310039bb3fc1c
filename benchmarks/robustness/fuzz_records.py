"""Makes one sealed record of every kind that travels, with keys that are the same in every run."""

import base64
import hashlib
import math
import struct
import tempfile
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rl_swarm.protocol import admission
from rl_swarm.protocol.admission import AccessList, Invitation
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.rounds import Member, PeerInfo, Refusal, Report, StageRecord, State
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import digest


def prime_of(name: str) -> int:
    """Return a probable prime of 1024 bits: good enough to sign with here."""
    digits = b"".join(hashlib.sha256(f"{name} {part}".encode()).digest() for part in range(4))
    number, small = int.from_bytes(digits, "big") | 3 << 1022 | 1, math.factorial(2000)
    while math.gcd(number, small) > 1 or pow(2, number - 1, number) != 1:
        number += 2
    return number


def rsa_key(name: str) -> rsa.RSAPrivateKey:
    p, q, e = prime_of(f"{name} p"), prime_of(f"{name} q"), 65537
    d = pow(e, -1, (p - 1) * (q - 1))
    rest = (rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q))
    return rsa.RSAPrivateNumbers(p, q, d, *rest, rsa.RSAPublicNumbers(e, p * q)).private_key()


def identity_of(key: Ed25519PrivateKey | rsa.RSAPrivateKey) -> Identity:
    """Return an identity that is the same in every run, so that a run can be repeated."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        file.flush()
        return Identity.load(Path(file.name))


def seeded(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


ALICE, OWNER, OLD = identity_of(seeded("alice")), identity_of(seeded("owner")), identity_of(rsa_key("old"))
AUTHORS = {author.peer_id: author for author in (ALICE, OWNER, OLD)}
SWARM = Manifest(
    peer_id=OWNER.peer_id,
    name="fuzz",
    created=1.0,
    seed=1,
    environment="reasoning",
    tasks=[Task("chain_sum", config={"max_terms": 3, "shuffle": True})],
    partial_rewards=False,
    versions={"reasoning-gym": "0.1.25"},
    rounds=3,
    stages=1,
    round_end="everyone",
    round_interval=60.0,
    peer_timeout=20.0,
    admission="invited",
)


def ticket_of(peer: Identity) -> str:
    """Return the ticket by which a peer is admitted."""
    key, uses, expires = seeded("invitation"), 3, 1 << 40
    signature = OWNER.sign(Invitation(key.public_key().public_bytes_raw(), uses, expires).message(SWARM))
    token = key.private_bytes_raw() + struct.pack(">IQ", uses, expires) + signature
    return admission.make_ticket(base64.urlsafe_b64encode(token).decode(), SWARM, peer.peer_id)


REPORT = Report(
    peer_id=ALICE.peer_id,
    swarm=SWARM.swarm(),
    node="alice",
    round=1,
    stage=0,
    timestamp=2.0,
    reward=0.5,
    training_reward=0.25,
    rollouts=8,
    vote=OWNER.peer_id,
)
ANSWERS = [
    Answer("What is 2 + 3?", "<answer>5</answer>", 1.0),
    Answer("What is 2 + 3?", 'Grüße, "5" \\ \n 😀', 0.0, False, [3, 1, 4], [-0.5, -1.25, 0.0]),
]
# One of every kind of record that travels, with all its fields set.
RECORDS: dict[str, msgspec.Struct] = {
    "manifest": SWARM,
    "publication": Publication(
        peer_id=ALICE.peer_id,
        kind="rollouts",
        swarm=SWARM.swarm(),
        node="alice",
        round=1,
        stage=0,
        timestamp=1.5,
        model="tiny",
        policy_version=3,
        sampling=Sampling(1.0, 0.95, 0, 24),
        tokenizer="abc",
        rollouts={"0": [ANSWERS[0], ANSWERS[0]], "1": [ANSWERS[1], ANSWERS[1]]},
        parents={"0": ["abc"]},
    ),
    "report": REPORT,
    "peer": PeerInfo(
        peer_id=ALICE.peer_id,
        swarm=SWARM.swarm(),
        node="alice",
        model="tiny",
        tokenizer="abc",
        device="cpu",
        host="here",
        pid=7,
        joined=1.0,
        timestamp=2.0,
        ticket=ticket_of(ALICE),
    ),
    "access_list": AccessList(
        peer_id=OWNER.peer_id,
        swarm=SWARM.swarm(),
        number=2,
        timestamp=1.0,
        allowed=[ALICE.peer_id],
        denied=[OLD.peer_id],
        revoked=["0123456789abcdef"],
    ),
    "state": State(
        peer_id=OWNER.peer_id,
        swarm=SWARM.swarm(),
        phase="running",
        round=1,
        stage=0,
        started=1.0,
        timestamp=2.0,
        members={ALICE.peer_id: Member("alice", 0, 2.0, 1, 0.5, 1)},
        reports={ALICE.peer_id: REPORT},
        access_list_number=2,
        refused={OLD.peer_id: Refusal("denied", 1.0)},
    ),
    "stage": StageRecord(
        peer_id=OWNER.peer_id,
        swarm=SWARM.swarm(),
        round=0,
        stage=0,
        started=1.0,
        ended=2.0,
        why="everyone",
        members=[ALICE.peer_id],
        reports={ALICE.peer_id: digest(b"")},
    ),
}
SIGNERS = {name: AUTHORS[record.peer_id] for name, record in RECORDS.items()}  # type: ignore[attr-defined]
