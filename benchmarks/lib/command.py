"""Reads the options of a benchmark and prints its table; torch is not needed for it."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser that shows a benchmark's docstring and knows `--json`."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the figures there; - prints them and no table"
    )


def learner_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of every learner benchmark; the defaults are one round of eight questions."""
    parser = parser_of(docstring)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2-135m or a directory (default: tiny)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=positive, help="of torch on the CPU (default: its own choice)")
    parser.add_argument("--questions", type=positive, default=8)
    parser.add_argument("--completions", type=positive, default=8, help="of every question")
    parser.add_argument("--tokens", type=positive, default=256, help="maximum length of a completion")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of a prompt")
    parser.add_argument("--repeats", type=positive, default=3, help="measured runs after the one that warms up")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in [header, ["---"] * len(header), *rows]:
        print(f"| {' | '.join(cells)} |")


def write_json(where: str | None, figures: Any) -> None:
    if where is None:
        return
    text = json.dumps(figures, indent=2)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n")
