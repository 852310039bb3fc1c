"""Reads what a swarm's owner signs: the manifest, the state and the access list; and changes the access list."""

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable

from msgspec.structs import replace

from rl_swarm.network.base import NetworkError
from rl_swarm.network.documents import ACCESS_LIST, MANIFEST, STATE, DocumentStore
from rl_swarm.protocol.admission import AccessList
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.wire import MAX_BYTES, Incomplete, Rejected, seal, unseal
from rl_swarm.storage.files import Refused

log = logging.getLogger(__name__)

MANIFEST_SECONDS = 180.0  # until a node gives up a manifest that is there but does not become whole
REMIND_SECONDS = 60.0  # between lines that say what is waited for


def read_manifest(store: DocumentStore) -> Manifest:
    return unseal(store.read(MANIFEST, MAX_BYTES), Manifest)


def read_state(store: DocumentStore, manifest: Manifest) -> State:
    state = unseal(store.read(STATE, MAX_BYTES), State)
    if state.peer_id != manifest.peer_id:
        raise Rejected(RejectReason.OWNER, "the state is not signed by the swarm's owner")
    if state.swarm != manifest.swarm():
        raise Rejected(RejectReason.SWARM, "the state of another swarm")
    return state


def read_access_list(store: DocumentStore, manifest: Manifest) -> AccessList:
    """Return the owner's access list; an empty one where there is none."""
    try:
        access_list = unseal(store.read(ACCESS_LIST, MAX_BYTES), AccessList)
    except FileNotFoundError:
        return AccessList(swarm=manifest.swarm())
    if access_list.peer_id != manifest.peer_id:
        raise Rejected(RejectReason.OWNER, "the list is not signed by the swarm's owner")
    if access_list.swarm != manifest.swarm():
        raise Rejected(RejectReason.SWARM, "the list of another swarm")
    return access_list


def change_access_list(
    store: DocumentStore, manifest: Manifest, owner: Identity, names: Iterable[str], allow: bool
) -> tuple[AccessList, AccessList]:
    """Allow or deny peers or invitations, and write the list if it changes. Return the list before and after."""
    before = after = read_access_list(store, manifest)
    for name in names:
        after = after.with_entry(name, allow)
    if after == before:
        return before, before
    try:
        newest = max(before.number, read_state(store, manifest).access_list_number)
    except (OSError, Rejected):  # no state yet
        newest = before.number
    after = replace(after, number=newest + 1, timestamp=time.time())
    store.write(ACCESS_LIST, seal(after, owner))
    return before, after


def await_manifest(
    store: DocumentStore, stop: threading.Event, poll: float, patience: float = MANIFEST_SECONDS
) -> Manifest | None:
    """Wait for the coordinator to write the manifest; None when told to stop.

    A missing manifest is waited for without end, an incomplete one for `patience` seconds.
    """
    name = store.name(MANIFEST)
    broken_since = last_reminder = math.inf
    for tries in itertools.count():
        now = time.monotonic()
        try:
            return read_manifest(store)
        except Refused:
            raise
        except FileNotFoundError:
            broken_since = math.inf
            problem = f"waiting for the coordinator: there is no {name} yet"
        except (OSError, Incomplete) as error:
            broken_since = min(broken_since, now) if isinstance(error, Incomplete) else math.inf
            problem = f"waiting for {name}, which cannot be used yet ({error})"
            if now - broken_since >= patience:
                raise NetworkError(
                    f"{store.root}/{name} has not become whole in {patience:.0f} s ({error}). If the drive still "
                    "syncs it, try again later; if not, its owner has to found the swarm in another folder."
                ) from error
        except Rejected as error:
            raise NetworkError(f"The {name} of this swarm cannot be used ({error}).") from error
        if tries == 1 or now - last_reminder >= REMIND_SECONDS:
            log.log(logging.INFO if broken_since == math.inf else logging.WARNING, "%s", problem)
            last_reminder = now
        if stop.wait(poll):
            break
    return None
