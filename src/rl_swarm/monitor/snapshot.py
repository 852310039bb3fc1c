"""Summarises what a follower knows, as records. Every function holds the follower's lock while it reads."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high
from typing import Literal

from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.headline import headline
from rl_swarm.monitor.node_history import by_stage
from rl_swarm.monitor.records import (
    EventPage,
    Health,
    Line,
    Lines,
    Link,
    NodeCurves,
    NodeDetail,
    NodePage,
    NodeRow,
    Overview,
    TaskScore,
)
from rl_swarm.monitor.run_reader import TREND_ROUNDS, NodeView
from rl_swarm.monitor.series import combined, number, padded, stride_for
from rl_swarm.network.address import is_url
from rl_swarm.node import run_settings
from rl_swarm.node.evaluation import mean
from rl_swarm.node.settings import public_settings
from rl_swarm.protocol.wire import Rejected

HELD_OUT = "held_out"  # the metric of the held-out score, which is measured now and then
MAX_TASKS = 256


def overview(follower: Follower, can_stop: bool = False, experiment: str = "") -> Overview:
    with follower.lock:
        view, state, manifest = follower.view, follower.view.state, follower.view.manifest
        nodes, histories = list(view.nodes.values()), list(follower.histories.values())
        own, external = sum(t.own_groups for t in histories), sum(t.external_groups for t in histories)
        rewards = [node.reward() for node in nodes if node.has_reward]
        told = headline(nodes, view.phase in ("finished", "stopped"))
        return Overview(
            name=manifest.name if manifest else "",
            address=view.address.text,
            swarm=manifest.swarm() if manifest else "",
            phase=view.phase,
            round=state.round if state else 0,
            stage=state.stage if state else 0,
            rounds=manifest.rounds if manifest else 0,
            stages=manifest.stages if manifest else 1,
            round_end=manifest.round_end if manifest else "",
            seconds_to_next=_seconds_to_next(follower),
            nodes=len(nodes),
            alive=sum(node.alive for node in nodes),
            models=sorted({node.peer.model for node in nodes if node.peer}),
            tasks=sorted({task.name for task in manifest.tasks}) if manifest else [],
            tokens=round(sum(t.tokens for t in histories)),
            rollouts=sum(t.rollouts for t in histories),
            tokens_per_second=sum(_speed(node) or 0.0 for node in nodes if node.alive),
            reward=mean(rewards) if rewards else None,
            reward_by_stage=_by_stage(follower, manifest.stages if manifest else 1),
            held_out_start=view.mean_held_out("start"),
            held_out_now=view.mean_held_out("now"),
            held_out_protocol=view.held_out_protocol(),
            headline=told.sentence,
            example=told.example,
            external_share=external / (own + external) if own + external else None,
            has_logs=any(node.rounds or node.held_out for node in nodes),
            unreadable_lines=sum(node.unreadable_lines for node in nodes),
            can_stop=can_stop,
            experiment=experiment,
            version=follower.version,
        )


def _by_stage(follower: Follower, stages: int) -> list[float | None]:
    """Return the mean of the nodes' last rounds in every stage; an empty list where there is one stage."""
    means: list[float | None] = []
    for stage in range(stages if stages > 1 else 0):
        curves = [history.curves for history in follower.histories.values()]
        last = [each.points(by_stage(stage), each.stride) for each in curves]
        known = [value for line in last for value in line[-TREND_ROUNDS:] if value is not None]
        means.append(mean(known) if known else None)
    return means


def health(follower: Follower) -> Health:
    """Return the health of the swarm. It is `stale` if it should go on, and was silent for a peer's timeout."""
    with follower.lock:
        state, manifest, now = follower.view.state, follower.view.manifest, follower.now()
        nodes = list(follower.view.nodes.values())
        signs = [node.peer.timestamp for node in nodes if node.peer]
        signs += [when for node in nodes if node.last and (when := node.last.timestamp) is not None]
        signs += [state.timestamp] if state else []
        since = max(0.0, now - max(signs)) if signs else None
        alive = sum(node.alive for node in nodes)
        phase = follower.view.phase
        late = since is not None and manifest is not None and since > max(30.0, manifest.peer_timeout)
        status: Literal["alive", "stale", "waiting", "finished"]
        if phase == "stopped" or (phase == "running" and late):
            status = "stale"
        else:
            status = "alive" if phase == "running" else phase
        return Health(status, state.round if state else 0, alive, since)


def nodes(follower: Follower, search: str = "", offset: int = 0, limit: int = 100) -> NodePage:
    """Return the leaderboard, best first; with `search`, the nodes whose name, id or model contains it."""
    sought = search.strip().lower()
    with follower.lock:
        found = [(rank, view) for rank, view in enumerate(_ranked(follower), 1) if _fits(view, sought)]
        rows = [_row(follower, rank, view) for rank, view in found[offset : offset + limit]]
    return NodePage(len(found), offset, rows)


def node(follower: Follower, name: str) -> NodeDetail | None:
    """Return a node's details, by its name in files or its peer id; None where there is no such node."""
    with follower.lock:
        view = find(follower, name)
        if view is None or view.node not in follower.histories:
            return None
        row = _row(follower, _ranked(follower).index(view) + 1, view)
        history, peer = follower.histories[view.node], view.peer
        scores = [_by_task(line) for line in (view.start, view.now)]
        memory = [value for value in history.curves.points("peak_memory", history.curves.stride) if value]
        used_by = {
            other.node: follower.histories[other.node].learned_from[row.peer_id]
            for other in follower.view.nodes.values()
            if other.node in follower.histories
        }
        rejected_by_peers: Counter[str] = Counter()
        for other in follower.histories.values():
            for (whose, reason), times in other.rejected_by_peers.items():
                if whose == row.node:
                    rejected_by_peers[reason] += times
        return NodeDetail(
            row=row,
            device=peer.device if peer else "",
            host=peer.host if peer else "",
            joined=peer.joined if peer else None,
            last_heartbeat=peer.timestamp if peer else None,
            tokens=round(history.tokens),
            rollouts=history.rollouts,
            peak_memory=max(memory, default=None),
            restarts=history.restarts,
            skipped=history.skipped,
            rejected=dict(history.rejected.most_common(100)),
            rejected_by_peers=dict(rejected_by_peers.most_common(100)),
            errors=dict(history.errors.most_common(100)),
            learned_from=_links(follower, history.learned_from),
            used_by=_links(follower, used_by),
            held_out=[
                TaskScore(task, scores[0].get(task), scores[1].get(task))
                for task in sorted(scores[0] | scores[1])[:MAX_TASKS]
            ],
            checkpoints=follower.view.checkpoints(view.node),
            settings=history.settings or _settings(follower),
            hardware=history.hardware,
            metrics=sorted(history.curves.sums),
            role_metrics={
                name: value for name, told in view.role_metrics.items() if (value := number(told)) is not None
            },
        )


def lines(follower: Follower, metric: str, points: int = 500, most: int = 50) -> Lines:
    """Return a metric of the best nodes over the rounds, and the mean of all."""
    name = "sampled" if metric == HELD_OUT else metric
    with follower.lock:
        views = _ranked(follower)
        histories = [follower.histories[view.node] for view in views]
        curves = [history.held_out if metric == HELD_OUT else history.curves for history in histories]
        step = stride_for(curves, points)
        mean_line = combined(curves, name, step).points(name, step)
        lines = [curve.points(name, step) for curve in curves[:most]]
    length = len(mean_line)
    shown = [Line(v.node, v.name, padded(line, length)) for v, line in zip(views, lines, strict=False)]
    return Lines(metric, [k * step for k in range(length)], mean_line, shown)


def curves(follower: Follower, name: str, metrics: Sequence[str], points: int = 500) -> NodeCurves | None:
    """Return some metrics of one node over the rounds; all that it has where none are named."""
    with follower.lock:
        view = find(follower, name)
        if view is None or view.node not in follower.histories:
            return None
        history = follower.histories[view.node]
        wanted = [metric for metric in (metrics or sorted(history.curves.sums)) if metric in history.curves.sums]
        step = stride_for([history.curves], points)
        values = {metric: history.curves.points(metric, step) for metric in wanted}
    length = max(map(len, values.values()), default=0)
    return NodeCurves(
        view.node,
        view.name,
        [k * step for k in range(length)],
        {metric: padded(line, length) for metric, line in values.items()},
    )


def events(follower: Follower, node: str = "", kind: str = "", offset: int = 0, limit: int = 100) -> EventPage:
    """Return events, newest first."""
    with follower.lock:
        view = find(follower, node) if node else None
        found = [
            event
            for event in follower.events
            if (not node or (view is not None and event.node == view.node)) and kind in ("", event.event)
        ]
    found.sort(key=lambda event: -event.timestamp)
    return EventPage(len(found), offset, found[offset : offset + limit])


def find(follower: Follower, name: str) -> NodeView | None:
    """Find a node by its name in files, its peer id or its animal name."""
    nodes = list(follower.view.nodes.values())
    for view in nodes:
        if name and name in (view.node, view.peer.peer_id if view.peer else ""):
            return view
    return next((view for view in nodes if view.name == name), None)


def _ranked(follower: Follower) -> list[NodeView]:
    """Sort the nodes, best first."""
    state = follower.view.state
    order = {peer_id: k for k, (peer_id, _) in enumerate(state.leaderboard())} if state else {}
    views = [view for view in list(follower.view.nodes.values()) if view.node in follower.histories]
    views.sort(key=lambda v: (order.get(v.peer.peer_id, len(order)) if v.peer else len(order), v.node))
    return views


def _fits(view: NodeView, sought: str) -> bool:
    known = (view.peer.peer_id, view.peer.model) if view.peer else ()
    return sought in "\n".join((view.name, view.node, *known)).lower()


def _row(follower: Follower, rank: int, view: NodeView) -> NodeRow:
    trend = len(view.rounds) > TREND_ROUNDS
    return NodeRow(
        rank=rank,
        node=view.node,
        name=view.name,
        peer_id=view.peer.peer_id if view.peer else "",
        model=view.peer.model if view.peer else "",
        alive=view.alive,
        round=view.last.round if view.last else None,
        participation=view.member.participation if view.member else 0,
        reward=number(view.reward()) if view.has_reward else None,
        total_reward=(number(view.member.reward) or 0.0) if view.member else 0.0,
        trend=number(view.reward() - view.reward(before=TREND_ROUNDS)) if trend else None,
        wins=view.member.wins if view.member else 0,
        held_out_start=number(view.start["sampled"]) if view.start else None,
        held_out_now=number(view.now["sampled"]) if view.now else None,
        tokens_per_second=_speed(view),
        external_share=follower.histories[view.node].external_share,
        role=view.role,
    )


def _speed(view: NodeView) -> float | None:
    return view.last.tokens_per_second if view.last else None


def _links(follower: Follower, groups: Mapping[str, int]) -> list[Link]:
    """Name the nodes that are counted, most groups first; a peer that left goes by its id."""
    views = list(follower.view.nodes.values())
    known = {view.node: view for view in views} | {view.peer.peer_id: view for view in views if view.peer}
    found = [
        Link(known[name].node, known[name].name, count) if name in known else Link("", name, count)
        for name, count in groups.items()
        if count
    ]
    return sorted(found, key=lambda link: (-link.groups, link.name))[:100]


def _by_task(line: dict[str, object] | None) -> dict[str, float]:
    scores = line.get("by_task") if line else None
    if not isinstance(scores, dict):
        return {}
    return {task: value for task, score in scores.items() if (value := number(score)) is not None}


def _seconds_to_next(follower: Follower) -> float | None:
    state, manifest = follower.view.state, follower.view.manifest
    if state is None or manifest is None or follower.view.phase != "running":
        return None
    pace = None if manifest.round_end == "interval" else _pace(follower.view.nodes.values())
    usual = manifest.round_interval if manifest.round_end == "interval" else pace and pace / manifest.stages
    return None if usual is None else max(0.0, usual - (follower.now() - state.started))


def _pace(views: Iterable[NodeView]) -> float | None:
    """Return the seconds per round, from the last lines of the logs."""
    paces = []
    for view in list(views):
        known = [(line.round, line.timestamp) for line in view.rounds if line.timestamp]
        if len(known) > 1 and (played := known[-1][0] - known[0][0]) > 0:
            paces.append((known[-1][1] - known[0][1]) / played)
    return median_high(paces) if paces else None


def _settings(follower: Follower) -> dict[str, str]:
    """Return the public settings that a run of `up` was started with."""
    if is_url(follower.view.address.text):
        return {}
    manifest = follower.view.manifest
    try:
        values = run_settings.read(follower.view.local_files, manifest).settings if manifest else {}
    except (OSError, Rejected):
        return {}
    return {name: str(value)[:200] for name, value in public_settings(values).items()}
