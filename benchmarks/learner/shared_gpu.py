"""Measures what nodes that share a GPU cost: seconds of a round and peak memory, of one node and of several.

    python -m benchmarks.learner.shared_gpu [--nodes 8] [--model smollm2-135m | --random gpt2] [--json FILE]

A round answers 8 questions 8 times with 256 tokens each, prompts of 128 tokens, and learns from the answers. The nodes
are threads of one process that share what `SharedDevice` shares, as those of `up` are, and begin every round together.
One node alone is a process of its own. `--random` takes a model of that family with random weights, of the size
that is usual (135 M and 124 M parameters), so that nothing has to be downloaded. Figures are medians.

`sample` ends when the last node has its answers, and `train` is the rest of the round. Memory is the most that torch
held, the first round with its captured included; beside it what `nvidia-smi` says of the GPU at the end, which
counts other processes too. On a CPU it is the most that the process held, libraries included.
"""

import argparse
import copy
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks.learner.systems import pad_of
from benchmarks.lib.command import learner_parser, print_table, progress, write_json
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.node.swarm import SHARED
from rl_swarm.node.worker import SWITCH_SECONDS

if TYPE_CHECKING:
    import torch

GIBIBYTE = 1 << 30


def load(args: argparse.Namespace) -> tuple[Any, int]:
    """Return the model on the CPU, and its padding token."""
    if args.random is None:
        from rl_swarm.learning.policy import load_model

        model, tokenizer = load_model(args.model)
        return model.eval(), pad_of(tokenizer)
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    torch.manual_seed(args.seed)
    config = (
        GPT2Config(bos_token_id=None, eos_token_id=None)
        if args.random == "gpt2"
        else LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return AutoModelForCausalLM.from_config(config).eval(), 0


class Node:
    """Does what a node of `up` does in a round, without environment and network."""

    def __init__(self, model: Any, pad: int, number: int, args: argparse.Namespace, sharing: Any) -> None:
        from rl_swarm.learning import memory
        from rl_swarm.learning.sampler import SamplingParams
        from rl_swarm.learning.sizes import ModelShape
        from rl_swarm.learning.trainer import Trainer

        settings = Settings.of(
            model=args.random or args.model,
            learning_rate=1e-6,
            local_groups=args.questions,
            external_groups=0,
            generations=args.completions,
            max_new_tokens=args.tokens,
        )
        self.model, self.number, self.args = model, number, args
        self.decoding = SamplingParams(args.tokens, eos=frozenset(), pad=pad)
        draw, words = random.Random(f"{args.seed} {number}"), range(model.config.vocab_size)
        self.prompts = [draw.choices(words, k=args.prompt) for _ in range(args.questions)]
        nodes, free = sharing.nodes if sharing else 1, memory.available(model.device)
        self.plan = memory.plan(ModelShape.of(model.config), free, settings, model.device.type, nodes)
        planned = settings.changed(batch_tokens=self.plan.batch_tokens)
        if sharing:
            self.trainer = sharing.make_trainer(model, pad, planned, self.plan)
        else:
            self.trainer = Trainer(model, pad, planned.learning)

    def sample(self, turn: int) -> list[Any]:
        from rl_swarm.learning.sampler import sample

        count, groups = self.args.completions, []
        step = max(1, self.plan.sequences // count)
        for start in range(0, len(self.prompts), step):
            seed = self.args.seed + 1000 * turn + start
            groups += sample(self.model, self.prompts[start : start + step], count, self.decoding, seed)
        assert sum(len(s.tokens) for group in groups for s in group) == (len(self.prompts) * count * self.args.tokens)
        return groups

    def train(self, groups: list[Any]) -> None:
        import torch

        from rl_swarm.learning.batches import TrainingGroup

        self.trainer.update(
            [
                TrainingGroup(
                    prompt,
                    [s.tokens for s in group],
                    [(-1.0) ** number for number in range(len(group))],
                    [s.logprobs for s in group],
                )
                for prompt, group in zip(self.prompts, groups, strict=True)
            ]
        )
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def rounds(nodes: int, args: argparse.Namespace, device: "torch.device") -> dict[str, Any]:
    """Play rounds of so many nodes; return seconds and memory."""
    import torch

    from benchmarks.lib.gauge import check_length, resident
    from rl_swarm.learning.parallel.shared_device import SharedDevice, own_stream

    sharing = SharedDevice(nodes) if nodes > 1 else None
    loaded, pad = load(args)
    check_length(loaded.config, args.prompt + args.tokens)
    turns = range(args.repeats + 1)
    sampled = [[0.0] * nodes for _ in turns]
    trained = [[0.0] * nodes for _ in turns]
    started = [0.0 for _ in turns]
    plans, failures = dict[int, Any](), list[BaseException]()
    turn_now = iter(turns)

    def begin() -> None:
        turn = next(turn_now, None)
        if turn is not None:
            started[turn] = time.perf_counter()

    together = threading.Barrier(nodes, action=begin)

    def live(number: int) -> None:
        try:
            with own_stream():
                node = Node(copy.deepcopy(loaded).to(device), pad, number, args, sharing)
                plans[number] = node.plan
                for turn in turns:
                    together.wait()
                    groups = node.sample(turn)
                    sampled[turn][number] = time.perf_counter()
                    node.train(groups)
                    trained[turn][number] = time.perf_counter()
                together.wait()
        except threading.BrokenBarrierError:
            pass  # another one failed
        except BaseException as error:  # noqa: BLE001 raised below
            failures.append(error)
            together.abort()

    sys.setswitchinterval(SWITCH_SECONDS)
    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    sampling = [max(sampled[turn]) - started[turn] for turn in turns]
    whole = [max(trained[turn]) - started[turn] for turn in turns]
    return {
        "nodes": nodes,
        "plan": str(plans[0]),
        "first_s": whole[0],
        "sample_s": statistics.median(sampling[1:]),
        "train_s": statistics.median(a - b for a, b in zip(whole[1:], sampling[1:], strict=True)),
        "round_s": statistics.median(whole[1:]),
        "rounds_s": whole[1:],
        "peak_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else resident("VmHWM"),
        "smi_bytes": smi_bytes() if device.type == "cuda" else None,
    }


def smi_bytes() -> int | None:
    """Return the memory in use by nvidia-smi; None where it cannot tell."""
    import torch

    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", "-i", name, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return int(done.stdout.strip()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def serve(nodes: int, args: argparse.Namespace, pipe: Connection) -> None:
    from benchmarks.lib.gauge import prepare

    try:
        pipe.send(rounds(nodes, args, prepare(args)))
    except UserError as error:
        pipe.send(str(error))
    except Exception:  # noqa: BLE001 whatever it is, the other side prints it and stops
        pipe.send(f"{nodes} nodes failed:\n{traceback.format_exc()}")


def measure(nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, with the environment variables that `up` sets."""
    progress(f"{nodes} {'nodes' if nodes > 1 else 'node'}")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = dict(os.environ)
    if nodes > 1:
        os.environ.update({key: value for key, value in SHARED.items() if key not in before})
    process = context.Process(target=serve, args=(nodes, args, theirs), daemon=True)
    process.start()
    os.environ.clear()
    os.environ.update(before)
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        raise SystemExit(f"The process of {nodes} nodes died; was it out of memory? Try fewer nodes.") from None
    process.join()
    if isinstance(answer, str):
        raise SystemExit(answer)
    found: dict[str, Any] = answer
    progress(f"{found['plan']}: {found['round_s']:.2f} s")
    return found


def show(results: list[dict[str, Any]], ratio: float) -> None:
    def gib(size: int | None) -> str:
        return "" if size is None else f"{size / GIBIBYTE:.1f}"

    rows = [
        [
            str(r["nodes"]),
            *(f"{r[key]:.2f}" for key in ("first_s", "sample_s", "train_s", "round_s")),
            f"{r['round_s'] / results[0]['round_s']:.2f}",
            gib(r["peak_bytes"]),
            gib(r["smi_bytes"]),
        ]
        for r in results
    ]
    header = ["nodes", "first round s", "sample s", "train s", "round s", "ratio", "GiB", "nvidia-smi GiB"]
    print_table(header, rows)
    print(f"\n{results[-1]['nodes']} nodes take {ratio:.2f} times as long as one.")


def main() -> None:
    parser = learner_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=8, help="that share the device (default: 8)")
    parser.add_argument("--random", choices=["llama", "gpt2"], help="random weights of this family, no --model")
    args = parser.parse_args()
    if args.nodes < 2:
        parser.error(f"--nodes {args.nodes}: compare one node with at least 2")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least one round is measured")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from benchmarks.lib.gauge import machine, prepare

    device = prepare(args)
    results = [measure(nodes, args) for nodes in (1, args.nodes)]
    ratio = results[1]["round_s"] / results[0]["round_s"]
    if args.json != "-":
        show(results, ratio)
    described = {key: value for key, value in vars(args).items() if key != "json"}
    write_json(
        args.json,
        {"machine": machine(device.type, args.threads), "options": described, "ratio": ratio, "runs": results},
    )


if __name__ == "__main__":
    main()
