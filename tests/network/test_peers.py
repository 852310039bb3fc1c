"""A swarm among peers, as users start it: processes that know nothing of each other but an address."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import RL_SWARM, end, family, metrics, needs_hivemind, run, start, state, until

QUICK = ["--set", "held_out_questions=4", "--set", "held_out_samples=1", "--set", "poll_interval=0.05"]
SMALL = ["--local-groups", "2", "--external-groups", "2", "--generations", "4"]
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
AROUND = {"P2P_LISTEN": LOOPBACK, "P2P_RELAY": "false"}
HERE = ["--set", f"p2p_listen={LOOPBACK}", "--set", "p2p_relay=false"]


def daemons(*nodes: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [child for node in nodes for child in family(node) if "p2pd" in " ".join(child.cmdline())]


@needs_hivemind
@pytest.mark.slow
def test_nodes_meet_at_a_bootnode_and_finish_without_it(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("boot", "lead", "one", "two")}
    for folder in folders.values():
        folder.mkdir()
    address = folders["lead"] / "experiments" / "open"
    processes = [boot := start(folders["boot"], "bootnode", *HERE, PYTHONUNBUFFERED="1")]
    try:
        assert boot.stdout is not None
        known = next(line.split()[-1] for line in boot.stdout if "join p2p://" in line)
        rules = ["--rounds", "4", "--round-end", "lockstep", "--min-peers", "2", "--set", "network=p2p"]
        lead = start(
            folders["lead"], "coordinate", str(address), *rules, *QUICK, *HERE, "--set", f"p2p_initial_peers={known}"
        )
        workers = [start(folders[name], "join", known, *SMALL, *QUICK, *HERE, NODE_ID=name) for name in ("one", "two")]
        processes += [lead, *workers]
        until(lambda: (address / "state/current_state.json").exists() and state(address)["phase"] == "running", 120)
        running = daemons(*processes)
        assert len(running) == 4
        boot.kill()
        outputs = [process.communicate(timeout=240)[0] for process in (lead, *workers)]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in (lead, *workers)] == [0, 0, 0], outputs
    assert (state(address)["phase"], state(address)["round"]) == ("finished", 3)
    for name in ("one", "two"):
        (run_folder,) = (folders[name] / "runs").iterdir()
        lines = [line for line in metrics(run_folder)[name] if line["kind"] == "round"]
        assert len(lines) == 4 and sum(line["external_scored"] for line in lines) > 0
    until(lambda: not any(daemon.is_running() for daemon in running))


@needs_hivemind
@pytest.mark.slow
def test_without_a_coordinator_the_clock_tells_the_round(tmp_path: Path) -> None:
    """Whoever founded the swarm is killed as soon as the others are in it."""
    folders = {name: tmp_path / name for name in ("lead", "one", "two")}
    for folder in folders.values():
        folder.mkdir()
    address = folders["lead"] / "experiments" / "open"
    rules = ["--rounds", "1000", "--round-end", "interval", "--round-interval", "6", "--set", "network=p2p"]
    processes = [lead := start(folders["lead"], "coordinate", str(address), *rules, *HERE, PYTHONUNBUFFERED="1")]

    def played(name: str) -> list[dict[str, Any]]:
        found = list((folders[name] / "runs").glob("*"))
        lines = metrics(found[0]).get(name, []) if found else []
        return [line for line in lines if line["kind"] == "round"]

    try:
        assert lead.stdout is not None
        known = next(line.split()[-1] for line in lead.stdout if "other nodes join at p2p://" in line)
        workers = [start(folders[name], "join", known, *SMALL, *QUICK, *HERE, NODE_ID=name) for name in ("one", "two")]
        processes += workers
        until(lambda: all(map(played, ("one", "two"))), 240)
        code, seen = run(tmp_path, "validate", known, "--nodes", "2", **AROUND)
        assert code == 0 and "2 members" in seen and "rescored answers" in seen, seen
        lead.kill()
        before = {name: len(played(name)) for name in ("one", "two")}
        until(
            lambda: all(
                sum(line["external_scored"] for line in played(name)[count:]) > 0 for name, count in before.items()
            ),
            240,
        )
        for worker in workers:
            worker.send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=240)[0] for process in workers]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in workers] == [130, 130], outputs


@needs_hivemind
def test_up_among_peers_plays_its_rounds_and_is_sound(tmp_path: Path) -> None:
    options = ["--network", "p2p", "--nodes", "2", "--rounds", "3", "--run", "run", *HERE, *QUICK, *SMALL]
    swarm = start(tmp_path, "up", *options)
    try:
        until(lambda: len(daemons(swarm)) == 3)
        running = daemons(swarm)
        output, _ = swarm.communicate(timeout=400)
    finally:
        end(swarm)
    assert swarm.returncode == 0 and "Test score" in output, output
    until(lambda: not any(daemon.is_running() for daemon in running))
    for lines in metrics(tmp_path / "run").values():
        played = [line for line in lines if line["kind"] == "round"]
        assert len(played) == 3 and sum(line["external_scored"] for line in played) > 0
    code, output = run(tmp_path, "validate", "run", "--rounds", "3", "--nodes", "2")
    assert code == 0 and "sound" in output, output


@needs_hivemind
@pytest.mark.slow
def test_up_among_peers_learns_and_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ["--network", "p2p", "--nodes", "3", "--rounds", "30", "--run", "run", *HERE]
    swarm = start(tmp_path, "up", *options)
    try:
        until(lambda: len(daemons(swarm)) == 4)
        running = daemons(swarm)
        until(lambda: (tmp_path / "run/bootnodes.json").exists())
        known = json.loads((tmp_path / "run/bootnodes.json").read_text())["addresses"][0]
        until(lambda: state(tmp_path / "run")["phase"] == "running")
        code, seen = run(tmp_path, "status", f"p2p://{known}", "--json", **AROUND)
        assert code == 0 and json.loads(seen[seen.index("{") :])["swarm"], seen
        code, seen = run(tmp_path, "validate", f"p2p://{known}", "--nodes", "3", **AROUND)
        assert code == 0 and "3 members, 3 publications" in seen and "rescored answers" in seen, seen
        code, seen = run(tmp_path, "watch", f"p2p://{known}", "--tui", **AROUND)
        assert code == 0 and "/30 " in seen and "reward" in seen, seen
        output, _ = swarm.communicate(timeout=240)
    finally:
        end(swarm)
    assert swarm.returncode == 0, output
    assert not any(daemon.is_running() for daemon in running)
    code, output = run(tmp_path, "validate", "run")
    assert code == 0 and "sound" in output


@needs_hivemind
@pytest.mark.slow
@pytest.mark.parametrize("environment", ["coding", "debate"])
def test_stages_and_roles_go_among_peers_too(environment: str, tmp_path: Path) -> None:
    options = ["--network", "p2p", "--nodes", "3", "--rounds", "2", "--local-groups", "2", "--run", "run"]
    code, output = run(tmp_path, "up", "--env", environment, *options, *QUICK, *HERE)
    assert code == 0 and "Reward by stage" in output, output
    code, output = run(tmp_path, "validate", "run", "--rounds", "2", "--nodes", "3")
    assert code == 0 and "sound" in output, output


NOISE = ("Traceback", "Task exception", "go-libp2p", "/home/", "leaked", "asyncio", "hivemind", "p2pd")


@pytest.mark.parametrize(
    "text",
    [
        "p2p://example.org:31000",
        "p2p:///ip4/127.0.0.1/tcp/31000",
        "p2p:///ip4/127.0.0.1/tcp/99999/p2p/12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu",
        "p2p:///ip4/999.0.0.1/tcp/31000/p2p/12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu",
        "p2p:///ip4/127.0.0.1/tcp/31000/p2p/12D3KooWbad",
        "p2p:///ip4/127.0.0.1/tcp/31000/p2p/12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu,p2p:///nonsense",
        "p2p:///ip4/127.0.0.1/tcp/1\x1b[31m/p2p/12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu",
    ],
)
def test_an_address_that_is_none_gets_a_clear_error(text: str, tmp_path: Path) -> None:
    code, output = run(tmp_path, "join", text)
    assert code == 2 and "is no address of a peer" in output and "/p2p/12D3KooW" in output, (RL_SWARM, output)
    assert not [word for word in NOISE if word in output] and "\x1b" not in output, output


@pytest.mark.slow
@needs_hivemind
def test_who_waits_at_an_address_where_nobody_is_ends_without_noise(tmp_path: Path) -> None:
    nobody = "p2p:///ip4/127.0.0.1/tcp/1/p2p/12D3KooWEChVMMMzV8acJ53mJHrw1pQ27UAGkCxWXLJutbeUMvVu"
    node = start(tmp_path, "join", nobody, "--set", f"p2p_listen={LOOPBACK}", PYTHONUNBUFFERED="1")
    try:
        assert node.stdout is not None
        seen = next(line for line in node.stdout if "waiting for a peer" in line)
        node.send_signal(signal.SIGTERM)
        output = seen + node.communicate(timeout=240)[0]
    finally:
        end(node)
    assert not [word for word in NOISE if word in output], output


@needs_hivemind
@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_swarm_ends_it_without_noise(tmp_path: Path) -> None:
    """As `timeout` and supervisors send it."""
    options = ["--network", "p2p", "--nodes", "2", "--rounds", "1000", "--run", "run", *HERE, *QUICK, *SMALL]
    swarm = start(tmp_path, "up", *options, start_new_session=True)
    try:
        until(lambda: state(tmp_path / "run")["round"] >= 1, 240)
        running = daemons(swarm)
        assert len(running) == 3
        os.killpg(swarm.pid, signal.SIGTERM)
        output, _ = swarm.communicate(timeout=240)
    finally:
        end(swarm)
    assert not [word for word in NOISE if word in output], output
    until(lambda: not any(daemon.is_running() for daemon in running))
