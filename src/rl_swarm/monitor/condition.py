"""Tells why a run does not just go on: crashed nodes, damaged logs, and the commands that help."""

from rl_swarm.commands import program, quoted
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import Condition, DamagedFile, LostNode
from rl_swarm.monitor.run_reader import NodeView, RunView
from rl_swarm.network.address import is_url
from rl_swarm.node import run_settings
from rl_swarm.protocol.untrusted import printable
from rl_swarm.protocol.wire import Rejected
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import LOGS
from rl_swarm.telemetry.logs import SWARM_LOG

MAX_NAMES = 20  # of nodes or files
MAX_LINES = 15  # of the end of a log
TAIL_BYTES = 8 << 10


def condition(follower: Follower) -> Condition:
    view = follower.view
    nodes = list(view.nodes.values())
    crashed = [_lost(node) for node in nodes if node.has_crashed] if view.phase in ("running", "crashed") else []
    damaged = [
        DamagedFile(f"logs/{node.node}/{log}", lines)
        for node in nodes
        for log in LOGS
        if (lines := node.unreadable_in(log))
    ]
    return Condition(
        last_sign=last_sign(view),
        crashed=crashed[:MAX_NAMES],
        log_end=log_end(view.local_files) if crashed else [],
        damaged=damaged[:MAX_NAMES],
        resume=_resume(view),
        watch=f"{program()} watch {quoted(view.address.text)}",
    )


def _lost(node: NodeView) -> LostNode:
    signs = [node.peer.timestamp if node.peer else None, node.last.timestamp if node.last else None]
    known = [sign for sign in signs if sign is not None]
    return LostNode(node.node, node.name, node.last.round if node.last else None, max(known, default=None))


def last_sign(view: RunView) -> float | None:
    """Return when any node, or the coordinator, was last heard of."""
    nodes = list(view.nodes.values())
    signs = [node.peer.timestamp for node in nodes if node.peer]
    signs += [when for node in nodes if node.last and (when := node.last.timestamp) is not None]
    signs += [view.state.timestamp] if view.state else []
    return max(signs, default=None)


def log_end(files: LocalFiles) -> list[str]:
    """Return the last lines of the run's log, without control characters."""
    try:
        size = files.stat(SWARM_LOG).st_size
        data = files.read(SWARM_LOG, TAIL_BYTES, max(0, size - TAIL_BYTES))[:TAIL_BYTES]
    except OSError:
        return []
    return [printable(line)[:300] for line in data.decode("utf-8", "replace").splitlines()[-MAX_LINES:]]


def _resume(view: RunView) -> str:
    if view.phase == "finished" or view.manifest is None:
        return ""
    if not is_url(view.address.text):
        try:
            run_settings.read(view.local_files, view.manifest)
            return f"{program()} up --resume {quoted(view.address.text)}"
        except (OSError, Rejected):
            pass  # not a run of `up`
    return f"{program()} join {quoted(view.address.text)}"
