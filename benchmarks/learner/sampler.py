"""Measures how fast our sampler is, against `transformers` and against the limit of the memory.

    python -m benchmarks.learner.sampler [--model smollm2-135m] [--samplers ours,dynamic,...] [--json FILE]

8 questions times 8 completions of 256 tokens each, prompts of 128 tokens, no end of sequence. Of transformers:
`generate` in one batch with its dynamic and its static cache, and continuous batching (`generate_batch`). On CUDA
transformers runs in bf16, as its users would; on the CPU in float32, and ours in what it finds faster. They take turns;
figures are medians.

A decoding step has to read the weights once and every sequence's keys and values. The limit is those bytes over the
bandwidth at which this device copies memory, measured here; a model that fits into a CPU's cache can beat it.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.learner.systems import NO_TOKEN, pad_of
from benchmarks.lib.command import learner_parser, print_table, progress, write_json
from rl_swarm.errors import UserError

if TYPE_CHECKING:
    import torch

SAMPLERS = ("ours", "dynamic", "static", "continuous")
Sampler = Callable[[int], int]  # from a seed to the number of tokens made


def ours(model: Any, tokenizer: Any, prompts: list[list[int]], args: argparse.Namespace) -> Sampler:
    from rl_swarm.learning.sampler import SamplingParams, sample

    decoding = SamplingParams(args.tokens, eos=frozenset(), pad=pad_of(tokenizer))

    def run(seed: int) -> int:
        groups = sample(model, prompts, args.completions, decoding, seed)
        return sum(len(one.tokens) for group in groups for one in group)

    return run


def generate(model: Any, tokenizer: Any, prompts: list[list[int]], args: argparse.Namespace, kind: str) -> Sampler:
    """Make a sampler of transformers: all in one batch, or a queue of requests that share batches."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=args.tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=pad_of(tokenizer),
        eos_token_id=NO_TOKEN,
        cache_implementation="static" if kind == "static" else None,
    )
    rows = [prompt for prompt in prompts for _ in range(args.completions)]
    ids = torch.tensor(rows, device=model.device)

    def in_one_batch(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return int(made.shape[0] * (made.shape[1] - ids.shape[1]))

    def as_requests(seed: int) -> int:
        torch.manual_seed(seed)
        made = model.generate_batch(rows, generation_config=config, progress_bar=False)
        if len(made) < len(rows):
            raise RuntimeError(f"it finished {len(made)} of {len(rows)} requests")
        return sum(len(one.generated_tokens) for one in made.values())

    return as_requests if kind == "continuous" else in_one_batch


def load(kind: str, args: argparse.Namespace, device: "torch.device") -> tuple[Any, Any]:
    import torch

    from rl_swarm.learning.policy import load_model

    model, tokenizer = load_model(args.model)
    dtype = torch.bfloat16 if device.type == "cuda" and kind != "ours" else torch.float32
    return model.to(device=device, dtype=dtype).eval(), tokenizer


def copy_bandwidth(device: "torch.device") -> float:
    """Return the bytes per second, read and written, of copying memory that exceeds every cache."""
    import torch

    size = 1 << (30 if device.type == "cuda" else 28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def bytes_per_step(model: Any, args: argparse.Namespace, width: int) -> int:
    """Return what a step reads on average: weights, and keys and values of the prompt and half the completion."""
    weights = sum(p.numel() for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()  # only the rows of the batch are read
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head
    sequences = args.questions * args.completions
    return int(width * (weights + sequences * per_token * (args.prompt + args.tokens / 2)))


def measure(args: argparse.Namespace, device: "torch.device") -> dict[str, Any]:
    from benchmarks.lib.gauge import Gauge, check_length, draw_prompts

    bandwidth = copy_bandwidth(device)
    samplers: dict[str, Sampler] = {}
    failed: dict[str, str] = {}
    runs: dict[str, list[tuple[float, int]]] = {kind: [] for kind in args.samplers}
    limit = 0.0
    for kind in args.samplers:
        model, tokenizer = load(kind, args, device)
        check_length(model.config, args.prompt + args.tokens)
        prompts = draw_prompts(tokenizer, args.questions, args.prompt, args.seed)
        if kind == "ours":
            samplers[kind] = ours(model, tokenizer, prompts, args)
        elif kind == "continuous" and not hasattr(model, "generate_batch"):
            failed[kind] = "this version of transformers has no generate_batch"
        else:
            samplers[kind] = generate(model, tokenizer, prompts, args, kind)
        limit = bytes_per_step(model, args, 2 if device.type == "cuda" else 4) / bandwidth
    gauge = Gauge(device, model)
    for turn in range(args.repeats + 1):
        for kind, sampler in list(samplers.items()):
            try:
                tokens, cost = gauge.measure(lambda sampler=sampler, turn=turn: sampler(args.seed + turn))
            except Exception as error:  # noqa: BLE001 a sampler that cannot run here is a result too
                failed[kind] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:120]
                progress(f"{kind}: {failed[kind]}")
                del samplers[kind]
                gc.collect()
                continue
            if turn:
                runs[kind].append((cost.seconds, tokens))
            progress(f"{kind} {f'run {turn} of {args.repeats}' if turn else 'warm-up'}: {cost.seconds:.2f} s")
    rows = {
        kind: {"failed": failed[kind]} if kind in failed else figures(of, args.tokens, limit)
        for kind, of in runs.items()
    }
    return {"bandwidth": bandwidth, "limit_ms": 1000 * limit, "samplers": rows}


def figures(runs: list[tuple[float, int]], steps: int, limit: float) -> dict[str, Any]:
    seconds = statistics.median(seconds for seconds, _ in runs)
    return {
        "seconds": seconds,
        "tokens": runs[0][1],
        "tokens_per_s": runs[0][1] / seconds,
        "step_ms": 1000 * seconds / steps,
        "times_limit": seconds / steps / limit,
        "all_s": [seconds for seconds, _ in runs],
    }


def show(results: dict[str, Any]) -> None:
    rows, base = [], results["samplers"].get("ours", {}).get("seconds")
    for kind, r in results["samplers"].items():
        if "failed" in r:
            rows.append([kind, "", "", "", "", r["failed"]])
            continue
        cells = [kind, f"{r['seconds']:.2f}", f"{r['tokens_per_s']:.0f}", f"{r['step_ms']:.2f}"]
        rows.append([*cells, f"{r['times_limit']:.1f}", f"{r['seconds'] / base:.2f}" if base else ""])
    print_table(["sampler", "seconds", "tokens/s", "ms a step", "times the limit", "ratio to ours"], rows)
    print(f"\nThe limit: {results['limit_ms']:.3f} ms a step, at {results['bandwidth'] / 1e9:.1f} GB/s measured.")


def main() -> None:
    parser = learner_parser(__doc__)
    parser.add_argument("--samplers", default=",".join(SAMPLERS), help="which of them, with commas")
    args = parser.parse_args()
    args.samplers = args.samplers.split(",")
    if unknown := [kind for kind in args.samplers if kind not in SAMPLERS]:
        parser.error(f"--samplers {','.join(unknown)}: choose from {', '.join(SAMPLERS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from benchmarks.lib.gauge import machine, prepare

    device = prepare(args)
    results = measure(args, device)
    if args.json != "-":
        show(results)
    done = {kind: r["seconds"] for kind, r in results["samplers"].items() if "seconds" in r}
    ratios = {kind: s / done["ours"] for kind, s in done.items() if "ours" in done and kind != "ours"}
    described = {key: value for key, value in vars(args).items() if key != "json"}
    write_json(
        args.json, {"machine": machine(device.type, args.threads), "options": described, "ratios": ratios, **results}
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
