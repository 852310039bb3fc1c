"""An experiment that is watched while its runs go on: the numbers of its report, as far as it has come."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browsing import Visit, address_of, opened
from playwright.sync_api import expect
from processes import end, run, start
from small_runs import SmallRun
from starlette.testclient import TestClient
from test_page import pytestmark as needs_chromium

from rl_swarm.experiment import conclusion, report
from rl_swarm.experiment.arms import Arm, Job
from rl_swarm.experiment.conclusion import ArmComparison
from rl_swarm.experiment.lockstep import rewind
from rl_swarm.experiment.measures import Measure
from rl_swarm.experiment.progress import ExperimentProgress, followed
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import METRICS
from rl_swarm.web.experiment import create_experiment_app

ROUNDS = 4


def signed(share: float) -> str:
    """Format a change as the page does."""
    digits = 1 if abs(share) < 0.095 else 0
    return f"{100 * share:+.{digits}f}".replace("-", "−") if round(100 * share, digits) else "0"


ALONE, SHARING = Arm(2, 0, "alone"), Arm(2, 2)


class SmallExperiment:
    """Two arms and a seed, played by the calls of a test."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.runs = {arm.label: self.begin(arm, 1) for arm in (ALONE, SHARING)}

    def begin(self, arm: Arm, seed: int) -> SmallRun:
        job = Job(arm, seed, ROUNDS, 2)
        folder = self.out / "runs" / job.name
        made = SmallRun(folder, nodes=2, total=ROUNDS)
        job.write(LocalFiles(folder))
        return made

    def play(self, label: str, rounds: int, more: float = 0.0) -> None:
        made = self.runs[label]
        for _ in range(rounds):
            if made.state.round == ROUNDS - 1:
                for number, identity in enumerate(made.identities):
                    made.score(identity, "end", 0.5 + more + number / 10)
            made.play(more=more)


@pytest.fixture
def experiment(tmp_path: Path) -> SmallExperiment:
    made = SmallExperiment(tmp_path / "e")
    made.play("2/0", ROUNDS)
    made.play("2/2 sapo", 2, more=0.1)
    return made


def test_when_all_have_finished_it_stands_as_the_report_says(experiment: SmallExperiment) -> None:
    progress = followed(experiment.out)
    experiment.play("2/2 sapo", 2, more=0.1)
    assert progress.poll() and not progress.poll()
    state = progress.state()
    numbers = report.as_numbers(report.find([experiment.out]))["configurations"]
    assert state.phase == "finished" and [arm.arm for arm in state.arms] == list(numbers)
    for arm in state.arms:
        found = numbers[arm.arm]
        for name in ("training_set", "fresh_local"):
            assert vars(getattr(arm, name)) == pytest.approx(found[name]["total"])
        assert vars(arm.held_out_start) == pytest.approx(found["held_out"]["sampled"]["start"])
        assert vars(arm.held_out) == pytest.approx(found["held_out"]["sampled"]["end"])
        for name, change in found["against"].get("2/0", {}).items():
            assert vars(getattr(arm, f"{name}_change")) == pytest.approx(change)
        for name, change in found["against_at_equal_tokens"].get("2/0", {}).items():
            assert vars(getattr(arm, f"{name}_change_equal_tokens")) == pytest.approx(change)
    for name in ("fresh_local", "training_set", "held_out"):
        assert progress.curves(name, 100)["2/2 sapo"] == [
            (after, pytest.approx(mean)) for after, mean, _, _ in numbers["2/2 sapo"][name]["by_round"]
        ]


def test_at_equal_tokens_an_arm_that_writes_more_is_counted_up_to_the_cheaper_one(tmp_path: Path) -> None:
    experiment = SmallExperiment(tmp_path / "e")
    long = experiment.runs["2/2 sapo"]
    write = long.write_round
    long.write_round = lambda *told: write(*told, tokens=100)  # type: ignore[method-assign]
    experiment.play("2/0", ROUNDS)
    experiment.play("2/2 sapo", ROUNDS // 2)
    experiment.play("2/2 sapo", ROUNDS // 2, more=0.5)
    found = report.as_numbers(report.find([experiment.out]))["configurations"]["2/2 sapo"]
    sharing = followed(experiment.out).state().arms[1]
    assert vars(sharing.fresh_local_change_equal_tokens) == pytest.approx(
        found["against_at_equal_tokens"]["2/0"]["fresh_local"]
    )
    assert sharing.fresh_local_change_equal_tokens.mean == pytest.approx(0), "its later rounds are not paid for"
    assert sharing.fresh_local_change.mean > 0.9


def test_the_conclusion_says_whether_the_interval_lies_above_zero(experiment: SmallExperiment) -> None:
    early = followed(experiment.out).state()
    assert (early.verdict, early.conclusion) == ("early", "Too early to say: 1 of 2 runs have finished.")
    experiment.play("2/2 sapo", 2, more=0.1)
    state = followed(experiment.out).state()
    assert state.verdict == "more"
    assert state.conclusion == (
        "Sharing (2/2 sapo) raised the reward of fresh answers by 39 % (35 to 44), compared with training alone (2/0), "
        "at the same number of generated tokens. With one seed, this is how nodes differ, not how runs do."
    )


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (Measure(0.062, 0.041, 0.081), "more", "raised the reward of fresh answers by 6.2 % (4.1 to 8.1)"),
        (Measure(-0.3, -0.4, -0.2), "less", "lowered the reward of fresh answers by 30 % (20 to 40)"),
        (Measure(0.01, -0.2, 0.3), "unclear", "changed the reward of fresh answers by +1.0 % (−20 to +30)"),
        (Measure(0.0, 0.0, 0.0), "unclear", "changed the reward of fresh answers by 0 % (0 to 0)"),
    ],
)
def test_a_change_is_told_in_words(change: Measure, verdict: str, words: str) -> None:
    other = ArmComparison(Arm(8, 8), "8/0", Measure(1.0, 0.9, 1.1), 3)
    alone = ArmComparison(Arm(4, 0), None, None, 3)
    found = conclusion.of([alone, other, ArmComparison(Arm(4, 4), "4/0", change, 3)], [True] * 9)
    assert found[0] == verdict and words in found[1] and "(4/4 sapo)" in found[1], "as published, not the best"
    assert found[1].startswith("No clear difference: sharing" if verdict == "unclear" else "Sharing")
    assert conclusion.of([alone], [True])[0] == "nothing" and conclusion.of([], [])[0] == "early"


def test_a_packed_experiment_stands_as_the_one_that_it_was_packed_from(experiment: SmallExperiment) -> None:
    experiment.play("2/2 sapo", 2, more=0.1)
    packed = experiment.out.parent / "packed" / "e.jsonl.xz"
    report.pack(experiment.out, packed)
    whole, read = followed(experiment.out), followed(packed)
    assert read.state().arms == whole.state().arms and not read.poll()
    assert read.state().runs == [replace(run, packed=True) for run in whole.state().runs]
    assert read.curves("fresh_local", 100) == whole.curves("fresh_local", 100)
    with TestClient(create_experiment_app(packed, ["localhost"]), "http://localhost") as client:
        state = client.get("/api/experiment").json()["state"]
        assert (state["name"], state["phase"], len(state["runs"])) == ("e", "finished", 2)
        assert client.get("/run/2-0-seed1/api/overview").status_code == 404, "its runs have no pages"


def test_an_arm_that_goes_on_is_compared_up_to_the_round_that_both_have_played(experiment: SmallExperiment) -> None:
    state = followed(experiment.out).state()
    alone, sharing = state.arms
    assert state.phase == "running" and (alone.played, sharing.played) == (ROUNDS, 2)
    assert alone.fresh_local.mean == pytest.approx(ROUNDS * (0.25 + 0.26))
    assert sharing.fresh_local.mean == pytest.approx(2 * (0.35 + 0.36))
    assert sharing.fresh_local_change.mean == pytest.approx(0.355 / 0.255 - 1)
    assert sharing.held_out.mean == 0.2, "its last look was before the first round"
    assert sharing.held_out_change.mean == pytest.approx(0.0), "and that of the other then"
    experiment.begin(ALONE, 2).play()
    again = followed(experiment.out).state()
    assert again.arms[0] == alone, "a finished seed does not wait for one that has just begun"
    assert [(run.run, run.phase, run.played) for run in again.runs] == [
        ("2-0-seed1", "finished", 4),
        ("2-0-seed2", "running", 1),
        ("2-2-sapo-seed1", "running", 2),
    ]


def test_rounds_that_a_crash_took_back_are_not_counted(experiment: SmallExperiment) -> None:
    progress = followed(experiment.out)
    made = experiment.runs["2/2 sapo"]
    for node in made.names:
        rewind(made.journals[node].logs[METRICS], 0)
    progress.poll()
    assert progress.state().arms[1].played == 1
    for node in made.names:
        made.write_round(node, 1, 0.9, [])
    progress.poll()
    assert progress.state().arms[1].fresh_local.mean == pytest.approx(0.35 + 0.36 + 2 * 0.9)


def test_nothing_yet_is_told_too(tmp_path: Path) -> None:
    progress = ExperimentProgress(tmp_path)
    Job(SHARING, 1, ROUNDS, 2).write(LocalFiles(tmp_path / "runs" / "2-2-sapo-seed1"))
    assert progress.poll()
    state = progress.state()
    assert (state.phase, state.runs[0].phase, state.arms[0].fresh_local) == ("waiting", "waiting", None)
    with TestClient(create_experiment_app(tmp_path, ["localhost"]), "http://localhost") as client:
        assert client.get("/api/experiment/curves").json()["rounds"] == []


def test_tables_and_curves_are_there_as_csv_and_every_run_by_its_name(experiment: SmallExperiment) -> None:
    with TestClient(create_experiment_app(experiment.out, ["localhost"]), "http://localhost") as client:
        (_, sharing) = csv.DictReader(io.StringIO(client.get("/api/experiment?format=csv").text))
        assert (sharing["arm"], sharing["against"], sharing["seeds"]) == ("2/2 sapo", "2/0", "1")
        assert float(sharing["fresh_local_low"]) <= float(sharing["fresh_local"]) == pytest.approx(1.42)
        curves = list(csv.DictReader(io.StringIO(client.get("/api/experiment/curves?format=csv").text)))
        assert [float(row["2/0"]) for row in curves] == [0.255] * ROUNDS and curves[3]["2/2 sapo"] == ""
        runs = client.get("/api/experiment/runs?format=csv").text
        assert runs.splitlines()[1] == "2-0-seed1,2/0,1,finished,4,4,False"
        assert client.get("/api/experiment/curves?metric=luck").status_code == 422
        assert client.get("/run/2-0-seed1/api/overview").json()["experiment"] == "e"
        assert client.get("/run/2-0-seed9/api/overview").status_code == 404
        assert client.get("/api/experiment", headers={"Host": "example.org"}).status_code == 400


@pytest.fixture
def watched(experiment: SmallExperiment) -> Iterator[str]:
    process = start(experiment.out.parent, "watch", "e", "--port", "18850")
    yield address_of(process)
    end(process)


@needs_chromium
def test_the_page_shows_arms_and_runs_and_changes_by_itself(experiment: SmallExperiment, watched: str) -> None:
    with opened() as browser:
        visit = Visit(browser, watched)
        page = visit.open("")
        sharing = page.get_by_label("Ways of training", exact=True).locator("tbody tr").nth(1)
        expect(sharing).to_contain_text("against 2/0")
        expect(sharing).to_contain_text("2 of 4")
        expect(sharing).to_contain_text("+39 %")
        expect(page.locator("canvas")).to_have_count(3)
        expect(page.locator("figure .key", has_text="2/2 sapo")).to_have_count(3)
        expect(page.locator(".conclusion")).to_have_text("Too early to say: 1 of 2 runs have finished.")
        assert not visit.barriers()
        experiment.play("2/2 sapo", 2, more=0.1)
        expect(page.locator("#phase")).to_have_text("finished")
        expect(sharing).to_contain_text("4 of 4")
        expect(sharing).to_contain_text("0.200 → 0.650")
        expect(page.locator(".conclusion.more")).to_contain_text(
            "raised the reward of fresh answers by 39 % (35 to 44)"
        )
        found = report.as_numbers(report.find([experiment.out]))["configurations"]["2/2 sapo"]
        page.locator("#more summary").click()
        shown = page.locator(".forest tbody tr", has_text="2/2 sapo against 2/0").locator("td.number").all_inner_texts()
        equal, plain = found["against_at_equal_tokens"]["2/0"], found["against"]["2/0"]
        changes = [
            equal["fresh_local"],
            equal["held_out"],
            *(plain[m] for m in ("fresh_local", "held_out", "training_set")),
        ]
        assert shown == ["{} % ({} to {})".format(*(signed(c[k]) for k in ("mean", "low", "high"))) for c in changes]
        assert page.locator(".forest circle").count() == len(changes), "and drawn"
        places = page.locator(".forest circle").first.evaluate(
            "dot => ['zero', 'whisker'].map(name => dot.parentNode.querySelector(`.${name}`).getBoundingClientRect().x)"
        )
        assert places[0] < places[1], "its interval lies right of zero"
        assert not visit.barriers()
        page.get_by_role("link", name="2-2-sapo-seed1").click()
        expect(page).to_have_title("Overview · 2-2-sapo-seed1")
        page.get_by_role("link", name="Experiment").click()
        expect(page).to_have_title("e · RL Swarm")
        visit.close()
        phone = Visit(browser, watched, 360, "dark")
        expect(phone.open("").get_by_label("Ways of training", exact=True)).to_contain_text("0.650")
        assert phone.too_wide() <= 0 and not phone.barriers()
        phone.close()


def test_status_tells_it_in_a_shell(experiment: SmallExperiment) -> None:
    where = experiment.out.parent
    code, output = run(where, "status", "e")
    assert code == 0 and "1 of 2 runs have finished" in output and "against 2/0" in output, output
    code, output = run(where, "status", "e", "--json")
    assert code == 0 and json.loads(output)["arms"][1]["played"] == 2
    code, output = run(where, "watch", "e", "--tui")
    assert code == 0 and "2-2-sapo-seed1 running 2/4" in output, output
    report.pack(experiment.out, where / "e.jsonl.xz")
    code, output = run(where, "status", "e.jsonl.xz")
    assert code == 0 and "1 of 1 runs have finished" in output and output.startswith("e  "), output
