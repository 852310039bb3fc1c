"""Manages who may take part in a swarm: `invite`, `allow`, `deny`, `members`."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from rl_swarm.cli import program
from rl_swarm.errors import UsageError, UserError
from rl_swarm.network.address import open_address
from rl_swarm.network.documents import DocumentStore
from rl_swarm.network.owner_documents import change_access_list, read_access_list, read_manifest, read_state
from rl_swarm.plural import counted
from rl_swarm.protocol import admission
from rl_swarm.protocol.admission import is_invitation
from rl_swarm.protocol.identity import Identity, animal_name, is_peer_id
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.untrusted import printable
from rl_swarm.protocol.wire import Rejected
from rl_swarm.storage.files import Refused

DAY = 86400.0
T = TypeVar("T")


def invite(address: str, owner: Identity, uses: int, days: float) -> None:
    """Print a new invitation, and what it is good for."""
    _, manifest = _opened(address, owner)
    expires = int(time.time() + days * DAY)
    name, token = admission.invite(manifest, owner, uses, expires)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
    told = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    told.print(f"Invitation {name} to {manifest.name}: for {counted(uses, 'peer')}, until {until}. Hand over:")
    print(token)
    if manifest.admission == "open":
        told.print("This swarm is open: anyone can also join it without an invitation.")
    told.print(f"Peers join with: {program()} join ADDRESS --invitation TOKEN")
    told.print(f"To revoke it, with all peers that used it: {program()} deny {address} {name}")


def change(address: str, owner: Identity, name: str, allow: bool) -> None:
    if not is_peer_id(name) and not is_invitation(name):
        raise UsageError(
            f"{name!r} is neither a peer id (12D3KooW... or Qm...) nor the name of an invitation. "
            f"`{program()} members {address}` lists both."
        )
    store, manifest = _opened(address, owner)
    if name == manifest.peer_id:
        raise UserError(f"{name} is the owner of this swarm and always takes part.")
    before, after = change_access_list(store, manifest, owner, [name], allow)
    who = f"invitation {name}" if is_invitation(name) else f"{animal_name(name)} ({name})"
    what = "allowed" if allow else "denied"
    if before == after:
        print(f"{who} was {what} already.")
    else:
        print(f"{who} is {what} from the next round on (list number {after.number}).")


def members(address: str, as_json: bool) -> None:
    """List who takes part, how each was admitted, and who is kept out."""
    store, manifest = _opened(address)
    access_list = _read(lambda: read_access_list(store, manifest), address)
    try:
        state = read_state(store, manifest)
    except (OSError, Rejected):
        state = State(swarm=manifest.swarm())
    rows = []
    for peer_id in sorted({*state.members, *state.refused, *access_list.allowed, *access_list.denied}):
        member, refusal = state.members.get(peer_id), state.refused.get(peer_id)
        why = admission.refusal_reason(manifest, access_list, peer_id, member)
        if why is not None and member is None and refusal is not None:
            why = refusal.why  # the coordinator knows more: it has seen the invitation
        came_by = f"invitation {member.invitation}" if member and member.invitation else ""
        rows.append(
            {
                "peer_id": peer_id,
                "name": animal_name(peer_id),
                "node": member.node if member else "",
                "by": "owner"
                if peer_id == manifest.peer_id
                else "allowed"
                if peer_id in access_list.allowed
                else came_by,
                "rounds": member.participation if member else 0,
                "now": f"refused: {why}" if why else "member" if member else "not joined yet",
            }
        )
    if as_json:
        told = {"admission": manifest.admission, "owner": manifest.peer_id, "list": access_list.number}
        print(json.dumps({**told, "revoked": access_list.revoked, "peers": rows}, indent=2))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    takes = "any peer" if manifest.admission == "open" else "invited peers only"
    console.print(f"{manifest.name} takes {takes}. Its owner is {animal_name(manifest.peer_id)} ({manifest.peer_id}).")
    for row in rows:
        rounds = counted(int(str(row["rounds"])), "round") if row["rounds"] else ""
        shown = filter(None, (row["peer_id"], row["name"], row["by"], rounds, row["now"]))
        print(printable("  ".join(str(value) for value in shown)))
    if access_list.revoked:
        console.print(f"Revoked invitations: {', '.join(access_list.revoked)}")


def _opened(address: str, owner: Identity | None = None) -> tuple[DocumentStore, Manifest]:
    store = open_address(address).store
    manifest = _read(lambda: read_manifest(store), address)
    if owner is not None and owner.peer_id != manifest.peer_id:
        raise UserError(
            f"This swarm belongs to {manifest.peer_id}, and IDENTITY_PATH is the key of {owner.peer_id}. Only its "
            "owner decides who takes part: give the owner's key with --identity-path."
        )
    return store, manifest


def _read(act: Callable[[], T], address: str) -> T:
    try:
        return act()
    except Refused as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    except OSError as error:
        raise UserError(
            f"{error.filename or address}: {error.strerror}. Is {address} the folder of a swarm?"
        ) from error
    except Rejected as error:
        raise UserError(f"The owner's file in {address} cannot be used ({error}).") from error
