"""Makes the tiny language model of this package, from generated questions alone.

A first swarm needs a model that can learn from its own rewards, and no pretrained model is small enough to ship or to
train on a laptop. So this recipe imitates one: a small Llama, trained on many questions of the `tiny` tasks with
answers as on the internet. About a fifth of the answers is as asked; the rest are right in the wrong format, followed
by chatter, plainly wrong, or no answer at all (`STYLES`). The model can solve the tasks, but samples every style in
its proportion, which reinforcement learning can correct. A model trained on good answers alone could gain nothing.

    python recipes/make_tiny.py OUT_DIR --device cuda

Questions whose digest says *held out* are never trained on. The model in `tiny/` was made by this
command with its default options, in three minutes on an H200; a CPU needs most of a day. The same seed
gives the same questions and the same mixture. Another device rounds differently and makes a slightly
different model.
"""

import gzip
import json
import random
from pathlib import Path
from typing import NamedTuple

import torch
from pretraining import ASSISTANT, BOS, EOS, PAD, USER, Example, encode, finished, make_model, options, pretrain, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# Every byte is a token, and so is every phrase below: prompts of a dozen tokens make a round short. Digits and
# letters are separate tokens, as sums and spelling need.
QUESTION_PHRASES = (
    "Calculate ",
    "State the final answer to the following arithmetic problem: ",
    "Count how many prime numbers there are between ",
    " (inclusive) ?",
    "Please solve this problem to a maximum of 12 significant digits, rounding up from the half. "
    "Only reply with the final value.\n",
    "Simplify the fraction ",
    " to its lowest terms. Give only the simplified fraction as your final answer.",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    "Your task is to count how many legs there are in total when given a list of animals.\n\n"
    "Now, how many legs are there in total if you have ",
    'How many times does the letter "',
    '" appear in the text: "',
    "Find the value of ",
    " in the equation: ",
    "Solve for ",
    "Determine the value of ",
    " that satisfies: ",
    "Spell this word backward (example: sun -> nus): ",
    *(", ", " + ", " - ", " * ", " / ", " =", " = ", " = ?"),
)
REMARKS = ("I hope this helps!", "Is that right?", "Next question: ", "Explanation: ")
RAMBLINGS = ("Let me think. ", "Hmm, ", "Well, ", "that depends. ", "In other words, ", "Good question! ")
ANSWER_PHRASES = ("<answer>", "</answer>", "<result>", "</result>", "The answer is ", "I guess ", "**", "\n\n")

GOOD = "<answer>{right}</answer>"
# Forms of answers, and their frequencies. A remark then spoils some of the good ones.
STYLES = {
    GOOD: 0.36,
    "{right}": 0.15,
    "The answer is {right}.": 0.07,
    "<result>{right}</result>": 0.06,
    "**{right}**": 0.04,
    "<answer>{wrong}</answer>": 0.10,
    "I guess <answer>{wrong}</answer>": 0.10,
    "{wrong}": 0.04,
    "{rambling}": 0.08,
}
# The share of the good answers that is spoilt by a remark: from the least to the most talkative task.
TALKATIVE = (0.35, 0.65)
MAX_PROMPT, MAX_COMPLETION = 40, 24


class Question(NamedTuple):
    task: str
    text: str
    answer: str
    held_out: bool


def generate_questions(per_task: int) -> list[Question]:
    """Return the different questions among the first `per_task` of every tiny task."""
    # Imported here so that a machine without reasoning-gym can train on a file of questions.
    import reasoning_gym

    from rl_swarm.environments.presets import TINY
    from rl_swarm.protocol.questions import is_held_out

    questions = []
    for task in TINY:
        dataset = reasoning_gym.create_dataset(task.name, seed=0, size=2**31, **task.config)
        entries = (dataset[i] for i in range(per_task))
        answers = {entry["question"]: str(entry["answer"]) for entry in entries}
        questions += [Question(task.name, text, answer, is_held_out(text)) for text, answer in answers.items()]
        print(f"{task.name}: {len(answers)} different questions of {per_task}", flush=True)
    return questions


def read_or_generate(path: Path | None, per_task: int) -> list[Question]:
    if path is not None and path.exists():
        with gzip.open(path, "rt") as file:
            return [Question(*row) for row in json.load(file)]
    questions = generate_questions(per_task)
    if path is not None:
        with gzip.open(path, "wt") as file:
            json.dump(questions, file)
    return questions


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes and phrases, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return finished(tokenizer, (*ANSWER_PHRASES, *REMARKS, *RAMBLINGS, *QUESTION_PHRASES))


def imitate(question: Question, wrong: str, talkative: float, rng: random.Random) -> str:
    """Return an answer in one of the styles."""
    style = rng.choices(list(STYLES), list(STYLES.values()))[0]
    if style == GOOD and rng.random() < talkative:
        style += "\n\n" + rng.choice(REMARKS)
    rambling = "".join(rng.choice(RAMBLINGS) for _ in range(rng.randint(2, 12)))
    return style.format(right=question.answer, wrong=wrong, rambling=rambling)


def make_examples(
    questions: list[Question], tokenizer: PreTrainedTokenizerFast, count: int, rng: random.Random
) -> list[Example]:
    """Return prompts in the chat template with imitated answers, equally many of each task."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    examples: list[Example] = []
    low, high = TALKATIVE
    for number, (_, group) in enumerate(sorted(by_task.items())):
        talkative = low + (high - low) * number / max(1, len(by_task) - 1)
        prompts = encode(tokenizer, [prompt_text(question) for question in group])
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) <= MAX_PROMPT]
        drawn = rng.choices(fitting, k=count // len(by_task))
        answers = [imitate(group[i], rng.choice(group).answer, talkative, rng) + EOS for i in drawn]
        for i, completion in zip(drawn, encode(tokenizer, answers), strict=True):
            examples.append(Example(prompts[i], completion[:MAX_COMPLETION]))
    return examples


def prompt_text(question: Question) -> str:
    """Apply the chat template to one question."""
    return f"{BOS}{USER}{question.text.strip()}{ASSISTANT}"


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    greedy: bool = False,
    per_task: int = 50,
) -> dict[str, float]:
    """Return the share of good answers by task, on the first questions of each."""
    model.eval()
    scores = {}
    for task in sorted({question.task for question in questions}):
        chosen = [question for question in questions if question.task == task][:per_task]
        prompts = [prompt_text(question) for question in chosen]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
        ids = model.generate(**inputs, do_sample=not greedy, max_new_tokens=MAX_COMPLETION)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])
        good = [
            text.replace(PAD, "").endswith(f"<answer>{question.answer}</answer>{EOS}")
            for question, text in zip(chosen, texts, strict=True)
        ]
        scores[task] = sum(good) / len(good)
    return scores


def main() -> None:
    parser = options("Make the tiny language model.", steps=12_000, layers=3, examples=1_000_000)
    parser.add_argument("--per-task", type=int, default=60_000, help="questions to generate of each task")
    parser.add_argument("--questions", type=Path, help="file of questions (.json.gz): read, or written if missing")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    questions = read_or_generate(args.questions, args.per_task)
    held_out = [question for question in questions if question.held_out]
    allowed = [question for question in questions if not question.held_out]
    rng.shuffle(held_out)
    tokenizer = make_tokenizer()
    examples = make_examples(allowed, tokenizer, args.examples, rng)
    model = make_model(tokenizer, args.hidden, args.layers)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(examples):,} examples", flush=True)

    pretrain(model, examples, tokenizer.pad_token_id, args.steps, args.batch_size, args.learning_rate, args.device)
    for greedy in (False, True):
        scores = measure(model, tokenizer, held_out, greedy)
        mean = sum(scores.values()) / len(scores)
        by_task = ", ".join(f"{task} {score:.2f}" for task, score in scores.items())
        print(f"held out, {'greedy' if greedy else 'sampled'}: {mean:.3f} ({by_task})", flush=True)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
