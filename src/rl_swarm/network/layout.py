"""Maps documents to paths, which name files in a swarm's folder and requests among peers.

    manifest.json                            the manifest, signed by the swarm's owner
    admission.json                           the owner's access list, if there is one
    state/current_state.json                 round, stage and members
    state/history.jsonl                      one signed line per stage that ended
    peers/<node>.json                        a node's introduction
    rollouts/round_<r>/stage_<s>/<node>.json what a node published (gzip)
    archives/round_<r>/stage_<s>/<node>.json the same of an old round, where it is kept
    rewards/round_<r>/stage_<s>/<node>.json  what a node reported

Nodes keep more in the folder, and with a URL on their own machines: `checkpoints/round_<r>/<node>/` and
`logs/<node>/*.jsonl`.
"""

from functools import lru_cache

from rl_swarm.network.documents import SAFE_NAME, DocumentKey, Kind
from rl_swarm.storage.files import ROUND_FOLDER, STAGE_FOLDER

MANIFEST_FILE = "manifest.json"  # which tells the folder of a swarm from any other
SINGLE = {
    Kind.MANIFEST: MANIFEST_FILE,
    Kind.ACCESS_LIST: "admission.json",
    Kind.STATE: "state/current_state.json",
    Kind.HISTORY: "state/history.jsonl",
}
FOLDERS = {Kind.INTRODUCTION: "peers", Kind.ROLLOUTS: "rollouts", Kind.ARCHIVE: "archives", Kind.REPORT: "rewards"}
ENDING = ".json"
_SINGLE_KEYS = {path: DocumentKey(kind) for kind, path in SINGLE.items()}
_KINDS = {folder: kind for kind, folder in FOLDERS.items()}


def path_of(key: DocumentKey) -> str:
    """Return the path of a document."""
    return SINGLE.get(key.kind) or f"{folder_of(key)}/{key.node}{ENDING}"


def folder_of(key: DocumentKey) -> str:
    """Return the folder that holds a document and the others of its group."""
    if key.kind in SINGLE:
        return SINGLE[key.kind].rpartition("/")[0]
    top = FOLDERS[key.kind]
    return top if key.kind is Kind.INTRODUCTION else f"{round_folder(key.kind, key.round)}/stage_{key.stage}"


def round_folder(kind: Kind, round: int) -> str:
    return f"{FOLDERS[kind]}/round_{round}"


@lru_cache(4096)
def key_at(path: str) -> DocumentKey | None:
    """Return the key of the document that belongs at a path; None for any other path."""
    if path in _SINGLE_KEYS:
        return _SINGLE_KEYS[path]
    folder, _, name = path.rpartition("/")
    top, *between = folder.split("/")
    node, kind = node_of(name), _KINDS.get(top)
    if node is None or kind is None:
        return None
    if kind is Kind.INTRODUCTION:
        return None if between else DocumentKey(kind, node=node)
    if len(between) != 2:
        return None
    round, stage = ROUND_FOLDER.fullmatch(between[0]), STAGE_FOLDER.fullmatch(between[1])
    return DocumentKey(kind, int(round[1]), int(stage[1]), node) if round and stage else None


def node_of(name: str) -> str | None:
    """Return the node that a file is named after; None for temporary files and copies that a sync has made."""
    node = name.removesuffix(ENDING)
    return node if node != name and SAFE_NAME.fullmatch(node) else None
