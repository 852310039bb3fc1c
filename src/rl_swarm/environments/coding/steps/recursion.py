"""Defines steps that are recursive functions. `$f` is the function's name."""

from rl_swarm.environments.coding.grammar import Step

NUMBERS = {
    "the factorial": "return 1 if n < 2 else n * $f(n - 1)",
    "the Fibonacci number at it, from 0 and 1": "return n if n < 2 else $f(n - 1) + $f(n - 2)",
    "the Lucas number at it, from 2 and 1": "return 2 - n if n < 2 else $f(n - 1) + $f(n - 2)",
    "the value of a(n) = a(n - 1) + a(n - 2) with a(0) = a(1) = $k": ("return $k if n < 2 else $f(n - 1) + $f(n - 2)"),
    "the value of a(n) = 2 a(n - 1) + $k with a(0) = 1": "return 1 if n == 0 else 2 * $f(n - 1) + $k",
    "the value of a(n) = $i a(n - 1) + n with a(0) = $k": "return $k if n == 0 else $i * $f(n - 1) + n",
    "the value of a(n) = a(n - 1) + n * n with a(0) = $k": "return $k if n == 0 else $f(n - 1) + n * n",
    "the value of a(n) = n - a(n - 1) with a(0) = $k": "return $k if n == 0 else n - $f(n - 1)",
    "the value of a(n) = a(n // 2) + $k with a(0) = 0": "return 0 if n == 0 else $f(n // 2) + $k",
    "the value of a(n) = a(n // $k) + n with a(0) = 0": "return 0 if n == 0 else $f(n // $k) + n",
    "the value of a(n) = n + a(n - $k), 0 below 1": "return 0 if n < 1 else n + $f(n - $k)",
    "the product of the numbers n, n - $k, n - 2 * $k down to 1": "return 1 if n < 1 else n * $f(n - $k)",
    "how often it can be divided by $k, rounding down, until it is 0": ("return 0 if n == 0 else 1 + $f(n // $k)"),
    "the digit sum by recursion": "return n if n < 10 else n % 10 + $f(n // 10)",
    "the product of its digits": "return n if n < 10 else n % 10 * $f(n // 10)",
    "the moves of the tower of Hanoi": "return 0 if n == 0 else 2 * $f(n - 1) + 1",
    "the number of ways to climb it in steps of 1 and 2": "return 1 if n < 2 else $f(n - 1) + $f(n - 2)",
    "the number of ways to climb it in steps of 1, 2 and 3": (
        "return int(n == 0) if n < 1 else $f(n - 1) + $f(n - 2) + $f(n - 3)"
    ),
    "the number of ways to climb it in steps of 1 and $k": ("return int(n == 0) if n < 1 else $f(n - 1) + $f(n - $k)"),
    "the power of $k with it as exponent, by recursion": "return 1 if n == 0 else $k * $f(n - 1)",
    "the Tribonacci number at it, from 0, 0 and 1": ("return n // 2 if n < 3 else $f(n - 1) + $f(n - 2) + $f(n - 3)"),
    "the Pell number at it, from 0 and 1": "return n if n < 2 else 2 * $f(n - 1) + $f(n - 2)",
    "the Jacobsthal number at it, from 0 and 1": "return n if n < 2 else $f(n - 1) + 2 * $f(n - 2)",
    "how many binary words of its length have no two ones in a row": (
        "return n + 1 if n < 2 else $f(n - 1) + $f(n - 2)"
    ),
    "how many steps it takes to 0: halve if even, else subtract 1": (
        "return 0 if n == 0 else 1 + $f(n - 1 if n % 2 else n // 2)"
    ),
    "how many steps it takes to 0: divide by $k if divisible, else subtract 1": (
        "return 0 if n == 0 else 1 + $f(n - 1 if n % $k else n // $k)"
    ),
}
LISTS = {
    "the alternating sum, beginning with plus": "return xs[0] - $f(xs[1:]) if xs else 0",
    "the sum of the squares, by recursion": "return xs[0] ** 2 + $f(xs[1:]) if xs else 0",
    "the value of the polynomial with these coefficients, constant first, at $k": (
        "return xs[0] + $k * $f(xs[1:]) if xs else 0"
    ),
    "the product of all": "return xs[0] * $f(xs[1:]) if xs else 1",
    "the product of those greater than $k": ("return (xs[0] if xs[0] > $k else 1) * $f(xs[1:]) if xs else 1"),
    "the largest sum of numbers no two of which are neighbours": (
        "return max($f(xs[1:]), xs[0] + $f(xs[2:])) if xs else 0"
    ),
    "how many subsets add up to $k": "return $f(xs[1:], t) + $f(xs[1:], t - xs[0]) if xs else int(t == 0)",
}
TEXTS = {
    "reverse it by recursion": "return $f(s[1:]) + s[0] if s else ''",
    "reverse each half of it": "return s[:len(s) // 2][::-1] + s[len(s) // 2:][::-1]",
    "take letters from its ends in turn, the first first": "return s[0] + $f(s[1:][::-1]) if s else ''",
    "put $c between equal neighbours": (
        "return s if len(s) < 2 else s[0] + ('$c' if s[0] == s[1] else '') + $f(s[1:])"
    ),
    "keep the first of equal neighbours": ("return s if len(s) < 2 else ('' if s[0] == s[1] else s[0]) + $f(s[1:])"),
    "move every $c to the end": "return '' if not s else $f(s[1:]) + s[0] if s[0] == '$c' else s[0] + $f(s[1:])",
}


def _recursive(argument: str, takes: str, gives: str, rows: dict[str, str]) -> tuple[Step, ...]:
    steps = []
    for clause, body in rows.items():
        more = ", t=$k" if "t - " in body else ""
        helper = f"def $f({argument}{more}):\n    {body}"
        steps.append(Step(clause, "$f($v)", takes, gives, helper=helper))
    return tuple(steps)


RECURSION = (
    *_recursive("n", "nat", "int", NUMBERS),
    *_recursive("xs", "list", "int", LISTS),
    *_recursive("s", "str", "str", TEXTS),
)
