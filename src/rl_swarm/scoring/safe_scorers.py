"""Makes scorers safe: answers are never run as code, and wrong answers are not rewarded.

Some of reasoning-gym's scorers pass an answer to `eval`: four directly, five through sympy's parser. A separate
process limits the damage, but code in the scorer could still reward itself. So here these scorers read an answer as a
Python literal or as arithmetic, and nothing else. Three others reward wrong answers in full, and are corrected.
`DIFFERENT` names every task whose score may differ from the original.
"""

import ast
import cmath
import importlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

A_LITERAL = "the original evaluates an answer that is not the stored one; here it is read as a Python literal"
ARITHMETIC_ALONE = "the original evaluates an answer through sympy; here it must be arithmetic"
DIFFERENT = {
    "binary_matrix": A_LITERAL,
    "spiral_matrix": A_LITERAL,
    "string_insertion": A_LITERAL,
    "n_queens": A_LITERAL,
    "simple_integration": ARITHMETIC_ALONE,
    "intermediate_integration": ARITHMETIC_ALONE,
    "polynomial_multiplication": ARITHMETIC_ALONE,
    "countdown": ARITHMETIC_ALONE,
    "puzzle24": ARITHMETIC_ALONE,
    "complex_arithmetic": "the original scores `nan` as 1, because its distance from any number is not above 0",
    "game_of_life_halting": "the original scores every text as 1: any is true, as is the stored one",
    "coin_flip": "the original scores the first digits of the right number, such as 0, as 1",
    "codeio": "the few programs that write files fail here, and so make different questions",
}

# Scorers that call `eval` on an answer, to read a list.
LISTS = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
)
FUNCTIONS = {"abs", "cbrt", "root", "sqrt"}  # besides the expression classes of sympy


def patch_libraries() -> None:
    """Patch reasoning-gym and sympy in this process."""
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

    for name in LISTS:
        vars(importlib.import_module(name))["eval"] = ast.literal_eval
    evaluate = sympy_parser.eval_expr

    def evaluate_arithmetic(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        check_arithmetic(code, {**global_dict, **local_dict})
        return evaluate(code, local_dict, global_dict)

    vars(sympy_parser)["eval_expr"] = evaluate_arithmetic


def check_arithmetic(code: str, names: Mapping[str, Any]) -> None:
    """Raise unless the code has only numbers, symbols, operators and calls of mathematical functions."""
    from sympy import Expr  # type: ignore[import-untyped]

    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, ARITHMETIC):
            raise ValueError(f"{type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("only functions with a name can be called")
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
            value = names.get(node.id)
            if not isinstance(value, Expr) and not (isinstance(value, type) and issubclass(value, Expr)):
                raise ValueError(f"{node.id} is no number, symbol or mathematical function")


def score_complex(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    value = dataset.parse_string_to_complex(answer)
    return float(dataset.score_answer(answer, entry)) if value is not None and cmath.isfinite(value) else 0.0


def score_halting(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    return float(answer.strip().lower() == str(entry["answer"]).lower())


def score_coin_flip(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    score = float(dataset.score_answer(answer, entry))
    if score < 1.0:
        return score
    given, right = (float(Fraction(text.replace(",", ""))) for text in (answer, str(entry["answer"])))
    return float(abs(given - right) <= 1e-4)


SCORERS: dict[str, Callable[[Any, str, dict[str, Any]], float]] = {
    "complex_arithmetic": score_complex,
    "game_of_life_halting": score_halting,
    "coin_flip": score_coin_flip,
}
