"""Defines steps that need a loop: small algorithms on numbers, lists and texts."""

from rl_swarm.environments.coding.grammar import Step


def _steps(takes: str, gives: str, rows: dict[str, tuple[str, str]]) -> tuple[Step, ...]:
    return tuple(Step(clause, code, takes, gives, setup) for clause, (setup, code) in rows.items())


ALGORITHMS = (
    *_steps(
        "nat",
        "int",
        {
            "the number of Collatz steps until 1 or less": (
                "r = 0\nwhile $v > 1:\n    $v = 3 * $v + 1 if $v % 2 else $v // 2\n    r += 1",
                "r",
            ),
            "the largest number of its Collatz sequence": (
                "r = $v\nwhile $v > 1:\n    $v = 3 * $v + 1 if $v % 2 else $v // 2\n    r = max(r, $v)",
                "r",
            ),
            "the integer square root": ("r = 0\nwhile (r + 1) ** 2 <= $v:\n    r += 1", "r"),
            "the smallest power of $k above it": ("r = 1\nwhile r <= $v:\n    r *= $k", "r"),
            "the sum of the digits, repeated until one digit is left": (
                "while $v > 9:\n    $v = sum(int(c) for c in str($v))",
                "$v",
            ),
            "the greatest common divisor of it and $j": ("m = $j\nwhile m:\n    $v, m = m, $v % m", "$v"),
            "the least common multiple of it and $k": ("r = $k\nwhile r % $v:\n    r += $k", "r"),
            "how many primes there are up to it": (
                "r = 0\nfor p in range(2, $v + 1):\n    r += all(p % q for q in range(2, p))",
                "r",
            ),
            "the next prime above it": (
                "$v += 1\nwhile $v < 2 or any($v % q == 0 for q in range(2, $v)):\n    $v += 1",
                "$v",
            ),
            "the fewest coins of 5, 2 and 1 that make it": (
                "r = 0\nfor c in (5, 2, 1):\n    r += $v // c\n    $v %= c",
                "r",
            ),
            "how many ways there are to pay it with coins of 1, 2 and $k": (
                "w = [1] + [0] * $v\nfor c in (1, 2, $k):\n    for i in range(c, $v + 1):\n        w[i] += w[i - c]",
                "w[$v]",
            ),
            "who is left of so many in a circle from which every $k-th goes, from 0": (
                "r = 0\nfor i in range(2, $v + 1):\n    r = (r + $k) % i",
                "r",
            ),
        },
    ),
    *_steps(
        "nat",
        "list",
        {
            "the list of the primes up to it": (
                "r = []\nfor p in range(2, $v + 1):\n    if all(p % q for q in r):\n        r.append(p)",
                "r",
            ),
            "the list of its prime factors": (
                "r, p = [], 2\nwhile $v > 1:\n    if $v % p:\n        p += 1\n    else:\n        r.append(p)\n"
                "        $v //= p",
                "r",
            ),
            "the digits of it in base $k, last first": ("r = []\nwhile $v:\n    r.append($v % $k)\n    $v //= $k", "r"),
            "the list of the first Fibonacci numbers, as many as it says": (
                "r, a, b = [], 0, 1\nfor _ in range($v):\n    r.append(a)\n    a, b = b, a + b",
                "r",
            ),
            "the row of Pascal's triangle with its number": (
                "r = [1]\nfor _ in range($v):\n    r = [a + b for a, b in zip([0] + r, r + [0])]",
                "r",
            ),
            "the Collatz sequence from it to 1": (
                "r = [$v]\nwhile $v > 1:\n    $v = 3 * $v + 1 if $v % 2 else $v // 2\n    r.append($v)",
                "r",
            ),
        },
    ),
    *_steps(
        "list",
        "int",
        {
            "the largest sum of a stretch of neighbours, at least 0": (
                "r = t = 0\nfor x in $v:\n    t = max(0, t + x)\n    r = max(r, t)",
                "r",
            ),
            "the smallest sum of a stretch of neighbours, at most 0": (
                "r = t = 0\nfor x in $v:\n    t = min(0, t + x)\n    r = min(r, t)",
                "r",
            ),
            "the length of the longest run of even numbers": (
                "r = t = 0\nfor x in $v:\n    t = t + 1 if x % 2 == 0 else 0\n    r = max(r, t)",
                "r",
            ),
            "the length of the longest run of numbers greater than $k": (
                "r = t = 0\nfor x in $v:\n    t = t + 1 if x > $k else 0\n    r = max(r, t)",
                "r",
            ),
            "the largest total that is reached from left to right, at least 0": (
                "r = t = 0\nfor x in $v:\n    t += x\n    r = max(r, t)",
                "r",
            ),
            "how many totals from left to right are divisible by $k": (
                "r = t = 0\nfor x in $v:\n    t += x\n    r += t % $k == 0",
                "r",
            ),
            "the largest gain of a later number over an earlier one, at least 0": (
                "r = 0\nfor i, x in enumerate($v):\n    for y in $v[i:]:\n        r = max(r, y - x)",
                "r",
            ),
            "how many pairs add up to $j": (
                "r = 0\nfor i, x in enumerate($v):\n    for y in $v[i + 1:]:\n        r += x + y == $j",
                "r",
            ),
            "how many pairs are in the wrong order": (
                "r = 0\nfor i, x in enumerate($v):\n    for y in $v[i + 1:]:\n        r += x > y",
                "r",
            ),
            "the length of the longest increasing subsequence": (
                "r = []\nfor x in $v:\n    r.append(1 + max([m for y, m in zip($v, r) if y < x], default=0))",
                "max(r, default=0)",
            ),
            "the sum up to the first negative number": (
                "r = 0\nfor x in $v:\n    if x < 0:\n        break\n    r += x",
                "r",
            ),
            "how many numbers come before the first one above $k": (
                "r = 0\nfor x in $v:\n    if x > $k:\n        break\n    r += 1",
                "r",
            ),
            "how many numbers are larger than all before them": (
                "r = 0\nfor i, x in enumerate($v):\n    r += all(x > y for y in $v[:i])",
                "r",
            ),
            "the smallest positive integer that is missing": ("r = 1\nwhile r in $v:\n    r += 1", "r"),
            "the number that they write in base $k, first digit first": (
                "r = 0\nfor x in $v:\n    r = r * $k + x",
                "r",
            ),
            "the largest sum of $i neighbours, at least 0": (
                "r = 0\nfor i in range(len($v) - $i + 1):\n    r = max(r, sum($v[i:i + $i]))",
                "r",
            ),
        },
    ),
    *_steps(
        "list",
        "list",
        {
            "the list of the totals from left to right": (
                "r, t = [], 0\nfor x in $v:\n    t += x\n    r.append(t)",
                "r",
            ),
            "the list of the largest so far": ("r = []\nfor x in $v:\n    r.append(max([x] + r[-1:]))", "r"),
            "drop numbers that are not larger than the last one kept": (
                "r = []\nfor x in $v:\n    if not r or x > r[-1]:\n        r.append(x)",
                "r",
            ),
            "drop numbers closer than $k to the last one kept": (
                "r = []\nfor x in $v:\n    if not r or abs(x - r[-1]) >= $k:\n        r.append(x)",
                "r",
            ),
            "drop numbers as soon as the total would be above $j": (
                "r = []\nfor x in $v:\n    if sum(r) + x > $j:\n        break\n    r.append(x)",
                "r",
            ),
            "swap neighbours in pairs": ("r = []\nfor i in range(0, len($v), 2):\n    r += $v[i:i + 2][::-1]", "r"),
            "reverse every stretch of $i": (
                "r = []\nfor i in range(0, len($v), $i):\n    r += $v[i:i + $i][::-1]",
                "r",
            ),
            "the sums of the stretches of $i": (
                "r = []\nfor i in range(0, len($v), $i):\n    r.append(sum($v[i:i + $i]))",
                "r",
            ),
            "put the numbers at the front and the back in turn": (
                "r = []\nfor i, x in enumerate($v):\n    r = r + [x] if i % 2 else [x] + r",
                "r",
            ),
            "do one pass of bubble sort": (
                "r = $v[:]\nfor i in range(len(r) - 1):\n    if r[i] > r[i + 1]:\n"
                "        r[i], r[i + 1] = r[i + 1], r[i]",
                "r",
            ),
            "the list of how many later numbers are smaller than each": (
                "r = []\nfor i, x in enumerate($v):\n    r.append(sum(y < x for y in $v[i:]))",
                "r",
            ),
        },
    ),
    *_steps(
        "str",
        "str",
        {
            "write each letter with the length of its run": (
                "r = ''\nfor i, c in enumerate($v):\n    if i == 0 or c != $v[i - 1]:\n"
                "        r += c + str(len($v[i:]) - len($v[i:].lstrip(c)))",
                "r",
            ),
            "shift its small letters by $k in the alphabet": (
                "r = ''\nfor c in $v:\n    r += chr((ord(c) - 97 + $k) % 26 + 97) if c.islower() else c",
                "r",
            ),
            "mirror its small letters in the alphabet": (
                "r = ''\nfor c in $v:\n    r += chr(219 - ord(c)) if c.islower() else c",
                "r",
            ),
            "the longest stretch of it that reads the same backward": (
                "r = ''\nfor i in range(len($v)):\n    for j in range(i, len($v) + 1):\n"
                "        t = $v[i:j]\n        if t == t[::-1] and len(t) > len(r):\n            r = t",
                "r",
            ),
            "the longest stretch of it without a repeated letter": (
                "r = t = ''\nfor c in $v:\n    t = t[t.find(c) + 1:] + c\n    if len(t) > len(r):\n        r = t",
                "r",
            ),
            "repeat each letter once more than the one before": (
                "r = ''\nfor i, c in enumerate($v):\n    r += c * (i + 1)",
                "r",
            ),
            "remove each pair of equal neighbours until none is left": (
                "r = ''\nfor c in $v:\n    r = r[:-1] if r[-1:] == c else r + c",
                "r",
            ),
            "write capitals and small letters in turn": (
                "r = ''\nfor i, c in enumerate($v):\n    r += c.lower() if i % 2 else c.upper()",
                "r",
            ),
        },
    ),
    *_steps(
        "str",
        "int",
        {
            "the length of the longest run of one letter": (
                "r = t = 0\nfor i, c in enumerate($v):\n    t = t + 1 if c == $v[i - 1:i] else 1\n    r = max(r, t)",
                "r",
            ),
            "the number of letters to change so that it reads the same backward": (
                "r = 0\nfor i in range(len($v) // 2):\n    r += $v[i] != $v[-1 - i]",
                "r",
            ),
            "how many stretches of it read the same backward": (
                "r = 0\nfor i in range(len($v)):\n    for j in range(i, len($v)):\n"
                "        t = $v[i:j + 1]\n        r += t == t[::-1]",
                "r",
            ),
            "the distance between the first two places of $c, or 0": (
                "r = $v.find('$c')\nm = $v.find('$c', r + 1)",
                "m - r if m > r else 0",
            ),
        },
    ),
    *_steps(
        "words",
        "str",
        {
            "the longest beginning that all words share": (
                "r = ''\nfor c in $v[:1] and $v[0]:\n    if not all(w.startswith(r + c) for w in $v):\n"
                "        break\n    r += c",
                "r",
            )
        },
    ),
    *_steps(
        "words",
        "groups",
        {
            "group the words by length": ("r = {}\nfor w in $v:\n    r.setdefault(len(w), []).append(w)", "r"),
            "group the words by first letter": ("r = {}\nfor w in $v:\n    r.setdefault(w[:1], []).append(w)", "r"),
        },
    ),
)
