"""Clients that do not finish, do not read, or are many: a real server with few files, and real sockets."""

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from processes import until
from small_runs import SmallRun

from rl_swarm.web import server
from rl_swarm.web.api import STATIC
from rl_swarm.web.connections import source_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine on Linux")

FILES = 256
START = """
import resource, sys
root, listening, files, seconds, missing = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
sys.modules |= dict.fromkeys(missing.split(","))
from rl_swarm.web import connections, server
if seconds:
    connections.HEAD_SECONDS = connections.BODY_SECONDS = connections.WRITE_SECONDS = float(seconds)
    connections.IDLE_SECONDS = int(seconds)
server._main(root, int(listening))
"""
KINDS = {"fast": "", "plain": "httptools,uvloop"}  # what is not installed
EACH_KIND = pytest.mark.parametrize("kind", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
PATIENCE = 60.0


class Served:
    def __init__(self, root: Path, listening: socket.socket, seconds: str, missing: str) -> None:
        self.address = listening.getsockname()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(root), str(listening.fileno()), str(FILES), seconds, missing],
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def connect(self, source: str = "127.0.0.1", sent: bytes = b"") -> socket.socket:
        made = socket.create_connection(self.address, PATIENCE, (source, 0))
        made.sendall(sent)
        return made

    def ask(self, path: str, source: str = "127.0.0.1") -> socket.socket:
        return self.connect(source, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def status(self, path: str, source: str = "127.0.0.1") -> int:
        """0 where the server hangs up."""
        try:
            with self.ask(path, source) as asked:
                return int((head(asked).split() or [b"", b"0"])[1])
        except ConnectionError:
            return 0

    def holds(self, client: socket.socket) -> bool:
        port = client.getsockname()[1]
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return any(each.raddr and each.raddr.port == port for each in connections)


@contextmanager
def served(root: Path, seconds: str = "", missing: str = "") -> Iterator[Served]:
    with server.bound("127.0.0.1", 28080) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # each connection has as little
        found = Served(root, listening, seconds, missing)
    try:
        assert found.status("/health") == 200
        yield found
    finally:
        assert found.process.stdin is not None
        found.process.stdin.close()
        try:
            assert found.process.wait(120) == 0
        finally:
            found.process.kill()


def head(asked: socket.socket) -> bytes:
    """The head of a response, or what there was of it."""
    heard = b""
    while b"\r\n\r\n" not in heard and (part := asked.recv(4096)):
        heard += part
    return heard


def rest(asked: socket.socket) -> bytes:
    """All that still comes before the server hangs up."""
    heard = b""
    with suppress(ConnectionError):
        while part := asked.recv(65536):
            heard += part
    return heard


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    played = SmallRun(tmp_path_factory.mktemp("runs") / "run", total=5)
    played.play()
    return played


POST = b"POST /api/id-to-name HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n["
UNFINISHED = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "half a head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "half a body": POST,
}


@EACH_KIND
def test_clients_that_do_not_finish_are_let_go(swarm: SmallRun, kind: str) -> None:
    """A byte now and then does not help them."""
    with served(swarm.root, "2", KINDS[kind]) as found, ExitStack() as stack:
        slow = [stack.enter_context(found.connect(sent=begun)) for begun in UNFINISHED.values()]
        dripping = [stack.enter_context(found.connect(sent=begun)) for begun in UNFINISHED.values() if begun]
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.2):
                for client in dripping:
                    with suppress(OSError):
                        client.send(b"x")

        dripper = threading.Thread(target=drip)
        dripper.start()
        try:
            for client in [*slow, *dripping]:
                until(lambda client=client: not found.holds(client))
        finally:
            over.set()
            dripper.join()
        assert [rest(client)[:12] for client in slow] == [b"HTTP/1.1 408"] * len(slow)
        assert found.status("/health") == 200


@EACH_KIND
def test_who_sends_too_much_and_leaves_amid_a_file_stops_nobody(swarm: SmallRun, kind: str) -> None:
    head_of = b"GET /static/vendor/uPlot.esm.js HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"
    with served(swarm.root, missing=KINDS[kind]) as found:
        for _ in range(3):
            with found.connect(sent=head_of + b"x" * 200_000) as leaving:
                assert leaving.recv(1)  # the file has begun to come
        with found.ask("/health", "127.0.0.2") as asked:
            asked.settimeout(PATIENCE)
            assert head(asked).startswith(b"HTTP/1.1 200")


@EACH_KIND
def test_connections_that_are_done_and_ask_nothing_more_are_closed(swarm: SmallRun, kind: str) -> None:
    with served(swarm.root, "2", KINDS[kind]) as found, found.ask("/health") as idle:
        assert head(idle).startswith(b"HTTP/1.1 200") and found.holds(idle)
        until(lambda: not found.holds(idle))


@EACH_KIND
def test_heads_without_end_are_cut_off(swarm: SmallRun, kind: str) -> None:
    with served(swarm.root, "", KINDS[kind]) as found, found.connect(sent=b"GET / HTTP/1.1\r\n") as endless:
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                endless.sendall(b"X-Long: " + b"x" * 8000 + b"\r\n")
        assert not found.holds(endless)
        assert found.status("/health") == 200


def test_floods_of_requests_in_one_connection_are_cut_off(swarm: SmallRun) -> None:
    with served(swarm.root) as found, found.connect() as many:
        with suppress(ConnectionError):
            many.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
        assert rest(many).count(b"HTTP/1.1 200") < 500
        assert found.status("/health") == 200


@pytest.mark.parametrize("missing", ["", "uvloop", "httptools,uvloop"])
def test_clients_that_leave_while_requests_wait_are_noticed(
    swarm: SmallRun, missing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first request is a stream of events, which would go on for ever."""
    two = b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(swarm.root, "", missing) as found:
        for _ in range(FILES // 4):  # more than one address may have
            with found.connect(sent=two) as leaving:
                heard = head(leaving)
            assert heard.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429"))
        until(lambda: found.status("/api/stream") == 200)
    assert "Traceback" not in capfd.readouterr().err


@EACH_KIND
def test_clients_that_do_not_read_are_let_go(swarm: SmallRun, kind: str) -> None:
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with served(swarm.root, "2", KINDS[kind]) as found, deaf:
        deaf.connect(found.address)
        deaf.sendall(b"GET /static/vendor/uPlot.esm.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert select.select([deaf], [], [], PATIENCE)[0], "it answers"
        until(lambda: not found.holds(deaf))
        deaf.settimeout(PATIENCE)
        assert len(rest(deaf)) < (STATIC / "vendor" / "uPlot.esm.js").stat().st_size
        assert found.status("/health") == 200


def test_many_connections_of_one_address_shut_nobody_else_out(swarm: SmallRun) -> None:
    with served(swarm.root) as found, ExitStack() as stack:
        many = [stack.enter_context(found.connect(sent=b"GET /health HTT")) for _ in range(300)]
        assert [found.status("/health", "127.0.0.2") for _ in range(20)] == [200] * 20
        with found.ask("/api/stream", "127.0.0.2") as stream:
            assert head(stream).startswith(b"HTTP/1.1 200")
        held = sum(map(found.holds, many))
        assert 0 < held <= FILES // 2
        until(lambda: found.status("/health") == 200)  # and to that address too, when their time is up


@pytest.mark.slow
def test_where_all_are_taken_the_address_with_the_most_makes_room(swarm: SmallRun) -> None:
    with served(swarm.root) as found, ExitStack() as stack:
        for number in range(2, 10):
            for _ in range(40):
                stack.enter_context(found.connect(f"127.0.0.{number}", b"GET /health HTT"))
        assert [found.status("/health", f"127.0.0.{number}") for number in range(20, 40)] == [200] * 20


@pytest.mark.slow
def test_streams_outlive_every_deadline(swarm: SmallRun) -> None:
    with served(swarm.root, "1") as found, found.ask("/api/stream") as stream:
        lines = (line for line in stream.makefile("rb") if line.startswith(b"data: "))
        first = next(lines)
        for _ in range(3):
            with found.connect() as silent:
                assert rest(silent).startswith(b"HTTP/1.1 408")
        swarm.play()
        assert next(lines) != first


def test_streams_have_a_share_of_their_own(swarm: SmallRun) -> None:
    with served(swarm.root) as found, ExitStack() as stack:

        def listen(source: str) -> int:
            return int(head(stack.enter_context(found.ask("/api/stream", source))).split()[1])

        heard = [listen("127.0.0.2") for _ in range(60)]
        assert heard == sorted(heard) and set(heard) == {200, 429}
        assert listen("127.0.0.3") == 200
        assert found.status("/health", "127.0.0.2") == found.status("/health", "127.0.0.3") == 200
        stack.close()
        until(lambda: listen("127.0.0.2") == 200)


def test_an_address_is_what_a_client_cannot_choose_freely() -> None:
    assert source_of("192.0.2.7") == source_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth1") and source_of("") == ""


@pytest.mark.slow
def test_a_run_has_its_dashboard_under_these_limits(swarm: SmallRun, tmp_path: Path) -> None:
    """As `up` starts it, with the files that this process has."""
    with server.dashboard_process(swarm.root, "127.0.0.1", 28080, None, tmp_path / "log", threading.Event()) as url:
        host, port = "127.0.0.1", int(url.rpartition(":")[2])
        with socket.create_connection((host, port), PATIENCE) as silent:
            assert rest(silent).startswith(b"HTTP/1.1 408")


STREAM = b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("kind", ["httptools alone", *KINDS])
def test_a_stream_ends_with_its_client_whatever_was_asked_behind_it(swarm: SmallRun, kind: str) -> None:
    """The server tells the last request of a connection that its client has gone: the stream is not the last."""
    missing = {**KINDS, "httptools alone": "uvloop"}[kind]
    with served(swarm.root, missing=missing) as found:
        for _ in range(60):  # more than there are places
            with found.connect(sent=STREAM + HEALTH) as asked:
                head(asked)
        until(lambda: found.status("/api/stream") == 200)


@EACH_KIND
def test_clients_that_are_let_go_leave_no_lines_in_the_log(
    swarm: SmallRun, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(swarm.root, missing=KINDS[kind]) as found:
        for _ in range(5):
            for sent in (HEALTH * 200, STREAM + HEALTH * 100):
                with found.connect(sent=sent) as asked, suppress(ConnectionError):
                    head(asked)
        assert found.status("/health") == 200
    assert "Traceback" not in capfd.readouterr().err
