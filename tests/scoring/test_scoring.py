"""Questions and rewards from the real scoring process, with honest and with hostile answers."""

import os
import signal
import subprocess
import sys
from collections import Counter
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_swarm.environments.presets import PRESETS
from rl_swarm.environments.reasoning import MAX_ANSWER, Reasoning, extract
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.scoring import process
from rl_swarm.scoring.process import ScoringProcess

# Tasks whose scorer hands answers to `eval`, as they are or through sympy; n_queens keeps many right answers.
EVALUATING = (
    "binary_matrix",
    "spiral_matrix",
    "string_insertion",
    "n_queens",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "countdown",
    "puzzle24",
)
HASH_SENSITIVE = (Task("ransom_note"), Task("isomorphic_strings"))  # other questions under another hash seed
SLOW = "¬" * 8000 + "P"  # takes the scorer of propositional_logic many seconds


def tagged(answer):
    return f"Let me think. <answer>{answer}</answer>"


@pytest.fixture(scope="module", params=PRESETS)
def preset(request):
    environment = Reasoning(PRESETS[request.param])
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def evaluating():
    environment = Reasoning([Task(name) for name in EVALUATING], partial_rewards=True)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def logic_process():
    environment = Reasoning([Task("propositional_logic"), Task("chain_sum", weight=20.0)])
    yield environment
    environment.close()


@pytest.fixture
def logic(logic_process):
    logic_process.scorer.restarts = logic_process.scorer.late = 0
    return logic_process


def of_task(environment, task, count=1):
    found = [q for q in environment.questions(range(100)) if q.task == task]
    assert len(found) >= count
    return found[:count]


def test_the_stored_answer_of_every_task_earns_the_full_reward(preset):
    questions = preset.questions(range(40 * len(preset.scorer.tasks)))
    counts = Counter(q.task for q in questions)
    assert set(counts) == {task.name for task in preset.scorer.tasks}
    assert min(counts.values()) >= 15
    known = [q for q in questions if q.answer is not None]
    assert {q.task for q in questions} - {q.task for q in known} <= {"propositional_logic"}
    rewards = preset.score([(q, tagged(q.answer)) for q in known])
    assert [q for q, reward in zip(known, rewards, strict=True) if reward != 1.0] == []


def test_a_wrong_answer_earns_nothing(preset):
    questions = preset.questions(range(200))
    answered = [(q, text) for q in questions for text in (tagged("no such answer"), tagged("-987654321"))]
    assert set(preset.score(answered)) == {0.0}


def test_an_answer_with_anything_behind_it_or_without_tags_earns_nothing(preset):
    questions = [q for q in preset.questions(range(60)) if q.answer is not None]
    for form in ("{}", "<answer>{}", "{}</answer>", "<answer>{}</answer> Subscribe!", "<answer>{}</answer></answer>"):
        assert set(preset.score([(q, form.format(q.answer)) for q in questions])) == {0.0}


def test_training_questions_are_never_held_out_ones(preset):
    held_out, training = preset.held_out(100), preset.questions(range(3000))
    assert not {q.prompt for q in held_out} & {q.prompt for q in training}
    assert all(sha256(q.prompt.encode()).digest()[0] >= 32 for q in training)


def test_the_held_out_set_is_fixed_and_spread_over_the_tasks(preset):
    held_out = preset.held_out(100)
    assert len({q.prompt for q in held_out}) == len(held_out) == 100
    counts = Counter(q.number for q in held_out)
    assert len(counts) == len(preset.scorer.tasks)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert held_out == preset.held_out(100)
    assert all(sha256(q.prompt.encode()).digest()[0] < 32 for q in held_out)


def test_a_seed_names_one_question_whatever_it_is_asked_together_with(preset):
    together = preset.questions([5, 6, 7, 5])
    assert together[0] == together[3]
    assert preset.questions([7]) == [together[2]]
    assert len({q.prompt for q in preset.questions(range(100))}) > 80


def test_weights_say_how_often_a_task_is_asked(logic):
    counts = Counter(q.task for q in logic.questions(range(400)))
    assert 1 <= counts["propositional_logic"] < 50


def test_questions_are_the_same_in_every_process_whatever_its_hash_seed():
    script = (
        "from rl_swarm.scoring.process import ScoringProcess; from rl_swarm.protocol.tasks import Task\n"
        "from rl_swarm.environments.presets import PRESETS\n"
        "import hashlib\n"
        "scorer = ScoringProcess([Task('ransom_note'), Task('isomorphic_strings'), *PRESETS['sapo']])\n"
        "print(hashlib.sha256(repr([scorer.questions(range(80)), scorer.held_out(40)]).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    scorer = ScoringProcess([*HASH_SENSITIVE, *PRESETS["sapo"]])
    try:
        here = repr([scorer.questions(range(80)), scorer.held_out(40)])
    finally:
        scorer.close()
    assert found.stdout.strip() == sha256(here.encode()).hexdigest()


def hostile(folder):
    """Expressions that do something when they are evaluated."""
    forge = "__import__('sys').modules['reasoning_gym.{}'].{}"
    return {
        "sleeps": "__import__('time').sleep(3600)",
        "exits": "__import__('os')._exit(0)",
        "forks": "[__import__('os').fork() for _ in range(3)]",
        "allocates": "[0] * 10**10",
        "counts": "sum(range(10**12))",
        "creates a file": f"open({str(folder / 'created')!r}, 'w').write('x')",
        "makes a folder": f"__import__('os').mkdir({str(folder / 'made')!r})",
        "deletes a file": f"__import__('os').remove({str(folder / 'precious')!r})",
        "pays itself": f"setattr({forge.format('algorithmic.binary_matrix', 'BinaryMatrixDataset')}, 'score_answer', "
        "lambda *_: 1.0)",
        "pays everybody": "setattr(__import__('__main__').Tasks, 'score', lambda *_: 1.0)",
        "answers for the scorer": "__import__('os').write(4, b'{\"scores\": [1, 1, 1]}\\n')",
        "is a method of something": "().__class__.__base__.__subclasses__()",
        "nests deeply": "[" * 4000 + "]" * 4000,
        "negates much": "-" * 8000 + "1",
        "is a lambda": "(lambda: 1)()",
        "is evaluated again": f"sympify(\"__import__('os').remove({str(folder / 'precious')!r})\")",
        "is a hidden import": "eval(chr(95) + chr(95) + 'import' + chr(95) + chr(95))('os')._exit(0)",
    }


@pytest.mark.parametrize("task", EVALUATING)
def test_no_answer_is_run(evaluating, tmp_path, task):
    """A hostile answer earns 0 and does nothing, and the honest answers around it keep their reward."""
    (tmp_path / "precious").write_text("mine")
    question = next(q for q in evaluating.held_out(40) if q.task == task)
    answers = hostile(tmp_path)
    rewards = evaluating.score(
        [
            (question, tagged(question.answer)),
            *[(question, tagged(answer)) for answer in answers.values()],
            (question, tagged(question.answer)),
            (question, tagged("1")),
        ]
    )
    assert evaluating.scorer.restarts == 0, "nor was one waited for"
    assert rewards[0] == rewards[-2] == 1.0
    paid = {name for name, reward in zip(answers, rewards[1:-2], strict=True) if reward > 0.05}
    assert paid == set()  # a few scorers pay a hundredth for any text
    assert rewards[-1] <= 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_all_scorers_that_evaluate_are_known():
    """A new version of reasoning-gym may have more of them."""
    import reasoning_gym

    folder = reasoning_gym.__path__[0]
    command = ["grep", "-rlE", r"\b(eval|exec|parse_expr|sympify)\(", "--include=*.py", folder]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = {os.path.basename(name).removesuffix(".py") for name in files}
    on_their_own_text = {
        "basic_arithmetic",
        "bitwise_arithmetic",
        "codeio",
        "generators_00_49",
        "generators_50_99",
        "number_sorting",
        "propositional_logic",
    }
    assert found == {*EVALUATING, *on_their_own_text}


def test_honest_forms_that_a_scorer_understands_still_count(evaluating):
    (matrix,) = of_task(evaluating, "binary_matrix")
    as_list = str([[int(x) for x in row.split()] for row in matrix.answer.splitlines()])
    (integral,) = of_task(evaluating, "simple_integration")
    answered = [
        (matrix, tagged(as_list)),
        (integral, tagged(f"sqrt(4) - 2 + ({integral.answer})")),
        (integral, tagged(f"log(abs(x)) - log(abs(x)) + ({integral.answer})")),
        (integral, tagged("sin(x) + 1.5")),
    ]
    assert evaluating.score(answered) == [0.1, 1.0, 1.0, 0.0]


def test_fractions_are_paid_only_when_asked_for(evaluating, monkeypatch):
    (matrix,) = of_task(evaluating, "binary_matrix")
    as_list = str([[int(x) for x in row.split()] for row in matrix.answer.splitlines()])
    answered = [(matrix, tagged(as_list)), (matrix, tagged(matrix.answer))]
    assert evaluating.score(answered) == [0.1, 1.0]
    monkeypatch.setattr(evaluating, "partial_rewards", False)
    assert evaluating.score(answered) == [0.0, 1.0]


@pytest.mark.parametrize(("seconds", "restarts"), [(process.SCORE_SECONDS, 0), (0.5, 1)])
def test_a_slow_answer_is_stopped_and_costs_the_others_nothing(logic, monkeypatch, seconds, restarts):
    """The process stops it by itself; an answer that blocks the process costs a restart."""
    monkeypatch.setattr(process, "SCORE_SECONDS", seconds)
    before = logic.scorer.restarts
    (slow,) = of_task(logic, "propositional_logic")
    honest = of_task(logic, "chain_sum", 2)
    answered = [(honest[0], tagged(honest[0].answer)), (slow, tagged(SLOW)), (honest[1], tagged(honest[1].answer))]
    assert logic.score(answered) == [1.0, 0.0, 1.0]
    assert logic.scorer.restarts == before + restarts


def test_what_a_peer_cannot_have_scored_in_its_time_is_left_out_and_counted(logic, caplog):
    (slow,) = of_task(logic, "propositional_logic")
    (honest,) = of_task(logic, "chain_sum")
    answered = [(honest, tagged(honest.answer)), *[(slow, tagged(SLOW))] * 64]
    rewards = logic.score(answered, seconds=2.0)
    assert rewards[0] == 1.0 and set(rewards[1:]) <= {0.0} and len(rewards) < 5
    assert logic.scorer.late == len(answered) - len(rewards)
    assert "answers of a peer are left out" in caplog.text
    assert logic.score([(honest, tagged(honest.answer))] * 2) == [1.0, 1.0]


def test_a_peer_gets_no_more_questions_made_than_its_time_allows(logic):
    made = logic.questions(range(60_000), seconds=1.0)
    assert 0 < len(made) < 60_000
    assert made[:20] == logic.questions(range(min(20, len(made))))


def test_answers_that_are_no_text_at_all_harm_nothing(logic):
    honest = of_task(logic, "chain_sum", 1)[0]
    odd = ["\ud800", "\udfff" * 100, "\x00", "1\x00", "\n{}\n", "\U0010ffff" * 100, '{"end": true}', "\u2028"]
    rewards = logic.score([(honest, tagged(text)) for text in odd] + [(honest, tagged(honest.answer))])
    assert rewards == [0.0] * len(odd) + [1.0]
    assert logic.scorer.restarts == 0


def test_a_process_that_dies_is_started_again_and_asks_the_same(logic):
    before = logic.questions(range(5))
    honest = [q for q in before if q.answer is not None]
    os.kill(logic.scorer._process.pid, signal.SIGKILL)
    assert logic.questions(range(5)) == before
    os.kill(logic.scorer._process.pid, signal.SIGKILL)
    assert logic.score([(q, tagged(q.answer)) for q in honest]) == [1.0] * len(honest)
    assert logic.scorer.restarts >= 2


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_secrets_and_open_files_of_the_node_do_not_reach_the_process(tmp_path, monkeypatch):
    """Nor does the process outlive its owner."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("IDENTITY_PATH", str(tmp_path / "swarm.pem"))
    (tmp_path / "swarm.pem").write_text("key")
    with open(tmp_path / "swarm.pem") as key:
        os.set_inheritable(key.fileno(), True)
        scorer = ScoringProcess([Task("chain_sum")])
        try:
            pid = scorer._process.pid
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = dict(line.partition(b"=")[::2] for line in file.read().split(b"\0") if line)
            opened = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
            directory = os.readlink(f"/proc/{pid}/cwd")
        finally:
            scorer.close()
    assert variables.keys() <= {
        *(b"PYTHONHASHSEED", b"PYTHONPATH", b"PYTHONUTF8", b"TZ", b"LC_CTYPE", b"LD_LIBRARY_PATH"),
        *(b"OMP_NUM_THREADS", b"OPENBLAS_NUM_THREADS", b"MKL_NUM_THREADS"),
    }
    assert variables[b"PYTHONHASHSEED"] == b"0"
    assert [name for name in opened if not name.startswith("pipe:") and name != "/dev/null"] == []
    assert directory != str(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task("no_such_task"), "no task 'no_such_task'"),
        (Task("composite"), "composite"),
        (Task("chain_sum", config={"min_terms": 5, "max_terms": 2}), "chain_sum.*min_terms.*5"),
        (Task("chain_sum", config={"colour": "red"}), "chain_sum has no setting 'colour'; it has .*max_terms"),
        (Task("chain_sum", config={"size": 10}), "no setting 'size'"),
        (Task("chain_sum", config={"seed": 10}), "no setting 'seed'"),
        (Task("count_primes", config={"max_n": 10**11}), r"count_primes makes no questions here: .*max_n is 10+;"),
        pytest.param(
            Task("spiral_matrix", config={"max_n": 10**9}),
            "spiral_matrix makes no questions here: .*max_n is 10+;",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Task("chain_sum", config={"min_digits": 10**8, "max_digits": 10**8}),
            "chain_sum makes no questions here: it takes more than 10 s.*_digits is 10+;",
            marks=pytest.mark.slow,
        ),
        (Task("word_sorting", config={"max_words": "many"}), "word_sorting"),
    ],
)
def test_a_task_that_cannot_be_used_is_named_with_its_setting(task, words):
    """The time limit holds whatever the code does."""
    with pytest.raises(TaskError, match=words):
        ScoringProcess([Task("gcd"), task])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "chain sum"}, "no name of a task"),
        ({"name": "x" * 10_000}, "no name of a task"),
        ({"name": "__import__('os')"}, "no name of a task"),
        ({"weight": -1.0}, "weight -1"),
        ({"weight": 0.0}, "weight 0"),
        ({"weight": 1e300}, "weight 1e\\+300"),
        ({"config": {"max_terms": 10**13}}, "setting max_terms of the task chain_sum is beyond 1e\\+12"),
        ({"config": {"max_terms": -(10**300)}}, "max_terms"),
        ({"config": {"max_terms": [1] * 200}}, "max_terms of the task chain_sum is a list of 200"),
        ({"config": {"max_terms": [1, 10**15]}}, "max_terms of the task chain_sum holds a value that is beyond"),
        ({"config": {"style": "x" * 300}}, "style of the task chain_sum is a text of 300"),
        ({"config": {f"k{i}": 1 for i in range(40)}}, "40 settings"),
        ({"config": {"a b": 1}}, "'a b'"),
        ({"config": {f"k{i}": "x" * 250 for i in range(20)}}, "characters"),
    ],
)
def test_settings_of_a_task_are_bounded_before_anything_is_made_of_them(fields, words):
    encoded = msgspec.json.encode({"name": "chain_sum", **fields})
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.json.decode(encoded, type=Task)
    with pytest.raises(ValueError, match=words):
        Task(**{"name": "chain_sum", **fields})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_settings_and_weights_are_finite(value):
    with pytest.raises(ValueError, match="max_terms of the task gcd is no finite number"):
        Task("gcd", config={"max_terms": value})
    with pytest.raises(ValueError, match="weight"):
        Task("gcd", weight=value)


def test_a_process_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('it is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=r"does not start.*it is broken"):
        ScoringProcess([Task("gcd")])


def test_one_task_may_stand_in_the_list_with_two_configurations():
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = Reasoning([Task("chain_sum", config=easy), Task("chain_sum")])
    try:
        questions = environment.questions(range(40))
        assert {q.number for q in questions} == {0, 1}
        assert set(environment.score([(q, tagged(q.answer)) for q in questions])) == {1.0}
    finally:
        environment.close()


def test_scoring_nothing_is_nothing(logic):
    assert logic.score([]) == []
    assert logic.score([(Question("chain_sum", 1, 1, "", None), "no answer at all")]) == [0.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("so <answer> 4 </answer>\n \n", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("<answer>3 <answer>4</answer>", "4"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>4</answer> done", None),
        ("<answer>4</answer><answer>", None),
        ("<answer>4</answer></answer>", None),
        ("<answer></answer>", None),
        ("<answer>  </answer>", None),
        ("<ANSWER>4</ANSWER>", None),
        ("</answer>", None),
        ("4", None),
        ("", None),
        ("<answer>" + "x" * MAX_ANSWER + "</answer>", "x" * MAX_ANSWER),
        ("<answer>" + "x" * (MAX_ANSWER + 1) + "</answer>", None),
        ("<answer>" + "x" * 100_000 + "</answer>", None),
    ],
)
def test_the_answer_is_what_stands_between_the_last_tags_if_nothing_follows(text, answer):
    assert extract(text) == answer


@given(st.text(), st.text(alphabet=st.characters(blacklist_characters="<>"), min_size=1))
def test_an_answer_is_found_behind_any_thoughts_and_never_with_a_tag_in_it(thoughts, answer):
    found = extract(f"{thoughts}<answer>{answer}</answer>")
    assert found == (answer.strip() or None)
    anything = extract(thoughts)
    assert anything is None or "answer>" not in anything


@pytest.mark.parametrize("said", [[{}], ["a"], [None], [1.0, 1.0, 1.0]])
def test_a_child_that_says_what_no_scorer_says_is_replaced(monkeypatch, said):
    """Code of an answer may reply for its child: it earns nothing, and the node continues."""
    scorer = ScoringProcess([Task("chain_sum")])
    try:
        (question,) = scorer.questions([1])
        answered = [(question, question.answer), (question, "wrong")]
        right = scorer.score(answered)
        with monkeypatch.context() as patch:
            patch.setattr(scorer, "_ask", lambda *request: iter(said))
            assert scorer.score(answered) == [0.0, 0.0]
        assert scorer.score(answered) == right and right[0] == 1.0
    finally:
        scorer.close()


@pytest.mark.parametrize("said", [b'"\xff"\n', b"[" * 100_000 + b"\n", b"{\n"])
def test_a_child_that_says_what_is_no_json_is_replaced(monkeypatch, said):
    scorer, read, heard = ScoringProcess([Task("chain_sum")]), process._read, [said]
    try:
        (question,) = scorer.questions([1])
        before = scorer.restarts
        monkeypatch.setattr(process, "_read", lambda *where: heard.pop() if heard else read(*where))
        scorer.score([(question, question.answer), (question, "wrong")])
        assert scorer.restarts > before and scorer.score([(question, question.answer)]) == [1.0]
    finally:
        scorer.close()
