"""Opens the address of a swarm: a local path or a URL, as text that people hand to each other.

The documents of the swarm are in the store at the address. Logs and checkpoints of a node are in a directory of its
machine: with a path that is the same directory, with a URL it is `runs/<name>-<digest of the URL>`.
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rl_swarm.errors import ConfigError, UsageError
from rl_swarm.network.documents import DocumentStore
from rl_swarm.network.folder import FolderStore
from rl_swarm.protocol.identity import is_peer_id
from rl_swarm.protocol.wire import digest
from rl_swarm.storage.files import SWARMS
from rl_swarm.storage.settings import StorageSettings

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
READ_ONLY = ("http", "https", "ftp", "github", "git")
NOT_YET = ("chain",)
PEER_SCHEME = "p2p"
PEER_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[A-Za-z0-9.:-]{1,253})/(tcp|udp)/(?P<port>[0-9]{1,5})"
    r"(/(quic|quic-v1|ws|wss|tls))*(/p2p/(?P<relay>[A-Za-z0-9]+)/p2p-circuit)?/p2p/(?P<peer>[A-Za-z0-9]+)"
)
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Address:
    text: str  # as people write it, and as the owner is remembered by
    name: str  # of a swarm that is founded here
    store: DocumentStore
    here: Path  # of logs and checkpoints, on this machine
    is_url: bool = False  # then other nodes keep their logs elsewhere
    peers: tuple[str, ...] = ()  # multiaddresses, where the documents are among peers

    def __str__(self) -> str:
        return self.text


def known_addresses(text: str) -> list[str]:
    """Return the multiaddresses in `p2p://<multiaddress>,<multiaddress>`; raise `UsageError` where there are none."""
    addresses = [part.strip().removeprefix(peer_url("")) for part in text.split(",") if part.strip()]
    for address in addresses or [""]:
        if not is_peer_address(address):
            raise UsageError(
                f"{ascii(address)[1:-1][:200] or text} is no address of a peer. One looks like "
                "/ip4/203.0.113.7/tcp/31000/p2p/12D3KooW…: `rl-swarm bootnode` and `rl-swarm up --network p2p` print "
                "theirs."
            )
    return addresses


def is_peer_address(text: str) -> bool:
    """Tell whether a text is the multiaddress of a peer, with its id at the end, directly or through a relay."""
    found = PEER_ADDRESS.fullmatch(text)
    if found is None or not all(is_peer_id(part) for part in found.group("relay", "peer") if part):
        return False
    if int(found["port"]) >= 1 << 16:
        return False
    if found["kind"].startswith("dns"):
        return HOST.fullmatch(found["host"]) is not None
    try:
        return ipaddress.ip_address(found["host"]).version == int(found["kind"][2])
    except ValueError:
        return False


def peer_url(multiaddress: str) -> str:
    """Return the address at which others join a swarm through this peer."""
    return f"{PEER_SCHEME}://{multiaddress}"


def is_url(where: Path | str) -> bool:
    return isinstance(where, str) and URL.match(where) is not None


def configured_address(settings: StorageSettings) -> Path | str | None:
    """Return the address of the folder swarm that the settings name, if they name one."""
    if settings.gdrive_path is None:
        return None
    if settings.experiment_name is None:
        raise ConfigError(
            f"GDRIVE_PATH={settings.gdrive_path} names the root of a folder swarm, but EXPERIMENT_NAME is not set. "
            "Set it to the swarm's name, for example EXPERIMENT_NAME=my-swarm."
        )
    if is_url(settings.gdrive_path):
        return f"{settings.gdrive_path.rstrip('/')}/{SWARMS}/{settings.experiment_name}"
    return Path(settings.gdrive_path).expanduser() / SWARMS / settings.experiment_name


def open_address(where: Path | str) -> Address:
    """Open the address that a text or a path stands for; raise `UsageError` where it stands for none.

    The documents of an address among peers are there once the engine runs (`p2p/joining.py`).
    """
    if isinstance(where, Path) or not (scheme := URL.match(where)):
        path = Path(where)
        return Address(str(path), path.name or path.resolve().name, FolderStore.at(path), path)
    kind = scheme[1].lower()
    url = kind + where[scheme.end(1) :].rstrip("/")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{where} is no URL ({error}).") from error
    if kind == "file":
        return open_address(Path(parts.path))
    if kind == PEER_SCHEME:
        here = Path("runs") / f"p2p-{digest(url.encode())[:8]}"
        peers = tuple(known_addresses(where))
        return Address(url, "p2p", FolderStore.at(here), here, is_url=True, peers=peers)
    if kind in NOT_YET:
        raise UsageError(f"{where}: swarms at a {kind}:// address are not supported. Use a path or the URL of a store.")
    if kind in READ_ONLY:
        raise UsageError(
            f"{where}: nodes cannot write to a {kind}:// address. Use a path, s3://bucket/name, gs://bucket/name or "
            "webdavs://server/folder/name."
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"An address is handed to others and stands in logs, so it carries neither credentials nor parameters: "
            f"{kind}://{parts.netloc.rpartition('@')[2]}{parts.path} is what is meant? Credentials are read from the "
            "environment; docs/folder-swarm.md says which variables."
        )
    name = parts.path.rpartition("/")[2]
    if (
        not parts.netloc
        or not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)
        or "//" in parts.path
        or "::" in url
    ):
        raise UsageError(
            f"{where}: a swarm needs a bucket or server, and a folder in it with a name of letters, digits, '.', '_' "
            f"and '-', such as {kind}://{parts.netloc or 'bucket'}/my-swarm."
        )
    from rl_swarm.network.remote import RemoteFiles

    here = Path("runs") / f"{name}-{digest(url.encode())[:8]}"
    return Address(url, name, FolderStore(RemoteFiles(url)), here, is_url=True)
