"""Who may take part: invitations, the owner's list, and what those are told who may not."""

import base64
import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from processes import QUICK, end, run, start, state, until

from benchmarks.lib.paths import ACCESS_LIST, MANIFEST, report_path
from rl_swarm.config.settings import Settings
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import change_access_list, read_access_list, read_state
from rl_swarm.network.round_server import RoundServer
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.node.founding import new_manifest
from rl_swarm.protocol import admission, rounds
from rl_swarm.protocol.admission import AccessList, AdmissionError
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.rounds import Member, PeerInfo, Report, State
from rl_swarm.protocol.wire import Rejected, seal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.settings import StorageSettings

OWNER, ANN, BOB, EVE = (Identity.generate() for _ in range(4))
WEEK = 7 * 86400


def manifest(**changes) -> Manifest:
    return new_manifest(
        Settings.of(admission="invited", rounds=50, round_end="everyone", peer_timeout=20.0, **changes),
        "test",
        OWNER.peer_id,
        1.0,
        stages=1,
    )


PRIVATE, OPEN = manifest(), replace(manifest(), admission="open")


def admit(who: Identity, token: str = "", members=None, roll=None, swarm=PRIVATE, now=None):
    shown = admission.make_ticket(token, swarm, who.peer_id) if token else ""
    roll = roll or AccessList(swarm=swarm.swarm())
    return admission.admit(swarm, roll, members or {}, who.peer_id, shown, time.time() if now is None else now)


def invite(uses: int = 1, swarm: Manifest = PRIVATE, owner: Identity = OWNER) -> tuple[str, str]:
    return admission.invite(swarm, owner, uses, int(time.time()) + WEEK)


# The rule.


def test_an_open_swarm_takes_anybody_but_whom_its_owner_denies():
    roll = AccessList(swarm=OPEN.swarm(), denied=[EVE.peer_id])
    assert admit(ANN, swarm=OPEN, roll=roll) == ("", None)
    assert admit(EVE, swarm=OPEN, roll=roll) == ("", "denied")


def test_a_swarm_of_invited_peers_takes_its_owner_the_allowed_and_the_invited():
    name, token = invite()
    roll = AccessList(swarm=PRIVATE.swarm(), allowed=[ANN.peer_id])
    assert admit(OWNER, roll=roll) == ("", None)
    assert admit(ANN, roll=roll) == ("", None)
    assert admit(BOB, token, roll=roll) == (name, None)
    assert admit(EVE, roll=roll) == ("", "uninvited")


def test_an_invitation_admits_as_many_peers_as_it_says_and_stays_bound_to_them():
    name, token = invite(uses=2)
    members = {ANN.peer_id: Member("ann", 0, 0.0, invitation=name), BOB.peer_id: Member("bob", 0, 0.0, invitation=name)}
    assert admit(EVE, token, dict(list(members.items())[:1])) == (name, None)
    assert admit(EVE, token, members) == ("", "used up")
    assert admit(ANN, token, members) == admit(ANN, "", members) == (name, None)


def test_an_invitation_ends_with_its_time_but_those_who_came_by_it_stay():
    name, token = invite()
    later = time.time() + WEEK + 1
    assert admit(ANN, token, now=later) == ("", "expired")
    assert admit(ANN, token, {ANN.peer_id: Member("ann", 0, 0.0, invitation=name)}, now=later) == (name, None)


def test_a_revoked_invitation_takes_all_with_it_but_those_allowed_by_name():
    name, token = invite(uses=9)
    members = {who.peer_id: Member("x", 0, 0.0, invitation=name) for who in (ANN, BOB)}
    roll = AccessList(swarm=PRIVATE.swarm(), revoked=[name], allowed=[BOB.peer_id])
    assert admit(ANN, token, members, roll)[1] == "revoked"
    assert admit(EVE, token, members, roll)[1] == "revoked"
    assert admit(BOB, token, members, roll) == (name, None)
    fresh, another = invite()
    assert admit(ANN, another, members, roll) == (fresh, None)


def test_an_invitation_is_recorded_in_an_open_swarm_too_and_a_bad_one_does_no_harm_there():
    name, token = invite(swarm=OPEN)
    assert admit(ANN, token, swarm=OPEN) == (name, None)
    assert admit(ANN, token, {ANN.peer_id: Member("ann", 0, 0.0)}, swarm=OPEN) == (name, None)
    assert admission.admit(OPEN, AccessList(swarm=OPEN.swarm()), {}, ANN.peer_id, "junk", 0.0) == ("", None)


@pytest.mark.parametrize("swarm, owner", [(OPEN, OWNER), (PRIVATE, EVE)])
def test_an_invitation_of_another_swarm_or_of_a_stranger_is_none(swarm, owner):
    _, token = invite(swarm=swarm, owner=owner)
    with pytest.raises(Rejected, match="not signed by the owner of this swarm"):
        admission.make_ticket(token, PRIVATE, ANN.peer_id)


def test_who_reads_a_ticket_cannot_use_it():
    """Introductions lie open in the folder."""
    shown = admission.make_ticket(invite(uses=9)[1], PRIVATE, ANN.peer_id)
    roll = AccessList(swarm=PRIVATE.swarm())
    assert admission.admit(PRIVATE, roll, {}, ANN.peer_id, shown, 0.0)[1] is None
    assert admission.admit(PRIVATE, roll, {}, EVE.peer_id, shown, 0.0)[1] == "invalid"
    with pytest.raises(Rejected):
        admission.make_ticket(shown, PRIVATE, EVE.peer_id)


def test_no_term_of_an_invitation_can_be_altered():
    _, token = invite()
    data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    for position in range(len(data)):
        forged = bytearray(data)
        forged[position] ^= 1
        with pytest.raises(Rejected):
            admission.make_ticket(base64.urlsafe_b64encode(forged).decode(), PRIVATE, ANN.peer_id)
    for part in (token[:-3], token[:50], token[3:], token + "AAAA"):
        with pytest.raises(Rejected):
            admission.make_ticket(part, PRIVATE, ANN.peer_id)


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_junk_is_no_invitation(text):
    with pytest.raises(Rejected):
        admission.make_ticket(text, PRIVATE, ANN.peer_id)
    assert admission.admit(PRIVATE, AccessList(swarm=""), {}, ANN.peer_id, text or "x", 0.0) == ("", "invalid")


def test_an_owner_with_an_rsa_key_invites_too():
    from test_identity import rsa_forms

    owner = Identity.from_bytes(rsa_forms()["protobuf"])
    swarm = replace(PRIVATE, peer_id=owner.peer_id)
    name, token = admission.invite(swarm, owner, 1, int(time.time()) + WEEK)
    assert admit(ANN, token, swarm=swarm) == (name, None)


def test_a_peer_is_on_one_list_at_a_time():
    roll = AccessList(swarm="s").with_entry(ANN.peer_id, allow=True)
    assert (roll.allowed, roll.denied) == ([ANN.peer_id], [])
    roll = roll.with_entry(ANN.peer_id, allow=False).with_entry("0123456789abcdef", allow=False)
    assert (roll.allowed, roll.denied, roll.revoked) == ([], [ANN.peer_id], ["0123456789abcdef"])
    roll = roll.with_entry(ANN.peer_id, allow=True).with_entry("0123456789abcdef", allow=True)
    assert (roll.allowed, roll.denied, roll.revoked) == ([ANN.peer_id], [], [])


# In a folder.


class Swarm:
    """A folder swarm with a conductor that looks when it is told to."""

    def __init__(self, folder: Path, swarm: Manifest = PRIVATE) -> None:
        self.manifest, self.files = swarm, LocalFiles(folder)
        self.store = FolderStore(self.files)
        self.files.write(MANIFEST, seal(swarm, OWNER))
        self.now = time.time()
        self.conductor = self.restarted()

    def restarted(self) -> RoundServer:
        self.conductor = RoundServer(
            self.store, self.manifest, OWNER, NetworkSettings(), StorageSettings(), threading.Event()
        )
        return self.conductor

    def look(self) -> State:
        self.now += self.manifest.peer_timeout / 4
        self.conductor.step(self.now)
        return self.conductor.state

    def node(self, who: Identity) -> DocumentCoordinator:
        return DocumentCoordinator(self.store, self.manifest, who, who.node, threading.Event(), 0.01)

    def join(self, who: Identity, shown: str = "") -> DocumentCoordinator:
        node = self.node(who)
        now = time.time()
        node.register(
            PeerInfo(swarm=self.manifest.swarm(), node=who.node, model="tiny", joined=now, timestamp=now, ticket=shown)
        )
        return node

    def ticket(self, token: str, who: Identity) -> str:
        return admission.make_ticket(token, self.manifest, who.peer_id)

    def report(self, who: Identity, round: int = 0) -> None:
        report = Report(
            swarm=self.manifest.swarm(), node=who.node, round=round, stage=0, timestamp=1.0, reward=1.0,
            training_reward=1.0, rollouts=1,
        )  # fmt: skip
        self.files.write(report_path(round, 0, who.node), seal(report, who))

    def change(self, *names: str, allow: bool) -> None:
        change_access_list(self.store, self.manifest, OWNER, names, allow)


def test_the_coordinator_makes_members_of_the_first_peers_that_an_invitation_admits(tmp_path):
    swarm = Swarm(tmp_path)
    name, token = invite(uses=1)
    swarm.join(ANN, swarm.ticket(token, ANN))
    assert swarm.look().members[ANN.peer_id].invitation == name
    bob = swarm.join(BOB, swarm.ticket(token, BOB))
    eve = swarm.join(EVE)
    found = swarm.look()
    assert set(found.members) == {ANN.peer_id}
    assert {who: refusal.why for who, refusal in found.refused.items()} == {
        BOB.peer_id: "used up",
        EVE.peer_id: "uninvited",
    }
    for node in (bob, eve):
        assert node.wait_for((-1, -1)) is None and node.turned_away
    assert "as many peers as the invitation admits" in str(bob.not_admitted(bob.turned_away))


def test_a_node_plays_from_the_moment_that_it_is_a_member_and_not_before(tmp_path):
    """What it published earlier would be nobody's. It need not wait for the stage to end."""
    swarm = Swarm(tmp_path)
    swarm.join(OWNER)
    assert swarm.look().phase == "running"
    ann = swarm.join(ANN, swarm.ticket(invite()[1], ANN))
    waiting = threading.Timer(0.3, ann.stop.set)
    waiting.start()
    assert ann.wait_for((-1, -1)) is None and ann.turned_away is None
    ann.stop.clear()
    swarm.look()
    assert ann.wait_for((-1, -1)).round == 0


def test_a_refused_peer_is_told_while_the_swarm_still_waits_for_its_first_member(tmp_path):
    swarm = Swarm(tmp_path)
    eve = swarm.join(EVE)
    assert swarm.look().phase == "waiting"
    assert eve.wait_for((-1, -1)) is None and eve.turned_away == "uninvited"


def test_bindings_survive_the_coordinator_and_the_loss_of_the_state(tmp_path):
    swarm = Swarm(tmp_path)
    name, token = invite(uses=1)
    swarm.join(ANN, swarm.ticket(token, ANN))
    swarm.look()
    swarm.report(ANN)
    assert swarm.look().round == 1
    for lost in (False, True):
        if lost:
            (tmp_path / "state" / "current_state.json").unlink()
        assert swarm.restarted().state.members[ANN.peer_id].invitation == name
        swarm.join(BOB, swarm.ticket(token, BOB))
        assert swarm.look().refused[BOB.peer_id].why == "used up"


def test_reports_of_those_not_admitted_do_not_count(tmp_path):
    swarm = Swarm(tmp_path)
    swarm.join(ANN, swarm.ticket(invite()[1], ANN))
    swarm.join(EVE)
    swarm.look()
    swarm.report(EVE)
    found = swarm.look()
    assert not found.reports and set(found.members) == {ANN.peer_id}
    swarm.report(ANN)
    found = swarm.look()
    assert found.round == 1 and found.members[ANN.peer_id].participation == 1


def test_a_denied_member_is_told_its_reports_are_refused_and_nobody_waits_for_it(tmp_path):
    swarm = Swarm(tmp_path, OPEN)
    swarm.join(ANN)
    eve = swarm.join(EVE)
    assert set(swarm.look().members) == {ANN.peer_id, EVE.peer_id}
    swarm.change(EVE.peer_id, allow=False)
    swarm.look()
    swarm.report(EVE)
    swarm.report(ANN)
    found = swarm.look()
    assert found.round == 1 and found.members[EVE.peer_id].participation == 0
    assert eve.wait_for((-1, -1)) is None and eve.turned_away == "denied"
    swarm.change(EVE.peer_id, allow=True)
    again = swarm.join(EVE)
    assert again.turned_away is None
    found = swarm.look()
    assert not found.refused and found.members[EVE.peer_id].last_seen == swarm.now
    assert again.wait_for((-1, -1)).round == 1


def test_a_node_that_was_refused_and_then_allowed_is_not_told_the_old_answer(tmp_path):
    swarm = Swarm(tmp_path)
    swarm.join(EVE)
    swarm.look()
    swarm.change(EVE.peer_id, allow=True)
    eve = swarm.join(EVE)
    eve.current()
    assert eve.turned_away is None
    assert set(swarm.look().members) == {EVE.peer_id}


def on_an_interval(tmp_path) -> Swarm:
    """Signs of life decide nothing there, so the coordinator reads introductions at the end of a round only."""
    return Swarm(tmp_path, replace(OPEN, round_end="interval", round_interval=12.0))


def test_a_denial_holds_after_a_restart_before_anything_is_counted(tmp_path):
    swarm = on_an_interval(tmp_path)
    swarm.join(ANN)
    swarm.join(EVE)
    assert swarm.look().phase == "running"
    swarm.change(EVE.peer_id, allow=False)
    swarm.report(ANN)
    swarm.report(EVE)
    swarm.restarted()
    assert set(swarm.look().reports) == {ANN.peer_id}


def test_a_denied_member_that_starts_again_is_told_again(tmp_path):
    swarm = on_an_interval(tmp_path)
    swarm.join(ANN)
    swarm.join(EVE)
    swarm.look()
    swarm.change(EVE.peer_id, allow=False)
    for round in (1, 2):
        eve = swarm.join(EVE)
        while swarm.look().round < round:
            pass
        eve.current()
        assert eve.turned_away == "denied"


def published(swarm: Manifest, who: Identity, round: int = 0) -> bytes:
    answers = [Answer(prompt="1 + 1?", response=str(k), reward=0.0) for k in range(2)]
    publication = Publication(
        peer_id=who.peer_id, kind="rollouts", swarm=swarm.swarm(), node=who.node, round=round, stage=0, timestamp=1.0,
        model="tiny", policy_version=0, sampling=Sampling(1.0, 1.0, 0, 8), rollouts={"0": answers},
    )  # fmt: skip
    return seal(publication, who, compress=True)


def test_a_node_ignores_what_those_publish_who_are_not_admitted(tmp_path):
    swarm = Swarm(tmp_path)
    swarm.join(ANN, swarm.ticket(invite()[1], ANN))
    swarm.join(EVE)
    swarm.look()
    for who in (ANN, EVE):
        for number in (0, 1):
            swarm.files.write(f"rollouts/round_{number}/stage_0/{who.node}.json", published(PRIVATE, who, number))
    rejected: list[tuple[str, str, str]] = []
    bob = swarm.node(BOB)
    bob.current()
    exchange = DocumentExchange(
        swarm.store, PRIVATE, BOB, BOB.node, threading.Event(), lambda *why: rejected.append(why), 0.01, 10, bob.refusal
    )  # fmt: skip
    nodes = [ANN.node, EVE.node]
    assert [found.peer_id for found in exchange.collect(0, 0, nodes)] == [ANN.peer_id]
    assert [(node, reason) for node, reason, _ in rejected] == [(EVE.node, "admission")]

    swarm.change(ANN.peer_id, allow=False)
    swarm.look()
    bob.current()
    assert list(exchange.collect(0, 0, nodes)) == [], "read before the denial, used no more"
    assert list(exchange.collect(1, 0, nodes)) == []
    assert [reason for _, reason, _ in rejected] == ["admission"] * 4


def test_a_node_reads_the_list_only_when_the_state_names_a_newer_one(tmp_path):
    class Counting(LocalFiles):
        reads = 0

        def read(self, path: str, limit: int) -> bytes:
            self.reads += path == ACCESS_LIST
            return super().read(path, limit)

    swarm = Swarm(tmp_path, OPEN)
    swarm.join(ANN)
    swarm.look()
    node = swarm.node(BOB)
    files = Counting(tmp_path)
    node.store = FolderStore(files)
    for _ in range(3):
        node.current()
    assert files.reads == 0 and node.refusal(EVE.peer_id) is None
    swarm.change(EVE.peer_id, allow=False)
    swarm.look()
    for _ in range(3):
        node.current()
    assert files.reads == 1 and node.refusal(EVE.peer_id) == "denied"


@pytest.mark.parametrize("what", ["a stranger's", "of another swarm", "older", "junk", "gone"])
def test_a_list_that_is_not_the_owners_newest_changes_nothing(tmp_path, what):
    swarm = Swarm(tmp_path, OPEN)
    swarm.change(ANN.peer_id, allow=False)
    older = (tmp_path / ACCESS_LIST).read_bytes()
    swarm.change(EVE.peer_id, allow=False)
    node = swarm.join(EVE)
    swarm.look()
    node.current()
    (tmp_path / ACCESS_LIST).write_bytes(
        {
            "a stranger's": seal(AccessList(swarm=OPEN.swarm(), number=9), EVE),
            "of another swarm": seal(AccessList(swarm=PRIVATE.swarm(), number=9), OWNER),
            "older": older,
            "junk": b"{junk",
            "gone": b"",
        }[what]
    )
    if what == "gone":
        (tmp_path / ACCESS_LIST).unlink()
    swarm.join(ANN)
    found = swarm.look()
    assert set(found.refused) == {ANN.peer_id, EVE.peer_id} and not found.members
    assert node.refusal(EVE.peer_id) == "denied"


def test_a_list_is_numbered_past_the_one_that_the_coordinator_has_seen(tmp_path):
    swarm = Swarm(tmp_path, OPEN)
    for who in (ANN, BOB, EVE):
        swarm.change(who.peer_id, allow=False)
    swarm.join(ANN)
    swarm.look()
    (tmp_path / ACCESS_LIST).unlink()
    swarm.change(BOB.peer_id, allow=False)
    assert read_access_list(swarm.store, OPEN).number == 4
    swarm.change(BOB.peer_id, allow=False)
    assert read_access_list(swarm.store, OPEN).number == 4, "nothing has changed"
    assert read_state(swarm.store, OPEN).access_list_number == 3


def test_strangers_do_not_make_the_state_grow_without_end(tmp_path, monkeypatch):
    from rl_swarm.network import round_server as conductor

    monkeypatch.setattr(conductor, "MAX_REFUSED", 3)
    swarm = Swarm(tmp_path)
    for _ in range(5):
        swarm.join(Identity.generate())
    assert len(swarm.look().refused) == 3


def test_a_node_that_is_sure_to_be_turned_away_is_told_before_it_loads_anything(tmp_path):
    swarm = Swarm(tmp_path)
    _, token = invite()
    with pytest.raises(AdmissionError, match="takes invited peers only") as told:
        swarm.node(EVE).request_admission(None)
    for part in (OWNER.peer_id, EVE.peer_id, "rl-swarm invite", "--invitation", "rl-swarm allow"):
        assert part in str(told.value)
    with pytest.raises(AdmissionError, match="INVITATION cannot be used"):
        swarm.node(EVE).request_admission(token[:40])
    swarm.change(EVE.peer_id, allow=False)
    with pytest.raises(AdmissionError, match="its owner has denied this node"):
        swarm.node(EVE).request_admission(token)
    assert swarm.node(ANN).request_admission(token)
    assert swarm.node(OWNER).request_admission(None) == ""


def test_a_member_keeps_its_invitation():
    at = rounds.record_presence(State(swarm="s"), "a", "node", 1.0, "invitation")
    assert rounds.record_presence(at, "a", "node", 2.0).members["a"] == Member("node", 0, 2.0, invitation="invitation")


# As a person does it.


def test_a_private_swarm_from_its_founding_to_a_denial(tmp_path):
    address = tmp_path / "experiments" / "one"
    small = ["local_groups=2", "generations=2", "poll_interval=0.1", "threads=1"]
    quick = [*QUICK, *(part for setting in small for part in ("--set", setting))]
    rules = ["--rounds", "100000", "--round-end", "everyone", "--set", "peer_timeout=2"]
    founding = ["coordinate", str(address), "--admission", "invited", *rules, "--set", "poll_interval=0.1"]
    coordinator = start(tmp_path, *founding)
    ann: dict[str, str] = {"IDENTITY_PATH": "ann.pem"}
    node = None
    try:
        until(lambda: (address / "manifest.json").exists())
        code, output = run(tmp_path, "join", str(address), *quick, **ann)
        assert code == 1 and "takes invited peers only" in output and "Traceback" not in output
        me = Identity.load(tmp_path / "ann.pem").peer_id
        assert run(tmp_path, "invite", str(address), **ann)[0] == 1, "not the owner"
        code, output = run(tmp_path, "invite", str(address), "--uses", "2", "--days", "1")
        assert code == 0
        token = max(output.split(), key=len)
        node = start(tmp_path, "join", str(address), *quick, "--invitation", token, **ann)
        until(lambda: state(address)["round"] >= 1)
        listed = json.loads(run(tmp_path, "members", str(address), "--json")[1])
        assert [row["peer_id"] for row in listed["peers"]] == [me]
        assert listed["peers"][0]["now"] == "member" and listed["peers"][0]["by"].startswith("invitation ")
        code, output = run(tmp_path, "deny", str(address), "nonsense")
        assert code == 2 and "neither a peer id" in output
        code, output = run(tmp_path, "deny", str(address), me)
        assert code == 0 and "denied" in output
        output, _ = node.communicate(timeout=240)
        assert node.returncode == 1 and "its owner has denied this node" in output, output
        assert list(address.glob("checkpoints/round_*/*/model.safetensors")), "what it had learned is saved"
        assert "refused: denied" in run(tmp_path, "members", str(address))[1]
        assert run(tmp_path, "allow", str(address), me)[0] == 0
        assert "refused" not in run(tmp_path, "members", str(address))[1]
    finally:
        end(coordinator)
        if node is not None:
            end(node)
