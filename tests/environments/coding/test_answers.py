"""The program in an answer, and what it earns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_swarm.environments.coding.answers import MAX_PROGRAM, earned, fenced, is_text, program

CODE = "def solve(n):\n    return n"


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{CODE}\n```",
        f"```py\n{CODE}\n```",
        f"```\n{CODE}\n```",
        f"Sure, here it is:\n```python \n{CODE}\n```  \nI hope this helps!",
        f"```python\nprint(1)\n```\nNo, better:\n```python\n{CODE}\n```",
        f"```python\n{CODE}\n```\n```python\ndef solve(n",  # the second was cut
    ],
)
def test_the_last_closed_fence_counts(answer):
    assert program(answer) == CODE


@pytest.mark.parametrize(
    "answer",
    [
        CODE,
        f"`{CODE}`",
        f"```python\n{CODE}",
        f"```python {CODE}```",
        f"```java\n{CODE}\n```",
        f"<code>\n{CODE}\n</code>",
        "```python\n\n```",
        f"```python\n{'#' * (MAX_PROGRAM + 1)}\n```",
        "",
    ],
)
def test_without_a_fence_there_is_no_program(answer):
    assert program(answer) is None


def test_rewards_are_those_of_the_original():
    assert earned("", right=False) == earned(" \n", right=False) == -1.2
    assert earned("\ufffd" * 3, right=False) == -1.2
    assert earned(CODE, right=False) == -1.0
    assert earned(fenced(CODE), right=False) == 0.0
    assert earned(fenced(CODE), right=True) == 1.0


@given(st.text(alphabet="`python\n x", max_size=200))
def test_any_text_is_read(text):
    found = program(text)
    assert found is None or (found in text and found.strip())
    assert is_text(text) == bool(text.strip())
