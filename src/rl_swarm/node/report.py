"""Reports a round: the mean reward and the vote to the coordinator, all figures to the node's own log."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rl_swarm.learning.devices import peak_memory
from rl_swarm.learning.trainer import Update
from rl_swarm.node.evaluation import mean
from rl_swarm.node.intake import Accepted
from rl_swarm.protocol.rollouts import Group
from rl_swarm.protocol.rounds import Report, State
from rl_swarm.telemetry.schema import Load, RoundRecord, Seconds

if TYPE_CHECKING:
    from rl_swarm.node.node import Node

log = logging.getLogger(__name__)


def best_peer(groups: Iterable[Group]) -> str:
    """Return the peer whose rollouts, as scored here, had the highest mean reward; empty if none earned anything."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.peer_id, []).append(group.mean_reward)
    ranked = sorted((-sum(values) / len(values), peer_id) for peer_id, values in rewards.items())
    return ranked[0][1] if ranked and ranked[0][0] < 0 else ""


def report(node: "Node", state: State, own: Sequence[Group], training: Sequence[Group], vote: str) -> Report:
    """Make the report of a stage for the coordinator."""
    return Report(
        peer_id=node.peer_id,
        swarm=state.swarm,
        node=node.name,
        round=state.round,
        stage=state.stage,
        timestamp=node.clock(),
        reward=mean([group.mean_reward for group in own]),
        training_reward=mean([group.mean_reward for group in training]),
        rollouts=len(own),
        vote=vote,
    )


def write_metrics(
    node: "Node",
    state: State,
    own: Sequence[Group],
    accepted: Accepted,
    update: Update,
    figures: Mapping[str, float] | None = None,
) -> None:
    """Write the figures of a stage to the node's log; `figures` are those of its role."""
    record = round_record(node, state, own, accepted, update, figures or {})
    node.journal.metrics(record, began=node.watch.began, phases=node.watch.phases)
    several = node.manifest.stages > 1
    log.log(
        logging.INFO if own or figures or not several else logging.DEBUG,
        "round %d%s: reward %.2f%s, learned from %d own and %d external groups, %.1f s",
        state.round,
        f" stage {state.stage}" if several else "",
        record.reward_local,
        "".join(f", {name} {value:.4g}" for name, value in (figures or {}).items()),
        record.local_with_signal,
        record.external_accepted,
        sum(node.watch.seconds.values()),
    )


def round_record(
    node: "Node", state: State, own: Sequence[Group], accepted: Accepted, update: Update, figures: Mapping[str, float]
) -> RoundRecord:
    """Fill the record of a stage."""
    completions = [completion for group in own for completion in group.completions]
    lengths = [float(len(completion.tokens or ())) for completion in completions]
    reward, several = mean([group.mean_reward for group in own]), node.manifest.stages > 1
    return RoundRecord(
        round=state.round,
        stage=state.stage,
        policy_version=node.policy.version,
        reward_local=reward,
        reward_training=mean([group.mean_reward for group in [*own, *accepted.chosen]]),
        local_groups=len(own),
        local_with_signal=sum(group.has_signal for group in own),
        zero_std_fraction=mean([float(not group.has_signal) for group in own]),
        completion_length=mean(lengths),
        truncated_fraction=mean([float(not completion.ended) for completion in completions]),
        entropy=update.entropy,
        clip_fraction=update.clip_fraction,
        logprob_mismatch=update.logprob_mismatch,
        loss=update.loss,
        kl=update.kl,
        grad_norm=update.grad_norm,
        trained_tokens=update.tokens,
        generated_tokens=int(sum(lengths)),
        tokens_per_second=round(sum(lengths) / max(node.watch.seconds["generate"], 1e-9), 1),
        seconds=Seconds.of(node.watch.rounded()),
        external_accepted=len(accepted.chosen),
        external_scored=len(accepted.scored),
        external_by_peer=dict(Counter(group.peer_id for group in accepted.chosen)),
        external_rejected={reason.value: count for reason, count in node.intake.rejected.items()},
        external_max_nll=round(accepted.max_nll, 2),
        peak_memory=peak_memory(node.policy.device),
        load=Load(**node.load.read()),
        role_metrics=dict(figures),
        reward_by_stage={str(state.stage): reward} if own and several else {},
        idle=several and not own,
    )
