"""Writes runs whose answers and events are of every kind: right, partly right, wrong, equal, programs."""

import time
from collections.abc import Sequence
from pathlib import Path

from small_runs import HOSTILE, SmallRun, questions_of

from benchmarks.lib.paths import rollouts_path
from rl_swarm.environments.coding.environment import Coding
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import question_seed
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import seal

RIGHT_TEXT = "The sum is easy. <answer>{}</answer> I am sure."
WRONG_TEXT = "The sum is easy. <answer>{}</answer> I am sad."
PROGRAM = "```python\ndef solve(x):\n    # <b>bold</b>\n    return 'text' + 1\n```"


def publish(
    run: SmallRun, identity: Identity, played: int, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]
) -> None:
    """Publish answers with the rewards that their author claims, by question."""
    publication = Publication(
        peer_id=identity.peer_id, kind="rollouts", swarm=run.manifest.swarm(), node=identity.node, round=played,
        stage=0, timestamp=time.time(), model="tiny", policy_version=played, sampling=Sampling(1.0, 1.0, 0, 24),
        rollouts={
            str(k): [Answer(prompt=prompt, response=text, reward=reward) for text, reward in answers]
            for k, (prompt, answers) in enumerate(groups)
        },
    )  # fmt: skip
    run.files.write(rollouts_path(played, 0, identity.node), seal(publication, identity))


def varied_run(root: Path) -> SmallRun:
    """A swarm of three nodes that differ in every column, with answers of every kind and events that repeat."""
    run = SmallRun(root, nodes=3, total=60)
    first, second, third = run.identities
    for _ in range(25):
        run.play("<answer>no</answer>")
    for score, identity in zip((0.4, 0.9, 0.6), run.identities, strict=True):
        run.score(identity, "now", score)
    for identity in run.identities:
        run.journals[identity.node].event("checkpoint", round=20)
    for _ in range(3):
        run.journals[first.node].event("rejected", node=second.node, reason="signature", detail=HOSTILE)
    run.journals[third.node].event("failed", error=HOSTILE)
    last = run.state.round - 1
    seeds = [question_seed(run.manifest, last, third.peer_id, k) for k in range(2)]
    one, two = questions_of("chain_sum,gcd").questions(seeds)
    mixed = [
        (WRONG_TEXT.format(one.answer), 0.0),
        (RIGHT_TEXT.format(one.answer), 1.0),
        (RIGHT_TEXT.format(one.answer), 1.0),
        ("half of it", 0.4),
        (HOSTILE, -0.5),
    ]
    all_wrong = [(PROGRAM, 0.0), (f"Not at all.\n\n{PROGRAM}\nThat is it.", 0.0)]
    publish(run, third, last, [(one.prompt, mixed), (two.prompt, all_wrong)])
    for identity in (first, second):  # nothing to learn from
        seeds = [question_seed(run.manifest, last, identity.peer_id, k) for k in range(2)]
        asked = questions_of("chain_sum,gcd").questions(seeds)
        publish(run, identity, last, [(q.prompt, [("same", 0.0), ("same", 0.0)]) for q in asked])
    return run


def coding_run(folder: Path) -> SmallRun:
    """A swarm whose one node has answered a programming task: rightly, wrongly and without a program."""
    run = SmallRun(folder / "coding", nodes=1, total=3, environment="coding", tasks="beginner")
    (identity,) = run.identities
    (question,) = Coding((Task("beginner"),)).questions([question_seed(run.manifest, 0, identity.peer_id, 0)])
    right = f"Here it is.\n\n```python\n{question.answer}\n```"
    wrong = f"```python\n{question.answer}\n    # wrong\n```".replace("return", "yield")
    publish(run, identity, 0, [(question.prompt, [(right, 1.2), (wrong, 0.2), ("I do not know.", -0.8)])])
    return run
