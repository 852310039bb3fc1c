"""The speed benchmarks run, small, and their figures add up; every benchmark explains itself."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from processes import CHECKOUT, run_benchmark

SMALL = ["--questions", "2", "--completions", "2", "--tokens", "8", "--prompt", "16", "--repeats", "1"]
SMALL += ["--device", "cpu", "--threads", "1"]


BENCHMARKS = {
    path.relative_to(CHECKOUT / "benchmarks").with_suffix("").as_posix().replace("/", "."): path.read_text()
    for path in sorted((CHECKOUT / "benchmarks").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
}
NO_HELP = {"robustness.fault_node"}  # hands its options on to rl-swarm


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_opens_with_its_command_and_stands_in_the_readme(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(BENCHMARKS[name])) or ""
    assert f"\n\n    python -m benchmarks.{name}" in docstring
    assert f"`{name}`" in (CHECKOUT / "benchmarks/README.md").read_text()


@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - NO_HELP))
def test_a_benchmark_answers_help_without_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('--help needs no torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = run_benchmark(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python -m benchmarks.{name}" in done.stdout


def figures(name: str, *arguments: str) -> Any:
    done = run_benchmark(name, *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_round_of_ours_is_measured_in_both_cases() -> None:
    result = figures("learner.round", *SMALL, "--systems", "ours")
    fixed, natural = result["cases"]["fixed"]["ours"], result["cases"]["natural"]["ours"]
    assert fixed["tokens"] == fixed["trained_tokens"] == 2 * 2 * 8
    assert natural["tokens"] <= fixed["tokens"]
    assert natural["trained_tokens"] < fixed["trained_tokens"]
    assert fixed["round_s"] == pytest.approx(fixed["generate_s"] + fixed["train_s"])
    assert fixed["round_s"] > 0
    assert fixed["ratio"] == 1
    assert result["ratios"] == {}


@pytest.mark.slow
def test_our_sampler_is_measured_against_transformers() -> None:
    result = figures("learner.sampler", *SMALL, "--samplers", "ours,dynamic")
    samplers = result["samplers"]
    assert set(samplers) == {"ours", "dynamic"}
    assert all(row["tokens"] == 2 * 2 * 8 and row["seconds"] > 0 for row in samplers.values())
    assert result["limit_ms"] > 0
    expected = samplers["dynamic"]["seconds"] / samplers["ours"]["seconds"]
    assert result["ratios"]["dynamic"] == pytest.approx(expected)


@pytest.mark.slow
def test_the_dashboard_is_measured_at_its_start_and_under_load_and_every_answer_is_right() -> None:
    result = figures("dashboard.load", "start", "load", "--quick")
    assert 0 < result["start"]["first_s"] <= result["start"]["worst_s"]
    assert result["start"]["processor_s"] > 0
    load = result["load"]
    assert load["wrong"] == {} and load["viewers_lost"] == 0
    assert load["pages"] > 0 and load["told"] >= load["viewers"] and load["rounds_played_meanwhile"] > 0
    assert 0 < load["median_ms"] <= load["p95_ms"] <= load["worst_ms"]
    assert 0 < load["rss_start"] <= load["rss_most"] and load["page_bytes"] > 1000


@pytest.mark.slow
def test_the_work_of_the_map_is_measured_and_it_rests_when_nothing_changes() -> None:
    (row,) = figures("dashboard.map", "--nodes", "20", "--rounds", "3")["sizes"]
    assert 0 < row["frame_median_ms"] <= row["frame_p95_ms"] and row["frames"] > 0
    assert (row["quiet_frames"], row["hidden_frames"]) == (0, 0)


def test_programs_judged_per_second_are_counted_and_every_verdict_is_right() -> None:
    rows = figures("learner.sandbox", "--programs", "80", "--tests", "1", "--repeats", "1")
    assert {"a fresh Python process per test", "a fork per program, not isolated"} < set(rows)
    assert any(name.startswith("ours") for name in rows)
    assert all(row["per_second"] > 0 and row["times"] > 0 for row in rows.values())


def test_unknown_systems_are_refused_with_the_known_ones() -> None:
    done = run_benchmark("learner.round", "--systems", "ours,theirs")
    assert done.returncode == 2
    assert "--systems theirs: choose from ours, genrl, trl" in done.stderr


@pytest.mark.slow
def test_nodes_that_share_a_device_are_measured_against_one_alone() -> None:
    result = figures("learner.shared_gpu", *SMALL, "--nodes", "3")
    one, three = result["runs"]
    assert (one["nodes"], three["nodes"]) == (1, 3)
    assert "3 nodes need together" in three["plan"]
    for run in (one, three):
        assert run["round_s"] == pytest.approx(run["sample_s"] + run["train_s"])
        assert run["sample_s"] > 0 and run["train_s"] > 0 and run["peak_bytes"] > 0
    assert result["ratio"] == pytest.approx(three["round_s"] / one["round_s"])
