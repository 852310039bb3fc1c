"""Ranks the nodes of a swarm and sorts them by any column, once per version: a page of 10,000 nodes costs little."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import NodePage, NodeRow
from rl_swarm.monitor.run_reader import TREND_ROUNDS, NodeView
from rl_swarm.monitor.series import Curves, number, stride_for

Column = Literal[
    "rank", "name", "model", "participation", "reward", "total_reward", "trend", "wins", "held_out_now",
    "external_share", "tokens_per_second",
]  # fmt: skip
SPARK = "reward_local"
SPARK_POINTS = 40


class Standings(NamedTuple):
    """Holds the nodes, best first: by held-out score, then by reward, then as the coordinator counted."""

    views: list[NodeView]
    rows: list[NodeRow]  # without sparklines
    texts: list[str]  # what a search looks through


def standings(follower: Follower) -> Standings:
    """Return all nodes, ranked. The caller holds the follower's lock."""
    return follower.once("standings", lambda: _ranked(follower))


def page(
    follower: Follower,
    search: str = "",
    sort: Column = "rank",
    descending: bool = False,
    first: Collection[str] = (),
    offset: int = 0,
    limit: int | None = 100,
    sparks: bool = False,
) -> NodePage:
    """Return a part of the leaderboard. The nodes in `first` come before all others; those without a value last."""
    sought = search.strip().lower()
    with follower.lock:
        texts = standings(follower).texts
        rows: Sequence[NodeRow] = follower.once(
            f"by {sort} {descending}", lambda: _sorted(standings(follower).rows, sort, descending)
        )
        if sought:
            rows = [row for row in rows if sought in texts[row.rank - 1]]
        if first:
            rows = [*(row for row in rows if row.node in first), *(row for row in rows if row.node not in first)]
        shown = list(rows[offset : None if limit is None else offset + limit])
        if sparks:
            shown = [replace(row, spark=_spark(follower.histories[row.node].curves)) for row in shown]
    return NodePage(len(rows), offset, shown)


def _ranked(follower: Follower) -> Standings:
    state = follower.view.state
    order = {peer_id: k for k, (peer_id, _) in enumerate(state.leaderboard())} if state else {}
    known = [view for view in list(follower.view.nodes.values()) if view.node in follower.histories]
    known.sort(key=lambda v: (order.get(v.peer.peer_id, len(order)) if v.peer else len(order), v.node))
    scored = [(view, number(view.reward()) if view.has_reward else None) for view in known]
    scored.sort(key=lambda pair: (_last_if_none(_held_out(pair[0].now)), _last_if_none(pair[1])))
    rows = [_row(follower, rank, *pair) for rank, pair in enumerate(scored, 1)]
    texts = ["\n".join((row.name, row.node, row.peer_id, row.model)).lower() for row in rows]
    return Standings([view for view, _ in scored], rows, texts)


def _last_if_none(value: float | None) -> tuple[bool, float]:
    return (True, 0.0) if value is None else (False, -value)


def _sorted(rows: list[NodeRow], column: Column, descending: bool) -> list[NodeRow]:
    """Sort rows by a column; equal ones stay in the order of their ranks."""
    if column in ("name", "model"):
        return sorted(rows, key=lambda row: str(getattr(row, column)).lower(), reverse=descending)
    known = [row for row in rows if getattr(row, column) is not None]
    missing = [row for row in rows if getattr(row, column) is None]
    return [*sorted(known, key=lambda row: float(getattr(row, column)), reverse=descending), *missing]


def _spark(curves: Curves) -> list[float | None]:
    """Return the reward over the rounds in a few points."""
    return curves.points(SPARK, stride_for([curves], SPARK_POINTS))


def _held_out(line: Mapping[str, Any] | None) -> float | None:
    return number(line["sampled"]) if line else None


def _row(follower: Follower, rank: int, view: NodeView, reward: float | None) -> NodeRow:
    member, last = view.member, view.last
    trend = len(view.rounds) > TREND_ROUNDS
    return NodeRow(
        rank=rank,
        node=view.node,
        name=view.name,
        peer_id=view.peer.peer_id if view.peer else "",
        model=view.peer.model if view.peer else "",
        alive=view.alive,
        round=last.round if last else None,
        participation=member.participation if member else 0,
        reward=reward,
        total_reward=(number(member.reward) or 0.0) if member else 0.0,
        trend=number(view.reward() - view.reward(before=TREND_ROUNDS)) if trend else None,
        wins=member.wins if member else 0,
        held_out_start=_held_out(view.start),
        held_out_now=_held_out(view.now),
        tokens_per_second=last.tokens_per_second if last else None,
        external_share=follower.histories[view.node].external_share,
        role=view.role,
    )
