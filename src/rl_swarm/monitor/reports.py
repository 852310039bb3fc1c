"""Fetches the rewards of nodes whose logs are elsewhere: a few reports at a time, the newest round first."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from rl_swarm.monitor.node_history import NodeHistory, by_stage
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.network.documents import RECORD_BYTES, report_key
from rl_swarm.protocol.rounds import Report
from rl_swarm.protocol.wire import Rejected, unseal

ROUNDS_BACK = 100  # that are asked for
AT_A_TIME, AT_ONCE = 32, 8  # reports per poll, and requests at the same time
LATE_ROUNDS = 2  # after which no more reports are expected

Place = tuple[int, int, str]  # round, stage, node


class ReportReader:
    def __init__(self) -> None:
        self._done: set[Place] = set()  # read, or never to come

    def read(self, view: RunView) -> list[Report]:
        """Fetch some of the reports that are not known yet. Over a network this takes time."""
        wanted = [place for place, _ in zip(self._wanted(view), range(AT_A_TIME), strict=False)]
        if not wanted:
            return []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(lambda place: self._one(view, place), wanted))
        return [report for report in found if report is not None]

    def _wanted(self, view: RunView) -> Iterator[Place]:
        state, manifest = view.state, view.manifest
        if state is None or manifest is None or state.phase == "waiting":
            return
        newest = state.round if state.phase == "finished" else state.round - 1
        oldest = max(0, newest - ROUNDS_BACK)
        self._done = {place for place in self._done if place[0] >= oldest}
        elsewhere = [node.node for node in list(view.nodes.values()) if node.peer and not node.rounds]
        for number in range(newest, oldest - 1, -1):
            for stage in range(manifest.stages):
                for node in elsewhere:
                    if (number, stage, node) not in self._done:
                        yield number, stage, node

    def _one(self, view: RunView, place: Place) -> Report | None:
        state, manifest, peer = view.state, view.manifest, view.nodes[place[2]].peer
        assert state is not None and manifest is not None and peer is not None
        try:
            report = unseal(view.store.read(report_key(*place), RECORD_BYTES), Report, RECORD_BYTES)
        except (OSError, Rejected):  # missing, unreachable or unusable
            if state.phase == "finished" or place[0] < state.round - LATE_ROUNDS:
                self._done.add(place)
            return None
        self._done.add(place)
        here = (report.swarm, report.peer_id, report.round, report.stage, report.node)
        return report if here == (manifest.swarm(), peer.peer_id, *place) else None


def add_report(report: Report, history: NodeHistory, stages: int, numbers: Mapping[str, int]) -> None:
    """Add a report to what is known of its node; `numbers` are those of the peers on the map, by peer id."""
    rewards = {"reward_local": [report.reward], "reward_training": [report.training_reward]}
    if stages > 1 and report.rollouts:
        rewards |= {by_stage(report.stage): [report.reward]}
    if stages == 1 or report.rollouts:  # else it had no role
        history.curves.add([report.round], rewards)
    history.rollouts += report.rollouts
    if report.vote in numbers:
        history.edges.add(report.round, {numbers[report.vote]: 1})
