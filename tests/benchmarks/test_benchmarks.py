"""The speed benchmarks run, small, and their figures add up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--questions", "2", "--completions", "2", "--tokens", "8", "--prompt", "16", "--repeats", "1"]
SMALL += ["--device", "cpu", "--threads", "1"]


def figures(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *SMALL, *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_a_round_of_ours_is_measured_in_both_cases() -> None:
    result = figures("round.py", "--systems", "ours")
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
    result = figures("sampler.py", "--samplers", "ours,dynamic")
    samplers = result["samplers"]
    assert set(samplers) == {"ours", "dynamic"}
    assert all(row["tokens"] == 2 * 2 * 8 and row["seconds"] > 0 for row in samplers.values())
    assert result["limit_ms"] > 0
    expected = samplers["dynamic"]["seconds"] / samplers["ours"]["seconds"]
    assert result["ratios"]["dynamic"] == pytest.approx(expected)


@pytest.mark.slow
def test_the_dashboard_is_measured_at_its_start_and_under_load_and_every_answer_is_right() -> None:
    command = [sys.executable, str(BENCHMARKS / "dashboard.py"), "start", "load", "--quick", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["start"]["first_s"] <= result["start"]["worst_s"]
    assert result["start"]["processor_s"] > 0
    load = result["load"]
    assert load["wrong"] == {} and load["viewers_lost"] == 0
    assert load["pages"] > 0 and load["told"] >= load["viewers"] and load["rounds_played_meanwhile"] > 0
    assert 0 < load["median_ms"] <= load["p95_ms"] <= load["worst_ms"]
    assert 0 < load["rss_start"] <= load["rss_most"] and load["page_bytes"] > 1000


def test_programs_judged_per_second_are_counted_and_every_verdict_is_right() -> None:
    command = [sys.executable, str(BENCHMARKS / "sandbox.py"), "--programs", "80", "--tests", "1"]
    command += ["--repeats", "1", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {"a fresh Python process per test", "a fork per program, not isolated"} < set(rows)
    assert any(name.startswith("ours") for name in rows)
    assert all(row["per_second"] > 0 and row["times"] > 0 for row in rows.values())


def test_unknown_systems_are_refused_with_the_known_ones() -> None:
    command = [sys.executable, str(BENCHMARKS / "round.py"), "--systems", "ours,theirs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "--systems theirs: choose from ours, genrl, trl" in done.stderr


@pytest.mark.slow
def test_nodes_that_share_a_device_are_measured_against_one_alone() -> None:
    result = figures("together.py", "--nodes", "3")
    one, three = result["runs"]
    assert (one["nodes"], three["nodes"]) == (1, 3)
    assert "3 nodes need together" in three["plan"]
    for run in (one, three):
        assert run["round_s"] == pytest.approx(run["sample_s"] + run["train_s"])
        assert run["sample_s"] > 0 and run["train_s"] > 0 and run["peak_bytes"] > 0
    assert result["ratio"] == pytest.approx(three["round_s"] / one["round_s"])
