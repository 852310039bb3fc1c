"""The precision of products on a CPU is measured once on a machine, and all processes use the result."""

import os
import subprocess
import sys

import pytest

from rl_swarm.learning.cpu import precision

CHOOSE = "from rl_swarm.learning.cpu import precision; print(precision.chosen(256))"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    precision.chosen.cache_clear()
    yield tmp_path / "rl-swarm" / "precision"
    precision.chosen.cache_clear()


def measured(monkeypatch, speed_up):
    precision.chosen.cache_clear()  # as a process that starts
    monkeypatch.setattr(precision, "speed_up", lambda width: speed_up)
    return precision.chosen(256)


@pytest.mark.parametrize(
    "speed_up, choice", [(0.25, "float32"), (0.6, "bfloat16"), (1.0, "bfloat16"), (2.0, "bfloat16")]
)
def test_float32_is_chosen_only_where_it_is_faster_by_a_margin(monkeypatch, speed_up, choice):
    assert measured(monkeypatch, speed_up) == choice


def test_the_first_measurement_on_a_machine_counts_for_all_later_processes(monkeypatch, cache):
    assert measured(monkeypatch, 0.25) == "float32"
    assert measured(monkeypatch, 4.0) == "float32"
    (file,) = cache.iterdir()
    assert file.read_text() == "float32"
    file.write_text("junk")
    assert measured(monkeypatch, 4.0) == "bfloat16"


def test_processes_that_start_together_choose_alike(cache):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [
        subprocess.Popen([sys.executable, "-c", CHOOSE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate()[0].strip() for process in started}
    (file,) = cache.iterdir()
    assert answers == {file.read_text()} and answers < {"bfloat16", "float32"}


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "rl-swarm").write_text("a file, where a folder should be")
    assert measured(monkeypatch, 0.25) == "float32"


def test_a_product_is_measured_in_both():
    assert precision.speed_up(256) > 0
