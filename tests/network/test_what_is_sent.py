"""A node sends nothing that everybody would refuse: it says so itself, and keeps what can be sent."""

import logging
import threading

import pytest
from msgspec.structs import replace
from swarms import POLL, identity_of, introduction, make_manifest, publication

from benchmarks.lib.paths import rollouts_path
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.protocol.manifest import Limits
from rl_swarm.protocol.rollouts import Answer, unpack
from rl_swarm.protocol.wire import SealError
from rl_swarm.storage.files import LocalFiles

TIGHT = make_manifest(limits=Limits(file_bytes=20_000, questions=6, completions=3, characters=4000))


def exchange(folder, node, rejected=None):
    on_reject = lambda *why: (rejected if rejected is not None else []).append(why)  # noqa: E731
    return DocumentExchange(FolderStore.at(folder), TIGHT, identity_of(node), node, threading.Event(), on_reject, POLL)


def arrived(folder, lengths):
    """What a receiver gets when ann publishes answers of these lengths: the lengths of those that it can use."""
    rollouts = {
        str(number): [Answer("What?", "x" * length, 0.5) for length in group] for number, group in enumerate(lengths)
    }
    rejected = []
    exchange(folder, "ann").publish(replace(publication(TIGHT, "ann"), rollouts=rollouts))
    (found,) = exchange(folder, "bob", rejected).collect(0, 0, ["ann"])
    assert not rejected
    return [[len(c.text) for c in rollout.completions] for rollout in unpack(found, TIGHT.limits)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([[9, 9]] * 6, [[9, 9]] * 6),
        ([[3000, 3000]] * 5, [[3000, 3000]] * 3),  # too many bytes
        ([[9, 9]] * 8, [[9, 9]] * 6),  # too many questions
        ([[1, 2, 3, 4], [5, 6]], [[1, 2, 3], [5, 6]]),  # too many answers
        ([[9, 4001, 8], [9, 9]], [[9, 8], [9, 9]]),  # too long a text
        ([[9, 9], [9, 4001], [9, 9]], [[9, 9]]),  # and too few answers without it
        ([[9, 4001]], []),
    ],
)
def test_of_too_many_rollouts_those_are_published_that_others_accept(lengths, expected, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    assert arrived(tmp_path, lengths) == expected
    assert len(caplog.records) == (lengths != expected)
    assert all("published" in record.message for record in caplog.records)


def test_a_node_whose_publications_all_would_refuse_says_why(tmp_path):
    with pytest.raises(SealError, match=r"Publication.*'model'"):
        exchange(tmp_path, "ann").publish(replace(publication(TIGHT, "ann"), model="m" * 257))
    assert not (tmp_path / rollouts_path(0, 0, "ann")).exists()


@pytest.mark.parametrize(
    ("changes", "why"), [({"model": "m" * 257}, "'model'"), ({"joined": float("nan")}, "'joined'")]
)
def test_an_introduction_that_all_would_refuse_is_not_written(changes, why, tmp_path):
    files = LocalFiles(tmp_path)
    ann = DocumentCoordinator(FolderStore(files), TIGHT, identity_of("ann"), "ann", threading.Event(), POLL)
    with pytest.raises(SealError, match=f"PeerInfo.*{why}"):
        ann.register(replace(introduction(TIGHT, "ann"), **changes))
    assert files.names("peers") == []
