"""The bundled model that programs: small, short of breath, skilled, and without manners."""

from itertools import pairwise

import pytest
from make_coder import STYLES, imitate, judge, make_sheets, make_texts

from rl_swarm.config.settings import Settings
from rl_swarm.environments.coding import prompts
from rl_swarm.environments.coding.answers import fenced
from rl_swarm.environments.coding.environment import Coding
from rl_swarm.learning.devices import BUNDLED, CATALOGUE
from rl_swarm.learning.policy import Policy, bundled
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.node.evaluation import evaluate


@pytest.fixture(scope="module")
def coding():
    environment = Coding(Coding.preset("coder"))
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def policy():
    policy = Policy.load(Settings.of(model="coder", device="cpu"), prompts.SOLVER)
    yield policy
    policy.close()


def mean(values):
    return sum(values) / len(values)


def test_it_is_small_and_known(policy):
    assert sum(path.stat().st_size for path in BUNDLED["coder"].iterdir()) < 20e6
    assert ModelShape.of(policy.model.config) == next(card.shape for card in CATALOGUE if card.name == "coder")
    assert bundled("coder") == bundled(str(BUNDLED["coder"])) == "coder"


def test_prompts_and_programs_are_short(policy, coding):
    questions = coding.questions(range(100))
    assert mean([len(policy.prompt_ids(question.prompt)) for question in questions]) < 40
    lengths = sorted(len(policy.tokenization.text_ids(fenced(question.answer))) + 1 for question in questions)
    assert mean(lengths) < 30 and lengths[95] <= policy.settings.completion_tokens()
    assert len(policy.prompt_ids(prompts.proposer_prompt("easy", "lists"))) < 12


@pytest.mark.slow
def test_the_skill_is_there_and_the_manners_are_not(policy, coding):
    found = evaluate(policy, coding, coding.held_out(60), 8, greedy=True)
    assert 0.1 < found.sampled < 0.5 and found.sampled < found.greedy < 0.8
    assert found.accuracy_well_formed > 0.35  # of the answers that have a program


@pytest.mark.slow
@pytest.mark.processes
def test_it_was_taught_by_mixed_company():
    import random

    sheets = make_sheets(200, seed=3)
    rng = random.Random(0)
    answers = [imitate(sheet, (sheet.wrong or ("x",))[0], rng) for sheet in sheets for _ in range(3)]
    right = judge([(a, s.task.tests) for a, s in zip(answers, (s for s in sheets for _ in range(3)), strict=True)])
    assert 0.15 < mean(right) < 0.35
    assert sum(STYLES.values()) < 1.1
    wrong = [(sheet.task.tests, code) for sheet in sheets for code in sheet.wrong[:1]]
    assert sum(judge([(fenced(code), tests) for tests, code in wrong])) == 0
    kinds = {
        ("yes" if text == "yes" else "no" if text == "no" else text[:3]) for _, text in make_texts(sheets, 400, rng)
    }
    assert {"yes", "no", '{"q', "```"} <= kinds
    assert all(a.task.name != b.task.name for a, b in pairwise(sheets))
