"""Reads the rollouts of a swarm, newest first, a page at a time, with the answer key.

A publication carries neither task nor answer key. Both follow from its place in the swarm, so they are generated again,
in a scoring process that starts with the first page.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from rl_swarm import environments
from rl_swarm.environments.base import Environment
from rl_swarm.errors import UserError
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import RolloutPage, RolloutRow, ShownCompletion, ShownTest
from rl_swarm.monitor.snapshot import find
from rl_swarm.network.documents import rollouts_key
from rl_swarm.node.conversation import Conversation
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Answer, Publication, Rollout, unpack
from rl_swarm.protocol.wire import Rejected, unseal

CACHED, LARGEST_CACHED = 128, 100_000  # publications, and the characters of one
LONGEST = 20_000  # characters of one text that are shown
MAX_COMPLETIONS = 64  # of one question
MAX_CHARACTERS = 1_000_000  # of one page, roughly
MAX_TRIES = 200  # publications read for one page
MAX_TRIES_FAR = 40  # where each is a request over the network

MAX_TESTS, LONGEST_TEST = 20, 300  # of one question, and characters of a call or its value
TEACHING_ROUNDS = 30  # the last rounds whose groups come first if they have right and wrong answers
REST = "rest-"  # begins the cursor of a page behind those

Place = tuple[int, int, str]  # round, stage, node
CURSOR = re.compile(r"([0-9]{1,15})-([0-9]{1,4})-([0-9]{1,6})-([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


@dataclass(frozen=True)
class RolloutFilter:
    """Selects rollouts to show. Rewards are means of a group."""

    round: int | None = None
    node: str = ""
    task: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    teaching_since: int | None = None  # groups with right and wrong answers, from this round on
    not_teaching_since: int | None = None  # all but those

    def matches(self, row: RolloutRow) -> bool:
        return (
            (not self.task or row.task == self.task)
            and (self.min_reward is None or row.reward >= self.min_reward)
            and (self.max_reward is None or row.reward <= self.max_reward)
            and (self.teaching_since is None or teaches(row))
            and (self.not_teaching_since is None or row.round < self.not_teaching_since or not teaches(row))
        )


class RolloutReader:
    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self._lock = threading.Lock()  # one page at a time: they share the cache and the scoring process
        self._cache: OrderedDict[Place, list[RolloutRow]] = OrderedDict()
        self._environment: Environment | None = None
        self._failed = False  # questions cannot be generated here

    def page(self, filters: RolloutFilter, after: str | None, limit: int, keys: bool = True) -> RolloutPage:
        """Return the rollouts from `after` on, the newest round first. Without `keys`, task and answer may be
        missing."""
        with self._lock:
            return self._page(filters, after, limit, keys)

    def teaching_page(self, filters: RolloutFilter, after: str | None, limit: int) -> RolloutPage:
        """Return a page of the order in which groups with right and wrong answers of the last rounds come first."""
        state = self.follower.view.state
        since = max(0, (state.round if state else 0) - TEACHING_ROUNDS)
        page = RolloutPage([], None, 0)
        with self._lock:
            if after is None or not after.startswith(REST):
                page = self._page(replace(filters, teaching_since=since), after, limit, True)
                if page.next is not None:
                    return page
                after = REST
            if len(page.rollouts) == limit:
                return replace(page, next=REST)
            rest = replace(filters, not_teaching_since=since)
            more = self._page(rest, after.removeprefix(REST), limit - len(page.rollouts), True)
        following = None if more.next is None else f"{REST}{more.next}"
        return RolloutPage([*page.rollouts, *more.rollouts], following, page.unreadable + more.unreadable)

    def _page(self, filters: RolloutFilter, after: str | None, limit: int, keys: bool) -> RolloutPage:
        start = cursor(after)
        rows: list[RolloutRow] = []
        unreadable = characters = 0
        tries = MAX_TRIES_FAR if self.follower.view.address.is_url else MAX_TRIES
        for place in self._places(filters, start):
            if tries == 0:
                return RolloutPage(rows, id_of(place, 0), unreadable)
            tries -= 1
            try:
                found = self._read(place, keys)
            except FileNotFoundError:
                continue
            except (OSError, Rejected):
                unreadable += 1
                continue
            for row in found:
                before = start is not None and place == start[:3] and row.number < start[3]
                if before or not filters.matches(row):
                    continue
                if len(rows) == limit or characters > MAX_CHARACTERS:
                    return RolloutPage(rows, row.id, unreadable)
                rows.append(row)
                characters += characters_of(row)
        return RolloutPage(rows, None, unreadable)

    def _places(self, filters: RolloutFilter, start: tuple[int, int, str, int] | None) -> Iterator[Place]:
        """Yield where publications may lie. They are looked up by the nodes' names, as no store lists rollouts."""
        view = self.follower.view
        state, manifest = view.state, view.manifest
        if state is None or manifest is None:
            return
        if filters.node:
            chosen = find(self.follower, filters.node)
            nodes = [chosen.node] if chosen else []
        else:
            nodes = sorted(view.nodes)
        newest = state.round if filters.round is None else min(filters.round, state.round)
        oldest = (filters.teaching_since or 0) if filters.round is None else filters.round
        if start:
            newest = min(newest, start[0])
        for number in range(newest, oldest - 1, -1):
            for stage in reversed(range(manifest.stages)):
                if start and (number, stage) > (start[0], start[1]):
                    continue
                for node in nodes:
                    if not (start and (number, stage) == (start[0], start[1]) and node < start[2]):
                        yield number, stage, node

    def _read(self, place: Place, keys: bool) -> list[RolloutRow]:
        """Return the rollouts of one publication, as its author signed them, with what follows from its place."""
        if place in self._cache:
            self._cache.move_to_end(place)
            return self._cache[place]
        view, manifest = self.follower.view, self.follower.view.manifest
        assert manifest is not None
        published = self._published(place)
        rows = self._rows(published, manifest, view.nodes[place[2]].name, keys)
        # While a round lasts, a node may write more of it.
        lasting = view.state is not None and (view.state.phase == "finished" or place[0] < view.state.round)
        if keys and lasting and sum(map(characters_of, rows)) <= LARGEST_CACHED:
            self._cache[place] = rows
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return rows

    def _published(self, place: Place) -> Publication:
        view, manifest = self.follower.view, self.follower.view.manifest
        assert manifest is not None
        limit = manifest.limits.file_bytes
        published = unseal(view.store.read(rollouts_key(*place), limit), Publication, limit)
        peer = view.nodes[place[2]].peer
        here = (published.swarm, published.round, published.stage, published.node)
        if here != (manifest.swarm(), *place) or peer is None or peer.peer_id != published.peer_id:
            raise Rejected(RejectReason.PLACE, "published for another place, or by another peer")
        return published

    def _rows(self, published: Publication, manifest: Manifest, name: str, keys: bool) -> list[RolloutRow]:
        rollouts = list(unpack(published, manifest.limits))
        questions = self._questions(manifest, rollouts) if keys else {}
        place = (published.round, published.stage, published.node)
        rows = []
        for rollout in rollouts:
            given = published.rollouts[str(rollout.number)]
            rewards = [answer.reward for answer in given]
            made = questions.get(rollout.number)
            real = made if made is not None and made.prompt == rollout.prompt else None
            texts = zip(given, advantages(rewards), strict=True)
            rows.append(
                RolloutRow(
                    id=id_of(place, rollout.number),
                    round=published.round,
                    stage=published.stage,
                    number=rollout.number,
                    node=published.node,
                    name=name,
                    timestamp=published.timestamp,
                    model=published.model,
                    task=real.task if real else None,
                    question=rollout.prompt[:LONGEST],
                    answer=real.answer[:LONGEST] if real and real.answer is not None else None,
                    reward=sum(rewards) / len(rewards),
                    best=1.0
                    + (max(0.0, self._environment.ending_reward(real, True)) if real and self._environment else 0),
                    tests=self._tests(real),
                    completions=[self._completion(given, real) for given in list(texts)[:MAX_COMPLETIONS]],
                )
            )
        return rows

    def _questions(self, manifest: Manifest, rollouts: list[Rollout]) -> dict[int, Question]:
        if self._failed or not rollouts:
            return {}
        try:
            self._environment = self._environment or environments.made(manifest)
            return dict(enumerate(self._conversation(manifest, rollouts[0].round).questions_of(rollouts)))
        except Rejected:  # other nodes reject it too
            return {}
        except (UserError, OSError):  # rollouts can be shown without answer keys
            self._failed = True
            return {}

    def _conversation(self, manifest: Manifest, round: int) -> Conversation:
        """Return the conversation of a round, which reads earlier stages where their authors published them."""
        peers = {view.peer.peer_id: node for node, view in self.follower.view.nodes.items() if view.peer}

        def fetch(stage: int, peer_id: str) -> Iterator[Publication]:
            with suppress(OSError, Rejected):
                yield self._published((round, stage, peers[peer_id]))

        assert self._environment is not None
        return Conversation(manifest, self._environment, round, fetch, lambda *why: None, members=sorted(peers))

    def _completion(self, given: tuple[Answer, float], question: Question | None) -> ShownCompletion:
        answer, advantage = given
        text, right = answer.response, answer.reward
        if question is not None and self._environment is not None:
            right = self._environment.credit(answer.reward)
        right = min(1.0, max(0.0, right))
        return ShownCompletion(text[:LONGEST], answer.reward, advantage, right, not answer.ended, len(text) > LONGEST)

    def _tests(self, question: Question | None) -> list[ShownTest]:
        if question is None or self._environment is None:
            return []
        found = self._environment.tests(question)[:MAX_TESTS]
        return [ShownTest(call[:LONGEST_TEST], expected[:LONGEST_TEST]) for call, expected in found]

    def close(self) -> None:
        if self._environment is not None:
            with suppress(OSError):
                self._environment.close()


def teaches(row: RolloutRow) -> bool:
    """Tell whether a group has right and wrong answers."""
    shares = [text.right for text in row.completions]
    return max(shares) >= 1.0 > min(shares)


def advantages(rewards: list[float]) -> list[float]:
    """Compute advantages as a node does by default. `learning/grpo.py` needs torch, which is not loaded here."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def characters_of(row: RolloutRow) -> int:
    return len(row.question) + sum(len(text.text) for text in row.completions)


def id_of(place: Place, number: int) -> str:
    return f"{place[0]}-{place[1]}-{number}-{place[2]}"


def cursor(text: str | None) -> tuple[int, int, str, int] | None:
    """Parse the id of a rollout into round, stage, node and number; None for no id and for a malformed one."""
    parts = CURSOR.fullmatch(text or "")
    return (int(parts[1]), int(parts[2]), parts[4], int(parts[3])) if parts else None
