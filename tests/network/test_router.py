"""A node behind a home router, in network namespaces of its own: needs root, `ip` and `nft` (Debian: nftables)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WORLD, ROUTER, HOME, OTHER = "rls-world", "rls-router", "rls-home", "rls-other"
MASQUERADE = """
table ip outside {
  chain leaving {
    type nat hook postrouting priority 100;
    oifname "wan0" masquerade
  }
}
table ip guard {
  chain passing {
    type filter hook forward priority 0; policy drop;
    iifname "lan0" accept
    ct state established,related accept
  }
}
"""
PEER = """
import json, sys, time
from pathlib import Path
from rl_swarm.protocol.identity import Identity
from rl_swarm.network.p2p.engine import PeerEngine
name, listen, known, wanted, reachable = sys.argv[1:]
engine = PeerEngine(
    Identity.load_or_create(Path(f"{name}.pem")), json.loads(known), [listen],
    answer=lambda request, peer: name.encode(),
    map_ports=False, reachability=reachable,
).start()
print(json.dumps(list(engine.addresses)), flush=True)
if wanted:
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline:
        try:
            print(engine.ask(wanted, b"who", 100).decode(), flush=True)
            break
        except OSError:
            time.sleep(0.5)
    engine.close()
else:
    time.sleep(90)
"""


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


@pytest.fixture
def networks() -> Iterator[None]:
    """World and other are on one network; home is behind a router that lets nothing in."""
    made = []
    try:
        for name in (WORLD, ROUTER, HOME, OTHER):
            ip(f"netns add {name}")
            made.append(name)
            ip(f"-n {name} link set lo up")
        ip(f"-n {WORLD} link add bridge type bridge")
        ip(f"-n {WORLD} addr add 10.77.0.1/24 dev bridge")
        ip(f"-n {WORLD} link set bridge up")
        for name, address in ((ROUTER, "10.77.0.2/24"), (OTHER, "10.77.0.3/24")):
            ip(f"link add wan0 netns {name} type veth peer name to-{name} netns {WORLD}")
            ip(f"-n {WORLD} link set to-{name} master bridge up")
            ip(f"-n {name} addr add {address} dev wan0")
            ip(f"-n {name} link set wan0 up")
        ip(f"link add lan0 netns {ROUTER} type veth peer name home0 netns {HOME}")
        ip(f"-n {ROUTER} addr add 192.168.77.1/24 dev lan0")
        ip(f"-n {ROUTER} link set lan0 up")
        ip(f"-n {HOME} addr add 192.168.77.2/24 dev home0")
        ip(f"-n {HOME} link set home0 up")
        ip(f"-n {HOME} route add default via 192.168.77.1")
        within = ["ip", "netns", "exec", ROUTER]
        subprocess.run([*within, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        subprocess.run([*within, "nft", "-f", "-"], input=MASQUERADE, check=True, text=True)
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def peer(folder: Path, network: str, name: str, address: str, known: list[str], wanted: str, reachable: str):
    command = ["ip", "netns", "exec", network, sys.executable, "-c", PEER, name, f"/ip4/{address}/tcp/0"]
    return subprocess.Popen(
        [*command, json.dumps(known), wanted, reachable], cwd=folder, stdout=subprocess.PIPE, text=True
    )


def test_who_is_behind_a_router_gives_and_gets(networks: None, tmp_path: Path) -> None:
    running = []
    try:
        running.append(boot := peer(tmp_path, WORLD, "boot", "10.77.0.1", [], "", "public"))
        known = json.loads(boot.stdout.readline())
        running.append(home := peer(tmp_path, HOME, "home", "192.168.77.2", known, "", "private"))
        there = json.loads(home.stdout.readline())[0].rpartition("/")[2]
        running.append(other := peer(tmp_path, OTHER, "other", "10.77.0.3", known, there, "public"))
        theirs = json.loads(other.stdout.readline())
        assert other.stdout.readline().strip() == "home", theirs  # what is behind the router is given
        boot_id = known[0].rpartition("/")[2]
        running.append(second := peer(tmp_path, HOME, "second", "192.168.77.2", known, boot_id, "private"))
        second.stdout.readline()
        assert second.stdout.readline().strip() == "boot"
    finally:
        for process in running:
            process.kill()
            process.wait()
