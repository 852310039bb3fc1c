"""Adds to the events of a swarm what follows from several nodes: from whom others learned, and whom a node refused."""

from collections import Counter
from dataclasses import replace

from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import Event
from rl_swarm.monitor.series import number
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import animal_name

TAUGHT_ROUNDS = 10  # the last rounds in which it is told from whom others learned
SHORTEST_ID = 40  # characters of a peer id; names of nodes are shorter, or are shown as they are


def taught(follower: Follower) -> list[Event]:
    """Tell for each of the last rounds whose answers most nodes learned from. The caller holds the follower's lock."""
    learners: dict[int, Counter[str]] = {}
    times: dict[int, float] = {}
    views = list(follower.view.nodes.values())
    for view in views:
        for line in view.rounds[-TAUGHT_ROUNDS:]:
            of_round = learners.setdefault(line.round, Counter())
            for peer_id, groups in line.external_by_peer.items():
                of_round[peer_id] += groups > 0
            times[line.round] = max(times.get(line.round, 0.0), number(line.timestamp) or 0.0)
    names = {view.peer.peer_id: view for view in views if view.peer}
    state = follower.view.state
    over = state.round + (state.phase == "finished") if state else 0
    found = []
    for played in sorted(learners)[-TAUGHT_ROUNDS:]:
        peer_id, nodes = max(learners[played].items(), key=lambda item: (item[1], item[0]), default=("", 0))
        if nodes and peer_id in names and played < over and times[played]:
            view = names[peer_id]
            said = f"wrote answers that {counted(nodes, 'other node')} learned from in round {played + 1}"
            found.append(Event(times[played], view.node, view.name, "taught", played, "", said))
    return found


def named(follower: Follower, event: Event) -> Event:
    """Name the other node of an event. The caller holds the follower's lock."""
    if not event.about:
        return event
    other = follower.view.nodes.get(event.about)
    if other is None and len(event.about) > SHORTEST_ID:  # a peer id
        other = next((v for v in follower.view.nodes.values() if v.peer and v.peer.peer_id == event.about), None)
    if other is not None:
        return replace(event, about=other.node, about_name=other.name)
    return replace(
        event, about="", about_name=animal_name(event.about) if len(event.about) > SHORTEST_ID else event.about
    )
