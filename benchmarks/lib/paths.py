"""Names the files of a folder swarm, for benchmarks and tests that look into the folder."""

from rl_swarm.network import documents
from rl_swarm.network.documents import report_key, rollouts_key
from rl_swarm.network.layout import folder_of, path_of

MANIFEST, ACCESS_LIST, STATE, HISTORY = map(
    path_of, (documents.MANIFEST, documents.ACCESS_LIST, documents.STATE, documents.HISTORY)
)


def rollouts_path(round: int, stage: int, node: str) -> str:
    return path_of(rollouts_key(round, stage, node))


def report_path(round: int, stage: int, node: str) -> str:
    return path_of(report_key(round, stage, node))


def report_folder(round: int, stage: int) -> str:
    return folder_of(report_key(round, stage))
