"""Shows, makes, moves and uses this node's key: `rl-swarm identity`."""

import base64
import binascii
import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from rl_swarm.cli import program
from rl_swarm.cli.arguments import Json
from rl_swarm.config import resolve as config
from rl_swarm.errors import UserError
from rl_swarm.protocol.identity import KEY_FILE_BYTES, Identity, animal_name, verify, warn_if_readable, write_new

app = typer.Typer(
    help="The node's identity: a private key, the peer id made from it, and a name made from that.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

KeyFile = Annotated[
    str | None,
    typer.Option("--identity-path", help="The key file; by default IDENTITY_PATH, or swarm.pem in this directory."),
]
SIGNED_FILE = b"rl-swarm signed file\n"  # no message of a swarm begins like this, so no signature passes for one
CHUNK = 1 << 20


def key_path(given: str | None) -> Path:
    flags: dict[str, object] = {"identity_path": given} if given is not None else {}
    return Path(config.load(flags=flags, command="identity").settings.network.identity_path)


def load(given: str | None) -> Identity:
    path = key_path(given)
    if not path.exists():
        raise UserError(
            f"IDENTITY_PATH={path}: there is no key yet. `{program()} identity new` makes one, "
            f"`{program()} identity import FILE` imports one."
        )
    warn_if_readable(path)
    return Identity.load(path)


@app.command()
def show(identity_path: KeyFile = None, as_json: Json = False) -> None:
    """Print this node's peer id, its name, and where its key is."""
    identity, path = load(identity_path), key_path(identity_path)
    found = {
        "peer_id": identity.peer_id,
        "name": identity.name,
        "node": identity.node,
        "file": str(path.absolute()),
        "key": identity.kind,
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for title, value in found.items():
        print(f"{title.replace('_', ' '):<8} {value}")


@app.command()
def new(identity_path: KeyFile = None) -> None:
    """Make a new key. An existing file is never overwritten."""
    _keep(Identity.generate(), key_path(identity_path), "Made")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="Where to; `-` prints it.")] = Path("-"),
    public: Annotated[bool, typer.Option("--public", help="Only the public key, which is no secret.")] = False,
    identity_path: KeyFile = None,
) -> None:
    """Write the key as PEM, for a backup or another machine. It never overwrites a file. The holder of the key is this
    peer."""
    identity = load(identity_path)
    pem = identity.public_pem() if public else identity.pem()
    if str(file) == "-":
        sys.stdout.write(pem.decode())
        return
    _write(file, pem, 0o644 if public else 0o600)
    print(f"The {'public' if public else 'private'} key of {identity.peer_id} is in {file}.")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A key: PEM, libp2p's protobuf, or base64 of that; `-` reads it.")],
    identity_path: KeyFile = None,
) -> None:
    """Import a key, such as an earlier system's swarm.pem. It keeps its peer id."""
    try:
        with _opened(file) as source:
            identity = Identity.from_bytes(source.read(KEY_FILE_BYTES))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} is no private key that a node can use ({error}). Give a PEM file without a password, or the "
            "swarm.pem of an earlier system."
        ) from error
    _keep(identity, key_path(identity_path), "Imported")


@app.command()
def sign(
    file: Annotated[Path, typer.Argument(help="What to sign; `-` reads it.")], identity_path: KeyFile = None
) -> None:
    """Sign a file and print the signature in base64."""
    identity = load(identity_path)
    print(base64.b64encode(identity.sign(_message(file))).decode())


@app.command(name="verify")
def verify_(
    file: Annotated[Path, typer.Argument(help="What was signed; `-` reads it.")],
    signature: Annotated[str, typer.Argument(help="As `identity sign` printed it.")],
    peer_id: Annotated[str, typer.Argument(help="Whose signature it should be.")],
) -> None:
    """Check a signature made by `identity sign`: exit code 0 if it is good, 1 if it is not."""
    try:
        raw = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if verify(peer_id, _message(file), raw):
        print(f"Good: {animal_name(peer_id)} ({peer_id}) signed {file}.")
        return
    print(f"NOT good: this is no signature of {peer_id[:64]!r} for {file} as it is.")
    raise typer.Exit(1)


def _message(file: Path) -> bytes:
    sha = hashlib.sha256()
    with _opened(file) as source:
        while chunk := source.read(CHUNK):
            sha.update(chunk)
    return SIGNED_FILE + sha.digest()


def _opened(file: Path) -> BinaryIO:
    try:
        return sys.stdin.buffer if str(file) == "-" else file.open("rb")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error


def _keep(identity: Identity, path: Path, what: str) -> None:
    _write(path, identity.pem(), 0o600)
    print(f"{what} {identity.peer_id} ({identity.name}, {identity.kind}) in {path}")


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        write_new(path, data, mode)
    except FileExistsError as error:
        raise UserError(f"{path}: the file exists and is not overwritten. Choose another, or move it away.") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Choose a place that can be written.") from error
