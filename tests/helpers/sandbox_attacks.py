"""Lists attacks of code on the process that runs it, as data, and runs them all."""

import json
import os
import platform
import secrets
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl_swarm.scoring.sandbox.sandbox import Program, Sandbox, Test

HASTE = 0.1  # seconds of processor time for what never ends
PATIENCE = 2.0  # and for what ends by itself, on however slow a machine
HONEST = "def add(a, b):\n    'honest-code'\n    return a + b"
PROLOGUE = """
import ctypes, gc, os, resource, shutil, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def attack():
    try:
        return attempt()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return "kept out"
"""
IN_MONTY = """
import os, sys, time
def attack():
    try:
        return attempt()
    except Exception as error:
        return "kept out"
"""


@dataclass(frozen=True)
class Attack:
    """Holds code, and which of its tests it may pass. A test of `attack()` expects that it reached nothing."""

    code: str
    passed: tuple[bool, ...] = (True,)
    error: str = ""  # a part of what the verdict says
    alone: bool = False  # outside a sandbox it succeeds and does no harm: so the table can fail


def tries(text: str, alone: bool = False) -> Attack:
    """Make an attempt that must raise: an expression, or statements that end in a `return`."""
    body = text if "return" in text else f"return repr({text})"
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return Attack(f"{PROLOGUE}\ndef attempt():\n{lines}\n", alone=alone)


def ends(text: str, error: str) -> Attack:
    return Attack(f"{PROLOGUE}\n{text}\n", (False,), error)


X86 = platform.machine() == "x86_64"
SECRET_FILES = {
    "reads swarm.pem": tries("open('{pem}').read()", alone=True),
    "climbs to swarm.pem": tries("open('../' * 40 + '{pem}'[1:]).read()", alone=True),
    "reads swarm.pem through its number": tries("syscall(257, -100, b'{pem}', 0)" if X86 else "open('{pem}')"),
    "lists the folder of the key": tries("os.listdir('{folder}')", alone=True),
    "goes to the folder of the key": tries("os.chdir('{folder}')", alone=True),
    "links to swarm.pem by name": tries("os.symlink('{pem}', 'link'); return open('link').read()"),
    "links to swarm.pem": tries("os.link('{pem}', 'link'); return open('link').read()"),
    "renames swarm.pem": tries("os.rename('{pem}', 'mine'); return open('mine').read()"),
    "writes into swarm.pem": tries("open('{pem}', 'a').write('x')"),
    "deletes swarm.pem": tries("os.unlink('{pem}')"),
    "writes beside swarm.pem": tries("open('{folder}/new', 'w').write('x')"),
    "reads the passwords": tries("open('/etc/passwd').read()", alone=True),
    "reads the sandbox's code": tries("open('{package}/scoring/sandbox/sandbox.py').read()", alone=True),
    "lists the root": tries("os.listdir('/')", alone=True),
    "writes into Python's library": tries("open(os.__file__, 'a')"),
    "replaces Python's library": tries("os.rename(os.__file__, os.__file__ + '.old')"),
    "writes where all may": tries("open('/var/tmp/sandbox-was-here', 'w')"),
    "writes into shared memory": tries("open('/dev/shm/sandbox-was-here', 'w')"),
    "goes around through /proc/self/root": tries("open('/proc/self/root{pem}').read()", alone=True),
    "goes around through the node's root": tries("open('/proc/{pid}/root{pem}').read()"),
    "goes around through the first process": tries("open('/proc/1/root{pem}').read()"),
    "goes through its parent's folder": tries("os.listdir(f'/proc/{{os.getppid()}}/cwd')"),
    "opens a file by its handle": tries("syscall(304, -100, b'x' * 64, 0)" if X86 else "open('{pem}')"),
    "sees what the node has open": tries("os.listdir('/proc/{pid}/fd')"),
}
SECRETS_IN_MEMORY = {
    "reads its environment": tries("return os.environ['SANDBOX_SECRET'] if os.environ else 'kept out'", alone=True),
    "asks C for the environment": tries(
        "libc.getenv.restype = ctypes.c_char_p\n"
        "return 'kept out' if libc.getenv(b'SANDBOX_SECRET') is None else 'found'",
        alone=True,
    ),
    "reads the environment it was started with": tries("open('/proc/self/environ').read()", alone=True),
    "reads the node's environment": tries("open('/proc/{pid}/environ').read()", alone=True),
    "reads the node's command": tries("open('/proc/{pid}/cmdline').read()", alone=True),
    "reads its parent's memory": tries("open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)"),
    "reads its own map": tries("open('/proc/self/maps').read()", alone=True),
    "traces its parent": tries("syscall(101 if '{machine}' == 'x86_64' else 117, 16, os.getppid(), 0, 0)"),
    "reads another's memory": tries("syscall(310 if '{machine}' == 'x86_64' else 270, {pid}, 0, 0, 0, 0, 0)"),
    "looks for what is expected, and for others' code": Attack(
        PROLOGUE + "def attempt():\n"
        "    wanted = ['exp' + 'ected-', 'hon' + 'est-code']\n"
        "    frames, frame = [], sys._getframe()\n"
        "    while frame:\n"
        "        frames += [frame.f_locals, frame.f_globals]\n"
        "        frame = frame.f_back\n"
        "    seen, todo = set(), [*gc.get_objects(), *frames, sys.argv, sys.modules]\n"
        "    while todo:\n"
        "        each = todo.pop()\n"
        "        if id(each) in seen:\n"
        "            continue\n"
        "        seen.add(id(each))\n"
        "        if isinstance(each, (str, bytes)) and each is not wanted:\n"
        "            text = each if isinstance(each, str) else each.decode('latin-1')\n"
        "            if any(word in text and len(text) > len(word) for word in wanted):\n"
        "                return text\n"
        "        elif len(seen) < 20_000:\n"
        "            todo += gc.get_referents(each)\n"
        "    return 'kept out'\n"
    ),
}
NETWORK = {
    "connects to the node": tries("socket.create_connection(('127.0.0.1', {port}))", alone=True),
    "opens a socket": tries("socket.socket()", alone=True),
    "sends a datagram": tries("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))", alone=True),
    "opens a local socket": tries("socket.socket(socket.AF_UNIX)", alone=True),
    "pairs sockets": tries("socket.socketpair()", alone=True),
    "asks the kernel about the network": tries("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    "opens a socket by its number": tries("syscall(41 if '{machine}' == 'x86_64' else 198, 2, 1, 0)", alone=True),
    "uses its own socket to pass a file": tries("socket.send_fds(socket.socket(fileno=3), [b'x'], [0])"),
    "looks a name up": tries("socket.getaddrinfo('localhost', 80)[0]"),
}
PROCESSES = {
    "forks": tries("os.fork()"),
    "forks as a bomb": tries("while True: os.fork()\nreturn 'x'"),
    "forks by its number": tries("syscall(56 if '{machine}' == 'x86_64' else 220, 17, 0, 0, 0, 0)"),
    "forks by the newer number": tries("syscall(435, b'\\0' * 88, 88)"),
    "forks as C does": tries("syscall(57 if '{machine}' == 'x86_64' else 220, 17, 0, 0, 0, 0)"),
    "starts a thread": tries("threading.Thread(target=print).start()", alone=True),
    "starts a program": tries("subprocess.run(['/bin/true'])", alone=True),
    "runs a shell": tries("return 'kept out' if os.system('true') else 'ran'", alone=True),
    "becomes a program": tries("os.execv('/bin/true', ['true'])"),
    "leaves a process behind": tries(
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\nreturn 'left'"
    ),
    "becomes a leader": tries("os.setsid()"),
    "kills its parent": tries("os.kill(os.getppid(), signal.SIGKILL)"),
    "kills the node": tries("os.kill({pid}, signal.SIGKILL)"),
    "interrupts the node": tries("os.kill({pid}, signal.SIGINT)"),
    "kills everybody": tries("os.kill(-1, signal.SIGKILL)"),
    "kills its group": tries("os.killpg(0, signal.SIGKILL)"),
    "kills a thread": tries("syscall(234 if '{machine}' == 'x86_64' else 131, os.getppid(), os.getppid(), 9)"),
    "stops itself": tries("os.kill(os.getpid(), signal.SIGSTOP)"),
    "opens a process": tries("os.pidfd_open({pid})" if hasattr(os, "pidfd_open") else "os.fork()"),
    "takes the node's priority": tries("os.setpriority(os.PRIO_PROCESS, {pid}, 19)"),
}
KERNEL = {
    "becomes root": tries("os.setuid(0)"),
    "becomes another user": tries("os.setuid(12345)"),
    "changes its root": tries("os.chroot('/')"),
    "mounts": tries("return 'kept out' if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) else 'mounted'"),
    "unmounts": tries("return 'kept out' if libc.umount2(b'/tmp', 2) else 'unmounted'"),
    "makes a namespace": tries("syscall(272 if '{machine}' == 'x86_64' else 97, 0x10000000)"),
    "enters a namespace": tries("return 'kept out' if libc.setns(0, 0) else 'entered'"),
    "lifts the seccomp filter": tries("return 'kept out' if libc.prctl(22, 0, 0, 0, 0) else 'lifted'"),
    "makes memory that is a file": tries("os.memfd_create('x')", alone=True),
    "uses io_uring": tries("syscall(425, 1, b'\\0' * 120)"),
    "loads a program into the kernel": tries("syscall(321 if '{machine}' == 'x86_64' else 280, 0, 0, 0)"),
    "reads the kernel's keys": tries("syscall(250 if '{machine}' == 'x86_64' else 219, 0, -3, 0)"),
    "shares memory": tries("syscall(29 if '{machine}' == 'x86_64' else 194, 0, 4096, 0o1600)"),
    "shares a semaphore": tries("syscall(64 if '{machine}' == 'x86_64' else 190, 7, 1, 0o1600)"),
    "shares a queue": tries("syscall(68 if '{machine}' == 'x86_64' else 186, 7, 0o1600)"),
    "shares a queue with a name": tries(
        "syscall(240 if '{machine}' == 'x86_64' else 180, b'sandbox', 0o102, 0o600, None)"
    ),
    "leaves a key": tries("syscall(248 if '{machine}' == 'x86_64' else 217, b'user', b'x', b'x', 1, -4)"),
    "looks how much memory is free": tries(
        "return 'kept out' if libc.sysinfo(ctypes.create_string_buffer(512)) else 'seen'", alone=True
    ),
    "looks how much room is left": tries("os.statvfs('.')", alone=True),
    "changes a file's times": tries("os.utime(os.__file__)"),
    "locks a file": tries("__import__('fcntl').flock(0, 2)", alone=True),
    "raises its limits": tries("resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))"),
    "raises the limits of the node": tries("resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))"),
    "turns its clock off": tries("signal.setitimer(signal.ITIMER_PROF, 0)", alone=True),
    "ignores the end of its time": tries("signal.signal(signal.SIGPROF, signal.SIG_IGN)", alone=True),
    "blocks the end of its time": tries("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])", alone=True),
    "asks to be woken": tries("signal.signal(signal.SIGALRM, lambda *_: None)", alone=True),
    "makes a pipe in the file system": tries("os.mkfifo('pipe')"),
    "makes a device": tries("os.mknod('device', 0o20666, os.makedev(1, 1))"),
}
RESOURCES = {
    "loops": ends("while True: pass", "too slow"),
    "loops in C": ends("sum(range(10**12))", "too slow"),
    "computes a power": ends("10 ** 10 ** 9", "too slow"),
    "matches a pattern": ends("import re; re.match('(a*)*b', 'a' * 40)", "too slow"),
    "catches everything while it loops": ends(
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "too slow"
    ),
    "sleeps": ends("while True: time.sleep(3600)", "too slow"),
    "lets others go first": ends("while True: os.sched_yield()", "too slow"),
    "waits for itself": ends("lock = threading.Lock()\nlock.acquire()\nlock.acquire()", "too slow"),
    "waits for nothing": ends("import select\nwhile True: select.select([], [], [], 3600)", "too slow"),
    "allocates": ends("x = bytearray(1 << 30)", "too much memory"),
    "allocates little by little": ends("x = []\nwhile True: x.append(bytearray(1 << 22))", "too "),
    "maps memory": tries("__import__('mmap').mmap(-1, 1 << 31)", alone=True),
    "opens many files": tries("files = [os.dup(0) for _ in range(10_000)]; return 'opened'"),
    "prints without end": ends("while True: print('x' * 100_000)", "too slow"),
    "writes to the standard streams": ends("while True: os.write(1, b'x' * 65536) + os.write(2, b'x')", "too slow"),
    "floods what it has open": ends("while True: os.write(3, b'=1\\n' * 1000)", ""),
    "returns much": Attack("def attack(): return 'x' * 10**7", (False,), "too long"),
    "returns many": Attack("def attack(): return list(range(10**6))", (False,), "too long"),
    "returns a nest": Attack(
        "def attack():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", (False,), "nested"
    ),
    "returns itself": Attack("def attack():\n    x = []\n    x.append(x)\n    return x", (False,), "nested"),
    "returns a long number": Attack("def attack(): return 10**10_000", (False,), "attack()"),
    "recurses": Attack("def attack(): return attack()", (False,), "RecursionError"),
    "recurses deeper": ends("sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
    "nests its own text": Attack("x = " + "(" * 5000 + ")" * 5000, (False,), ""),
    "crashes": ends("ctypes.string_at(0)", "signal 11"),
    "aborts": ends("os.abort()", "signal"),
    "is no text": Attack("x = '\ud800'", (False,), ""),
    "has a null character": Attack("x = 1\0", (False,), "null"),
}
if X86:  # getpid as a 32-bit program would ask for it, in machine code
    KERNEL["calls the kernel as a 32-bit program"] = ends(
        "import mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()",
        "signal",
    )
    KERNEL["calls the kernel in its other numbering"] = tries("syscall(0x40000000 + 41, 2, 1, 0)")
CHEATS = {
    "exits early": ends("os._exit(0)", "it ended early"),
    "exits": ends("sys.exit(0)", "SystemExit"),
    "exits in the call": Attack("import os\ndef attack(): os._exit(0)", (False,), "it ended early"),
    "patches what writes down": ends(
        "import __main__\n__main__.write = lambda value: '1'\ndef attack(): return 0", "gave 1"
    ),
    "patches everything": ends(
        "import builtins, json\n"
        "for module in list(sys.modules.values()):\n"
        "    for name in ('write', 'same', 'compare', 'read', 'eval', 'compile'):\n"
        "        if hasattr(module, name) and module is not os:\n"
        "            setattr(module, name, lambda *a, **k: True)\n",
        "",
    ),
    "says what it likes": ends("os.write(3, b'=\\n=1\\n' * 9)\nos._exit(0)", ""),
    "says it everywhere": ends(
        "for number in range(64):\n"
        "    try: os.write(number, b'=\\n=True\\n=\\'kept out\\' or True\\n')\n"
        "    except OSError: pass\n"
        "os._exit(0)",
        "",
    ),
    "writes replies for the server": ends(
        "for number in range(64):\n    try: os.write(number, b'\\0' * 12)\n    except OSError: pass\nos._exit(0)", ""
    ),
    "closes everything": ends("os.closerange(0, 64)", "it ended early"),
    "equals everything": Attack(
        "class Yes:\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 1\ndef attack(): return Yes()",
        (False,),
        "cannot be compared",
    ),
    "is a string that equals everything": Attack(
        "class Yes(str):\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 1\ndef attack(): return Yes('x')",
        (False,),
        "gave 'x'",
    ),
    "is a number that equals everything": Attack(
        "class Yes(int):\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 1\ndef attack(): return Yes(7)",
        (False,),
        "gave 7",
    ),
    "shows itself as another": Attack(
        "class Lie:\n    __repr__ = lambda _: \"'kept out'\"\ndef attack(): return Lie()",
        (False,),
        "cannot be compared",
    ),
    "says it is a number": Attack(
        "class Lie:\n    __class__ = int\n    __repr__ = lambda _: '1'\ndef attack(): return Lie()", (False,), ""
    ),
    "raises what cannot be shown": Attack(
        "class Odd(Exception):\n    def __str__(self): raise self\ndef attack(): raise Odd", (False,), "cannot be shown"
    ),
    "answers with an expression": Attack(
        "import os\ndef attack(): os.write(3, b'=__import__(\"os\").getpid()\\n'); os._exit(0)", (False,), "no value"
    ),
}
TRACES = {
    "leaves a file": tries("open('note', 'w').write('x'); return 'kept out'"),
    "leaves a folder that cannot be opened": tries("os.mkdir('shut'); os.mkdir('shut/in', 0); return 'kept out'"),
    "fills the scratch folder": tries(
        "total = 0\ntry:\n    for n in range(100):\n        total += open(str(n), 'wb', 0).write(b'x' * (1 << 22))\n"
        "except OSError: pass\nreturn 'kept out' if total <= 8 << 20 else total"
    ),
    "writes a large file": tries(
        "open('large', 'wb', 0).write(b'x' * (64 << 20)) > (4 << 20) and 1 / 0; return 'kept out'"
    ),
    "fills it with names": tries(
        "made = 0\ntry:\n    for made in range(1000): open(str(made), 'w').close()\n"
        "except OSError: pass\nreturn 'kept out' if made <= 64 else made"
    ),
    "makes files and removes them": tries(
        "for n in range(40):\n    open('note', 'w').close()\n    os.unlink('note')\nreturn 'kept out'"
    ),
    "makes files without names": tries(
        "for _ in range(9): os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))\nreturn 'kept out'"
    ),
    "nests folders": tries(
        "made = 0\ntry:\n    for made in range(1000): os.mkdir('d' + '/d' * made)\nexcept OSError: pass\n"
        "return 'kept out' if made <= 64 else made"
    ),
}
ATTACKS = {
    **SECRET_FILES, **SECRETS_IN_MEMORY, **NETWORK, **PROCESSES, **KERNEL, **RESOURCES, **CHEATS, **TRACES
}  # fmt: skip


# All that a program could find of the one before it in its folder: numbers are counted on, and folders have times.
LOOK = (
    "import os\n"
    "before = os.stat('.')\n"
    "found = os.listdir('/tmp')\n"
    "made = os.open('new', os.O_CREAT | os.O_RDWR)\n"
    "same = before.st_mtime_ns == before.st_ctime_ns\n"
    "seen = [found, before.st_ino, before.st_nlink, before.st_size, same, os.fstat(made).st_ino]\n"
)


class World:
    """Sets up what there is to reach: a key, an open port, an environment, this process and its children."""

    def __init__(self, folder: Path) -> None:
        self.pem = folder / "swarm.pem"
        self.pem.write_text(f"secret-{secrets.token_hex(8)}")
        self.pem.chmod(0o600)
        os.environ["SANDBOX_SECRET"] = "secret"
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.before = self.look()

    def fill(self, code: str) -> str:
        known = {
            "pem": self.pem, "folder": self.pem.parent, "pid": os.getpid(), "port": self.server.getsockname()[1],
            "machine": platform.machine(), "package": Path(sys.modules[Sandbox.__module__].__file__).parents[2],
        }  # fmt: skip
        for name, value in known.items():
            code = code.replace("{" + name + "}", str(value))
        return code.replace("{{", "{").replace("}}", "}")

    def look(self) -> dict[str, object]:
        try:
            self.server.accept()[0].close()
            met = True
        except BlockingIOError:
            met = False
        traces = [path for path in ("/var/tmp/sandbox-was-here", "/dev/shm/sandbox-was-here") if os.path.exists(path)]
        return {
            "key": self.pem.read_text(),
            "files": sorted(os.listdir(self.pem.parent)),
            "somebody connected": met,
            "traces": traces,
            "environment": os.environ["SANDBOX_SECRET"],
        }


def descendants(pid: int) -> list[int]:
    """Return all processes below this one, whichever of its threads started them."""
    found: list[int] = []
    for children in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may have ended meanwhile
            found += map(int, children.read_text().split())
    return found + [each for child in found for each in descendants(child)]


def play(isolation: str, folder: Path) -> list[str]:
    """Run the attacks and return those that were not contained."""
    world = World(folder)
    expected = f"expected-{secrets.token_hex(8)}"
    good = Program(HONEST, (Test("add(2, 3)", "5"), Test("add('a', 'b')", "'ab'")))
    bad = Program(HONEST, (Test("add(2, 3)", "6"), Test("add('a', 'b')", "'ab'")))
    look = Program(LOOK, (Test("seen", "None"),))
    before = set(descendants(os.getpid()))
    hasty, patient = (Sandbox(isolation, cpu_seconds=limit, workers=1) for limit in (HASTE, PATIENCE))
    complaints = []
    try:
        right = [(verdict.passed, verdict.error) for verdict in patient.judge([good, bad])]
        assert right == [((True, True), ""), ((False, True), "add(2, 3) gave 5")]
        fresh = patient.judge([look])[0].error
        usual = len(descendants(os.getpid()))
        for name, attack in ATTACKS.items():
            if isolation != "namespaces" and name in TRACES:
                continue
            if isolation == "monty" and attack.error == "too slow" and not name.startswith("loops"):
                continue  # each takes a few times as long there
            sandbox = hasty if attack.error == "too slow" else patient
            tests = (Test("attack()", "'kept out'"), Test("1", repr(expected)))
            code = attack.code.replace(PROLOGUE, IN_MONTY) if isolation == "monty" else attack.code
            (verdict,) = sandbox.judge([Program(world.fill(code), tests)])
            if isolation == "monty":  # in which many of them do not even begin
                contained = verdict.passed == (attack.passed[0] and verdict.passed[0], False)
            else:
                contained = verdict.passed == (*attack.passed, False) and attack.error in verdict.error
            if not contained:
                complaints.append(f"{name}: {verdict}")
            if name in TRACES and (found := sandbox.judge([look])[0].error) != fresh:
                complaints.append(f"{name}: the next one sees what it left: {found} instead of {fresh}")
            if [(verdict.passed, verdict.error) for verdict in sandbox.judge([good, bad])] != right:
                complaints.append(f"{name}: the verdicts after it are others")
            if world.look() != world.before:
                complaints.append(f"{name}: {world.look()} instead of {world.before}")
            if len(descendants(os.getpid())) > usual:
                complaints.append(f"{name}: it left a process")
    finally:
        hasty.close()
        patient.close()
    if left := set(descendants(os.getpid())) - before:
        complaints.append(f"{left} are left")
    return complaints


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"user": os.getuid(), "found": play(sys.argv[1], Path(folder))}))


if __name__ == "__main__":
    main()
