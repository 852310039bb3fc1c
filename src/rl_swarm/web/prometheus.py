"""Writes the swarm's numbers in the format of Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_NODES = 1000


def text(follower: Follower) -> bytes:
    registry = CollectorRegistry()
    registry.register(Numbers(follower))
    return generate_latest(registry)


class Numbers(Collector):
    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    def collect(self) -> Iterator[Metric]:
        overview, rows = snapshot.overview(self.follower), snapshot.nodes(self.follower, limit=MAX_NODES).nodes
        gauges = {
            "round": ("the current round", overview.round),
            "rounds": ("rounds of the run", overview.rounds),
            "nodes": ("nodes that have joined", overview.nodes),
            "nodes_alive": ("nodes that are online", overview.alive),
            "reward": ("mean reward of the last rounds", overview.reward),
            "held_out_score": ("mean score on questions that training never sees", overview.held_out_now),
            "external_share": ("share of external groups among the groups trained on", overview.external_share),
        }
        for name, (what, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"rl_swarm_{name}", what, value=value)
        yield CounterMetricFamily("rl_swarm_tokens", "tokens that models generated", value=overview.tokens)
        yield CounterMetricFamily("rl_swarm_rollouts", "questions that models answered", value=overview.rollouts)
        labels = ["node", "name", "model"]
        of_node: dict[str, tuple[str, list[float | None]]] = {
            "alive": ("1 if the node is online, else 0", [float(row.alive) for row in rows]),
            "reward": ("mean reward of its last rounds", [row.reward for row in rows]),
            "held_out_score": ("its score on questions that training never sees", [row.held_out_now for row in rows]),
            "tokens_per_second": ("tokens it generates per second", [row.tokens_per_second for row in rows]),
            "participation": ("rounds it reported", [float(row.participation) for row in rows]),
            "wins": ("votes it received", [float(row.wins) for row in rows]),
        }  # fmt: skip
        for name, (what, values) in of_node.items():
            family = GaugeMetricFamily(f"rl_swarm_node_{name}", what, labels=labels)
            for row, value in zip(rows, values, strict=True):
                if value is not None:
                    family.add_metric([row.node, row.name, row.model], value)
            yield family
