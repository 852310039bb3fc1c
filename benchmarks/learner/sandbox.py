"""Measures how many programs are judged per second, in our sandbox and in its alternatives.

    python -m benchmarks.learner.sandbox                # two at a time, three tests each
    python -m benchmarks.learner.sandbox --tests 1

Every verdict is checked. What is not installed (bubblewrap, pydantic-monty) is left out. The processor time is that of
all processes together; unlike the others it stays true on a machine that has other work.
"""

import itertools
import os
import shutil
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from benchmarks.lib.command import parser_of, print_table, write_json
from rl_swarm.scoring.sandbox import sandbox
from rl_swarm.scoring.sandbox.sandbox import Program, Sandbox, Test, available

TASKS = [
    (
        "def merge(a, b):\n    out = []\n    while a and b:\n        out.append((a if a[0] <= b[0] else b).pop(0))\n"
        "    return out + a + b\n",
        [("merge([1, 4], [2, 3])", "[1, 2, 3, 4]"), ("merge([], [1])", "[1]"), ("merge([2], [2])", "[2, 2]")],
    ),
    (
        "def is_palindrome(text):\n    letters = [c.lower() for c in text if c.isalnum()]\n"
        "    return letters == letters[::-1]\n",
        [
            ("is_palindrome('Never odd or even')", "True"),
            ("is_palindrome('ab')", "False"),
            ("is_palindrome('')", "True"),
        ],
    ),
    (
        "import math\n\ndef primes(n):\n"
        "    return [k for k in range(2, n) if all(k % d for d in range(2, math.isqrt(k) + 1))]\n",
        [("primes(12)", "[2, 3, 5, 7, 11]"), ("len(primes(200))", "46"), ("primes(2)", "[]")],
    ),
    (
        "from collections import Counter\n\ndef count(words):\n    return Counter(words.split())\n",
        [("count('a b a')", "{'a': 2, 'b': 1}"), ("count('')", "{}"), ("count('x x')", "{'x': 2}")],
    ),
    (
        "def flatten(tree):\n    if not isinstance(tree, list):\n        return [tree]\n"
        "    return [leaf for branch in tree for leaf in flatten(branch)]\n",
        [("flatten([1, [2, [3]]])", "[1, 2, 3]"), ("flatten([])", "[]"), ("flatten([[[4]]])", "[4]")],
    ),
    (
        "def knapsack(items, size):\n    best = [0] * (size + 1)\n    for weight, value in items:\n"
        "        for room in range(size, weight - 1, -1):\n"
        "            best[room] = max(best[room], best[room - weight] + value)\n    return best[size]\n",
        [("knapsack([(1, 1), (3, 4), (4, 5)], 7)", "9"), ("knapsack([], 5)", "0"), ("knapsack([(2, 3)], 1)", "0")],
    ),
]
BUBBLEWRAP = [
    "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--clearenv",
    "--cap-drop", "ALL",
]  # fmt: skip
NAMES = {
    "namespaces": "ours: namespaces, seccomp, Landlock",
    "seccomp": "ours: seccomp, Landlock",
    "monty": "ours: pydantic-monty, a part of Python",
}
UNGUARDED = (  # the sandbox's fork server without its guards
    "from rl_swarm.scoring.sandbox import fork_server as server\n"
    "assert all(map(callable, (server.isolate, server.lock, server.probe, server.lockdown.probe)))\n"
    "server.isolate = server.lock = lambda *_: None\n"
    "server.lockdown.probe = lambda *_: {}\n"
    "server.probe = lambda channel: server.os.write(channel, b'{\"measured\": true}')\n"
    "server.main()\n"
)


@dataclass(frozen=True)
class Result:
    name: str
    programs: int
    seconds: float
    processor: float

    @property
    def per_second(self) -> float:
        return self.programs / self.seconds


def programs(count: int, tests: int) -> list[Program]:
    """Make correct and wrong programs in turn."""
    made = []
    for number, (code, cases) in zip(range(count), itertools.cycle(TASKS), strict=False):
        expected = [(call, value if number % 2 == 0 else "'wrong'") for call, value in cases[:tests]]
        made.append(Program(code, tuple(Test(*case) for case in expected)))
    return made


def check(verdicts: Sequence[bool]) -> None:
    assert list(verdicts) == [number % 2 == 0 for number in range(len(verdicts))], "a verdict is not right"


def processor() -> float:
    """Return the processor seconds of this process, of its ended children, and of all descendants."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / ticks
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may have ended meanwhile
                todo += map(int, children.read_text().split())
    return total


def measure(name: str, count: int, work: Callable[[], list[bool]]) -> Result:
    before, began = processor(), time.perf_counter()
    check(work())
    return Result(name, count, time.perf_counter() - began, processor() - before)


def in_processes(prefix: Sequence[str], made: Sequence[Program], workers: int) -> list[bool]:
    """Judge each test in a Python process that prints what the call gave."""

    def passes(program: Program, test: Test) -> bool:
        command = [*prefix, "-c", f"{program.code}\nprint(repr({test.call}))"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        shown = done.stdout.strip().removeprefix("Counter(").removesuffix(")")
        return bool(literal_eval(shown or "{}") == literal_eval(test.expected))

    def right(program: Program) -> bool:
        return all([passes(program, test) for test in program.tests])

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(right, made))


def in_sandbox(box: Sandbox, made: Sequence[Program]) -> list[bool]:
    return [verdict.right for verdict in box.judge(made)]


def opened(boxes: ExitStack, isolation: str, made: Sequence[Program], workers: int) -> Sandbox:
    box = Sandbox(isolation, workers=workers)
    boxes.callback(box.close)
    box.judge(made[: 4 * workers])  # all of its processes have started
    return box


def run(count: int, tests: int, workers: int, repeats: int) -> list[Result]:
    """Measure all in turn, several times, and keep the best turn of each.

    Other work on the machine only slows a turn down.
    """
    few = programs(max(2, count // 20) // 2 * 2, tests)
    many = programs(count, tests)
    python, bare = [sys.executable], [sys.executable, "-I", "-S"]
    in_turn: dict[str, tuple[int, Callable[[], list[bool]]]] = {
        "a fresh Python process per test": (len(few), partial(in_processes, python, few, workers)),
        "the same without site-packages": (len(few), partial(in_processes, bare, few, workers)),
    }
    if shutil.which("bwrap"):
        work = partial(in_processes, [*BUBBLEWRAP, *bare], few, workers)
        in_turn["the same in bubblewrap"] = (len(few), work)
    with ExitStack() as boxes:
        command, environment = sandbox.start("seccomp")
        unguarded = [*command[:-2], "-c", UNGUARDED]
        with patch.object(sandbox, "start", lambda isolation: (unguarded, environment)):
            box = opened(boxes, "seccomp", many, workers)
        in_turn["a fork per program, not isolated"] = (count, partial(in_sandbox, box, many))
        for offer in available():
            if not offer.problem:
                box = opened(boxes, offer.isolation, many, workers)
                in_turn[NAMES[offer.isolation]] = (count, partial(in_sandbox, box, many))
        turns = [measure(name, number, work) for _ in range(repeats) for name, (number, work) in in_turn.items()]
    return [max((turn for turn in turns if turn.name == name), key=lambda turn: turn.per_second) for name in in_turn]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="a twentieth where each test is a process")
    parser.add_argument("--tests", type=int, choices=[1, 2, 3], default=3, help="of a program")
    parser.add_argument("--workers", type=int, default=2, help="programs at a time")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each, of which the best counts")
    args = parser.parse_args()
    results = run(args.programs, args.tests, args.workers, args.repeats)
    fresh = results[0]
    figures = {
        result.name: {
            "per_second": result.per_second,
            "processor_ms": 1000 * result.processor / result.programs,
            "times": result.per_second / fresh.per_second,
        }
        for result in results
    }
    write_json(args.json, figures)
    if args.json != "-":
        header = ["what", "programs per second", "per minute", "processor time a program", "times as many"]
        rows = [
            [
                name,
                f"{row['per_second']:,.0f}",
                f"{60 * row['per_second']:,.0f}",
                "not known" if "bubblewrap" in name else f"{row['processor_ms']:.1f} ms",
                f"{row['times']:.1f}",
            ]
            for name, row in figures.items()
        ]
        print_table(header, rows)


if __name__ == "__main__":
    main()
