"""Untrusted code is run, judged and contained: in real processes, as root and as an ordinary user."""

import ast
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
import sandbox_attacks
from hypothesis import given
from hypothesis import strategies as some
from sandbox_attacks import ATTACKS, descendants, play

from rl_swarm.cli import doctor
from rl_swarm.errors import UserError
from rl_swarm.scoring import lockdown
from rl_swarm.scoring.sandbox import sandbox
from rl_swarm.scoring.sandbox.literals import MAX_TEXT, read, same, write
from rl_swarm.scoring.sandbox.sandbox import MAX_REQUEST, Program, Sandbox, Test, available

OFFERED = {offer.isolation: offer for offer in available()}
ORDINARY = 12345  # a user that is nobody here
HELPERS = Path(__file__).parents[1] / "helpers"


def needs(isolation):
    """Where CI is set Linux has to have it, so that the tests cannot be left out by accident."""
    offer = OFFERED[isolation]
    optional = isolation == "monty" or sys.platform != "linux" or "CI" not in os.environ
    if offer.problem and optional:
        pytest.skip(f"no {isolation} here: {offer.problem}")
    assert not offer.problem


@pytest.fixture(scope="module", params=["namespaces", "seccomp", "monty"])
def box(request):
    needs(request.param)
    made = Sandbox(request.param, workers=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def best():
    needs("namespaces")
    made = Sandbox(workers=1, cpu_seconds=0.3)
    assert made.isolation == "namespaces"
    yield made
    made.close()


def program(code, *tests):
    return Program(code, tuple(Test(call, expected) for call, expected in tests))


def verdict(box, code, *tests):
    (found,) = box.judge([program(code, *tests)])
    return found


def test_programs_are_judged_by_the_results_of_their_calls(box):
    code = "def add(a, b):\n    return a + b\n"
    verdicts = box.judge(
        [
            program(code, ("add(2, 3)", "5"), ("add('a', 'b')", "'ab'"), ("add([1], [2])", "[1, 2]")),
            program(code, ("add(2, 3)", "6"), ("add(2, 3)", "5")),
            program(code, ("add(2, 'a')", "5"), ("add(1, 1)", "2")),
            program("def add(a, b):\n    return a ++ ", ("add(2, 3)", "5")),
            program("1 / 0", ("1", "1"), ("2", "2")),
            program(code, ("subtract(3, 2)", "1")),
            program(code),
            program(code, ("add(1, 2)", "add(1, 2)")),
        ]
    )
    assert [found.passed for found in verdicts] == [
        (True, True, True), (False, True), (False, True), (False,), (False, False), (False,), (), (False,)
    ]  # fmt: skip
    assert [found.right for found in verdicts] == [True] + [False] * 7
    assert verdicts[0].error == "" and verdicts[1].error == "add(2, 3) gave 5"
    assert verdicts[2].error.startswith("add(2, 'a'): TypeError")
    assert "Syntax" in verdicts[3].error and "ZeroDivisionError" in verdicts[4].error
    assert "NameError" in verdicts[5].error and "0 tests" in verdicts[6].error
    assert verdicts[7].error.startswith("a test expects add(1, 2), which is no literal")


HONEST = {
    "floats differ in their last digits": ("def f(): return 0.1 + 0.2", "0.3"),
    "an integer is a float": ("def f(): return 2", "2.0"),
    "a counter is a dictionary": (
        "from collections import Counter\ndef f(): return Counter('aab')",
        "{'a': 2, 'b': 1}",
    ),
    "sets have no order": ("def f(): return {3, 1, 2}", "{1, 2, 3}"),
    "nothing": ("def f(): pass", "None"),
    "bytes": ("def f(): return b'\\0\\xc8'", r"b'\x00\xc8'"),
    "letters": ("def f(): return 'é\\n\\'\"😀'", "'é\\n\\'\"😀'"),
    "not a number": ("def f(): return [float('nan'), -float('inf')]", "[nan, -inf]"),
    "deep": ("def f(): return ((1, [2, {'k': (3,)}]), ())", "((1, [2, {'k': (3,)}]), ())"),
    "much is printed": ("def f():\n    for n in range(2000): print('x' * 50)\n    return 1", "1"),
    "sleeping takes no time": ("import time\ndef f():\n    time.sleep(1000)\n    return 1", "1"),
}
IN_CPYTHON = {
    "generators": ("def g():\n    yield 1\ndef f(): return list(g())", "[1]"),
    "any module of the library": (
        "import colorsys, xml.etree.ElementTree as t\ndef f(): return t.fromstring('<a/>').tag", "'a'",
    ),
    "classes with annotations": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef f(): return P(3).x", "3",
    ),
    "sets in the same order everywhere": ("def f(): return list({'b', 'a', 'c', 'd'})", None),
    "chance is the same everywhere": ("import random\ndef f(): return random.random()", "0.8444218515250481"),
    "no input": ("import sys\ndef f(): return sys.stdin.read()", "''"),
    "no name of a script": ("x = 0\nif __name__ == '__main__': x = 1\ndef f(): return x", "0"),
    "recursion": ("def f(n=900): return n and 1 + f(n - 1)", "900"),
    "lock": ("import threading\ndef f():\n    with threading.Lock(): return 1", "1"),
}  # fmt: skip


def test_honest_programs_are_right_in_every_isolation(box):
    tried = HONEST if box.isolation == "monty" else {**HONEST, **IN_CPYTHON}
    same_order = subprocess.run(
        [sys.executable, "-c", "print(list({'b', 'a', 'c', 'd'}))"],
        env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    programs = [program(code, ("f()", expected or same_order)) for code, expected in tried.values()]
    found = dict(zip(tried, box.judge(programs), strict=True))
    assert {name: each.error for name, each in found.items() if not each.right} == {}


WRONG = {
    "a list is no tuple": ("def f(): return [1]", "(1,)"),
    "a string is no number": ("def f(): return '1'", "1"),
    "nearly": ("def f(): return 0.3001", "0.3"),
    "too large for a float": ("def f(): return 10**400", "1.5"),
    "one too many": ("def f(): return {1: 2, 3: 4}", "{1: 2}"),
    "a function": ("def f(): return f", "1"),
}


def test_wrong_programs_are_wrong_in_every_isolation(box):
    found = box.judge([program(code, ("f()", expected)) for code, expected in WRONG.values()])
    assert not any(each.right for each in found)


def test_programs_as_long_as_allowed_are_run_and_longer_ones_are_not(box):
    def long(size):
        code = "def f(): return 1\n"
        return program(code + "#" * (size - len(code) - len("f()") - 2), ("f()", "1"))

    most, more = box.judge([long(MAX_REQUEST), long(MAX_REQUEST + 1)])
    assert most.right and f"more than {MAX_REQUEST} bytes" in more.error
    text = "x" * (MAX_TEXT - 2)
    assert verdict(box, f"def f(): return 'x' * {MAX_TEXT - 2}", ("f()", repr(text))).right
    found = verdict(box, f"def f(): return 'x' * {MAX_TEXT - 2}", *[("f()", repr(text))] * 3)
    assert found.passed[0] and not found.passed[2]
    assert verdict(box, "def f(): return 1", *[("f()", "1")] * 100).right


def run_as_ordinary_user(isolation):
    """The attacks in a process of a user without rights. Python may lie where only root may look, /root for example:
    then such folders are covered, in a mount namespace, by empty ones with nothing but what is needed in them."""
    needed = [sys.base_prefix, str(Path(sandbox.__file__).parents[3]), str(HELPERS)]
    shut = {}
    for path in needed:
        for folder in [*reversed(Path(path).parents), Path(path)]:
            if not folder.stat().st_mode & 1:
                shut[path] = folder
                break
    kept = {path: f"/mnt/{number}" for number, path in enumerate(shut)}
    steps = ["mount -t tmpfs none /mnt"]
    steps += [f"mkdir {place} && mount --bind {path} {place}" for path, place in kept.items()]
    steps += [f"mount -t tmpfs -o mode=755 none {folder}" for folder in sorted(set(shut.values()))]
    steps += [f"mkdir -p {path} && mount --bind {place} {path}" for path, place in kept.items()]
    command = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"]
    command += [os.path.realpath(sys.executable), "-S", str(HELPERS / "sandbox_attacks.py"), isolation]
    if shut:
        command = ["unshare", "--mount", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh", *command]
    environment = {"PYTHONPATH": needed[1], "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("isolation", ["namespaces", "seccomp"])
@pytest.mark.parametrize("who", ["as it is started", pytest.param("as an ordinary user", marks=pytest.mark.slow)])
def test_every_attack_is_contained_and_changes_no_verdict(isolation, who, tmp_path, monkeypatch):
    needs(isolation)
    monkeypatch.setenv("SANDBOX_SECRET", "")
    if who == "as it is started":
        assert play(isolation, tmp_path) == []
        return
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    found = run_as_ordinary_user(isolation)
    assert found == {"user": ORDINARY, "found": []}


def test_every_attack_is_contained_by_the_interpreter_that_is_safe_by_itself(tmp_path, monkeypatch):
    needs("monty")
    monkeypatch.setenv("SANDBOX_SECRET", "")
    assert play("monty", tmp_path) == []


def test_without_a_sandbox_the_same_attacks_succeed(tmp_path, monkeypatch):
    """So the tests above can fail."""
    monkeypatch.setenv("SANDBOX_SECRET", "")
    world = sandbox_attacks.World(tmp_path)
    attacks = {name: world.fill(attack.code) for name, attack in ATTACKS.items() if attack.alone}
    script = (
        "import json\n"
        "contained = []\n"
        f"for name, code in {attacks!r}.items():\n"
        "    names = {}\n"
        "    exec(code, names)\n"
        "    if names['attack']() == 'kept out': contained.append(name)\n"
        "print(json.dumps(contained))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    world.server.close()
    assert len(attacks) > 25
    assert json.loads(done.stdout.splitlines()[-1]) == []


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can read another process's memory")


def memory_of_servers():
    """The memory that children inherit, by address."""
    for pid in descendants(os.getpid()):
        with (
            suppress(FileNotFoundError, ProcessLookupError),  # a program's child that is just ending
            open(f"/proc/{pid}/maps") as maps,
            open(f"/proc/{pid}/mem", "rb", 0) as memory,
        ):
            for line in maps:
                place, rights = line.split()[:2]
                if rights.startswith("rw") and "[v" not in line:
                    first, last = (int(edge, 16) for edge in place.split("-"))
                    memory.seek(first)
                    yield (pid, first), memory.read(last - first)


@only_root
def test_the_fork_server_never_holds_code_or_expected_values(best):
    found = verdict(best, "mark = 'code-of-' + 'one-task'\n#marked-code", ("mark", "'code-of-one-task'"))
    assert found.right
    assert len(descendants(os.getpid())) >= 2
    looked_at = 0
    for _, content in memory_of_servers():
        looked_at += len(content)
        for secret in (b"marked-code", b"code-of-one-task"):
            assert secret not in content
    assert looked_at > 1 << 20


@only_root
@pytest.mark.parametrize("isolation", ["namespaces", pytest.param("seccomp", marks=pytest.mark.slow)])
def test_the_process_that_forks_forgets_how_a_program_ended(isolation):
    """Otherwise the next child, which inherits its memory, could read a message of the last one."""
    needs(isolation)
    box = Sandbox(isolation, workers=1)

    def holding(number):
        word = struct.pack("=I", number)
        return {(*place, at) for place, content in memory_of_servers() for at in places(content, word)}

    def places(content, word):
        at = content.find(word)
        while at >= 0:
            if at % 4 == 0:
                yield at
            at = content.find(word, at + 1)

    try:
        for status in (0xA7, 0xB3, 0x95, 0xE1):
            before = holding(status << 8)  # as `wait` tells it
            assert verdict(box, f"import os\nos._exit({status})", ("1", "1")).error == "it ended early"
            assert holding(status << 8) <= before
    finally:
        box.close()


@pytest.mark.parametrize("isolation", ["namespaces", "seccomp"])
def test_a_program_that_takes_too_long_by_the_clock_is_ended_and_told_so(isolation):
    """It is stopped from outside, so that it uses no processor time."""
    needs(isolation)
    box = Sandbox(isolation, cpu_seconds=30.0, workers=1, wall_seconds=2.0)
    (process,) = box._idle
    waiting = descendants(process.process.pid)
    found = []
    judging = threading.Thread(target=lambda: found.extend(box.judge([program("while True: pass", ("1", "1"))])))
    try:
        judging.start()
        deadline = time.monotonic() + 240
        while not (running := set(descendants(process.process.pid)) - set(waiting)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for pid in running:
            os.kill(pid, signal.SIGSTOP)
        judging.join()
        assert [each.error for each in found] == ["too slow: it takes more than 2 s by the clock"]
        assert verdict(box, "def f(): return 1", ("f()", "1")).right
        assert box.restarts == 0
    finally:
        judging.join()
        box.close()


def test_time_that_the_machine_takes_away_is_not_the_programs(best):
    """Its process is stopped for longer than its time limit."""
    code = "def f():\n    total = 0\n    for n in range(1_000_000): total += n\n    return total"
    began, held, times = threading.Event(), 0.05, 20
    assert held * times > best.cpu_seconds

    def hold_up():
        began.wait()
        for _ in range(times):
            everybody = descendants(os.getpid())
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in everybody:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
                time.sleep(held if number == signal.SIGSTOP else 0.002)

    thread = threading.Thread(target=hold_up)
    thread.start()
    began.set()
    assert verdict(best, code, ("f()", "499999500000")).right
    thread.join()


def test_a_process_that_was_killed_from_outside_costs_no_program_its_verdict(best):
    right = program("def f(): return 1", ("f()", "1"))
    assert best.judge([right])[0].right
    before = best.restarts
    for pid in descendants(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    assert [found.right for found in best.judge([right] * 3)] == [True] * 3
    assert best.restarts == before + 1


LITTER = {  # what a program may leave in its folder
    "a folder that nobody may enter": "os.mkdir('/tmp/a', 0)",
    "more levels than files can be open": "os.makedirs('/tmp/' + 'a/' * 50)",
    "some of each": "os.makedirs('/tmp/a/b'); os.mkdir('/tmp/a/b/c', 0); open('/tmp/a/b/d', 'w').close()",
}


@pytest.mark.parametrize("isolation", ["namespaces", "seccomp", "monty"])
def test_what_a_program_leaves_costs_later_ones_nothing(isolation):
    needs(isolation)
    right = program("def f(): return 1", ("f()", "1"))
    box = Sandbox(isolation, workers=4)
    try:
        for left in LITTER.values():
            box.judge([program(f"import os\n{left}", ("1", "1"))] * 4)
        assert [found.right for found in box.judge([right] * 4)] == [True] * 4
        assert box.restarts == 0
        if isolation == "namespaces":
            assert verdict(box, "import os\nleft = os.listdir('/tmp')", ("left", "[]")).right
    finally:
        box.close()


def test_programs_at_the_same_time_have_folders_of_their_own():
    """Each program writes a file, computes until both run, and lists the files."""
    needs("namespaces")
    code = (
        "import os, time\n"
        "open('/tmp/of-{0}', 'w').close()\n"
        "while time.process_time() < 0.3: pass\n"
        "seen = os.listdir('/tmp')\n"
    )
    box = Sandbox("namespaces", workers=2)
    try:
        found = box.judge([program(code.format(who), ("seen", f"['of-{who}']")) for who in "ab"])
        assert [each.error for each in found] == ["", ""]
        assert len(box._idle) == 2, "each had a process of its own"
    finally:
        box.close()


def test_processes_that_ended_while_they_waited_cost_no_program_a_try():
    needs("namespaces")
    right = program("def f(): return 1", ("f()", "1"))
    box = Sandbox("namespaces", workers=1)
    try:
        box._idle.extend(sandbox.SandboxProcess("namespaces", 1.0, 20.0) for _ in range(sandbox.MAX_TRIES))
        for process in box._idle:
            os.killpg(process.process.pid, signal.SIGKILL)
            process.process.wait()
        assert box.judge([right])[0].right
        assert box.restarts == sandbox.MAX_TRIES + 1
    finally:
        box.close()


def test_programs_whose_turn_does_not_come_are_not_judged(best):
    loop = program("while True: pass", ("1", "1"))
    verdicts = best.judge([loop] * 20, seconds=0.5)
    assert verdicts[0].judged and "too slow" in verdicts[0].error
    assert not verdicts[-1].judged and not verdicts[-1].right and "not judged" in verdicts[-1].error
    assert best.judge([program("x = 1", ("x", "1"))], seconds=60.0)[0].right


def test_nothing_is_left_when_a_sandbox_is_closed_or_its_owner_dies(tmp_path):
    script = (
        "import os, sys\n"
        "from rl_swarm.scoring.sandbox.sandbox import *\n"
        "box = Sandbox(workers=1)\n"
        "box.judge([Program('x = 1', (Test('x', '1'),))])\n"
        "print('ready', flush=True)\n"
        "box.judge([Program('while True: pass', (Test('x', '1'),))])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout.readline() == b"ready\n"
    left = descendants(owner.pid)
    assert left
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 240
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < deadline, "a process outlived its owner"
        time.sleep(0.02)


def without(*names):
    """Starts Python where the kernel knows no such system calls, as on an old one or in a strict container."""
    numbers = {"unshare": (272, 97), "landlock": (444, 444), "seccomp": (317, 277)}
    column = lockdown.MACHINES[os.uname().machine][0]
    steps = [(0x20, 0, 0, 0)]
    for name in names:
        steps += [(0x15, 0, 1, numbers[name][column]), (0x06, 0, 0, 0x00050000 | 38)]
    program = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (0x06, 0, 0, 0x7FFF0000)])
    return (
        "from rl_swarm.scoring import lockdown\n"
        "from rl_swarm.scoring.sandbox import sandbox\n"
        "from rl_swarm.errors import UserError\n"
        f"lockdown.no_new_privileges(); lockdown.filter_installer({program!r})()\n"
    )


def told(script):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_best_isolation_that_holds_is_taken_and_code_is_refused_where_none_does():
    needs("namespaces")
    use = "box = sandbox.Sandbox(); print(box.isolation); box.close()\n"
    assert told(without() + use) == "namespaces\n"
    assert told(without("landlock") + use) == "namespaces\n"
    assert told(without("unshare") + use) == "seccomp\n"
    hide = "sandbox.ISOLATIONS.pop('monty')\n"  # as if it were not installed
    refused = told(
        without("unshare", "landlock") + hide + f"try:\n    {use.strip()}\nexcept UserError as error: print(error)\n"
    )
    assert "Code of models and strangers is not run here" in refused
    assert "namespaces: " in refused and "seccomp: " in refused and "pip install 'rl-swarm[monty]'" in refused
    unfiltered = told(without("seccomp") + hide + f"try:\n    {use.strip()}\nexcept UserError as error: print(error)\n")
    assert "Code of models and strangers is not run here" in unfiltered


@pytest.mark.processes
def test_the_doctor_says_which_isolation_is_active():
    needs("namespaces")
    lines = list(doctor.code())
    assert lines[0] == (True, f"programs of models and peers run behind {sandbox.ISOLATIONS['namespaces']}")


def test_the_doctor_says_where_no_code_is_run_and_what_would_help():
    needs("namespaces")
    look = "doctor.CHECKS = [('running code', doctor.code)]\nprint('ended with', doctor.examine())\n"
    hide = "from rl_swarm.cli import doctor\nsandbox.ISOLATIONS.pop('monty')\n"
    said = " ".join(told(without("unshare", "landlock") + hide + look).split())
    assert said.startswith("-- running code: only the environment coding needs it.")
    assert "not run here" in said and "pip install 'rl-swarm[monty]'" in said
    assert said.endswith("All checks passed, except the lines with --. Start with: rl-swarm up ended with 0")


def test_an_unknown_isolation_is_refused():
    with pytest.raises(UserError, match="namespaces, seccomp, monty"):
        Sandbox("firejail")


PLAIN = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20) | some.binary(max_size=20),
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.lists(inner, max_size=4).map(tuple)
        | some.dictionaries(some.text(max_size=5) | some.integers(), inner, max_size=4)
        | some.sets(some.integers() | some.text(max_size=5), max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_what_is_written_is_read_as_it_was(value):
    assert same(read(write(value)), value)
    text = repr(value)
    if "nan" not in text and "inf" not in text:
        assert read(text) == ast.literal_eval(text)


@given(some.text(alphabet="[](){},:'\"\\bruxN01.eE-+_ \nsetnaif", max_size=60))
def test_any_other_text_is_refused_and_never_more_than_python_allows(text):
    try:
        value = read(text)
    except ValueError:
        return
    if "nan" not in text and "inf" not in text:
        assert value == eval(text.strip(), {"__builtins__": {"set": set}})


@pytest.mark.parametrize(
    "text",
    ["-" * 60_000 + "1", "[" * 60_000, "9" * 5000, "'" + "\\" * 9999, "(" * 40 + ")" * 40, "{" * 9999, "1 " * 9999],
)
def test_texts_made_to_break_a_parser_are_refused(text):
    with pytest.raises(ValueError):
        read(text)


def test_values_of_subclasses_are_written_as_what_they_extend():
    for value in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        assert read(write(value)) == {"a": 2, "b": 1}
    assert write((1,)) == "(1,)" and write(set()) == "set()" and write(frozenset([1])) == "{1}"
    with pytest.raises(ValueError, match="range"):
        write(range(3))
