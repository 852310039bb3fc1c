"""A locked process cannot harm, whatever code runs in it: attempts in real processes."""

import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time

import pytest

from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.tasks import Task
from rl_swarm.scoring import lockdown, process
from rl_swarm.scoring.process import ScoringProcess

linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in lockdown.MACHINES,
    reason="the kernel's protections are Linux's, here for x86_64 and aarch64",
)


def in_locked_process(code, before=""):
    """Runs code in a process that has locked itself down; returns what it prints."""
    script = (
        "import ctypes, importlib, json, os, signal, socket, subprocess, sys, threading, time\n"
        f"{textwrap.dedent(before)}\n"
        "from rl_swarm.scoring.lockdown import lock_down, packages\n"
        "print(json.dumps(lock_down(packages())))\n"
        f"{textwrap.dedent(code)}\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=240)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_module_that_answers_to_every_name_is_no_package(monkeypatch):
    class Obliging(type(sys)):
        def __getattr__(self, name):
            return self

    monkeypatch.setitem(sys.modules, "obliging", Obliging("obliging"))
    assert any(path.endswith("pytest") for path in lockdown.packages())


ATTEMPTS = {
    "reads a file": "open('{folder}/precious').read()",
    "reads the system's": "open('/etc/passwd').read()",
    "reads what it was started with": "open('/proc/self/environ').read()",
    "reads its parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "lists a folder": "os.listdir('{folder}')",
    "lists home": "os.listdir(os.path.expanduser('~'))",
    "creates a file": "open('{folder}/created', 'w')",
    "writes into one": "open('{folder}/precious', 'r+').write('x')",
    "creates one by number": "os.open('{folder}/created', os.O_CREAT | os.O_RDONLY)",
    "empties one": "os.open('{folder}/precious', os.O_TRUNC)",
    "truncates one": "os.truncate('{folder}/precious', 0)",
    "deletes one": "os.remove('{folder}/precious')",
    "renames one": "os.rename('{folder}/precious', '{folder}/other')",
    "makes a folder": "os.mkdir('{folder}/made')",
    "makes a link": "os.symlink('/etc/passwd', '{folder}/link')",
    "changes who may read": "os.chmod('{folder}/precious', 0o777)",
    "writes into a package": "open(json.__file__, 'a')",
    "writes byte code": "open(json.__file__ + 'c', 'wb')",
    "connects": "socket.create_connection(('127.0.0.1', {port}))",
    "sends a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "opens a local socket": "socket.socket(socket.AF_UNIX)",
    "pairs sockets": "socket.socketpair()",
    "forks": "os.fork()",
    "starts a thread": "threading.Thread(target=print).start()",
    "starts a program": "subprocess.run(['/bin/sh', '-c', ':'])",
    "runs a shell": "sys.exit(0) if os.system('true') == 0 else 1 / 0",
    "becomes a program": "os.execv('/bin/true', ['true'])",
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kills everybody": "os.kill(-1, signal.SIGKILL)",
    "traces its parent": "[1 / 0 if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) else 0]",
    "lifts its limits": "__import__('resource').setrlimit(7, (4096, 4096))",
    "takes another user's name": "os.setuid(12345)",
    "changes its root": "os.chroot('/')",
    "mounts": "[1 / 0 if ctypes.CDLL(None).mount(b'x', b'/mnt', b'tmpfs', 0, None) else 0]",
    "allocates": "bytearray(1 << 30)",
    "maps memory": "__import__('mmap').mmap(-1, 1 << 31)",
}


@linux
def test_a_locked_process_can_do_nothing_to_anything(tmp_path):
    """All attempts in one process, each of which must fail; then it still computes and imports."""
    (tmp_path / "precious").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        attempts = {
            name: text.replace("{folder}", str(tmp_path)).replace("{port}", str(port))
            for name, text in ATTEMPTS.items()
        }
        code = f"""
        succeeded = []
        for name, text in {attempts!r}.items():
            try:
                eval(text)
                succeeded.append(name)
            except (OSError, MemoryError, RuntimeError, ZeroDivisionError, ValueError):
                pass
        print(json.dumps(succeeded))
        import colorsys, hmac
        print(sum(range(10)), len(os.urandom(4)), os.path.exists(json.__file__))
        """
        status, lines, errors = in_locked_process(code)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert status == 0, errors
    assert set(json.loads(lines[0]).values()) == {True}
    assert lines[1:] == ["[]", "45 4 True"]
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_the_lock_the_same_attempts_succeed(tmp_path):
    """So the test above can fail."""
    (tmp_path / "precious").write_text("mine")
    names = ["reads a file", "creates a file", "makes a folder", "pairs sockets", "starts a program", "allocates"]
    code = "\n".join(ATTEMPTS[name].replace("{folder}", str(tmp_path)) for name in names)
    script = f"import os, socket, subprocess\n{code}"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"precious", "created", "made"}


@linux
def test_a_thread_that_was_there_before_is_locked_as_well():
    before = """
    locked, found = threading.Event(), []
    def late():
        locked.wait()
        for attempt in (socket.socket, os.fork, lambda: os.kill(os.getppid(), 0)):
            try:
                attempt()
                found.append('done')
            except OSError:
                found.append('refused')
    thread = threading.Thread(target=late)
    thread.start()
    """
    status, lines, errors = in_locked_process("locked.set(); thread.join(); print(found)", before)
    assert status == 0, errors
    assert lines[1] == "['refused', 'refused', 'refused']"


@pytest.mark.processes
def test_only_protections_that_hold_are_claimed():
    free = lockdown.probe()
    if sys.platform == "linux":
        assert set(free.values()) == {False}
    text = lockdown.describe({"network": True, "reading files": False})
    assert "kept from network" in text and "NOT from reading files" in text
    assert "NOT" not in lockdown.describe({"network": True})


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_the_numbers_of_the_system_calls_are_the_kernels(header, column):
    """The numbers of the kernel's headers: those of x86_64, and those that aarch64 shares with others."""
    if not os.path.exists(header):
        pytest.skip("no header that lists them")
    with open(header) as file:
        known = {found[1]: int(found[2]) for found in re.finditer(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read())}
    known["newfstatat"] = known.get("newfstatat", known.get("fstatat", -1))
    every = {**lockdown.ALLOWED, **lockdown.FOLDER_CALLS, **lockdown.BLOCKING}
    ours = {name: numbers[column] for name, numbers in every.items()}
    ours |= {name: numbers[column] for name, (numbers, _) in lockdown.OPENING.items()}
    ours = {name: number for name, number in ours.items() if number is not None}
    assert len(ours) > 40
    assert {name: known.get(name) for name in ours} == ours


def answer_of(program, number, flags=0):
    """What the kernel would do with a system call, step by step."""
    data = {0: number, 4: lockdown.MACHINES[platform.machine()][1], 24: flags, 32: flags}
    place = value = 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == lockdown.LOAD:
            value = data[operand]
        elif code == lockdown.RETURN:
            return operand
        else:
            holds = {
                lockdown.EQUAL: value == operand,
                lockdown.ABOVE: value >= operand,
                lockdown.ANY_BIT: bool(value & operand),
            }[code]
            place += if_true if holds else if_false


@linux
@pytest.mark.parametrize("for_code", [False, True])
def test_the_filter_answers_every_number_as_the_tables_say(for_code):
    column = lockdown.MACHINES[platform.machine()][0]
    allow, refuse, missing, done = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050000
    expected = {number: refuse if number < lockdown.NEWER else missing for number in range(600)}
    expected |= {numbers[column]: allow for numbers in lockdown.ALLOWED.values()}
    opening = [numbers[column] for numbers, _ in lockdown.OPENING.values() if numbers[column] is not None]
    expected |= dict.fromkeys(opening, allow)
    if for_code:
        expected |= {numbers[column]: allow for numbers in lockdown.FOLDER_CALLS.values()}
        expected |= {numbers[column]: done for numbers in lockdown.BLOCKING.values()}
        expected |= {lockdown.ALLOWED[name][column]: refuse for name in lockdown.SIGNALS | lockdown.REVEALING}
    expected.pop(None, None)
    program = lockdown.call_filter(for_code)
    assert {number: answer_of(program, number) for number in expected} == expected
    assert answer_of(program, 0x40000000) == missing
    yields = lockdown.ALLOWED["sched_yield"][column]
    assert answer_of(program, yields) == (done if for_code else allow), "no code stretches its time by waiting"
    for number in opening:
        assert answer_of(program, number, os.O_WRONLY | os.O_CREAT) == (allow if for_code else refuse)


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@linux
def test_both_scoring_children_are_locked_and_alone():
    scorer = ScoringProcess([Task("chain_sum")])
    try:
        scorer.questions([1])
        scorer.questions([1], seconds=30.0)
        children = children_of(scorer._process.pid)
        assert len(children) == 2
        for child in children:
            with open(f"/proc/{child}/status") as file:
                status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
            assert (status["Seccomp"], status["NoNewPrivs"], status["Threads"]) == ("2", "1", "1")
        assert "NOT" not in scorer.protection()
    finally:
        scorer.close()
    deadline = time.monotonic() + 240
    while any(lives(child) for child in children):
        assert time.monotonic() < deadline, "a child outlived its process"
        time.sleep(0.01)


@pytest.fixture
def disarmed_in_vain(tmp_path, monkeypatch):
    """A scoring process in which answers to `binary_matrix` do run, as if one had found a way."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(
        "import ast\n"
        "literal = ast.literal_eval\n"
        "ast.literal_eval = lambda text: eval(text) if isinstance(text, str) else literal(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "code")
    scorer = ScoringProcess([Task("binary_matrix")])
    yield scorer
    scorer.close()


@linux
def test_code_that_runs_in_spite_of_all_reaches_nothing_and_pays_no_one_else(disarmed_in_vain, tmp_path):
    scorer = disarmed_in_vain
    (question,) = scorer.questions([3])
    rows = [[int(cell) for cell in row.split()] for row in question.answer.splitlines()]

    def after(code):  # the right answer, if the code before it does not fail
        return question, f"[{code}, {rows}][1]"

    modules = "__import__('{}')"
    attempts = [
        f"{modules.format('os')}.listdir('/')",
        f"open({str(tmp_path / 'created')!r}, 'w')",
        f"{modules.format('socket')}.socket()",
        f"{modules.format('os')}.fork()",
        f"{modules.format('os')}.execv('/bin/true', ['true'])",
        f"{modules.format('os')}.kill({os.getpid()}, 0)",
        f"{modules.format('os')}.kill({modules.format('os')}.getppid(), 9)",
        "bytearray(1 << 30)",
    ]
    allowed = scorer.score([after("len('it runs')")], seconds=30.0)
    assert allowed == [0.1]  # what the scorer pays for a list: the code has run
    assert max(scorer.score([after(code) for code in attempts], seconds=30.0)) < 0.1
    assert not (tmp_path / "created").exists()

    pays_all = "setattr(__import__('__main__').Tasks, 'score', lambda *_: 1.0)"
    wrong = Question(question.task, question.number, question.seed, "", None), "wrong"
    scorer.score([after(pays_all)], seconds=30.0)
    assert scorer.score([wrong], seconds=30.0) == [1.0]  # that child belongs to the answer now
    assert scorer.score([wrong, (question, question.answer)]) == [0.0, 1.0]  # the node's own does not

    speaks = "__import__('os').write(4, b'1.0\\n' * 8) + __import__('os').write(5, b'1.0\\n' * 8)"
    scorer.score([after(speaks)], seconds=30.0)
    assert scorer.score([wrong, (question, question.answer)]) == [0.0, 1.0]


ENDS = {
    "it exits": "__import__('os')._exit(0)",
    "it crashes": "__import__('ctypes').string_at(0)",
    "it computes where no signal is noticed": "sum(range(10**12))",
    "it needs too much memory": "bytearray(1 << 31)",
}


@linux
def test_whatever_an_answer_does_to_its_process_the_others_are_scored(disarmed_in_vain):
    scorer = disarmed_in_vain
    (question,) = scorer.questions([3])
    right = (question, question.answer)
    ends = [(question, f"[{code}]") for code in ENDS.values()]
    for seconds in (None, 60.0):
        scorer.restarts = 0
        assert scorer.score([right, *[each for end in ends for each in (end, right)]], seconds) == [
            1.0,
            *[0.0, 1.0] * len(ends),
        ]
        assert scorer.restarts >= 3


@linux
def test_a_child_that_was_killed_from_outside_costs_no_answer_its_reward():
    scorer = ScoringProcess([Task("chain_sum")])
    try:
        (question,) = scorer.questions([1])
        scorer.questions([1], seconds=30.0)
        for child in children_of(scorer._process.pid):
            os.kill(child, signal.SIGKILL)
            while lives(child):
                time.sleep(0.01)
        process_id = scorer._process.pid
        for seconds in (None, 30.0):
            assert scorer.score([(question, question.answer)] * 2, seconds) == [1.0, 1.0]
        assert (scorer.restarts, scorer._process.pid) == (2, process_id)
    finally:
        scorer.close()


@linux
def test_a_process_that_waits_for_nothing_is_ended_by_its_owner(disarmed_in_vain, monkeypatch):
    monkeypatch.setattr(process, "SCORE_SECONDS", 0.3)
    (question,) = disarmed_in_vain.questions([3])
    waits = (question, "[__import__('time').sleep(600)]")
    right = (question, question.answer)
    assert disarmed_in_vain.score([right, waits, right]) == [1.0, 0.0, 1.0]
    assert disarmed_in_vain.restarts == 1
