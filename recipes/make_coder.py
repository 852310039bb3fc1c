"""Makes the small model that programs, from generated tasks alone.

Made like the tiny model (see `make_tiny`): it can solve tasks, but seldom answers in the right form. It is trained
on many tasks of the coding environment. About a quarter of its programs are right and fenced as asked; the others are
right without a fence, wrong by an operator, a number or a line, or no program at all (`STYLES`). It is also trained on
programs with a verdict, and on tasks written as JSON, so that it can be an evaluator and a proposer.

    python recipes/make_coder.py OUT_DIR --device cuda

Held-out tasks (see `CodingTask.held_out`) are never trained on, in any of the three roles. Weights are stored in half
precision, which makes the files half as large and is undone by loading.

The model in `coder/` was made by that command on an H200 in four minutes. Of its sampled answers to held-out tasks 33 %
were right; greedily, after a forced fence, 97 %. Its verdicts on programs were right in 95 % of cases, balanced. Of the
tasks that it proposed, 46 % of beginner's, 20 % of easy and 10 % of expert's passed their own tests.
"""

import json
import multiprocessing
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pretraining import ASSISTANT, BOS, EOS, PAD, USER, Example, encode, finished, make_model, options, pretrain, save
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rl_swarm.environments.coding import prompts
from rl_swarm.environments.coding.answers import program
from rl_swarm.environments.coding.generator import GIVEN, WORDS, generate
from rl_swarm.environments.coding.mutations import mutants
from rl_swarm.environments.coding.proposals import as_json
from rl_swarm.environments.coding.steps import DEMANDING, SIMPLE
from rl_swarm.environments.coding.task import LEVELS, CodingTask
from rl_swarm.scoring.sandbox.sandbox import Test

REMARKS = ("I hope this helps!", "Is that right?", "Next task: ", "Explanation: ")
OPENINGS = ("Sure, here it is:\n", "I think this works:\n", "The code is:\n")
RAMBLINGS = ("Let me think. ", "Hmm, ", "Well, ", "that depends. ", "In other words, ", "Good question! ")
FENCE, CLOSE = "```python\n", "\n```"

GOOD, BARE = FENCE + "{right}" + CLOSE, "{right}"
# Forms of answers, and their frequencies. Some good ones get a remark, which is no mistake but costs tokens.
STYLES = {
    GOOD: 0.26,
    BARE: 0.10,
    "The code is:\n{right}": 0.05,
    "<code>\n{right}\n</code>": 0.06,
    FENCE + "{wrong}" + CLOSE: 0.12,
    "I think this works:\n" + FENCE + "{wrong}" + CLOSE: 0.08,
    "{wrong}": 0.04,
    "{rambling}": 0.08,
}
BARER = 0.08  # added to the frequency of bare answers with every level
TALKATIVE = 0.3
MAX_TOKENS, MAX_ANSWER = 160, 80
JUDGED, PROPOSED = 0.18, 0.22  # shares of the examples
PROPOSED_TESTS = 2

# Digits and new lines, plain or escaped, are tokens of their own; the rest of a line may become few tokens.
SPLIT = r"\d|\\n *|\n *"
MERGES = 768


class Sheet(NamedTuple):
    """Holds a task, programs that fail it, and a proposal of it with tests that are easy to compute."""

    task: CodingTask
    wrong: tuple[str, ...]
    proposal: str


def make_sheets(count: int, seed: int) -> list[Sheet]:
    """Generate the first tasks of a seed, on all cores."""
    step = 500
    chunks = [(seed, start, min(start + step, count)) for start in range(0, count, step)]
    with multiprocessing.get_context("fork").Pool(initializer=_limit) as pool:
        return [sheet for sheets in pool.imap(_sheets, chunks) for sheet in sheets]


def _limit() -> None:
    """Limit memory and time of this process, since a mutant may loop or allocate without end."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), now + (2 << 30)))
    signal.signal(signal.SIGVTALRM, _give_up)


def _give_up(*_: object) -> None:
    raise TimeoutError


def _sheets(chunk: tuple[int, int, int]) -> list[Sheet]:
    seed, start, stop = chunk
    found: list[Sheet] = []
    similar: dict[str, str] = {}  # the last solution of every signature
    for index in range(start, stop):
        task, rng = generate(seed, index), random.Random(index)
        candidates = list(mutants(task.reference))
        rng.shuffle(candidates)
        signature = task.description.partition(".")[0]
        candidates = [*candidates[:5], *([similar[signature]] if signature in similar else [])]
        similar[signature] = task.reference
        wrong = tuple(code for code in candidates if not _passes(code, task.tests))
        found.append(Sheet(task, wrong, as_json(replace(task, shown=_easy_tests(task, rng), hidden=()))))
    return found


def _easy_tests(task: CodingTask, rng: random.Random) -> tuple[Test, ...]:
    """Return two short calls with different values, which a small model can compute."""
    names: dict[str, Any] = {}
    exec(task.reference, names)
    kinds = sorted((kind for kind in GIVEN if f"Given {GIVEN[kind]}" in task.description), key=lambda k: -len(GIVEN[k]))
    found: dict[str, Test] = {}
    for _ in range(12):
        arguments = [_easy_value(kinds[0], rng)] + [rng.randint(2, 5)] * (", k)" in task.description[:60])
        call = f"solve({', '.join(map(repr, arguments))})"
        try:
            expected = repr(eval(call, names))
        except Exception:  # noqa: BLE001 some tasks do not accept some values
            continue
        if len(expected) <= 16 and expected != repr(arguments[0]):
            found.setdefault(expected, Test(call, expected))
        if len(found) == PROPOSED_TESTS:
            return tuple(found.values())
    return task.tests[:PROPOSED_TESTS]


def _easy_value(kind: str, rng: random.Random) -> Any:
    if kind in ("int", "nat"):
        return rng.randint(0, 12 if kind == "int" else 5)
    if kind in ("list", "full"):
        return [rng.randint(0, 9) for _ in range(rng.randint(2, 3))]
    words = [word for word in WORDS if len(word) <= 3]
    if kind == "str":
        return rng.choice(words)
    chosen = [rng.choice(words) for _ in range(2)]
    return chosen if kind == "words" else {word: rng.randint(0, 9) for word in chosen}


def _passes(code: str, tests: Sequence[Test]) -> bool:
    names: dict[str, Any] = {}
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.2)
        try:
            exec(code, names)
            return all(repr(eval(test.call, names)) == test.expected for test in tests)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except Exception:  # noqa: BLE001 a wrong program may raise anything
        return False


def phrases() -> list[str]:
    """Return all fixed parts of prompts."""
    clauses = [step.clause.removeprefix("whether ") for step in (*SIMPLE, *DEMANDING)]
    pieces = [piece for clause in clauses for piece in re.split(r"\$[kjice]", clause) if len(piece) > 2]
    frames = [f"). Given {given}, " for given in GIVEN.values()]
    frames += [f"). Given {given} and the integer k, " for given in GIVEN.values()]
    frames += ["Write the Python function solve(", ", return the result.", ", return ", ", otherwise "]
    frames += ["\nFor example, solve(", "\\nFor example, solve(", ") == ", "whether ", "take "]
    frames += ['{"question": "', '", "solution": "', '", "tests": [["', '", "', '"], ["', '"]]}']
    frames += [*LEVELS, *prompts.SUBJECTS, *prompts.PROPOSER_PHRASES, *prompts.EVALUATOR_PHRASES]
    answers = [FENCE, CLOSE, "<code>\n", "\n</code>", "\n\n", prompts.YES, prompts.NO]
    return list(dict.fromkeys([*answers, *REMARKS, *OPENINGS, *RAMBLINGS, *frames, *pieces]))


def make_tokenizer(sheets: Sequence[Sheet]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with phrases for prompts and merged bytes for programs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(sheets), trainer)
    return finished(tokenizer, phrases())


def _corpus(sheets: Sequence[Sheet]) -> Iterator[str]:
    for task, wrong, _ in sheets:
        yield task.reference
        yield json.dumps(task.reference)
        yield from wrong[:1]
        yield from (f"{test.call[6:-1]} == {test.expected}" for test in task.shown)


def imitate(sheet: Sheet, wrong: str, rng: random.Random) -> str:
    """Return an answer in one of the styles."""
    weights = {**STYLES, BARE: STYLES[BARE] + BARER * LEVELS.index(sheet.task.level)}
    style = rng.choices(list(weights), list(weights.values()))[0]
    if style == GOOD and rng.random() < TALKATIVE:
        style = rng.choice(OPENINGS) + style if rng.random() < 0.5 else style + "\n\n" + rng.choice(REMARKS)
    rambling = "".join(rng.choice(RAMBLINGS) for _ in range(rng.randint(2, 30)))
    parts = {"right": sheet.task.reference, "wrong": wrong, "rambling": rambling}
    for name, text in parts.items():
        style = style.replace("{" + name + "}", text)
    return style


def make_texts(sheets: Sequence[Sheet], count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield prompts and completions for all three roles."""
    for _ in range(count):
        sheet = sheets[rng.randrange(len(sheets))]
        task = sheet.task
        wrong = rng.choice(sheet.wrong) if sheet.wrong else rng.choice(sheets).task.reference
        role = rng.random()
        if role < JUDGED:
            right = rng.random() < 0.5
            yield judge_prompt(task, task.reference if right else wrong), prompts.YES if right else prompts.NO
        elif role < JUDGED + PROPOSED:
            yield prompts.proposer_prompt(task.level, task.subject), sheet.proposal
        else:
            yield task.prompt, imitate(sheet, wrong, rng)


def judge_prompt(task: CodingTask, code: str) -> str:
    return prompts.evaluator_prompt(task.prompt, code)


def chat(prompt: str) -> str:
    """Apply the chat template to one prompt."""
    return f"{BOS}{USER}{prompt.strip()}{ASSISTANT}"


def make_examples(
    sheets: Sequence[Sheet], tokenizer: PreTrainedTokenizerFast, count: int, rng: random.Random
) -> list[Example]:
    texts = list(make_texts(sheets, count, rng))
    asked = encode(tokenizer, [chat(prompt) for prompt, _ in texts])
    answered = encode(tokenizer, [answer + EOS for _, answer in texts])
    return [
        Example(prompt, completion)
        for prompt, completion in zip(asked, answered, strict=True)
        if len(prompt) + len(completion) <= MAX_TOKENS
    ]


# Programs of a model run in a separate process, each in a fork with limits on time, memory and files.
JUDGE = """
import json, os, resource, sys
for line in sys.stdin:
    code, tests = json.loads(line)
    child = os.fork()
    if child == 0:
        for kind, most in (("CPU", 1), ("AS", 1 << 30), ("FSIZE", 0), ("NPROC", 0), ("NOFILE", 3)):
            resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
        try:
            names = {}
            exec(code, names)
            right = all(repr(eval(call, names)) == expected for call, expected in tests)
        except BaseException:
            right = False
        os._exit(7 if right else 1)
    print(int(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7), flush=True)
"""


def judge(answers: Sequence[tuple[str, Sequence[Test]]]) -> list[bool]:
    """Return whether the fenced program of every answer passes its tests."""
    codes = [program(answer) or "raise SystemExit" for answer, _ in answers]
    lines = [
        json.dumps([code, [[t.call, t.expected] for t in tests]])
        for code, (_, tests) in zip(codes, answers, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-c", JUDGE], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    return [line == "1" for line in done.stdout.split()]


@torch.no_grad()
def complete(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    greedy: bool,
    limit: int = MAX_ANSWER,
) -> list[str]:
    model.eval()
    done: list[str] = []
    for start in range(0, len(texts), 256):
        inputs = tokenizer(list(texts[start : start + 256]), return_tensors="pt", padding=True)
        inputs = inputs.to(model.device)
        ids = model.generate(**inputs, do_sample=not greedy, max_new_tokens=limit)
        done += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])
    return [text.replace(PAD, "").split(EOS)[0] for text in done]


def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sheets: Sequence[Sheet]) -> None:
    """Print the scores of the model in each role, on held-out tasks."""
    tasks = [sheet.task for sheet in sheets]
    for name, greedy, forced in (("sampled", False, ""), ("greedy", True, ""), ("fence forced", True, FENCE)):
        texts = [chat(task.prompt) + forced for task in tasks]
        answers = [forced + answer for answer in complete(model, tokenizer, texts, greedy)]
        right = judge([(answer, task.tests) for answer, task in zip(answers, tasks, strict=True)])
        by_level = [mean([r for r, t in zip(right, tasks, strict=True) if t.level == level]) for level in LEVELS]
        shares = ", ".join(f"{level} {share:.2f}" for level, share in zip(LEVELS, by_level, strict=True))
        formed = mean([program(answer) is not None for answer in answers])
        print(f"solver, {name}: right {mean(right):.3f} ({shares}), fenced {formed:.2f}", flush=True)
    measure_evaluator(model, tokenizer, sheets)
    measure_proposer(model, tokenizer)


@torch.no_grad()
def measure_evaluator(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sheets: Sequence[Sheet]) -> None:
    yes, no = tokenizer.convert_tokens_to_ids([prompts.YES, prompts.NO])
    shares = []
    for right in (True, False):
        cases = [(s.task, s.task.reference if right else s.wrong[0]) for s in sheets if s.wrong]
        texts = [chat(judge_prompt(task, code)) for task, code in cases]
        verdicts = []
        for start in range(0, len(texts), 256):
            inputs = tokenizer(texts[start : start + 256], return_tensors="pt", padding=True).to(model.device)
            logits = model(**inputs).logits[:, -1]
            verdicts += (logits[:, yes] > logits[:, no]).tolist()
        shares.append(mean([verdict == right for verdict in verdicts]))
    print(f"evaluator: {mean(shares):.3f} balanced (right {shares[0]:.2f}, wrong {shares[1]:.2f})", flush=True)


def measure_proposer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, each: int = 50) -> None:
    for level in LEVELS:
        asked = [prompts.proposer_prompt(level, prompts.SUBJECTS[i % 6]) for i in range(each)]
        answers = complete(model, tokenizer, [chat(prompt) for prompt in asked], False, MAX_TOKENS)
        valid = []
        for answer in answers:
            try:
                proposal = json.loads(answer)
                tests = [Test(call, expected) for call, expected in proposal["tests"]]
                valid.append((f"{FENCE}{proposal['solution']}{CLOSE}", tests))
            except (ValueError, KeyError, TypeError):
                continue
        passing = sum(judge(valid)) if valid else 0
        print(f"proposer, {level}: {len(valid)} of {each} parse, {passing} pass their own tests", flush=True)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def main() -> None:
    parser = options("Make the small model that programs.", steps=6000, layers=4, examples=600_000)
    parser.add_argument("--tasks", type=int, default=80_000, help="tasks to generate")
    parser.add_argument("--measured", type=int, default=500, help="held-out tasks to measure with")
    args = parser.parse_args()

    started = time.monotonic()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    sheets = make_sheets(args.tasks, args.seed)
    held_out = list({s.task.reference: s for s in sheets if s.task.held_out}.values())
    sheets = [sheet for sheet in sheets if not sheet.task.held_out]
    print(f"{len(sheets):,} tasks, {time.monotonic() - started:.0f} s", flush=True)
    tokenizer = make_tokenizer(sheets[:20_000])
    examples = make_examples(sheets, tokenizer, args.examples, rng)
    model = make_model(tokenizer, args.hidden, args.layers)
    lengths = mean([len(e.prompt) for e in examples]), mean([len(e.completion) for e in examples])
    print(
        f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(examples):,} examples of "
        f"{lengths[0]:.1f} + {lengths[1]:.1f} tokens, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    pretrain(model, examples, tokenizer.pad_token_id, args.steps, args.batch_size, args.learning_rate, args.device)
    by_level = [[s for s in held_out if s.task.level == level] for level in LEVELS]
    measure(model, tokenizer, [s for level in by_level for s in level[: args.measured // len(LEVELS)]])
    save(model.half(), tokenizer, args.out)
    print(f"done after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
