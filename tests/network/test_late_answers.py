"""A peer that answers late holds up nobody, and is heard when it has answered."""

import threading

import pytest

from rl_swarm.network.p2p import late_answers as late
from rl_swarm.network.p2p.late_answers import LateAnswers

SOON = 120  # seconds, on any machine


class Peers:
    """Peers that answer when they are told to."""

    def __init__(self):
        self.may, self.asked, self.fails = {}, [], set()
        self.answered = threading.Event()

    def ask(self, peer_id, request, limit):
        self.asked.append((peer_id, request))
        if peer_id in self.may:
            assert self.may[peer_id].wait(SOON)
        self.answered.set()
        if peer_id in self.fails:
            raise TimeoutError("silent")
        return request.upper()[:limit]


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.setattr(late, "LATE_SECONDS", 0.01)
    found = Peers()
    found.answers = LateAnswers(found.ask)
    yield found
    for event in found.may.values():
        event.set()
    found.answers.close()


def waits(monkeypatch, seconds):
    monkeypatch.setattr(late, "MOMENT_SECONDS", seconds)


def until_done(peers, peer_id):
    peers.answers._pending[peer_id][1].exception(SOON)


def test_who_answers_at_once_is_heard_at_once(peers, monkeypatch):
    waits(monkeypatch, SOON)
    assert peers.answers.ask("ann", b"a", 10) == b"A"
    assert peers.answers.late == {} and peers.answers._pending == {}


def test_an_answer_that_takes_long_is_there_when_it_is_asked_for_again(peers, monkeypatch):
    waits(monkeypatch, 0.01)
    peers.may["ann"] = threading.Event()
    with pytest.raises(TimeoutError, match="has not answered yet"):
        peers.answers.ask("ann", b"a", 10)
    waits(monkeypatch, SOON)
    assert peers.answers.ask("bob", b"b", 10) == b"B", "others are heard meanwhile"
    with pytest.raises(TimeoutError, match="the last request"):  # one request at a time
        peers.answers.ask("ann", b"another", 10)
    peers.may["ann"].set()
    until_done(peers, "ann")
    assert peers.answers.ask("ann", b"a", 10) == b"A"
    assert peers.asked == [("ann", b"a"), ("bob", b"b")], "it was asked once"


def test_who_was_late_is_waited_for_less_until_it_answers_quickly(peers, monkeypatch):
    waits(monkeypatch, 0.0)  # everybody is late
    peers.may["ann"] = threading.Event()
    with pytest.raises(TimeoutError):
        peers.answers.ask("ann", b"a", 10)
    peers.may["ann"].set()
    until_done(peers, "ann")
    assert list(peers.answers.late) == ["ann"]
    peers.answers.ask("ann", b"a", 10)
    waits(monkeypatch, SOON)
    monkeypatch.setattr(late, "LATE_SECONDS", SOON)
    assert peers.answers.ask("ann", b"b", 10) == b"B"
    assert peers.answers.late == {}


def test_what_went_wrong_is_told_and_forgotten(peers, monkeypatch):
    waits(monkeypatch, SOON)
    peers.fails.add("ann")
    with pytest.raises(TimeoutError, match="silent"):
        peers.answers.ask("ann", b"a", 10)
    assert list(peers.answers.late) == ["ann"] and peers.answers._pending == {}


def test_many_that_never_answer_take_bounded_room(peers, monkeypatch):
    waits(monkeypatch, 0.01)
    monkeypatch.setattr(late, "MAX_PENDING", 3)
    for number in range(5):
        peers.may[str(number)] = threading.Event()
        with pytest.raises(TimeoutError):
            peers.answers.ask(str(number), b"a", 10)
    assert len(peers.answers._pending) == 3
    peers.may["0"].set()
    until_done(peers, "0")
    waits(monkeypatch, SOON)
    assert peers.answers.ask("bob", b"b", 10) == b"B", "what was answered makes room"
