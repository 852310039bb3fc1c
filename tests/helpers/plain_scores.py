"""Computes reasoning-gym's own scores in a plain process, to compare ours with."""

import json
import math
import os
import resource
import sys
import warnings


def honest_answers(entries, index):
    right = str(entries[index]["answer"])
    another = str(entries[(index + 1) % len(entries)]["answer"])
    return [right, "no such answer", "-987654", f"  {right}\n ", "", " ", another]


def made(name, dataset, count):
    """Return the first `count` questions that the task can make in a few seconds, by seed."""
    from rl_swarm.scoring.worker import TooSlow, entry_of, time_limit

    found = {}
    for seed in range(2 * count):
        try:
            with time_limit(4.0):
                found[seed] = entry_of(name, dataset, seed)
        except (Exception, TooSlow):  # a task may fail for a seed
            continue
        if len(found) == count:
            break
    return found


def main():
    import reasoning_gym

    from rl_swarm.scoring.worker import FEW, PLANNED_AHEAD, TooSlow, time_limit

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    request = json.load(sys.stdin)
    out, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # tasks print
    scores = []
    for number, name in enumerate(request["tasks"]):
        size = FEW if name in PLANNED_AHEAD else 2**31
        dataset = reasoning_gym.create_dataset(name, seed=0, size=size)
        found = made(name, dataset, request["count"])
        for index, (seed, entry) in enumerate(found.items()):
            for answer in request["texts"] or honest_answers(list(found.values()), index):
                score = 0.0
                if name not in request["dangerous"]:
                    try:
                        with time_limit(1.0):
                            score = float(dataset.score_answer(answer, entry))
                    except (Exception, TooSlow):
                        score = 0.0
                scores.append([number, seed, answer, score if math.isfinite(score) else 0.0])
    os.write(out, json.dumps(scores).encode())


if __name__ == "__main__":
    main()
