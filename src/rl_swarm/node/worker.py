"""Runs one process of a swarm, from its address to its last round: `join` trains, `coordinate` serves the rounds."""

import errno
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_swarm import environments
from rl_swarm.environments.settings import ROLES, TaskSettings
from rl_swarm.errors import ConfigError, ModelError, UserError
from rl_swarm.network import owners
from rl_swarm.network.address import Address, is_url, open_address, peer_url
from rl_swarm.network.base import NetworkError
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.documents import MANIFEST, PEERS, STATE, DocumentStore
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import await_manifest, read_manifest
from rl_swarm.network.presence import Watch, only_one_here
from rl_swarm.network.round_server import RoundServer
from rl_swarm.node import run_settings
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.heartbeats import heartbeats, phase_pause
from rl_swarm.node.settings import NodeSettings, public_settings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo, State
from rl_swarm.protocol.wire import MAX_BYTES, Incomplete, Rejected, seal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.private import swarm_folder
from rl_swarm.telemetry import sinks
from rl_swarm.telemetry.export import Source
from rl_swarm.telemetry.journal import Journal

if TYPE_CHECKING:
    from rl_swarm.environments.base import Environment, Role
    from rl_swarm.learning.checkpoints import Checkpoints, Place
    from rl_swarm.learning.parallel.shared_device import SharedDevice
    from rl_swarm.learning.policy import Policy

log = logging.getLogger(__name__)

SAVING_SECONDS = 20.0  # for nodes to stop after another of their process has failed
SWITCH_SECONDS = 0.0001  # a thread that feeds the GPU must not wait long for one that computes


def join(
    address: Path | str, settings: NodeSettings, stop: threading.Event, sharing: "SharedDevice | None" = None
) -> None:
    """Join the swarm at the address and train until it has finished or `stop` is set."""
    with explained(address):
        _join(open_address(address), settings, stop, sharing)


def join_together(address: Path | str, workers: Mapping[str, NodeSettings], stop: threading.Event) -> None:
    """Run several nodes that share a GPU, each in a thread. When one fails, all stop and save."""
    from rl_swarm.learning.parallel.shared_device import SharedDevice, own_stream

    sharing, failures = SharedDevice(len(workers)), list[Exception]()

    def run(settings: NodeSettings) -> None:
        try:
            with own_stream():
                join(address, settings, stop, sharing)
        except Exception as error:  # raised below, when the other nodes have saved
            if not isinstance(error, UserError):
                log.exception("failed")
            failures.append(error)
            stop.set()

    sys.setswitchinterval(SWITCH_SECONDS)
    threads = [
        threading.Thread(target=run, args=(settings,), name=name, daemon=True) for name, settings in workers.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failures:
            thread.join(1.0)
    deadline = time.monotonic() + SAVING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]


def coordinate(address: Path | str, settings: NodeSettings, stop: threading.Event) -> None:
    """Coordinate the swarm at the address, and found it if there is none."""
    with explained(address):
        place = open_address(address)
        if isinstance(place.store, FolderStore):
            try:
                place.store.make()
            except OSError as error:
                raise UserError(
                    f"{address} cannot be made: {error.strerror}. Choose a directory that can be written."
                ) from error
        identity = Identity.load_or_create(Path(settings.network.identity_path))
        manifest = run_settings.manifest_of(place.store, place.here, settings)
        manifest = manifest or found(place.store, settings, place.name, identity)
        log.info("coordinating %s: %d rounds, ending by %s", address, manifest.rounds, manifest.round_end)
        if settings.swarm.network == "p2p":
            _lead_among_peers(place, settings, identity, manifest, stop)
            return
        state = RoundServer(place.store, manifest, identity, settings.network, settings.storage, stop).run()
        log.info("%s at round %d", state.phase, state.round)


def _lead_among_peers(
    place: Address, settings: NodeSettings, identity: Identity, manifest: Manifest, stop: threading.Event
) -> None:
    """Coordinate over the peer-to-peer network.

    With rounds on an interval the clock coordinates, and this process is a peer that knows the manifest.
    """
    from rl_swarm.network.p2p import joining

    signed = place.store.read(MANIFEST, MAX_BYTES)
    with (
        joining.engine_of(identity, [], settings.network, place.here) as engine,
        joining.among_peers(engine, identity, manifest, signed, place.here) as store,
    ):
        joining.write_bootnodes(engine, place.here)
        for address in engine.addresses:
            log.info("other nodes join at %s", peer_url(address))
        if manifest.round_end == "interval":
            coordinator = coordinator_of(store, manifest, identity, "", stop, settings.network.poll_interval)
            coordinator.wait_for((manifest.rounds, 0))
            return
        state = RoundServer(store, manifest, identity, settings.network, settings.storage, stop).run()
        log.info("%s at round %d", state.phase, state.round)
        stop.wait(joining.LINGER_SECONDS)  # nodes still ask how it ended


def found(store: DocumentStore, settings: NodeSettings, name: str, identity: Identity) -> Manifest:
    """Return the swarm's manifest; write it if this is a new swarm."""
    try:
        return read_manifest(store)
    except FileNotFoundError:
        if store.nodes(PEERS) or _has_state(store):
            raise NetworkError(
                f"{store.root} holds a swarm, but no {store.name(MANIFEST)}. Wait until the drive has synced it, or "
                "start in another folder."
            ) from None
        stages = environments.named(settings.task.environment).stages
        manifest = new_manifest(settings, name, identity.peer_id, time.time(), stages)
        store.write(MANIFEST, seal(manifest, identity))
        return manifest
    except (Incomplete, Rejected) as error:
        path = f"{store.root}/{store.name(MANIFEST)}"
        raise NetworkError(f"{path} cannot be used ({error}). Start in another folder.") from error


def _has_state(store: DocumentStore) -> bool:
    try:
        store.read(STATE, 0)
    except FileNotFoundError:
        return False
    return True


def _join(address: Address, settings: NodeSettings, stop: threading.Event, sharing: "SharedDevice | None") -> None:
    identity = Identity.load_or_create(Path(settings.network.identity_path))
    name = settings.network.node_id or identity.node
    wanted = sinks.requested(settings.telemetry, os.environ)
    with opened(address, settings, identity, stop) as (address, manifest):
        if manifest is None:
            return
        owners.check(manifest, address.text, settings.network)
        settings = with_role(settings, manifest)
        if settings.sharing.publish_frequency == "round" and manifest.round_end == "lockstep":
            raise ConfigError(
                "ROLLOUT_PUBLISH_FREQUENCY=round cannot be used in a lock-step swarm, where nodes wait for each "
                "other's rollouts before they learn. Use `stage` or `generation`."
            )
        if settings.sharing.publish_frequency == "generation" and environments.of_swarm(manifest).context_peers:
            raise ConfigError(
                "ROLLOUT_PUBLISH_FREQUENCY=generation cannot be used where later stages answer to what was published "
                "in earlier ones: all nodes must see the same. Use `stage`."
            )
        private = (
            swarm_folder(settings.storage, address.text if address.is_url else address.here, manifest.swarm()) / name
        )
        public = {"model": settings.model.model} | public_settings(settings.flat())
        source = Source(manifest.name, manifest.swarm(), name, identity.peer_id, private, public)
        with only_one_here(identity, manifest.swarm()), sinks.sink_threads(wanted, source, stop) as feeds:
            journal = Journal(private / "logs", feeds, LocalFiles(address.here), f"logs/{name}")
            try:
                _take_part(address, settings, stop, sharing, identity, name, manifest, journal, private)
            except Exception as error:
                with suppress(OSError):
                    journal.event("failed", error=f"{type(error).__name__}: {error}"[:500])
                raise


@contextmanager
def opened(
    address: Address, settings: NodeSettings, identity: Identity, stop: threading.Event
) -> Iterator[tuple[Address, Manifest | None]]:
    """Open the address; yield it with its documents and manifest, or None when told to stop before there is one."""
    if settings.swarm.network == "folder" and not address.peers:
        kept = run_settings.manifest_of(address.store, address.here, settings)
        yield address, kept or await_manifest(address.store, stop, settings.network.poll_interval)
        return
    from rl_swarm.network.p2p import joining

    known = address.peers or joining.await_bootnodes(address.here, stop)
    with joining.engine_of(identity, known, settings.network, address.here) as engine:
        found = joining.await_manifest(engine, settings.network, stop)
        if found is None:
            yield address, None
            return
        manifest, signed = found
        with joining.among_peers(engine, identity, manifest, signed, address.here) as store:
            yield replace(address, store=store), manifest


def _take_part(
    address: Address,
    settings: NodeSettings,
    stop: threading.Event,
    sharing: "SharedDevice | None",
    identity: Identity,
    name: str,
    manifest: Manifest,
    journal: Journal,
    private: Path,
) -> None:
    store, here = address.store, address.here
    coordinator = coordinator_of(store, manifest, identity, name, stop, settings.network.poll_interval)
    shown = coordinator.node  # to peers; files on this machine have the node's own name
    ticket = coordinator.request_admission(settings.network.invitation)
    owners.remember(manifest, address.text, settings.network)
    check_name(coordinator.current(), identity, shown)
    watch = Watch(store, shown, identity, manifest.swarm())

    from rl_swarm.learning.checkpoints import Checkpoints
    from rl_swarm.learning.devices import devices_of, gpu_ids, hardware, pick_device, use_threads
    from rl_swarm.learning.policy import other_models
    from rl_swarm.node.hub import Push
    from rl_swarm.node.node import Node
    from rl_swarm.telemetry.machine import LoadMeter

    threads = (settings.model.threads or os.cpu_count() or 1) // settings.model.devices_per_node
    use_threads(threads, pick_device(settings.model))
    checkpoints = Checkpoints(
        private / "checkpoints", identity, name, LocalFiles(here), settings.checkpoint.keep_checkpoints
    )
    kind = environments.of_swarm(manifest)
    role_kind, role_name = role_of(settings.task, kind)
    prompt = kind.system_prompt if role_kind.system_prompt is None else role_kind.system_prompt
    log.info("loading the model %s", settings.model.model)
    policy, place = _restored(checkpoints, manifest.swarm(), settings, prompt, sharing)
    known = coordinator.current().members.get(identity.peer_id)
    if place is None and known is not None and known.participation:
        log.warning("no checkpoint of this node can be used: it starts again from the base model, %s", policy.name)
    settings = settings.changed(model=policy.name)  # `auto` has become a model
    environment = environments.made(manifest)
    environment.configure(settings.task, settings.model.hf_token, other_models(settings))
    role = role_kind(environment)
    devices = devices_of(policy.device, settings.model)
    node = Node(
        name=shown,
        role=role,
        role_name=role_name,
        identity=identity,
        settings=settings,
        manifest=manifest,
        environment=environment,
        policy=policy,
        exchange=DocumentExchange(
            store,
            manifest,
            identity,
            shown,
            stop,
            lambda *why: node.intake.reject(*why),
            settings.network.poll_interval,
            settings.sharing.fetch_max_peers,
            coordinator.refusal,
        ),
        coordinator=coordinator,
        journal=journal,
        checkpoints=checkpoints,
        stop=stop,
        push=Push.wanted(settings, private / "push", journal, stop),
        load=LoadMeter(gpu_ids(devices)),
    )
    if place:
        journal.restore(place.logs)
        node.done = (place.round, place.stage)
        node.intake.reputation.restore(place.standing)
        role.restore({} if place.role is msgspec.UNSET else place.role)
    journal.event(
        "resumed" if place else "joined",
        round=node.done[0],
        model=policy.name,
        pid=os.getpid(),
        hardware=hardware(devices),
        settings=public_settings(settings.flat()),
    )
    log.info(
        "%s (%s) %s with %s on %s",
        identity.name,
        identity.peer_id,
        "resumes" if place else "joins",
        policy.name,
        policy.device,
    )
    if address.is_url:
        log.info("its logs and checkpoints are on this machine, in %s", here)
    log.debug("private files are in %s", private)
    log.log(logging.INFO if policy.plan.fits else logging.WARNING, "%s", policy.plan)

    if place is None and role.learns:
        log.info("first answers to the held-out questions")
    node.prepare()
    watch.wait(manifest.peer_timeout, stop)
    peer = PeerInfo(
        peer_id=identity.peer_id,
        swarm=manifest.swarm(),
        node=shown,
        model=policy.name,
        tokenizer=policy.tokenizer_hash,
        device=str(policy.device),
        host=platform.node(),
        pid=os.getpid(),
        joined=time.time(),
        timestamp=time.time(),
        ticket=ticket,
        role=role_name or msgspec.UNSET,
    )
    coordinator.register(peer)
    soonest = phase_pause(address.is_url, settings.network.poll_interval)
    try:
        with heartbeats(coordinator, peer, manifest.peer_timeout / 4, stop, watch, node.phase, soonest):
            node.run()
    finally:
        environment.close()
        policy.close()
    journal.event("left", round=node.done[0])
    if journal.close() and coordinator.current().phase == "finished":
        checkpoints.clear()  # the run is over, and the folder has the model
    if coordinator.turned_away:
        raise coordinator.not_admitted(coordinator.turned_away)


def with_role(settings: NodeSettings, manifest: Manifest) -> NodeSettings:
    """Return the settings with those of the node's role, where the user has left the defaults."""
    kind = environments.of_swarm(manifest)
    if settings.task.role not in (*ROLES, *kind.roles):
        raise ConfigError(
            f"role={settings.task.role!r}: this swarm plays {manifest.environment!r}, which has no such role. What can "
            f"be used: worker, {', '.join(kind.roles)}."
        )
    role, given, defaults = role_of(settings.task, kind)[0], settings.flat(), NodeSettings().flat()
    theirs = {name: value for name, value in role.settings.items() if given[name] == defaults[name]}
    return settings.changed(**{**theirs, "environment": manifest.environment})


def role_of(settings: TaskSettings, kind: "type[Environment]") -> "tuple[type[Role], str]":
    """Return the role that the settings name, and its name on the wire: empty for the ordinary role, the first."""
    ordinary, *others = kind.roles
    named = settings.role in others
    return kind.roles[settings.role if named else ordinary], settings.role if named else ""


def coordinator_of(
    store: DocumentStore, manifest: Manifest, identity: Identity, name: str, stop: threading.Event, poll: float
) -> DocumentCoordinator:
    """Return the coordinator of a swarm as its nodes see it.

    Among peers, with rounds on an interval, it is the clock, and peers are named by their ids.
    """
    if manifest.round_end == "interval" and not isinstance(store, FolderStore):
        from rl_swarm.network.p2p.clock_rounds import ClockCoordinator
        from rl_swarm.network.p2p.documents import PeerStore

        if isinstance(store, PeerStore):
            return ClockCoordinator(store, manifest, identity, stop, poll)
    return DocumentCoordinator(store, manifest, identity, name, stop, poll)


def check_name(state: State, identity: Identity, name: str) -> None:
    """Check that a peer keeps its name in a swarm: under another name, no node would read what it writes."""
    member = state.members.get(identity.peer_id)
    if member is not None and member.node != name:
        raise NetworkError(
            f"{identity.peer_id} takes part in this swarm as {member.node}, and this node is called {name}. Go on with "
            f"NODE_ID={member.node}, or take another identity: IDENTITY_PATH=another-file.pem."
        )


def _restored(
    checkpoints: "Checkpoints", swarm: str, settings: NodeSettings, system_prompt: str, sharing: "SharedDevice | None"
) -> "tuple[Policy, Place | None]":
    """Load the policy of the newest usable checkpoint, or a new one."""
    from rl_swarm.learning.checkpoints import CheckpointError, restore_optimizer
    from rl_swarm.learning.parallel.data_parallel import DataParallelPolicy
    from rl_swarm.learning.policy import Policy

    load = DataParallelPolicy.load if settings.model.devices_per_node > 1 else partial(Policy.load, shared=sharing)
    for saved in checkpoints.written(swarm):
        place = saved.place
        model = place.model if settings.model.model == "auto" else settings.model.model
        same = settings.changed(model=model)  # `auto` may choose another model now
        try:
            folder = checkpoints.fetch(saved)
            if not place.files:  # of a model that does not learn
                return load(same, system_prompt), place
            policy = load(same, system_prompt, folder)
            restore_optimizer(policy, folder)
        except (ModelError, CheckpointError) as error:
            log.warning("the checkpoint of round %d is skipped: %s", place.round, error)
            continue
        policy.version = place.policy_version
        return policy, place
    return load(settings, system_prompt), None


@contextmanager
def explained(address: Path | str) -> Iterator[None]:
    """Turn what a disk or a store can do to a node into one message for its user."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not is_url(str(error.filename)):
            where = "this machine" if is_url(address) else address
            raise UserError(
                f"The disk of {where} is full. Free some space, then go on with the same command."
            ) from error
        if not is_url(address) and not Path(address).is_dir():
            raise UserError(
                f"The folder {address} has disappeared. Mount it again, then go on with the same command."
            ) from error
        raise UserError(f"{error.filename or address}: {error.strerror or error}") from error
