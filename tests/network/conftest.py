import pytest
from processes import HAS_HIVEMIND
from swarms import NETWORKS, close_engines

from rl_swarm.network import retries

THROUGHOUT = (
    "test_clocks.py", "test_fair_shares.py", "test_hostile_peers.py", "test_hostile_requests.py",
    "test_peer_to_peer.py",
)  # fmt: skip
collect_ignore = [] if HAS_HIVEMIND else list(THROUGHOUT)  # they need hivemind throughout


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Shorten the pauses after a drive's faults, which last a tenth of a second here, and after a peer that did not
    answer, as an honest one may on a busy machine."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr("rl_swarm.network.p2p.engine.SILENT_SECONDS", (0.2, 1.0))


@pytest.fixture
def impatient(monkeypatch):
    """Files that never become whole are given up soon."""
    monkeypatch.setattr(retries, "GIVE_UP_AFTER", 0.1)


AMONG_PROCESSES = {"bucket", "peer-to-peer"}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.processes) if name in AMONG_PROCESSES else name for name in NETWORKS]
)
def network(request, tmp_path):
    """Makes swarms on each network in turn. A new network is one more entry in `NETWORKS`."""
    if request.param == "bucket":
        request.getfixturevalue("s3")
    made = []

    def make(**changes):
        made.append(NETWORKS[request.param](tmp_path / f"swarm-{len(made)}", **changes))
        return made[-1]

    yield make
    for swarm in made:
        swarm.close()


@pytest.fixture(scope="module", autouse=True)
def peers_of_this_file_alone():
    """Peers remember whom they have met: those of another file would be among the neighbours of these."""
    yield
    close_engines()
