"""Keeps answers from being run.

Some of reasoning-gym's scorers hand an answer to `eval`: four as it is, five through sympy's parser. A process
of its own limits what that can break, but code in the scorer could still delete files and pay itself rewards.
So the scorers are made to read an answer as a Python literal or as arithmetic, and nothing else.
"""

import ast
import importlib
from collections.abc import Mapping
from typing import Any

# The scorers that call `eval` on an answer, all of them to read a list.
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
FUNCTIONS = {"abs", "cbrt", "root", "sqrt"}  # beside the classes of sympy that are mathematical expressions


def disarm() -> None:
    """Changes reasoning-gym and sympy in this process."""
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

    for name in LISTS:
        vars(importlib.import_module(name))["eval"] = ast.literal_eval
    evaluate = sympy_parser.eval_expr

    def evaluate_arithmetic(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        check_arithmetic(code, {**global_dict, **local_dict})
        return evaluate(code, local_dict, global_dict)

    vars(sympy_parser)["eval_expr"] = evaluate_arithmetic


def check_arithmetic(code: str, names: Mapping[str, Any]) -> None:
    """Refuses all but numbers, symbols, operators and calls of mathematical functions."""
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
