"""A swarm in a terminal: the numbers of the page, in any width, and nothing that a stranger wrote reaches the
terminal."""

import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from processes import RL_SWARM, SMALL, end, run
from rich.cells import cell_len
from rich.console import Console
from small_runs import SmallRun

from benchmarks.lib.paths import STATE
from rl_swarm.cli.live import print_once
from rl_swarm.cli.runs import list_runs
from rl_swarm.cli.summary import print_summary
from rl_swarm.experiment import drawing as standing
from rl_swarm.experiment.progress import ArmState, ExperimentState
from rl_swarm.monitor import snapshot
from rl_swarm.monitor.charts import bar, chart, curve, spread
from rl_swarm.monitor.drawing import FRAMES, Drawing, clock, packed, plain
from rl_swarm.monitor.records import Event
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.protocol.identity import Identity, animal_name
from rl_swarm.protocol.wire import seal
from rl_swarm.telemetry.journal import METRICS
from rl_swarm.telemetry.schema import AnsweredQuestion, HeldOutRecord

NOBODY = 2**31 - 1  # a process id that no system hands out
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b2J[red]markup[/] \u202ereversed\u202c\r\n"


def drawn(run: SmallRun, width: int = 100, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    drawing = Drawing(RunView(run.root))
    drawing.refresh()
    console.print(drawing.draw(width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_tells_the_numbers_of_the_page(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=3, total=5)
    for _ in range(2):
        run.play()
    run.score(run.identities[0], "now", 0.5)
    drawing = Drawing(RunView(run.root))
    told = drawing.refresh()
    seen = drawn(run)
    assert "round 2/5" in seen and "3 of 3 nodes online" in seen and "model tiny" in seen
    assert f"{told.rollouts} rollouts" in seen and f"{told.tokens} tokens" in seen
    assert "test score 0.200 → 0.300" in seen and "40% external groups" in seen
    assert f"reward {told.reward:.2f}" in seen and "left" not in seen
    for row in snapshot.nodes(drawing.follower).nodes:
        line = next(line for line in seen.splitlines() if row.name in line and f"{row.reward:.2f}" in line)
        assert line.split()[0] == str(row.rank) and f" {row.wins} " in line
    assert f"{animal_name(run.identities[0].peer_id)} joined" in seen


def test_who_is_gone_is_said_and_what_stopped_or_finished_too(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=2)
    gone = Identity.generate()
    run.identities.append(gone)
    run.journals[gone.node] = run.journals[run.names[0]]
    run.join(gone, NOBODY)
    run.play()
    assert f"{animal_name(gone.peer_id)} (offline)" in drawn(run) and "2 of 3 nodes online" in drawn(run)
    run.play()
    assert "round 2/2" in drawn(run) and "measuring the test score" in drawn(run)
    other = SmallRun(tmp_path / "other", total=2, pid=NOBODY)
    assert "crashed: 2 nodes ended without leaving" in drawn(other, 120)
    for journal in other.journals.values():
        journal.event("left", round=0)
    assert "stopped: no node is online" in drawn(other, 120)


def test_the_time_that_is_left_follows_from_the_rounds_seen(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=6)
    times = iter([0.0, 0.0, 20.0])
    drawing = Drawing(RunView(run.root), clock=lambda: next(times))
    assert drawing.seconds_left(drawing.refresh()) is None
    run.play()
    assert drawing.seconds_left(drawing.refresh(now=True)) == 20.0 * 5


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_any_width_is_readable_and_no_line_is_longer(tmp_path: Path, width: int) -> None:
    run = SmallRun(tmp_path / "run", nodes=3, total=5)
    run.play()
    lines = drawn(run, width).splitlines()
    assert max(map(cell_len, map(str.rstrip, lines))) <= width
    if width >= 60:
        assert all(any(animal_name(i.peer_id) in line and "0.2" in line for line in lines) for i in run.identities)
        assert any({"node", "reward", "trend", "wins"} <= set(line.split()) for line in lines)
    assert any("external" in line for line in lines) or width < 80


def test_a_low_terminal_shows_the_best_and_says_how_many_more_there_are(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=20, total=5)
    run.play()
    lines = drawn(run, 80, 24).splitlines()
    assert len(lines) < 24 and animal_name(run.identities[-1].peer_id) in "".join(lines[:9])
    shown = sum(bool(re.match(r" ?\d+  ", line)) for line in lines)
    assert 3 <= shown < 20 and f"and {20 - shown} more" in lines
    assert len(drawn(run, 80).splitlines()) > 24, "without a terminal all are shown"


def test_text_of_strangers_is_text(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=5)
    run.play()
    hostile = run.identities[1]
    peer = RunView.open(run.root).nodes[hostile.node].peer
    assert peer is not None
    run.files.write(f"peers/{hostile.node}.json", seal(replace(peer, model=ESCAPES), hostile))
    run.journals[hostile.node].event(f"x{ESCAPES}"[:32], round=0, words=ESCAPES)
    seen = drawn(run, 200)
    assert "owned" in seen and "[red]markup[/]" in seen and "reversed" in seen
    assert all(letter.isprintable() for letter in seen.replace("\n", ""))
    assert plain("a\tb" * 999, 5) == "a ba "


def harmless(seen: str) -> bool:
    return all(letter.isprintable() for letter in seen.replace("\n", ""))


def test_what_models_wrote_is_text_in_the_summary_of_a_run_too(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "[red]" / "run", nodes=1, total=5)
    (node,) = run.names
    run.journals[node].logs[METRICS].replace(b"")
    tasks = {ESCAPES: 0.5}
    for when, greedy in (("start", None), ("now", 0.5)):
        run.journals[node].metrics(HeldOutRecord(
            when=when, round=0, questions=1, sampled=0.5, greedy=greedy, well_formed=0.5,
            accuracy_well_formed=0.5, by_task=tasks, greedy_by_task={}, well_formed_by_task=tasks,
            accuracy_well_formed_by_task=tasks,
            examples=[AnsweredQuestion(ESCAPES, ESCAPES, "1", ESCAPES, 0.0)],
        ))  # fmt: skip
    console = Console(file=io.StringIO(), width=400, color_system=None)
    print_summary(RunView.open(run.root), 1.0, console)
    assert isinstance(console.file, io.StringIO)
    seen = console.file.getvalue()
    assert seen.count("[red]markup[/]") == 3, "a question, and two answers"
    assert "1 model stayed at 50 % on unseen questions" in seen
    assert "[red]/run" in seen and harmless(seen)


def test_folders_that_others_named_are_listed_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ESCAPES.replace("/", "").strip() + "[red"
    SmallRun(tmp_path / "good", total=5)
    shutil.copytree(tmp_path / "good", tmp_path / name)
    list_runs(tmp_path)
    seen = capsys.readouterr().out
    assert "owned" in seen and "[red]markup" in seen and harmless(seen)


def test_an_experiment_of_others_is_drawn_as_text() -> None:
    arm = ArmState(ESCAPES, 1, [1], 1, 1, None, None, None, None, ESCAPES, None, None, None)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(standing.drawn(ExperimentState(ESCAPES, "running", [arm], [], 0, 0), 200))
    assert isinstance(console.file, io.StringIO)
    assert "owned" in console.file.getvalue() and harmless(console.file.getvalue())


def test_numbers_of_strangers_are_short_and_harmless(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=5)
    run.play()
    for node, reward in zip(run.names, (9e14, 1e308), strict=True):
        run.write_round(node, 1, reward, [])
    run.score(run.identities[0], "now", 1e308)
    drawing = Drawing(RunView(run.root))
    drawing.refresh()
    for when in (1e308, -1e308):
        drawing.follower.events.append(Event(when, run.names[0], "somebody", "joined", None, ""))
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(drawing.draw(60))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert any("reward" in line and "trend" in line and "wins" in line for line in lines)
    assert any("--:--:--  somebody joined" in line for line in lines) and any("5e+14" in line for line in lines)
    assert [clock(seconds) for seconds in (61.0, -1.0, float("inf"), float("nan"))] == ["1:01", "?", "?", "?"]


def crowded(tmp_path: Path, nodes: int = 40) -> SmallRun:
    """Write a swarm of many nodes, of which the last three are offline."""
    run = SmallRun(tmp_path / "run", nodes=nodes, total=5)
    for identity in run.identities[-3:]:
        run.join(identity, NOBODY)
    for number, identity in enumerate(run.identities):
        run.score(identity, "now", number / nodes)
    return run


def test_a_large_swarm_is_summed_up_on_one_screen_and_listed_when_asked(tmp_path: Path) -> None:
    run = crowded(tmp_path)
    run.tick()
    gone = [animal_name(identity.peer_id) for identity in run.identities[-3:]]
    for height in (None, 24, 40):
        seen = drawn(run, 80, height)
        assert len(seen.splitlines()) < (height or 40) and "and 30 more" in seen and "--all" in seen
        assert "37 of 40 nodes online" in seen and "test scores of 40 nodes" in seen
        assert "lowest 0.00 · 10 % below 0.10 · half below 0.50 · 10 % above 0.88 · highest 0.97" in seen
        assert all(name in next(line for line in seen.splitlines() if "offline: " in line) for name in gone[:2])
    assert sum(bool(re.match(r" *\d+  ", line)) for line in seen.splitlines()) == 10
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_once(RunView(run.root), console, every=True)
    assert isinstance(console.file, io.StringIO)
    every = console.file.getvalue()
    assert all(animal_name(identity.peer_id) in every for identity in run.identities) and "more" not in every


def test_a_wide_terminal_shows_the_curve_and_the_events_beside_the_table(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=3, total=9)
    for step in range(4):
        run.play(more=step / 10)
    wide, narrow = drawn(run, 200).splitlines(), drawn(run, 80).splitlines()
    first = next(line for line in wide if line.startswith("1  "))
    assert "█" in "".join(wide) and any(line.rstrip().endswith(" joined  with tiny") for line in wide)
    assert len(wide) < 24 and any("round 1 to 4" in line for line in wide)
    assert cell_len(first.rstrip()) > 100 and max(cell_len(line.rstrip()) for line in wide) <= 200
    assert not any("round 1 to 4" in line for line in narrow)


def test_before_the_first_round_it_says_which_step_the_nodes_are_at(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=5)
    (run.root / STATE).unlink()
    shutil.move(run.root / "peers", tmp_path / "peers")
    drawing = Drawing(RunView(run.root), wanted=4)

    def step() -> str:
        overview = drawing.refresh(now=True)
        return drawing.status(overview, 80).plain

    assert step() == "loading the model, 2 of 4 nodes ready"
    drawing.wanted = 2
    assert step() == "first answers to the unseen questions, 0 of 2 nodes ready"
    shutil.move(tmp_path / "peers", run.root / "peers")
    assert step() == "2 nodes ready, the first round begins"
    overview = drawing.refresh()
    moving = {drawing.status(overview, 80, seconds).plain[0] for seconds in (60.0, 60.2, 60.4)}
    assert len(moving) == 3 and drawing.status(overview, 80, 61.0).plain[2:].startswith("1:01  2 nodes")


def test_the_bar_has_its_own_colours_and_shows_without_any() -> None:
    half, whole = bar(5, 10, 20), bar(10, 10, 20)
    assert half.plain == "━" * 10 + "┄" * 10 and whole.plain == "━" * 20
    assert bar(0, 0, 4).plain == "┄" * 4 and bar(9, 3, 4).plain == "━" * 4
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    console.print(half, whole)
    assert isinstance(console.file, io.StringIO)
    codes = set(re.findall(r"\x1b\[([0-9;]+)m", console.file.getvalue()))
    assert codes == {"36", "90", "32", "0"}, "cyan, grey, green: nothing red"


def test_a_chart_has_the_highest_and_the_lowest_value_beside_it() -> None:
    lines = [line.plain for line in chart([0.1, 0.2, None, 0.9], 11, 3)]
    assert lines == ["  0.90    █", "          █", "  0.10 ▁▄ █"]
    assert chart([], 40, 8) == [] and chart([0.5], 3, 8) == []
    assert [line.plain.strip()[-1] for line in spread([1.0, 1.0], 60)[:1]] == ["2"]


def test_curves_and_facts_in_characters() -> None:
    assert curve([0.0, None, 0.5, 1.0]) == "▁ ▅█" and curve([0.3, 0.3]) == "▁▁" and curve([None]) == ""
    assert packed(["one", "two", "three"], 9) == ["one · two", "three"]


def test_without_a_terminal_it_is_shown_once(tmp_path: Path) -> None:
    swarm = SmallRun(tmp_path / "run", total=5)
    swarm.play()
    code, seen = run(tmp_path, "watch", "run", "--tui", timeout=240)
    assert code == 0 and "round 1/5" in seen and "\x1b" not in seen
    assert all(animal_name(identity.peer_id) in seen for identity in swarm.identities)
    assert run(tmp_path, "status", "run", timeout=240) == (0, seen)
    code, said = run(tmp_path, "watch", "run", "--tui", "--port", "9000", timeout=240)
    assert code == 2 and "--port" in said
    code, said = run(tmp_path, "watch", "nowhere", "--tui", timeout=240)
    assert code == 1 and "nowhere is no swarm" in said and "Traceback" not in said


class Terminal:
    """Runs a command in a pseudo-terminal of so many columns and 30 lines, and collects what it writes there."""

    def __init__(self, cwd: Path, columns: int, *arguments: str, **environ: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.seen = b""
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [*RL_SWARM, *arguments], cwd=cwd, env={**own, "TERM": "xterm-256color", **environ},
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
        os.close(self.ours)

    def read(self) -> bool:
        if not select.select([self.ours], [], [], 1.0)[0]:
            return True
        try:
            found = os.read(self.ours, 65536)
        except OSError:  # the command has closed it
            return False
        self.seen += found
        return bool(found)

    def until(self, words: bytes) -> None:
        deadline = time.monotonic() + 240
        while words not in self.seen and self.read():
            assert time.monotonic() < deadline, self.seen
        assert words in self.seen, self.seen

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace"))


def test_up_moves_from_the_first_second_on_and_ends_with_the_sentence(tmp_path: Path) -> None:
    flags = ["--run", "runs/one", "--nodes", "1", "--rounds", "2", "--device", "cpu", *SMALL]
    with Terminal(tmp_path, 80, "up", *flags) as terminal:
        while terminal.read():
            pass
        assert terminal.process.wait(240) == 0
    shown = terminal.text()
    before = re.split(r"round \d/2", shown)[0]
    assert "loading the model, 0 of 1 node ready" in before
    assert len(set(re.findall(f"([{FRAMES}]) 0:0", before))) > 3, "the spinner turns while there is only a process"
    assert "1 model " in shown and "on unseen questions" in shown and "rl-swarm chat runs/one" in shown
    colours = set(re.findall(rb"\x1b\[([0-9;]*)m\xe2\x94\x81", terminal.seen))
    assert colours and not any(b"31" in colour for colour in colours), "the bar is not red"


def test_without_colours_the_bar_still_shows_how_much_is_done(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=4)
    run.play()
    with Terminal(tmp_path, 60, "status", "run", NO_COLOR="1") as terminal:
        terminal.until("━━┄".encode())
        while terminal.read():
            pass
    assert not re.findall(rb"\x1b\[[0-9;]*3[0-9]m", terminal.seen)


def test_join_and_coordinate_say_what_they_wait_for_and_move(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    with Terminal(tmp_path, 80, "join", "drive/x/swarm", "--set", "poll_interval=0.1") as terminal:
        (tmp_path / "drive" / "x").mkdir(exist_ok=True)
        terminal.until(b"waiting for the coordinator")
        terminal.seen = b""
        terminal.until("⠴".encode())
        terminal.until("⠙".encode())
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(120) == 130


@pytest.mark.slow
def test_in_a_terminal_it_moves_until_ctrl_c(tmp_path: Path) -> None:
    swarm = SmallRun(tmp_path / "run", total=9)
    swarm.play()
    with Terminal(tmp_path, 60, "watch", "run", "--tui") as terminal:
        terminal.until(b"round 1/9")
        swarm.play()
        terminal.until(b"round 2/9")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(b"\x1b[?25h")  # the cursor is back
        assert terminal.process.wait(120) == 130
    assert b"Traceback" not in terminal.seen and b"\x1b[1A" in terminal.seen, "it was drawn in place"
