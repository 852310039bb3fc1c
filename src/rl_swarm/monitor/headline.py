"""Sums a run up in one sentence, with one question before and after: for the page, `status` and the end of `up`."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_swarm.monitor.records import AnswerPair
from rl_swarm.monitor.run_reader import NodeView
from rl_swarm.monitor.series import number
from rl_swarm.node.evaluation import mean
from rl_swarm.plural import counted

MAX_NODES_SEARCHED = 16  # for an example: those that changed most
LONGEST_QUESTION, LONGEST_ANSWER = 600, 300  # characters that are shown
LONGEST_READ = 8000  # characters of a text that are looked at
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Headline:
    sentence: str  # empty while there is no score
    example: AnswerPair | None


def headline(nodes: Sequence[NodeView], finished: bool) -> Headline:
    """Compare the first held-out scores of the nodes with their last ones."""
    firsts = [(node, first) for node in nodes if (first := score_of(node.start)) is not None]
    pairs = [
        (node, first, now)
        for node, first in firsts
        if node.now is not node.start and (now := score_of(node.now)) is not None
    ]
    if not pairs:
        if finished or not firsts:
            return Headline("", None)
        begin = "begins" if len(firsts) == 1 else "begin"
        start = _percent([first for _, first in firsts])
        return Headline(f"{counted(len(firsts), 'model')} {begin} at {start} % on unseen questions.", None)
    start, end = _percent([first for _, first, _ in pairs]), _percent([now for *_, now in pairs])
    played = max(int(number((node.now or {}).get("round")) or 0) + 1 for node, *_ in pairs)
    rounds = f"{counted(max(0, played), 'round')}{'' if finished else ' so far'}"
    if start == end:
        change = f"stayed at {start} % on unseen questions over {rounds}"
        example = _example([node for node, *_ in pairs[:MAX_NODES_SEARCHED]], (False, False))
        return Headline(f"{counted(len(pairs), 'model')} {change}.", example)
    gain = 1 if end > start else -1
    change = f"{'went' if gain > 0 else 'fell'} from {start} % to {end} % on unseen questions in {rounds}"
    most_changed = heapq.nlargest(MAX_NODES_SEARCHED, pairs, key=lambda pair: (pair[2] - pair[1]) * gain)
    example = _example([node for node, *_ in most_changed], (gain < 0, gain > 0))
    return Headline(f"{counted(len(pairs), 'model')} {change}.", example)


def clean(text: str, most: int) -> str:
    """Return a model's or a peer's text as one bounded line, harmless to a terminal."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_READ])
    line = " ".join(shown.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _percent(shares: Sequence[float]) -> int:
    return round(100 * mean(shares))


def score_of(line: Line | None) -> float | None:
    """Return the score of a line of a log. A peer wrote it, so it may be no share at all."""
    score = number(line.get("sampled")) if line else None
    return score if score is not None and 0 <= score <= 1 else None


def _example(nodes: Sequence[NodeView], right: tuple[bool, bool]) -> AnswerPair | None:
    """Find an answer that was `right` before and after or not: the plainest one of the first node that has any."""
    for node in nodes:
        if found := list(_pairs(node, right)):
            return min(found, key=_plainness)
    return None


def _plainness(example: AnswerPair) -> tuple[bool, bool, int]:
    """Order examples: at first those whose wrong answer does not hold the key, and says something; then short ones."""
    wrong = example.before if example.after_right else example.after
    holds_key = example.key is not None and example.key in wrong
    return holds_key, not wrong, len(example.question) + len(example.before) + len(example.after)


def _pairs(node: NodeView, right: tuple[bool, bool]) -> Iterator[AnswerPair]:
    before, after = _examples(node.start), _examples(node.now)
    for asked, first in before.items():
        second = after.get(asked)
        if second is None or (first["reward"] == 1, second["reward"] == 1) != right:
            continue
        key = first.get("answer")
        yield AnswerPair(
            question=clean(asked[1], LONGEST_QUESTION),
            before=clean(first["completion"], LONGEST_ANSWER),
            after=clean(second["completion"], LONGEST_ANSWER),
            before_right=first["reward"] == 1,
            after_right=second["reward"] == 1,
            key=clean(key, LONGEST_ANSWER) if isinstance(key, str) and key else None,
            task=clean(asked[0], 64),
            node=node.node,
            name=node.name,
        )


def _examples(line: Line | None) -> dict[tuple[str, str], Line]:
    return {(one["task"], one["prompt"]): one for one in (line or {}).get("examples", [])}
