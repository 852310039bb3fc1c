"""Measures what one round costs: our learner against GenRL 0.3.0 and TRL, same model, machine and answers.

    python -m benchmarks.learner.round [--model smollm2-135m] [--systems ours,genrl,trl] [--json FILE]

GenRL and TRL come with `pip install -c constraints.txt -e '.[bench]'`. A round answers 8 questions 8 times with up to
256 tokens, prompts of 128 tokens, and learns from the answers. Every system generates with its own code. Then all of
them learn from one set of answers, drawn beforehand, in which every group has signal. Each system runs in a process of
its own, and they take turns. Figures are medians. On a machine with other work use `--threads 1`: several threads would
mostly wait for that work.

- `natural`: questions of the model's own tasks, behind examples that fill up the length. The model ends its answers.
- `fixed`: the same questions; every answer has full length.

In the other two systems a batch ends together, so its longest answer sets the cost. `ratios` in the JSON are those of
the first case.
"""

import argparse
import multiprocessing
import os
import statistics
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks.learner.systems import NEEDS, SYSTEMS, Workload, missing, pad_of
from benchmarks.lib.command import MEBIBYTE, learner_parser, print_table, progress, write_json
from rl_swarm.environments import task_list
from rl_swarm.errors import UserError

if TYPE_CHECKING:
    import torch

SHORT = 8  # tokens


def workloads(args: argparse.Namespace, device: "torch.device") -> dict[str, Workload]:
    """Make the cases, with answers from our sampler."""
    from benchmarks.lib.gauge import check_length
    from rl_swarm.learning.sampler import SamplingParams, sample

    model, tokenizer, prompts, eos = asked(args)
    check_length(model.config, args.prompt + args.tokens)
    rewards = [[float(number % 2) for number in range(args.completions)] for _ in prompts]
    cases = {}
    for case, ends in (("natural", eos), ("fixed", frozenset[int]())):
        decoding = SamplingParams(args.tokens, eos=ends, pad=pad_of(tokenizer))
        groups = sample(model.to(device).eval(), prompts, args.completions, decoding, args.seed)
        tokens = [[list(one.tokens) for one in group] for group in groups]
        logprobs = [[list(one.logprobs) for one in group] for group in groups]
        cases[case] = Workload(prompts, tokens, logprobs, rewards, sorted(ends), args.tokens)
    return cases


def asked(args: argparse.Namespace) -> tuple[Any, Any, list[list[int]], frozenset[int]]:
    """Return the model, its tokenizer, prompts of the wanted length from its tasks, and its end tokens."""
    from rl_swarm.config.settings import Settings
    from rl_swarm.environments.reasoning import Reasoning
    from rl_swarm.learning.policy import Policy, load_model

    model, tokenizer = load_model(args.model)
    settings = Settings.of(model=args.model, cpu_only=True)
    policy = Policy(model, tokenizer, args.model, Reasoning.system_prompt, settings)
    environment = Reasoning(task_list(settings.task, settings.model.model), False)
    try:
        shown = environment.questions([args.seed * 1000 + number for number in range(40)])
    finally:
        environment.close()
    prompts = []
    for number in range(args.questions):
        ids: list[int] = []
        for question in [*shown[number + 1 :], *shown[:number]]:  # examples
            ids += policy.prompt_ids(question.prompt)
            ids += [*tokenizer(f"<answer>{question.answer}</answer>")["input_ids"], tokenizer.eos_token_id]
        ids += policy.prompt_ids(shown[number].prompt)
        prompts.append(ids[-args.prompt :])
    return model, tokenizer, prompts, policy.eos


def serve(name: str, args: argparse.Namespace, batch: int, work: Workload, pipe: Connection) -> None:
    """Run one system in its process: obey the orders, and report seconds and memory."""
    import transformers

    from benchmarks.lib.gauge import Gauge, prepare

    try:
        device = prepare(args)

        transformers.utils.logging.set_verbosity_error()
        system = SYSTEMS[name](args.model, device, work, batch)
        gauge = Gauge(device, system.model)
        pipe.send(system.precision)
        while (order := pipe.recv()) is not None:
            if isinstance(order, Workload):
                system.take(order)
                continue
            seed: int = order
            made, generated = gauge.measure(lambda seed=seed: system.generate(seed))
            _, trained = gauge.measure(system.train)
            pipe.send(
                {
                    "tokens": made,
                    "generate_s": generated.seconds,
                    "train_s": trained.seconds,
                    "round_s": generated.seconds + trained.seconds,
                    "round_cpu_s": generated.cpu_seconds + trained.cpu_seconds,
                    "generate_bytes": generated.peak,
                    "train_bytes": trained.peak,
                }
            )
    except EOFError:
        return  # the parent has gone
    except Exception:  # noqa: BLE001 whatever it is, the other side prints it and stops
        pipe.send(RuntimeError(f"{name} failed:\n{traceback.format_exc()}"))


class SystemProcess:
    """Drives a system that lives in a process of its own."""

    def __init__(self, name: str, args: argparse.Namespace, batch: int, work: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(name, args, batch, work, other), daemon=True)
        self.process.start()
        other.close()
        self.precision = ""

    def wait(self) -> None:
        self.precision = self._answer()

    def take(self, work: Workload) -> None:
        self.pipe.send(work)

    def play(self, seed: int) -> dict[str, Any]:
        self.pipe.send(seed)
        answer: dict[str, Any] = self._answer()
        return answer

    def leave(self) -> None:
        self.pipe.send(None)
        self.process.join()

    def _answer(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise SystemExit("The process of a system died; was it out of memory? Try a smaller size.") from None
        if isinstance(answer, RuntimeError):
            raise SystemExit(str(answer))
        return answer


def measure(args: argparse.Namespace, cases: dict[str, Workload], device: "torch.device") -> dict[str, Any]:
    batch = args.trl_batch or (8 if device.type == "cpu" else args.questions * args.completions)
    processes = {}
    progress(f"loading {', '.join(args.systems)}")
    for name in args.systems:
        processes[name] = SystemProcess(name, args, batch, cases[args.cases[0]])
    for process in processes.values():
        process.wait()
    results: dict[str, Any] = {}
    for case in args.cases:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
        for name, process in processes.items():
            if not SYSTEMS[name].compiles:  # a short warm-up is enough
                process.take(cases[case].cut(SHORT))
                process.play(args.seed)
            process.take(cases[case])
        for turn in range(args.repeats + 1):
            for name, process in processes.items():
                if not turn and not SYSTEMS[name].compiles:
                    continue
                run = process.play(args.seed + turn)
                runs[name] += [run] if turn else []
                what = f"run {turn} of {args.repeats}" if turn else "warm-up"
                progress(f"{case} {name} {what}: {run['generate_s']:.2f} s + {run['train_s']:.2f} s")
        results[case] = {
            name: {
                "precision": processes[name].precision,
                **{key: statistics.median(run[key] for run in of) for key in of[0]},
                "tokens_per_s": statistics.median(run["tokens"] / run["generate_s"] for run in of),
                "rounds_s": [run["round_s"] for run in of],
                "trained_tokens": sum(len(ids) for group in cases[case].completions for ids in group),
            }
            for name, of in runs.items()
        }
        for figures in results[case].values():
            if "ours" in processes:
                base = results[case]["ours"]
                figures["ratio"] = figures["round_s"] / base["round_s"]
                figures["cpu_ratio"] = figures["round_cpu_s"] / base["round_cpu_s"]
                figures["generate_ratio"] = figures["generate_s"] / base["generate_s"]
                figures["train_ratio"] = figures["train_s"] / base["train_s"]
    for process in processes.values():
        process.leave()
    return results


def show(results: dict[str, Any]) -> None:
    header = ["case", "system", "precision", "generate s", "tokens", "tokens/s", "train s", "round s"]
    header += ["generate MiB", "train MiB", "ratio"]
    rows = [
        [
            case,
            name,
            r["precision"],
            f"{r['generate_s']:.2f}",
            f"{r['tokens']:.0f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['train_s']:.2f}",
            f"{r['round_s']:.2f}",
            f"{r['generate_bytes'] / MEBIBYTE:.0f}",
            f"{r['train_bytes'] / MEBIBYTE:.0f}",
            f"{r['ratio']:.2f}" if "ratio" in r else "",
        ]
        for case, systems in results.items()
        for name, r in systems.items()
    ]
    print_table(header, rows)


def main() -> None:
    parser = learner_parser(__doc__)
    parser.add_argument("--systems", default="ours,genrl,trl", help="which of ours, genrl and trl, with commas")
    parser.add_argument("--cases", default="natural,fixed", help="which of natural and fixed, with commas")
    parser.add_argument(
        "--trl-batch", type=int, help="TRL's per_device_train_batch_size (default: 8 on the CPU, else all at once)"
    )
    args = parser.parse_args()
    args.systems, args.cases = args.systems.split(","), args.cases.split(",")
    for option, given, known in (("systems", args.systems, NEEDS), ("cases", args.cases, ("natural", "fixed"))):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{option} {','.join(unknown)}: choose from {', '.join(known)}")
    if problem := missing(args.systems):
        raise SystemExit(problem)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from benchmarks.lib.gauge import machine, prepare

    device = prepare(args)
    progress("drawing the answers to learn from")
    cases = workloads(args, device)
    results = measure(args, cases, device)
    if args.json != "-":
        show(results)
    headline = results[args.cases[0]]
    write_json(
        args.json,
        {
            "machine": machine(device.type, args.threads),
            "options": {key: value for key, value in vars(args).items() if key != "json"},
            "ratios": {n: r["ratio"] for n, r in headline.items() if n != "ours" and "ratio" in r},
            "cases": results,
        },
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
