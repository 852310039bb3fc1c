"""Summarises what a follower knows, as records. Every function holds the follower's lock while it reads."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high
from typing import Literal

from rl_swarm.monitor import feed, standings
from rl_swarm.monitor.condition import condition, last_sign
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
    Overview,
    TaskScore,
)
from rl_swarm.monitor.run_reader import TREND_ROUNDS, NodeView
from rl_swarm.monitor.series import Curves, combined, number, padded, percentiles, stride_for
from rl_swarm.network.address import is_url
from rl_swarm.node import run_settings
from rl_swarm.node.evaluation import mean
from rl_swarm.node.settings import public_settings
from rl_swarm.protocol.wire import Rejected

HELD_OUT = "held_out"  # the metric of the held-out score, which is measured now and then
MAX_TASKS = 256
BAND = (0.1, 0.5, 0.9)  # the percentiles over all nodes that a chart shows


def overview(follower: Follower, can_stop: bool = False, experiment: str = "") -> Overview:
    with follower.lock:
        view, state, manifest = follower.view, follower.view.state, follower.view.manifest
        nodes, histories = list(view.nodes.values()), list(follower.histories.values())
        own, external = sum(t.own_groups for t in histories), sum(t.external_groups for t in histories)
        told = headline(view.active(), view.phase in ("finished", "stopped", "crashed"))
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
            seconds_left=_seconds_left(follower),
            nodes=len(nodes),
            alive=sum(node.alive for node in nodes),
            models=sorted({node.peer.model for node in nodes if node.peer}),
            tasks=sorted({task.name for task in manifest.tasks}) if manifest else [],
            tokens=round(sum(t.tokens for t in histories)),
            rollouts=sum(t.rollouts for t in histories),
            tokens_per_second=sum(_speed(node) or 0.0 for node in nodes if node.alive),
            reward=_recent(follower),
            reward_by_stage=_by_stage(follower, manifest.stages if manifest else 1),
            held_out_start=view.mean_held_out("start"),
            held_out_now=view.mean_held_out("now"),
            held_out_protocol=view.held_out_protocol(),
            headline=told.sentence,
            example=told.example,
            external_share=external / (own + external) if own + external else None,
            has_logs=any(node.rounds or node.held_out for node in nodes),
            unreadable_lines=sum(node.unreadable_lines for node in nodes),
            condition=condition(follower),
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
        sign = last_sign(follower.view)
        since = None if sign is None else max(0.0, now - sign)
        alive = sum(node.alive for node in nodes)
        phase = follower.view.phase
        late = since is not None and manifest is not None and since > max(30.0, manifest.peer_timeout)
        status: Literal["alive", "stale", "waiting", "finished"]
        if phase in ("stopped", "crashed") or (phase == "running" and late):
            status = "stale"
        elif phase == "running":
            status = "alive"
        else:
            status = "finished" if phase == "finished" else "waiting"
        return Health(status, state.round if state else 0, alive, since)


def nodes(follower: Follower, search: str = "", offset: int = 0, limit: int = 100) -> NodePage:
    """Return the leaderboard, best first; with `search`, the nodes whose name, id or model contains it."""
    return standings.page(follower, search, offset=offset, limit=limit)


def node(follower: Follower, name: str) -> NodeDetail | None:
    """Return a node's details, by its name in files or its peer id; None where there is no such node."""
    with follower.lock:
        view = find(follower, name)
        if view is None or view.node not in follower.histories:
            return None
        ranked = standings.standings(follower)
        row = next(row for row in ranked.rows if row.node == view.node)
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


def lines(
    follower: Follower, metric: str, points: int = 500, most: int = 50, also: Sequence[str] = (), spread: bool = True
) -> Lines:
    """Return a metric of the best nodes over the rounds and of those in `also`, and mean and spread of all nodes."""
    name = "sampled" if metric == HELD_OUT else metric
    with follower.lock:
        views = standings.standings(follower).views
        held_out = metric == HELD_OUT
        curves = [follower.histories[v.node].held_out if held_out else follower.histories[v.node].curves for v in views]
        step = stride_for(curves, points)
        mean_line, low, median, high = follower.once(
            ("lines", metric, step, spread), lambda: _mean_and_band(curves, name, step, spread)
        )
        chosen = {id(view) for view in [*views[:most], *filter(None, (find(follower, node) for node in also))]}
        lines = [(v, curve.points(name, step)) for v, curve in zip(views, curves, strict=True) if id(v) in chosen]
        recent = _recent(follower) if metric == "reward_local" else None
    length = len(mean_line)
    shown = [Line(view.node, view.name, padded(line, length)) for view, line in lines]
    rounds = [k * step for k in range(length)]
    return Lines(metric, rounds, mean_line, shown, len(views), low, median, high, recent)


def _mean_and_band(curves: Sequence[Curves], name: str, step: int, spread: bool) -> tuple[list[float | None], ...]:
    """Return the mean over nodes, and with `spread` the 10th, 50th and 90th percentile."""
    mean_line = combined(curves, name, step).points(name, step)
    band = percentiles(curves, name, step, BAND) if spread else ([], [], [])
    return mean_line, *(padded(line, len(mean_line)) if spread else line for line in band)


def _recent(follower: Follower) -> float | None:
    """Return the mean over the nodes of the reward in their last rounds. Hold the lock."""
    found = []
    for node in follower.view.active():
        history = follower.histories.get(node.node)
        if history and not node.rounds:  # its log is elsewhere: these are its reports
            stride = history.curves.stride
            points = history.curves.means("reward_local", stride)[-max(1, TREND_ROUNDS // stride) :]
            known = [value for value in points if value is not None]
            if known:
                found.append(mean(known))
                continue
        if node.has_reward:
            found.append(node.reward())
    return mean(found) if found else None


def run_settings_of(follower: Follower) -> dict[str, str]:
    """Return the public settings of a run, and what its nodes are: their number, models and tasks."""
    about = overview(follower)
    with follower.lock:
        known = _settings(follower)
        told = known or next((h.settings for h in follower.histories.values() if h.settings), {})
    return {
        "nodes in the swarm": str(about.nodes),
        "models": ", ".join(about.models)[:200],
        "tasks": ", ".join(about.tasks)[:500],
        "rounds": str(about.rounds),
        **told,
    }


def metrics(follower: Follower) -> set[str]:
    """Return the names of all metrics that any node has a curve of."""
    with follower.lock:
        found = {name for history in follower.histories.values() for name in history.curves.sums}
        scored = any(history.held_out.sums for history in follower.histories.values())
    return found | ({HELD_OUT} if scored else set())


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


def events(
    follower: Follower, node: str = "", kind: str = "", offset: int = 0, limit: int = 100, lessons: bool = False
) -> EventPage:
    """Return events, newest first; with `lessons`, also from whom others learned in the last rounds."""
    with follower.lock:
        view = find(follower, node) if node else None
        taught = follower.once("taught", lambda: feed.taught(follower)) if lessons else []
        found = [
            event
            for event in (*follower.events, *taught)
            if (not node or (view is not None and event.node == view.node)) and kind in ("", event.event)
        ]
        found.sort(key=lambda event: -event.timestamp)
        shown = [feed.named(follower, event) for event in found[offset : offset + limit]]
    return EventPage(len(found), offset, shown)


def find(follower: Follower, name: str) -> NodeView | None:
    """Find a node by its name in files, its peer id or its animal name."""
    nodes = list(follower.view.nodes.values())
    for view in nodes:
        if name and name in (view.node, view.peer.peer_id if view.peer else ""):
            return view
    return next((view for view in nodes if view.name == name), None)


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


def _seconds_left(follower: Follower) -> float | None:
    """Estimate the time until the last round is over, from the interval or the pace of the last rounds."""
    state, manifest = follower.view.state, follower.view.manifest
    if state is None or manifest is None or follower.view.phase != "running":
        return None
    by_clock = manifest.round_end == "interval"
    pace = manifest.round_interval * manifest.stages if by_clock else _pace(follower.view.nodes.values())
    return None if pace is None else pace * max(0, manifest.rounds - state.round)


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
