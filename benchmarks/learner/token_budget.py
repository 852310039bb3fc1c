"""Measures the training step by its budget of tokens: seconds and peak memory, each budget in its own process.

    python -m benchmarks.learner.token_budget [--model smollm2-135m | --random llama] [--budgets 2048,4608]

The step learns from 8 groups of 8 answers of 256 tokens to prompts of 128 tokens. Memory is the most that torch held,
weights and moments included; on a CPU the most that the process held. `ratio` is to the fastest.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.learner.shared_gpu import load
from benchmarks.lib.command import learner_parser, positive, print_table, progress, write_json
from rl_swarm.learning.settings import LearningSettings

GIGABYTE = 10**9


def step(budget: int, args: argparse.Namespace, pipe: Connection) -> None:
    """Time updates with one budget, and send seconds and bytes."""
    import torch

    from benchmarks.lib.gauge import prepare, resident
    from rl_swarm.learning.batches import TrainingGroup
    from rl_swarm.learning.trainer import Trainer

    device = prepare(args)
    model, pad = load(args)
    draw, words = random.Random(args.seed), range(model.config.vocab_size)

    def tokens(count: int) -> list[int]:
        return draw.choices(words, k=count)

    groups = [
        TrainingGroup(
            tokens(args.prompt),
            [tokens(args.tokens) for _ in range(args.completions)],
            [(-1.0) ** number for number in range(args.completions)],
            None,
        )
        for _ in range(args.questions)
    ]
    trainer = Trainer(model.to(device), pad, LearningSettings(learning_rate=1e-6, batch_tokens=budget))
    seconds = []
    for _ in range(args.repeats + 1):
        started = time.perf_counter()
        trainer.update(groups)  # waits for the figures, and so for all of it
        seconds.append(time.perf_counter() - started)
    held = torch.cuda.max_memory_reserved() if device.type == "cuda" else resident("VmHWM")
    pipe.send((statistics.median(seconds[1:]), held))


def main() -> None:
    parser = learner_parser(__doc__)
    parser.add_argument("--random", choices=["llama", "gpt2"], help="random weights of that family's usual size")
    parser.add_argument("--budgets", default="2048,3072,4608,5120,5376,6144,9216,20000", help="with commas")
    args = parser.parse_args()
    try:
        budgets = [positive(text) for text in args.budgets.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"--budgets {args.budgets}: numbers of tokens with commas between them, such as 2048,4608")
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        ours, theirs = context.Pipe()
        child = context.Process(target=step, args=(budget, args, theirs))
        child.start()
        theirs.close()
        try:
            seconds, held = ours.recv()
        except EOFError:
            raise SystemExit(f"the step with {budget} tokens failed") from None
        child.join()
        progress(f"{budget} tokens: {seconds:.3f} s")
        rows.append({"batch_tokens": budget, "seconds": round(seconds, 4), "GB": round(held / GIGABYTE, 2)})
    fastest = min(row["seconds"] for row in rows)
    for row in rows:
        row["ratio"] = round(row["seconds"] / fastest, 2)
    write_json(args.json, {"budgets": rows})
    if args.json != "-":
        print_table(list(rows[0]), [list(map(str, row.values())) for row in rows])


if __name__ == "__main__":
    main()
