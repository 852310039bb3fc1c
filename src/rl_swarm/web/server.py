"""Runs the dashboard as a process: a free socket, and a server that ends with its parent."""

import contextlib
import errno
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl_swarm.errors import UserError
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_PORTS = 100  # that are tried, from the requested one on
LAST_READ_SECONDS = 1.0  # for open pages to read how it ended
NICENESS = 10  # of the dashboard of `up`: the nodes come first
TOKEN = "SWARM_WEB_TOKEN"
STOP = b"stop\n"  # written by the dashboard of `up` when a user with the token stops the run
ANY_HOST = ("0.0.0.0", "::")
MISSING = "The dashboard needs more packages: pip install 'rl-swarm[web]'"


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "prometheus_client"))


def check_host(host: str) -> None:
    """Raise unless the dashboard can listen there, on whatever port."""
    bound(host, 0).close()


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to the first free port from this one on."""
    for candidate in range(port, min(port + MAX_PORTS, 65536)) if port else (0,):
        try:
            family = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0][0]
            found = socket.socket(family, socket.SOCK_STREAM)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind((host, candidate))
                found.listen(128)
            except OSError:
                found.close()
                raise
            return found
        except socket.gaierror as error:
            raise UserError(f"--host {host}: {error.strerror}. Use an address of this machine.") from error
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UserError(f"--host {host}: {error.strerror}. Use an address of this machine.") from error
    raise UserError(f"--port {port}: none of the {MAX_PORTS} ports from it on is free. Choose another.")


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    shown = "localhost" if host in ("127.0.0.1", "::1", *ANY_HOST) else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def hosts_of(listening: socket.socket) -> list[str]:
    """Return the host names that the server answers to: any, once it listens to more than this machine."""
    host = listening.getsockname()[0]
    return ["127.0.0.1", "localhost", "[::1]"] if host in ("127.0.0.1", "::1") else ["*"]


def serve(
    view: RunView,
    listening: socket.socket,
    stop: threading.Event,
    token: str | None = None,
    stop_run: Callable[[], None] | None = None,
) -> None:
    """Serve a swarm until `stop` is set."""
    from rl_swarm.web.api import create_app

    _serve(create_app(Follower(view), hosts_of(listening), token, stop_run), listening, stop)


def serve_experiment(path: Path, listening: socket.socket, stop: threading.Event, token: str | None = None) -> None:
    """Serve an experiment and all its runs until `stop` is set."""
    from rl_swarm.web.experiment import create_experiment_app

    _serve(create_experiment_app(path, hosts_of(listening), token), listening, stop)


def _serve(app: "FastAPI", listening: socket.socket, stop: threading.Event) -> None:
    import uvicorn

    from rl_swarm.web.connections import BACKLOG, IDLE_SECONDS, BoundedStreams, bounded_protocol, max_connections

    most = max_connections()
    config = uvicorn.Config(
        BoundedStreams(app, most // 2),
        http=bounded_protocol(most),
        proxy_headers=False,  # connections are counted by their real address
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        log_config=None,
        log_level="error",  # else every malformed request would be logged
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="on",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="dashboard", daemon=True)
    thread.start()
    while thread.is_alive() and not stop.wait(0.2):
        pass
    if thread.is_alive() and app.state.announce_end():
        time.sleep(LAST_READ_SECONDS)
    app.state.close()
    server.should_exit = True
    thread.join()


@contextmanager
def dashboard_process(
    root: Path, host: str, port: int, token: str | None, private_log: Path, stop: threading.Event
) -> Iterator[str]:
    """Run the dashboard of a run in a process of its own, and yield its URL. A user with the token can set `stop`
    there."""
    with bound(host, port) as listening, private_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_swarm.web.server", str(root), str(listening.fileno())],
            pass_fds=[listening.fileno()],
            env={**os.environ, TOKEN: token or ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,  # the terminal belongs to `up`
            start_new_session=True,  # Ctrl-C goes to its parent
        )
        url = url_of(listening)
    assert process.stdin is not None and process.stdout is not None
    output = process.stdout

    def listen() -> None:
        if STOP in output:
            stop.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield url
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()


def _tell_parent() -> None:
    sys.stdout.buffer.write(STOP)
    sys.stdout.buffer.flush()


def _main(root: str, descriptor: int) -> None:
    """Serve until the pipe from the parent closes, however the parent ends."""
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with socket.socket(fileno=descriptor) as listening:
        serve(RunView(Path(root)), listening, stop, os.environ.get(TOKEN) or None, _tell_parent)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
