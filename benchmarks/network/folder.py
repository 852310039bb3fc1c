"""Measures what a folder swarm costs: calls, bytes and seconds, with 4 nodes and 2 stages per round.

    python -m benchmarks.network.folder [--rounds 100] [--bucket] [--json FILE]

Exchange, coordinator, round server and selection are the real ones; only the model is missing. A node "generates" by
sleeping, and publishes text made from a seed: 8 questions x 8 completions, prompts of about 400 characters, responses
of about 300, English prose and arithmetic. Every call at the folder counts, also one that finds nothing.

Times are scaled down: an interval of 0.4 s with looks every 0.4/30 s stands for 60 s with looks every 2 s. In the last
two rows looks are as far apart as in reality, and every call takes 0.1 s, as on a drive across the network. These rows
say how many seconds a stage costs there.

Added seconds, out of lock-step: publishing, collecting and reporting, and the time from writing a state until a node
sees it. In lock-step: all that a stage takes beyond its slowest node's work.

With `--bucket` the last two scenarios are played in a bucket of the tests' S3 server on this machine, which counts its
requests. The same run measures the same content as plain JSON, in the layout of the system we replace.
"""

import logging
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.command import parser_of, print_table, write_json
from benchmarks.lib.paths import STATE
from benchmarks.network.synthetic_rollouts import QUESTIONS, Arithmetic, TimedArithmetic, plain_json
from rl_swarm.config.settings import Settings
from rl_swarm.network.address import open_address
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.presence import Watch
from rl_swarm.network.round_server import RoundServer
from rl_swarm.node.heartbeats import heartbeats
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest, RoundEnd, derive_seed, question_seed
from rl_swarm.protocol.rollouts import Group, Publication, Sampling, to_answers
from rl_swarm.protocol.rounds import PeerInfo, Report, State
from rl_swarm.protocol.tasks import Task
from rl_swarm.storage.files import Files

if TYPE_CHECKING:
    from rl_swarm.protocol.rollouts import RolloutId

NODES, STAGES = 4, 2
MAX_AGE = 2  # rounds back that a node asks for, out of lock-step
REPLACED = {"calls per stage": "about 16", "seconds per stage": "1 to 2", "MB per 100 rounds": "8"}


@dataclass(frozen=True)
class Scenario:
    name: str
    end: RoundEnd
    external: int  # J: groups with signal that a node wants; it stops asking when it has them
    interval: float = 0.4
    poll: float = 0.4 / 30
    work: tuple[float, float] = (0.1, 0.25)  # seconds that generating takes, at least and at most
    latency: float = 0.0  # seconds that every call takes
    rounds: int | None = None

    @property
    def life(self) -> float:
        """Return the peer timeout: twice the interval, as by default."""
        return 2 * self.interval if self.end == "interval" else 120.0


EVERYTHING = NODES * QUESTIONS
SCENARIOS = [
    Scenario("interval, 4 external groups", "interval", 4),
    Scenario("lock-step, 4 external groups", "lockstep", 4, poll=0.02, work=(0.03, 0.06)),
    Scenario("interval, everything from everyone", "interval", EVERYTHING),
    Scenario("lock-step, everything from everyone", "lockstep", EVERYTHING, poll=0.02, work=(0.03, 0.06)),
    Scenario("interval, 0.1 s per call", "interval", 4, 6.0, 2.0, (1.5, 3.0), 0.1, rounds=4),
    Scenario("lock-step, 0.1 s per call", "lockstep", 4, 6.0, 2.0, (1.5, 3.0), 0.1, rounds=4),
]


@dataclass
class Tally:
    """Counts calls at the folder, by subject and outcome."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    stages: list[float] = field(default_factory=list)  # when each state was written
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, path: str, call: str, written: int = 0, read: int = 0) -> None:
        subject = path.partition("/")[0]
        with self.lock:
            self.calls[subject, call] += 1
            self.written[subject] += written
            self.read[subject] += read

    def about(self, *subjects: str) -> int:
        return sum(count for (subject, _), count in self.calls.items() if not subjects or subject in subjects)


class CountedFiles:
    """Wraps a store and counts its calls."""

    def __init__(self, files: Files, tally: Tally, latency: float) -> None:
        self.files, self.tally, self.latency = files, tally, latency
        self.root, self.remove, self.move = files.root, files.remove, files.move

    def read(self, path: str, limit: int) -> bytes:
        time.sleep(self.latency)
        try:
            data = self.files.read(path, limit)
        except FileNotFoundError:
            self.tally.note(path, "nothing there")
            raise
        self.tally.note(path, "read", read=len(data))
        return data

    def write(self, path: str, data: bytes) -> None:
        time.sleep(self.latency)
        self.files.write(path, data)
        self.tally.note(path, "write", written=len(data))
        if path == STATE:
            self.tally.stages.append(time.monotonic())

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        time.sleep(self.latency)
        self.files.append(path, data, at)
        self.tally.note(path, "append", written=len(data))

    def names(self, folder: str) -> list[str]:
        time.sleep(self.latency)
        self.tally.note(folder, "list")
        return self.files.names(folder)


@dataclass
class Node:
    """Does what `rl_swarm.node.round` does around a model, in the same order, without one."""

    name: str
    identity: Identity
    scenario: Scenario
    manifest: Manifest
    environment: Arithmetic
    exchange: DocumentExchange
    coordinator: DocumentCoordinator
    tally: Tally
    used: "set[RolloutId]" = field(default_factory=set)
    added: list[float] = field(default_factory=list)  # seconds per stage, not counting work
    worked: dict[tuple[int, int], float] = field(default_factory=dict)
    plain: int = 0  # bytes of what it published, as plain JSON
    taken: int = 0

    def run(self) -> None:
        done, free_since, now = (-1, -1), time.monotonic(), time.time()
        peer = PeerInfo(
            swarm=self.manifest.swarm(),
            node=self.name,
            model="none",
            host=platform.node(),
            pid=os.getpid(),
            joined=now,
            timestamp=now,
        )
        self.coordinator.register(peer)
        watch = Watch(self.coordinator.store, self.name, self.identity, self.manifest.swarm())
        life = self.manifest.peer_timeout / 4
        with heartbeats(self.coordinator, peer, life, self.coordinator.stop, watch):
            while (state := self.coordinator.wait_for(done)) is not None and state.phase == "running":
                noticed = time.monotonic() - max(self.tally.stages[-1], free_since)
                done = (state.round, state.stage)
                self.added.append(noticed + self.play(state))
                free_since = time.monotonic()

    def play(self, state: State) -> float:
        """Play one stage, and return the seconds that went into the network."""
        from rl_swarm.node import intake
        from rl_swarm.node.round import score
        from rl_swarm.node.strategies import Strategy

        me, place = self.identity.peer_id, (state.round, state.stage)
        seeds = [question_seed(self.manifest, state.round, me, k) for k in range(QUESTIONS)]
        rng = random.Random(derive_seed(1, me, *place))
        questions = self.environment.questions(seeds)
        completions = self.environment.generate(len(questions), rng)
        groups = score(self.environment, me, questions, completions)
        publication = self.publication(groups, state)
        self.plain += len(plain_json(publication))
        self.worked[place] = rng.uniform(*self.scenario.work)
        time.sleep(self.worked[place])

        started, scoring = time.monotonic(), TimedArithmetic(self.environment, time.monotonic)
        self.exchange.publish(publication)
        checks = intake.Checks(self.manifest, scoring, fail, used=self.used)
        selection = intake.Selection(self.scenario.external, checks, Strategy(), rng)
        accepted = selection.run(self.publications(state, rng))
        self.used |= set(accepted.ids)
        self.taken += len(accepted.chosen)
        self.coordinator.submit(self.report(state))
        return time.monotonic() - started - scoring.seconds

    def publication(self, groups: list[Group], state: State) -> Publication:
        return Publication(
            peer_id=self.identity.peer_id,
            kind="rollouts",
            swarm=self.manifest.swarm(),
            node=self.name,
            round=state.round,
            stage=state.stage,
            timestamp=time.time(),
            model="Qwen2.5-0.5B-Instruct",
            policy_version=state.round,
            sampling=Sampling(1.0, 1.0, 0, 256),
            rollouts={str(k): to_answers(group, share_logprobs=False) for k, group in enumerate(groups)},
        )

    def publications(self, state: State, rng: random.Random) -> Iterator[Publication]:
        nodes = [m.node for peer_id, m in sorted(state.members.items()) if peer_id != self.identity.peer_id]
        rng.shuffle(nodes)
        lockstep = self.scenario.end == "lockstep"
        oldest = state.round if lockstep else max(0, state.round - MAX_AGE)
        for number in range(state.round, oldest - 1, -1):
            patience = self.manifest.peer_timeout if lockstep and number == state.round else 0.0
            yield from self.exchange.collect(number, state.stage, nodes, patience, in_order=lockstep)

    def report(self, state: State) -> Report:
        return Report(
            swarm=state.swarm,
            node=self.name,
            round=state.round,
            stage=state.stage,
            timestamp=time.time(),
            reward=0.5,
            training_reward=0.5,
            rollouts=QUESTIONS,
            vote=self.identity.peer_id,
        )


def quiet_at_the_end() -> None:
    """Silence the warning about a heartbeat that is being written while the folder is removed."""
    logging.getLogger("rl_swarm.node.heartbeats").setLevel(logging.ERROR)


def fail(node: str, reason: str, detail: str) -> None:
    raise AssertionError(f"{node} was rejected: {detail}")


def files_at(address: str) -> Files:
    store = open_address(address).store
    assert isinstance(store, FolderStore)
    return store.files


def measure(scenario: Scenario, rounds: int, address: str) -> dict[str, Any]:
    owner, stop, tally, environment = Identity.generate(), threading.Event(), Tally(), Arithmetic()
    manifest = Manifest(
        peer_id=owner.peer_id,
        name="benchmark",
        created=0.0,
        seed=1,
        environment="arithmetic",
        tasks=[Task("arithmetic")],
        partial_rewards=False,
        versions={},
        rounds=scenario.rounds or rounds,
        stages=STAGES,
        round_end=scenario.end,
        round_interval=scenario.interval,
        peer_timeout=scenario.life,
    )

    def node(number: int) -> Node:
        name, identity = f"node-{number}", Identity.generate()
        files = CountedFiles(files_at(address), tally, scenario.latency)
        exchange = DocumentExchange(FolderStore(files), manifest, identity, name, stop, fail, scenario.poll)
        coordinator = DocumentCoordinator(FolderStore(files), manifest, identity, name, stop, scenario.poll)
        return Node(name, identity, scenario, manifest, environment, exchange, coordinator, tally)

    nodes = [node(number) for number in range(NODES)]
    settings = Settings.of(min_peers=NODES, poll_interval=scenario.poll)
    files = CountedFiles(files_at(address), tally, scenario.latency)
    server = RoundServer(FolderStore(files), manifest, owner, settings.network, settings.storage, stop)
    with ThreadPoolExecutor(NODES + 1) as pool:
        playing = [pool.submit(node.run) for node in nodes]
        pool.submit(server.run).result()
        for thread in playing:
            thread.result()

    stages = manifest.rounds * STAGES
    published = tally.calls["rollouts", "write"]
    if scenario.end == "lockstep":  # all nodes wait for the slowest
        work = sum(max(node.worked[place] for node in nodes) for place in nodes[0].worked)
        added = (tally.stages[-1] - tally.stages[0] - work) / stages
    else:
        added = sum(sum(node.added) for node in nodes) / sum(len(node.added) for node in nodes)
    per_100 = 100 * STAGES * NODES / published / 1e6  # bytes of all publications -> MB per 100 rounds
    return {
        "scenario": scenario.name,
        "stages": stages,
        "publications": published,
        "external_groups_taken": sum(node.taken for node in nodes) / published,
        "calls_per_stage": {
            "rollouts": tally.about("rollouts") / stages,
            "rollouts_by_kind": {
                call: count / stages for (subject, call), count in tally.calls.items() if subject == "rollouts"
            },
            "reports": tally.about("rewards") / stages,
            "state": tally.about("state") / stages,
            "heartbeats": tally.about("peers") / stages,
            "everything": tally.about() / stages,
        },
        "megabytes_per_100_rounds": {
            "rollouts_written": tally.written["rollouts"] * per_100,
            "rollouts_read": tally.read["rollouts"] * per_100,
            "everything_written": tally.written.total() * per_100,
            "everything_read": tally.read.total() * per_100,
            "plain_json_written": sum(node.plain for node in nodes) * per_100,
        },
        "bytes_of_plain_json": tally.written["rollouts"] / sum(node.plain for node in nodes),
        "seconds_added_per_stage": added,
    }


def show(results: list[dict[str, Any]]) -> None:
    header = ["scenario", "rollout calls per stage (written + found + not there yet)"]
    header += ["all calls per stage (reports, state, heartbeats)", "MB per 100 rounds", "plain JSON", "share"]
    rows = []
    for r in results:
        calls, size = r["calls_per_stage"], r["megabytes_per_100_rounds"]
        kinds = [calls["rollouts_by_kind"].get(kind, 0.0) for kind in ("write", "read", "nothing there")]
        others = [calls[what] for what in ("reports", "state", "heartbeats")]
        rows.append(
            [
                r["scenario"],
                f"{calls['rollouts']:.1f} ({' + '.join(f'{kind:.1f}' for kind in kinds)})",
                f"{calls['everything']:.1f} ({', '.join(f'{count:.1f}' for count in others)})",
                f"{size['rollouts_written']:.1f}",
                f"{size['plain_json_written']:.1f}",
                f"{100 * r['bytes_of_plain_json']:.0f} %",
                f"{r['seconds_added_per_stage']:.2f}",
            ]
        )
    replaced = [REPLACED[what] for what in ("calls per stage", "MB per 100 rounds", "seconds per stage")]
    rows.append(["the system we replace", replaced[0], "", replaced[1], "", "", replaced[2]])
    print_table([*header, "s added per stage"], rows)


def print_requests() -> None:
    """Play the last two scenarios in a bucket, and print the requests at its S3 server."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
    from stores import BUCKET, S3

    server = S3()
    os.environ.update(server.environ)
    server.make_bucket(BUCKET)
    rows = []
    for scenario in SCENARIOS[-2:]:
        server.requests.clear()
        name = scenario.name.partition(",")[0]
        result = measure(replace(scenario, latency=0.0), 0, f"s3://{BUCKET}/{name}")
        each = {kind: count / result["stages"] for kind, count in server.requests.items()}
        kinds = [each.pop(kind, 0.0) for kind in ("GET", "PUT", "LIST")] + [sum(each.values())]
        counts = [f"{count:.1f}" for count in [sum(kinds), *kinds]]
        rows.append([name, *counts, f"{result['seconds_added_per_stage']:.2f}"])
    header = ["scenario", "requests per stage", "GET", "PUT", "LIST", "others", "seconds added per stage"]
    print_table(header, rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--bucket", action="store_true")
    args = parser.parse_args()
    quiet_at_the_end()
    if args.bucket:
        print_requests()
        return
    results = []
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="folder-") as folder:
            results.append(measure(scenario, args.rounds, folder))
    if args.json != "-":
        show(results)
    write_json(args.json, {"results": results, "replaced": REPLACED})


if __name__ == "__main__":
    main()
