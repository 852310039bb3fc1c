"""Defines the settings of a node's place in the network: its key, its peers, and the coordinator's work."""

from typing import Annotated, ClassVar

from rl_swarm.protocol.wire import Name
from rl_swarm.sections import Section, setting


class NetworkSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "The node and its network"

    node_id: Annotated[
        Name | None, setting("this node's name in files; made from the identity when not given", "NODE_ID")
    ] = None
    identity_path: Annotated[str, setting("the node's private key, made at first start", "IDENTITY_PATH")] = "swarm.pem"
    invitation: Annotated[
        str | None, setting("the owner's invitation to a swarm of invited peers", "INVITATION", secret=True)
    ] = None
    owner: Annotated[
        str | None,
        setting(
            "the peer id of the swarm's owner: a manifest of anybody else is refused; when not given, "
            "of anybody else than the first time",
            "SWARM_OWNER",
        ),
    ] = None
    poll_interval: Annotated[
        float, setting("seconds between looks at the folder while waiting", gt=0, le=1_000_000)
    ] = 2.0
    min_peers: Annotated[int, setting("peers that must have joined before the first round", ge=1)] = 1
    cleanup_rollouts: Annotated[bool, setting("remove old rollouts", "ROLLOUT_CLEANUP_ENABLED")] = False
    keep_rollout_rounds: Annotated[
        int, setting("rounds of rollouts that are kept", "ROLLOUT_KEEP_LAST_N_ROUNDS", ge=1)
    ] = 10
    archive_rollouts: Annotated[
        bool, setting("move old rollouts to archives/ instead of deleting them", "ROLLOUT_ARCHIVE_OLD")
    ] = False
    p2p_initial_peers: Annotated[
        str | None, setting("addresses (`p2p://…`) of the first peers to contact, comma-separated", "P2P_KNOWN")
    ] = None
    p2p_listen: Annotated[
        str, setting("multiaddresses to listen at, comma-separated; port 0 is any that is free", "P2P_LISTEN")
    ] = "/ip4/0.0.0.0/tcp/0"
    p2p_announce: Annotated[
        str | None,
        setting("multiaddresses at which others reach this node, where it cannot know them itself", "P2P_ANNOUNCE"),
    ] = None
    p2p_relay: Annotated[
        bool, setting("ask the router for a port, and be reached through other peers where it gives none", "P2P_RELAY")
    ] = True
