"""Plays the life of a node: one round, top to bottom."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import msgspec

from rl_swarm.environments.base import Environment, ModelRequest, Role
from rl_swarm.learning.checkpoints import Checkpoints, Place
from rl_swarm.learning.devices import peak_memory
from rl_swarm.learning.policy import Policy, Published, SampleRequest, TrainRequest, Work, update_batches
from rl_swarm.learning.trainer import Update
from rl_swarm.network.base import Coordinator, Exchange
from rl_swarm.node import selection, strategies
from rl_swarm.node.conversation import Conversation
from rl_swarm.node.evaluation import evaluate, mean
from rl_swarm.node.hub import Push
from rl_swarm.node.reputation import PeerReputation, in_turn
from rl_swarm.node.selection import Selection
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest, derive_seed, question_seed
from rl_swarm.protocol.questions import Question, Statement
from rl_swarm.protocol.rollouts import Completion, Group, Publication, Sampling, to_answers
from rl_swarm.protocol.rounds import Member, Report, State
from rl_swarm.telemetry.journal import Journal, Stopwatch
from rl_swarm.telemetry.machine import LoadMeter
from rl_swarm.telemetry.schema import HeldOutRecord, Load, RoundRecord, Seconds

log = logging.getLogger(__name__)

LATE_ROUNDS = 3  # in which a node publishes, until it is waited for again


class Stopped(Exception):
    """The node was told to stop in the middle of a round."""


@dataclass
class Node:
    name: str  # in what it sends
    identity: Identity
    settings: NodeSettings
    manifest: Manifest
    environment: Environment
    policy: Policy
    exchange: Exchange
    coordinator: Coordinator
    journal: Journal
    checkpoints: Checkpoints
    stop: threading.Event
    role: Role | None = None  # the ordinary one by default
    role_name: str = ""  # in what it sends; empty for the ordinary one
    push: Push | None = None  # to the hub, where the settings ask for it
    load: LoadMeter = field(default_factory=LoadMeter)  # of what it runs on
    clock: Callable[[], float] = time.time
    done: tuple[int, int] = (-1, -1)  # the last round and stage that this node finished
    held_out: list[Question] = field(default_factory=list)
    used: set[selection.Key] = field(default_factory=set)  # external rollouts it has learned from
    rejected: Counter[str] = field(default_factory=Counter)  # in this round, by reason
    refused: set[selection.Place] = field(default_factory=set)  # publications that failed, not read again
    late: Counter[str] = field(default_factory=Counter)  # nodes that are not waited for, and for how long
    members: Mapping[str, Member] = field(default_factory=dict)
    transcripts: dict[int, Conversation] = field(default_factory=dict)  # by round

    def __post_init__(self) -> None:
        self.plays = self.role or Role(self.environment)
        self.watch = Stopwatch()  # of the stage at hand
        self.standing = PeerReputation(self.settings.sharing.max_peer_failures, self.settings.sharing.ban_rounds)
        self.strategy = strategies.named(self.settings.sharing.strategy)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def model(self) -> Policy:
        """The model, as roles may use it."""
        return self.policy

    def prepare(self) -> None:
        """What takes time before the first round: a node that has joined is ready to play."""
        if self.plays.learns:
            self.held_out = self.environment.held_out(self.settings.evaluation.held_out_questions)
        if self.done == (-1, -1):
            self.measure("start")

    def run(self) -> None:
        """Plays rounds until the swarm has finished or the node is told to stop."""
        while (state := self.coordinator.wait_for(self.done)) is not None and state.phase == "running":
            self.note_skipped(state)
            try:
                self.play(state)
            except Stopped:
                break
            if state.stage + 1 < self.manifest.stages:
                continue
            self.look(state)
            every = self.settings.checkpoint.hub_every if self.push and state.round + 1 < self.manifest.rounds else 0
            push = every > 0 and state.round % every == every - 1
            every = self.settings.checkpoint.checkpoint_every
            if push or (every and state.round % every == every - 1):
                self.save(push)
        finished = state is not None and state.phase == "finished"
        if finished:
            self.measure("end")
            self.journal.event("finished", round=self.done[0])
        if self.done != (-1, -1):
            self.save(push=finished)
        if self.push:
            self.push.finish()

    def look(self, state: State) -> None:
        """The held-out score, after the rounds in which it is due."""
        every = self.settings.evaluation.held_out_every
        if every and state.round % every == every - 1 and state.round + 1 < self.manifest.rounds:
            self.measure("now")

    def play(self, state: State) -> None:
        """One stage of a round, by itself, as its role has it."""
        for work in self.begin(state):
            work.run()

    def begin(self, state: State) -> Iterator[ModelRequest]:
        """One stage of a round, as its role has it; what it knows of older rounds is let go of."""
        self.members, self.watch = state.members, Stopwatch()
        self.rejected.clear()
        oldest = state.round - self.settings.sharing.max_rollout_age - 1
        self.transcripts = {number: kept for number, kept in self.transcripts.items() if number >= oldest}
        return self.plays.turn(self, state)

    def turn(self, state: State) -> Iterator[Work]:
        """One stage of a round: answer, publish, collect, learn, report. Yields what is to be done with the model."""
        watch, settings = self.watch, self.settings

        with watch("questions"):
            questions = self.questions(state)

        local: list[Group] = []
        at_once = 1 if settings.sharing.publish_frequency == "generation" else max(len(questions), 1)
        for start in range(0, len(questions), at_once):
            local += yield from self.answer(questions[start : start + at_once], state, start)
            if settings.sharing.publish_frequency != "round":
                with watch("publish"):
                    self.publish(local, state)

        yield Published()
        with watch("collect"):
            external = self.collect(state, local)
        self.used = {key for key in self.used if key[1] >= state.round - settings.sharing.max_rollout_age} | set(
            external.keys
        )

        training = [*local, *external.chosen]
        update = Update()
        for groups in update_batches(training, settings.learning.groups_per_update) * settings.learning.epochs:
            yield (learning := TrainRequest(self.policy, groups, watch))
            update.add(learning.update)

        if settings.sharing.publish_frequency == "round":
            with watch("publish"):
                self.publish(local, state)
        with watch("report"):
            vote = selection.best_peer(external.scored)
            self.coordinator.submit(self.report(local, training, vote, state))
        self.done = (state.round, state.stage)
        self.write_metrics(state, local, external, update, watch)

    def show(self, groups: Sequence[Group], state: State, **metrics: float) -> Iterator[Work]:
        """A stage in which nothing is learned: publishes the groups, or nothing, and reports."""
        watch = self.watch
        self.check_stop()
        with watch("publish"):
            self.publish(groups, state)
        yield Published()
        with watch("report"):
            self.coordinator.submit(self.report(groups, groups, "", state))
        self.done = (state.round, state.stage)
        self.write_metrics(state, groups, Selection(), Update(), watch, metrics)

    def questions(self, state: State, count: int | None = None) -> list[Question]:
        """This node's questions in a stage; those of a later one follow from what others said before."""
        seeds = self.seeds(state, count)
        if state.stage == 0 and not self.role_name:
            return self.environment.questions(seeds)
        transcript = self.transcript(state.round)
        return transcript.questions(self.identity.peer_id, self.role_name, state.stage, seeds)

    def heard(self, round: int, stage: int, role: str | None = None) -> list[Statement]:
        """What the others said in a stage that has ended, as many as are asked in a round; `role` says who, `""` is the
        ordinary one."""
        transcript = self.transcript(round)
        order = transcript.order(self.identity.peer_id)
        roles = () if role is None else (role,)
        speakers = transcript.speakers(stage, order, self.settings.sharing.fetch_max_peers, roles)
        return [said for peer_id in speakers for said in transcript.said(stage, peer_id)]

    def transcript(self, round: int) -> Conversation:
        """The earlier stages of a round, as far as this node has heard them."""

        def fetch(stage: int, peer_id: str) -> Iterator[Publication]:
            for publication in self.exchange.collect(round, stage, [self.members[peer_id].node]):
                if publication.peer_id == peer_id:
                    yield publication

        if round not in self.transcripts:
            self.transcripts[round] = Conversation(self.manifest, self.environment, round, fetch, self.reject)
        self.transcripts[round].members = sorted(self.members)
        return self.transcripts[round]

    def seeds(self, state: State, count: int | None = None) -> list[int]:
        """Of this node's questions in a round."""
        numbers = range(self.settings.learning.local_groups if count is None else count)
        return [question_seed(self.manifest, state.round, self.identity.peer_id, k) for k in numbers]

    def answer(
        self,
        questions: Sequence[Question],
        state: State,
        start: int = 0,
        count: int | None = None,
        greedy: bool = False,
    ) -> Generator[Work, None, list[Group]]:
        """The node's own completions of the questions, scored."""
        self.check_stop()
        count = count or self.settings.sampling.generations
        seed = derive_seed(self.manifest.seed, "sample", self.identity.peer_id, state.round, state.stage, start)
        yield (answering := SampleRequest(self.policy, questions, count, seed, self.watch, greedy))
        with self.watch("score"):
            return self.scored(questions, answering.completions)

    def scored(self, questions: Sequence[Question], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """Completions of this node, whoever wrote them, as groups."""
        peer = self.identity.peer_id
        answered = [(peer, q, c) for q, c in zip(questions, completions, strict=True)]
        return selection.score(answered, self.environment, external=False)

    def publish(self, groups: Sequence[Group], state: State) -> None:
        settings, me = self.settings, self.identity.peer_id
        named = {str(k): [p.digest for p in group.question.parents] for k, group in enumerate(groups)}
        heard = self.transcript(state.round).heard(me, state.stage) if groups and state.stage else ()
        self.exchange.publish(
            Publication(
                peer_id=self.identity.peer_id,
                kind="rollouts",
                swarm=state.swarm,
                node=self.name,
                round=state.round,
                stage=state.stage,
                timestamp=self.clock(),
                model=self.policy.name,
                policy_version=self.policy.version,
                sampling=Sampling(
                    settings.sampling.temperature,
                    settings.sampling.top_p,
                    settings.sampling.top_k,
                    settings.completion_tokens(),
                ),
                tokenizer=self.policy.tokenizer_hash if settings.sharing.share_logprobs else "",
                rollouts={str(k): to_answers(group, settings.sharing.share_logprobs) for k, group in enumerate(groups)},
                heard=list(map(list, heard)),
                parents={number: digests for number, digests in named.items() if digests},
                role=self.role_name,
            )
        )

    def collect(self, state: State, local: Sequence[Group] = ()) -> Selection:
        """Rollouts of others, checked and scored here."""
        self.check_stop()
        rng = random.Random(derive_seed(self.manifest.seed, "select", self.identity.peer_id, state.round, state.stage))
        settings, sources = self.settings, self.sources(state)
        found = selection.select(
            self.publications(state, rng, sources),
            self.strategy.wanted(settings.learning.external_groups, local),
            self.manifest,
            self.environment,
            self.used,
            rng,
            self.reject,
            selection.Checks(
                sources={p: s for p, s in sources.items() if p != self.identity.peer_id},
                share=settings.sharing.max_source_share,
                completions=settings.sampling.generations,
                max_span_nlls=partial(self.policy.max_span_nlls, allowance=settings.sharing.likelihood_allowance)
                if settings.sharing.check_likelihood
                else None,
                most_nats=settings.sharing.likelihood_threshold,
            ),
            self.strategy,
            self.transcript,
        )
        for peer_id, failed in found.asked.items():
            if self.standing.note(peer_id, failed, state.round):
                self.journal.event("not_asked", peer=peer_id, rounds=settings.sharing.ban_rounds)
                log.warning("%s keeps failing and is not asked for %d rounds", peer_id, settings.sharing.ban_rounds)
        self.refused = {
            key for key in self.refused | found.refused if key[1] >= state.round - settings.sharing.max_rollout_age
        }
        return found

    def publications(self, state: State, rng: random.Random, sources: Mapping[str, str]) -> Iterator[Publication]:
        """What the other members published: this round first, then, out of lock-step, the rounds before."""
        members = {
            peer_id: member.node
            for peer_id, member in sorted(state.members.items())
            if peer_id != self.identity.peer_id and not self.is_silent(member, state)
        }
        members = {p: node for p, node in members.items() if self.standing.asks(p, state.round, rng)}
        asked = in_turn(members, sources, rng)[: self.settings.sharing.fetch_max_peers]
        nodes = [members[peer_id] for peer_id in asked]
        punctual, late = ([n for n in nodes if bool(self.late[n]) == is_late] for is_late in (False, True))
        lockstep, patience = self.manifest.round_end == "lockstep", self.manifest.peer_timeout
        oldest = state.round if lockstep else max(0, state.round - self.settings.sharing.max_rollout_age)
        for number in range(state.round, oldest - 1, -1):
            if lockstep:
                found = self.exchange.collect(number, state.stage, punctual, patience, in_order=True)
                found = chain(
                    self.awaited(found, punctual),
                    self.exchange.collect(number, state.stage, late, in_order=True),
                )
            else:
                found = self.exchange.collect(number, state.stage, nodes)
            for publication in found:
                self.late[publication.node] = max(0, self.late[publication.node] - 1)
                if self.environment.hears and number == state.round:
                    self.transcript(number).saw(publication)
                if selection.place_of(publication) in self.refused or publication.role != self.role_name:
                    continue
                if members.get(publication.peer_id) == publication.node:
                    yield publication
                else:
                    self.reject(publication.node, "peer", f"{publication.peer_id} is not the member of that name")

    def sources(self, state: State) -> dict[str, str]:
        """Whom a member's rollouts are counted with: all of its invitation, else of its part of the internet."""
        near = self.exchange.subnets()
        return {
            peer_id: near.get(peer_id, source) if source == peer_id else source
            for peer_id, source in state.sources().items()
        }

    def awaited(self, found: Iterable[Publication], nodes: Sequence[str]) -> Iterator[Publication]:
        """What comes from these nodes, in their order. Those that were waited for in vain are not the next times."""
        waiting = list(nodes)
        for publication in found:
            came = waiting.index(publication.node)  # exchanges give what was asked for
            for node in waiting[:came]:
                self.late[node] = LATE_ROUNDS
            del waiting[: came + 1]
            yield publication
        for node in waiting:
            self.late[node] = LATE_ROUNDS

    def is_silent(self, member: Member, state: State) -> bool:
        """Whether nothing is to be expected of a member. With rounds on an interval the coordinator does not look."""
        if self.manifest.round_end == "lockstep":
            return not member.is_awaited(state.timestamp, self.manifest.peer_timeout)
        silence = state.timestamp - member.last_seen
        return self.manifest.round_end != "interval" and silence > self.manifest.peer_timeout

    def report(self, local: Sequence[Group], training: Sequence[Group], vote: str, state: State) -> Report:
        return Report(
            peer_id=self.identity.peer_id,
            swarm=state.swarm,
            node=self.name,
            round=state.round,
            stage=state.stage,
            timestamp=self.clock(),
            reward=mean([g.mean_reward for g in local]),
            training_reward=mean([g.mean_reward for g in training]),
            rollouts=len(local),
            vote=vote,
        )

    def write_metrics(
        self,
        state: State,
        local: Sequence[Group],
        external: Selection,
        update: Update,
        watch: Stopwatch,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        completions = [c for g in local for c in g.completions]
        lengths = [float(len(c.tokens or ())) for c in completions]
        reward, several = mean([g.mean_reward for g in local]), self.manifest.stages > 1
        record = RoundRecord(
            round=state.round,
            stage=state.stage,
            policy_version=self.policy.version,
            reward_local=reward,
            reward_training=mean([g.mean_reward for g in [*local, *external.chosen]]),
            local_groups=len(local),
            local_with_signal=sum(g.has_signal for g in local),
            zero_std_fraction=mean([float(not g.has_signal) for g in local]),
            completion_length=mean(lengths),
            truncated_fraction=mean([float(not c.ended) for c in completions]),
            entropy=update.entropy,
            clip_fraction=update.clip_fraction,
            logprob_mismatch=update.logprob_mismatch,
            loss=update.loss,
            kl=update.kl,
            grad_norm=update.grad_norm,
            trained_tokens=update.tokens,
            generated_tokens=int(sum(lengths)),
            tokens_per_second=round(sum(lengths) / max(watch.seconds["generate"], 1e-9), 1),
            seconds=Seconds.of(watch.rounded()),
            external_accepted=len(external.chosen),
            external_scored=len(external.scored),
            external_by_peer=dict(Counter(g.peer_id for g in external.chosen)),
            external_rejected=dict(self.rejected),
            external_max_nll=round(external.max_nll, 2),
            peak_memory=peak_memory(self.policy.device),
            load=Load(**self.load.read()),
            role_metrics=dict(metrics or {}),
            reward_by_stage={str(state.stage): reward} if local and several else {},
            idle=several and not local,
        )
        self.journal.metrics(record, began=watch.began, phases=watch.phases)

        log.log(
            logging.INFO if local or metrics or not several else logging.DEBUG,
            "round %d%s: reward %.2f%s, learned from %d own and %d external groups, %.1f s",
            state.round,
            f" stage {state.stage}" if several else "",
            reward,
            "".join(f", {name} {value:.4g}" for name, value in (metrics or {}).items()),
            sum(g.has_signal for g in local),
            len(external.chosen),
            sum(watch.seconds.values()),
        )

    def measure(self, when: str) -> None:
        """The held-out score; greedy answers too at the start and the end."""
        if not self.held_out:
            return
        result = evaluate(
            self.policy, self.environment, self.held_out, self.settings.evaluation.held_out_samples, when != "now"
        )
        record = HeldOutRecord(when=when, round=self.done[0], **msgspec.structs.asdict(result))
        self.journal.metrics(record)
        log.info("held-out score %.3f (%s)", result.sampled, when)

    def save(self, push: bool = False) -> None:
        place = Place(
            self.manifest.swarm(),
            self.identity.peer_id,
            self.policy.name,
            *self.done,
            self.policy.version,
            logs=self.journal.digests(),
            standing=self.standing.kept(self.done[0]),
            role=self.plays.kept() or msgspec.UNSET,
        )
        policy = self.policy if self.plays.learns else None
        folder = self.checkpoints.save(policy, place)
        self.journal.event("checkpoint", round=self.done[0])
        if push and self.push and self.plays.learns:
            self.push(folder, self.policy, self.manifest)

    def note_skipped(self, state: State) -> None:
        skipped = state.round - self.done[0] - 1
        if self.done == (-1, -1) and state.round > 0:
            self.journal.event("joined_late", round=state.round)
        elif skipped > 0:
            self.journal.event("skipped", first=self.done[0] + 1, last=state.round - 1)
            log.warning("skipped %d rounds, now at round %d", skipped, state.round)

    def reject(self, node: str, reason: str, detail: str) -> None:
        """A failure of a peer is data: counted, logged, and the round goes on."""
        self.rejected[reason] += 1
        self.journal.event("rejected", node=node, reason=reason, detail=detail[:500])
        log.warning("rollouts of %s rejected: %s", node, detail[:200])

    def check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped
