"""What a publication may hold, and how it is taken apart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Limits
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Answer, Completion, Group, Publication, Sampling, to_answers, unpack
from rl_swarm.protocol.wire import Rejected, seal, sign, unseal

ALICE = Identity.generate()
LIMITS = Limits(questions=3, completions=4, characters=20)


def publication(rollouts, **changes):
    made = Publication(
        peer_id=ALICE.peer_id,
        kind="rollouts",
        swarm="swarm",
        node="alice",
        round=5,
        stage=0,
        timestamp=1.0,
        model="tiny",
        policy_version=5,
        sampling=Sampling(1.0, 1.0, 0, 24),
        rollouts=rollouts,
    )
    return replace(made, **changes)


def answered(prompt, *texts, **more):
    return [Answer(prompt, text, 0.0, **more) for text in texts]


def reason(rollouts, limits=LIMITS):
    with pytest.raises(Rejected) as caught:
        list(unpack(publication(rollouts), limits))
    return caught.value.reason


def test_a_publication_comes_apart_in_the_order_of_its_questions():
    rollouts = {str(number): answered(f"question {number}", "a", "b") for number in (2, 0, 1)}
    found = list(unpack(publication(rollouts, tokenizer="hash"), LIMITS))
    assert [(r.number, r.prompt) for r in found] == [(0, "question 0"), (1, "question 1"), (2, "question 2")]
    for rollout in found:
        assert (rollout.peer_id, rollout.round, rollout.stage) == (ALICE.peer_id, 5, 0)
        assert rollout.completions == (Completion("a", True), Completion("b", True))
        assert rollout.tokenizer == "hash"


def test_ten_questions_are_in_the_order_of_numbers_not_of_text():
    rollouts = {str(number): answered(str(number), "a", "b") for number in range(12)}
    assert [r.number for r in unpack(publication(rollouts), Limits())] == list(range(12))


def test_as_much_as_the_limits_allow_is_accepted_and_no_more():
    full = {str(number): answered("p" * 20, *["r" * 20] * 4) for number in range(3)}
    assert len(list(unpack(publication(full), LIMITS))) == 3
    assert reason({**full, "3": full["0"]}) == "limits"
    assert reason({"0": answered("p", *"abcde")}) == "limits"
    assert reason({"0": answered("p" * 21, "a", "b")}) == "limits"
    assert reason({"0": answered("p", "a", "r" * 21)}) == "limits"


@pytest.mark.parametrize("texts", ["", "a"])
def test_a_group_of_fewer_than_two_is_none(texts):
    assert reason({"0": answered("p", *texts)}) == "limits"


@pytest.mark.parametrize("key", ["", "-1", "00", "01", "1.0", " 1", "1 ", "x", "²", "١", "1_0", "1" * 5000, "0x0"])
def test_a_question_number_is_a_plain_number(key):
    assert reason({"0": answered("p", "a", "b"), key: answered("p", "a", "b")}) == "schema"


@pytest.mark.parametrize("numbers", [[1], [0, 2], [7], [999999]])
def test_nobody_chooses_which_questions_to_answer(numbers):
    """Whoever could leave questions out would share the easy ones."""
    assert reason({str(number): answered("p", "a", "b") for number in numbers}) == "question"


def test_the_completions_of_a_question_answer_one_prompt():
    assert reason({"0": answered("p", "a", "b") + answered("q", "c")}) == "schema"


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [([1, 2], None), (None, [-0.5]), ([1, 2], [-0.5]), ([], [-0.5]), (None, [])]
)
def test_tokens_without_their_log_probabilities_are_refused(tokens, logprobs):
    given = [*answered("p", "a"), Answer("p", "b", 0.0, True, tokens, logprobs)]
    assert reason({"0": given}) == "schema"


def test_tokens_and_log_probabilities_arrive():
    given = answered("p", "a", "b", ended=False, tokens=[1, 2], logprobs=[-0.5, -1.0])
    (rollout,) = unpack(publication({"0": given}), LIMITS)
    assert rollout.completions[0] == Completion("a", False, (1, 2), (-0.5, -1.0))


@pytest.mark.parametrize("share", [False, True])
def test_what_a_node_publishes_can_be_read_by_the_others(share):
    group = Group(
        ALICE.peer_id,
        Question("chain_sum", 0, 1, "1 + 1?", "2"),
        (Completion("2", True, (3, 4), (-0.123456, -1.0)), Completion("no", False, (5,), (-2.0,))),
        (1.0, 0.0),
        external=False,
    )
    sent = publication({"0": to_answers(group, share)})
    received = unseal(seal(sent, ALICE, compress=True), Publication)
    assert received == sent
    (rollout,) = unpack(received, LIMITS)
    assert rollout.prompt == "1 + 1?"
    assert [(c.text, c.ended) for c in rollout.completions] == [("2", True), ("no", False)]
    assert [c.tokens for c in rollout.completions] == ([(3, 4), (5,)] if share else [None, None])
    assert rollout.completions[0].logprobs == ((-0.1235, -1.0) if share else None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node", "../../etc/passwd"),
        ("node", "a\n"),
        ("node", ""),
        ("node", "a" * 65),
        ("round", -1),
        ("stage", -1),
        ("policy_version", -1),
        ("model", "m" * 257),
        ("tokenizer", "t" * 65),
        ("kind", "report"),
        ("swarm", "s" * 65),
        ("round", 2**53),
        ("parents", {"0": ["d" * 65]}),
        ("rollouts", {"0": answered("p", "a", tokens=[-1], logprobs=[-1.0])}),
        ("rollouts", {"0": answered("p", "a", tokens=[2**31], logprobs=[-1.0])}),
        ("rollouts", {"0": answered("p", "a", tokens=[1], logprobs=[-1e300])}),
        ("rollouts", {"0": [Answer("p", "a", 1e300)]}),
    ],
)
def test_a_publication_with_an_impossible_field_is_refused(field, value):
    sent = sign(replace(publication({}), **{field: value}), ALICE)
    with pytest.raises(Rejected, match="schema"):
        unseal(sent, Publication)


def test_the_name_of_a_rollout_depends_on_all_that_it_is():
    one = publication({"0": answered("p", "a", "b"), "1": answered("p", "a", "b")})
    names = {
        one.digest("0"),
        one.digest("1"),
        replace(one, round=6).digest("0"),
        replace(one, stage=1).digest("0"),
        replace(one, swarm="other").digest("0"),
        replace(one, peer_id="other").digest("0"),
        replace(one, rollouts={"0": answered("p", "a", "c")}).digest("0"),
    }
    assert len(names) == 7
    assert replace(one, timestamp=2.0).digest("0") == one.digest("0")


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_a_group_has_signal_exactly_if_its_rewards_differ(rewards):
    question = Question("chain_sum", 0, 1, "1 + 1?", "2")
    group = Group("p", question, (Completion("a", True),) * len(rewards), tuple(rewards), True)
    assert group.has_signal is (len(set(rewards)) > 1)
    assert math.isclose(group.mean_reward, math.fsum(rewards) / len(rewards), abs_tol=1e-12)


NUMBERS = st.text(max_size=3) | st.integers(-2, 5).map(str)
ANSWERS = st.lists(
    st.builds(
        Answer,
        prompt=st.sampled_from(["p", "q", "p" * 30]),
        response=st.text(max_size=25),
        reward=st.floats(),
        tokens=st.none() | st.lists(st.integers(), max_size=2),
        logprobs=st.none() | st.lists(st.floats(), max_size=2),
    ),
    max_size=6,
)


@given(st.dictionaries(NUMBERS, ANSWERS, max_size=5))
def test_whatever_is_in_a_publication_comes_out_within_the_limits_or_not_at_all(rollouts):
    try:
        found = list(unpack(publication(rollouts), LIMITS))
    except Rejected:
        return
    assert [r.number for r in found] == list(range(len(rollouts)))
    for rollout in found:
        assert 2 <= len(rollout.completions) <= LIMITS.completions
        assert all(len(c.text) <= LIMITS.characters for c in rollout.completions)
