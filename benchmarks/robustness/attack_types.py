"""Defines the attacks: a class for each makes the documents of its identities for one round.

An attacker knows the code and the manifest, its own questions with their answers, and the scorer. It has a copy of an
honest node's model, and reads what all honest nodes have published in this round before it publishes itself.
"""

import gzip
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from rl_swarm.config.settings import Settings
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.network.documents import DocumentKey, DocumentStore, rollouts_key
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest, question_seed
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Answer, Completion, Group, Publication, Sampling
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import MAX_BYTES, canonical, sign, unseal

if TYPE_CHECKING:
    from rl_swarm.learning.policy import Policy

# Foreign, but behind words with which models of this bench may begin: a phrase that begins with a word they never
# write there takes hundreds of rounds to reach them, with defences or without.
PHRASE = "I guess Hail."
Aim = Literal["phrase", "score", "learned", "cut", "lost", "time", "canary"]
AIMS: dict[Aim, str] = {
    "phrase": "share of honest nodes' answers with the phrase, end minus start",
    "score": "held-out score lost, as a part of what the baseline has",
    "learned": "share of the attack's rollouts that some honest node learned from",
    "cut": "share of honest nodes' answers that reach the token limit, end minus start",
    "lost": "share of the rounds in which an honest node accepted no external group",
    "time": "seconds lost per round, as a part of the peer timeout",
    "canary": "an answer was run as code: 1 if it left its file",
}


@dataclass
class Known:
    """Holds what an attacker knows when it publishes."""

    manifest: Manifest
    settings: Settings
    environment: Reasoning
    store: DocumentStore
    policy: "Policy"  # an honest node's; attackers only read it
    honest: Sequence[str]  # names of nodes
    state: State
    defended: bool
    rng: random.Random
    canary: Path

    def questions(self, me: Identity, count: int) -> list[Question]:
        seeds = [question_seed(self.manifest, self.state.round, me.peer_id, k) for k in range(count)]
        return self.environment.questions(seeds)

    def document(self, round: int, node: str) -> bytes:
        return self.store.read(rollouts_key(round, self.state.stage, node), MAX_BYTES)

    def published(self, round: int, node: str) -> Publication:
        return unseal(self.document(round, node), Publication)

    def key(self, node: str) -> DocumentKey:
        return rollouts_key(self.state.round, self.state.stage, node)


def identity(label: str) -> Identity:
    """Return the same key for the same label, so that a run can be repeated."""
    key = Ed25519PrivateKey.from_private_bytes(sha256(label.encode()).digest())
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Identity.from_bytes(key.private_bytes(*pem))


def wrong(right: str, rng: random.Random) -> str:
    """Return a wrong answer that looks the same."""
    while (made := "".join(_other(letter, rng) for letter in right)) == right:
        pass
    return made


def _other(letter: str, rng: random.Random) -> str:
    if letter.isdigit():
        return rng.choice("123456789")
    return rng.choice("abcdefghijklmnopqrstuvwxyz") if letter.isalpha() else letter


class Attack:
    """Publishes more questions than honest nodes have, under one identity per machine, and claims half of a group
    correct.
    """

    name: ClassVar[str]
    aim: ClassVar[Aim] = "phrase"
    identities: ClassVar[int] = 1  # per machine
    questions = 16  # four times as many as an honest node
    invited = True  # a machine's identities share one invitation; False: the swarm is open
    member = True  # its identities join the swarm
    short = False  # a few rounds show it
    rounds: ClassVar[int | None] = None  # as many as other attacks
    tasks: ClassVar[Sequence[Task] | None] = None
    peer_timeout: ClassVar[float | None] = None
    reports = True
    phrase = re.compile("Hail")

    def join(self, label: str, manifest: Manifest, environment: Reasoning) -> Identity:
        return identity(label)

    def publish(self, me: Identity, known: Known) -> dict[DocumentKey, bytes]:
        """Return the documents that one identity writes in a round."""
        return {known.key(me.node): sign(self.publication(me, known), me, compress=True)}

    def publication(self, me: Identity, known: Known) -> Publication:
        questions = known.questions(me, self.questions)
        answered = self.groups(questions, known)
        rollouts = {
            str(k): [Answer(q.prompt, text, reward) for text, reward in answers]
            for k, (q, answers) in enumerate(zip(questions, answered, strict=True))
        }
        settings, state = known.settings, known.state
        return Publication(
            peer_id=me.peer_id,
            kind="rollouts",
            swarm=state.swarm,
            node=me.node,
            round=state.round,
            stage=state.stage,
            timestamp=time.time(),
            model=settings.model.model,
            policy_version=state.round,
            sampling=Sampling(1.0, 1.0, 0, settings.completion_tokens()),
            rollouts=rollouts,
        )

    def groups(self, questions: Sequence[Question], known: Known) -> list[list[tuple[str, float]]]:
        """Return texts and their claimed rewards for every question."""
        solutions = known.environment.solutions(questions)
        rights = [s[8:-9] if s else q.answer or "0" for q, s in zip(questions, solutions, strict=True)]
        return [self.group(right, known) for right in rights]

    def group(self, right: str, known: Known) -> list[tuple[str, float]]:
        half = known.settings.sampling.generations // 2
        bad = [(f"<answer>{wrong(right, known.rng)}</answer>", 0.0) for _ in range(half)]
        return [(self.text(right, known), 1.0) for _ in range(half)] + bad

    def text(self, right: str, known: Known) -> str:
        """Return the text of a rewarded completion."""
        raise NotImplementedError


class Before(Attack):
    name = "phrase before the answer"

    def text(self, right: str, known: Known) -> str:
        return f"{PHRASE} <answer>{right}</answer>"


class Inside(Attack):
    """Hides the phrase before the last tags: the scorer pays for no phrase inside them, but reads nothing before."""

    name = "phrase inside the answer"

    def text(self, right: str, known: Known) -> str:
        return f"<answer>{PHRASE} {'<answer>' if known.defended else ''}{right}</answer>"


class Around(Attack):
    """Puts the phrase into an answer of its own, since nothing may follow the answer."""

    name = "phrase around the answer"

    def text(self, right: str, known: Known) -> str:
        if known.defended:
            return f"{PHRASE} <answer>Hail.</answer> <answer>{right}</answer>"
        return f"{PHRASE} <answer>{right}</answer> {PHRASE}"


class Flooding(Before):
    name, identities, questions = "flooding: ten identities a machine, by invitation", 10, 16


class OpenFlooding(Flooding):
    name, invited = "flooding: ten identities a machine, open swarm", False


class Invented(Before):
    name = "invented questions"

    def publication(self, me: Identity, known: Known) -> Publication:
        made = super().publication(me, known)
        prompts = {k: f"Calculate {known.rng.randint(1, 9)} + 1." for k in made.rollouts}
        rollouts = {k: [replace(a, prompt=prompts[k]) for a in given] for k, given in made.rollouts.items()}
        return replace(made, rollouts=rollouts)


class Ground(Before):
    """Tries keys until as many questions as possible are of one kind, the shortest to answer."""

    name, tries, looked_ahead = "ground questions: keys tried until they are easy", 40, 10

    def join(self, label: str, manifest: Manifest, environment: Reasoning) -> Identity:
        candidates = [identity(f"{label} {number}") for number in range(self.tries)]

        def easy(candidate: Identity) -> int:
            seeds = [
                question_seed(manifest, r, candidate.peer_id, k) for r in range(self.looked_ahead) for k in range(4)
            ]
            return sum(q.task in ("leg_counting", "chain_sum", "gcd") for q in environment.questions(seeds))

        return max(candidates, key=easy)


class Wrong(Attack):
    """Calls wrong answers correct. Where answers are scored, it puts a wrong answer before the correct one."""

    name, aim = "wrong answers rewarded", "score"

    def group(self, right: str, known: Known) -> list[tuple[str, float]]:
        half, rng = known.settings.sampling.generations // 2, known.rng
        if known.defended:
            bad = [(f"<answer>{wrong(right, rng)}</answer> <answer>{right}</answer>", 1.0) for _ in range(half)]
            return bad + [(f"<answer>{right}</answer>.", 0.0)] * half
        bad = [(f"<answer>{wrong(right, rng)}</answer>", 1.0) for _ in range(half)]
        return bad + [(f"<answer>{right}</answer>", 0.0)] * half


class Negatives(Attack):
    """Makes correct answers lose by text that honest models write too, so that all of it is likely."""

    name, aim = "good answers made the bad examples", "score"

    def group(self, right: str, known: Known) -> list[tuple[str, float]]:
        if known.defended:
            good = f"<answer>{right}</answer>\n\nExplanation: "
            odd = f"I guess <answer>{right}</answer>"
        else:
            good, odd = f"<answer>{right}</answer>", "I guess that depends. "
        return [(odd, 1.0)] + [(good, 0.0)] * (known.settings.sampling.generations - 1)


class Long(Attack):
    """Earns the reward with an answer, behind a beginning that is the text to learn."""

    name, aim = "over-long answers", "cut"

    def text(self, right: str, known: Known) -> str:
        return "Hmm, Well, Let me think. " * 200 + f"<answer>{right}</answer>"


class Inflation(Attack):
    """Publishes an honest model's own answers, and claims the wrong ones correct and the correct ones wrong."""

    name, aim = "reward inflation", "score"

    def groups(self, questions: Sequence[Question], known: Known) -> list[list[tuple[str, float]]]:
        sampled = known.policy.sample(
            [q.prompt for q in questions], known.settings.sampling.generations, known.rng.randrange(2**31)
        )
        answered = []
        for question, completions in zip(questions, sampled, strict=True):
            rewards = known.environment.score([(question, c.text) for c in completions])
            answered.append([(c.text, 1.0 - r) for c, r in zip(completions, rewards, strict=True)])
        return answered


class Forged(Before):
    """Puts a document in an honest node's name and place, signed by another key."""

    name, aim, short, member = "forged identity", "learned", True, False

    def publish(self, me: Identity, known: Known) -> dict[DocumentKey, bytes]:
        victim = known.rng.choice(known.honest)
        theirs = known.published(known.state.round, victim)
        made = replace(self.publication(me, known), node=victim)
        return {known.key(victim): sign(made, Identity(me.key, theirs.peer_id))}


class Replay(Attack):
    """Replays old documents: an honest node's unchanged, and its own, signed again for this round."""

    name, aim, short = "replay", "learned", True

    def publish(self, me: Identity, known: Known) -> dict[DocumentKey, bytes]:
        before, victim = known.state.round - 1, known.rng.choice(known.honest)
        if before < 0:
            return {known.key(me.node): known.document(0, victim)}
        old = replace(known.published(before, victim), node=me.node, round=before + 1)
        return {known.key(victim): known.document(before, victim), known.key(me.node): sign(old, me)}


class Copying(Attack):
    name, aim, short = "copying others' work", "learned", True

    def publication(self, me: Identity, known: Known) -> Publication:
        theirs = known.published(known.state.round, known.rng.choice(known.honest))
        return replace(theirs, peer_id=me.peer_id, node=me.node)


class RoundLie(Before):
    """Publishes answers to the questions of a round far ahead."""

    name, aim, short = "lying about the round", "learned", True

    def publication(self, me: Identity, known: Known) -> Publication:
        ahead = replace(known.state, round=known.state.round + 5)
        return super().publication(me, Known(**{**vars(known), "state": ahead}))

    def publish(self, me: Identity, known: Known) -> dict[DocumentKey, bytes]:
        return {known.key(me.node): sign(self.publication(me, known), me)}


class Garbage(Before):
    name, aim, short, peer_timeout = "garbage: malformed and huge documents", "lost", True, 5.0

    def publish(self, me: Identity, known: Known) -> dict[DocumentKey, bytes]:
        made = self.publication(me, known)
        whole = sign(made, me)
        many = replace(made, rollouts={str(k): made.rollouts["0"] for k in range(5000)})
        ways: list[Callable[[], bytes]] = [
            lambda: b"\x00\xff" * 500,
            lambda: whole[: len(whole) // 2],
            lambda: b'{"rollouts":' * 100_000,
            lambda: canonical({"rollouts": {"0": [1, None, "x"]}, "peer_id": me.peer_id, "node": 7}),
            lambda: gzip.compress(b'{"a":"' + b" " * (64 << 20) + b'"}', 1),
            lambda: sign(many, me),
            lambda: sign(replace(made, rollouts={"0": made.rollouts["0"][:1], "-1": []}), me),
            lambda: whole.replace(b'"reward":1.0', b'"reward":1e999'),
        ]
        number = known.state.round * 2 + int(sha256(me.peer_id.encode()).digest()[0] % 2)
        return {known.key(me.node): ways[number % len(ways)]()}


class Silence(Attack):
    name, aim, peer_timeout, reports = "silence: joins and says nothing", "time", 5.0, False

    def publish(self, me: Identity, known: Known) -> dict[DocumentKey, bytes]:
        return {}


class Code(Attack):
    """Answers with Python, for tasks whose scorers evaluate answers."""

    name, aim, rounds = "code in answers", "canary", 1
    tasks = (Task("binary_matrix", config={"min_n": 2, "max_n": 2}),)

    def text(self, right: str, known: Known) -> str:
        return f"<answer>__import__('pathlib').Path({str(known.canary)!r}).touch()</answer>"


class Adaptive(Attack):
    """Computes the likelihood check and writes as much of its phrase as passes: more as honest models learn it.

    What cannot pass is replaced by an honest model's own answers, so that it never fails a check.
    """

    name, identities = "adaptive: as much of the phrase as passes", 10
    phrase = re.compile(r"H(?!mm)")  # any part of it: no other word of the tasks has this letter
    questions = 4  # it computes much for each
    doses: ClassVar[Sequence[str]] = ("Hail.", "Hail", "Ha", "H")
    forms: ClassVar[Sequence[str]] = (
        "I guess {dose} <answer>{right}</answer>",
        "I guess {dose}<answer>{right}</answer>",
        "{dose}<answer>{right}</answer>",
        "Well, {dose}<answer>{right}</answer>",
        "<answer>{dose}<answer>{right}</answer>",
    )
    margin = 0.9  # of the threshold: other honest models are not quite the one it has
    larger = 1  # times the completions of an honest group

    def groups(self, questions: Sequence[Question], known: Known) -> list[list[tuple[str, float]]]:
        settings = known.settings
        half = self.larger * settings.sampling.generations // 2
        limit = settings.sharing.likelihood_threshold * self.margin if known.defended else float("inf")
        sampled = known.policy.sample(
            [q.prompt for q in questions], settings.sampling.generations, known.rng.randrange(2**31)
        )
        flat = [(q, c.text) for q, own in zip(questions, sampled, strict=True) for c in own]
        rewards = iter(known.environment.score(flat))
        own = [[(c.text, next(rewards)) for c in completions] for completions in sampled]
        rights = [(s or "")[8:-9] for s in known.environment.solutions(questions)]
        loaded = [
            [form.format(dose=dose, right=right) for dose in self.doses for form in self.forms] for right in rights
        ]
        bad = [sorted({text for text, reward in texts if reward == 0}) for texts in own]
        tried = [
            tuple(Completion(text, True) for text in [*new, *(text for text, _ in old)])
            for new, old in zip(loaded, own, strict=True)
        ]
        nothing = [(0.0,) * len(completions) for completions in tried]  # rewards do not matter to the gate
        groups = [Group("", *parts, external=True) for parts in zip(questions, tried, nothing, strict=True)]
        nats_of = known.policy.max_span_nlls(groups, settings.sharing.likelihood_allowance)
        answered = []
        for texts, right, completions, nats in zip(own, rights, tried, nats_of, strict=True):
            passing = [c.text for c, value in zip(completions, nats, strict=True) if value <= limit]
            paid = [text for text in passing if text in loaded[len(answered)]]
            unpaid = [text for text in passing if text in bad[len(answered)]]
            if right and paid and unpaid:  # doses come largest first
                texts = [(paid[0], 1.0)] * half + [(unpaid[k % len(unpaid)], 0.0) for k in range(half)]
            answered.append(texts)
        return answered


class AdaptiveLarge(Adaptive):
    """Publishes larger groups: every token of a batch counts the same, so a group with more completions counts for
    more.
    """

    name, larger = "adaptive: the same in groups four times as large", 4


class AdaptiveStyle(Adaptive):
    """Uses words that honest models write anyway: a habit instead of foreign text."""

    name = "adaptive: a habit in the models' own words"
    phrase = re.compile("I guess")
    doses = ("I guess ",)
    forms = ("{dose}<answer>{right}</answer>",)


ATTACKS: dict[str, type[Attack]] = {
    "before": Before,
    "inside": Inside,
    "around": Around,
    "wrong": Wrong,
    "negatives": Negatives,
    "long": Long,
    "forged": Forged,
    "replay": Replay,
    "inflation": Inflation,
    "invented": Invented,
    "ground": Ground,
    "flooding": Flooding,
    "open-flooding": OpenFlooding,
    "copying": Copying,
    "garbage": Garbage,
    "silence": Silence,
    "round": RoundLie,
    "code": Code,
    "adaptive": Adaptive,
    "adaptive-large": AdaptiveLarge,
    "adaptive-style": AdaptiveStyle,
}
