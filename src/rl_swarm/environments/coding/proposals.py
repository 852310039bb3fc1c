"""What a proposer writes: one JSON object with a question, a solution and at most four tests."""

import json

from rl_swarm.environments.coding.task import CodingTask

MOST_TESTS = 4


def as_json(task: CodingTask, tests: int = MOST_TESTS) -> str:
    """A task as a proposal."""
    pairs = [[test.call, test.expected] for test in task.tests[:tests]]
    proposal = {"question": task.description, "solution": task.reference, "tests": pairs}
    return json.dumps(proposal, ensure_ascii=False)
