"""Checks that a run is sound, and tells what was found: `rl-swarm validate`."""

import json
from pathlib import Path

from rl_swarm import environments
from rl_swarm.config import resolve as config
from rl_swarm.errors import FAILED, UserError
from rl_swarm.experiment.arms import FILE as ARM
from rl_swarm.experiment.arms import is_experiment
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.monitor.validate import rescore
from rl_swarm.monitor.validate import validate as validate_run
from rl_swarm.monitor.validate_peers import validate as validate_peers
from rl_swarm.network.address import open_address
from rl_swarm.plural import counted
from rl_swarm.protocol.untrusted import printable

MAX_PRINTED = 50  # notes and errors that are printed


def validate(address: str, rounds: int | None, nodes: int | None, as_json: bool) -> int:
    """Print the verdict on a run; return the exit code."""
    among_peers = bool(open_address(address).peers)
    if not among_peers:
        if is_experiment(address) or (Path(address) / ARM).is_file():
            raise UserError(
                f"{address} belongs to an experiment, whose nodes keep their logs but not their rollouts: nothing can "
                "be checked again. `rl-swarm validate` is for runs of `rl-swarm up` and for swarms of several machines."
            )
        RunView.open(address)
    verdict, opened = (
        validate_peers(address, rounds, nodes, config.user_network())
        if among_peers
        else validate_run(address, rounds, nodes)
    )
    if opened is not None:
        environment = environments.made(opened.manifest)
        try:
            rescore(opened, environment, verdict)
        finally:
            environment.close()
    if as_json:
        found = {"address": address, "sound": verdict.sound, "errors": verdict.errors, "notes": verdict.notes}
        print(json.dumps({**found, "checked": verdict.checked}, indent=2))
        return 0 if verdict.sound else FAILED
    for kind, lines in (("note", verdict.notes), ("error", verdict.errors)):
        for line in lines[:MAX_PRINTED]:
            print(f"{kind}: {printable(line)}")
        if len(lines) > MAX_PRINTED:
            print(f"{kind}: and {len(lines) - MAX_PRINTED} more")
    print("checked: " + ", ".join(counted(number, what) for what, number in verdict.checked.items()))
    wrong = counted(len(verdict.errors), "error")
    print("The run is sound." if verdict.sound else f"The run is NOT sound: {wrong}.")
    return 0 if verdict.sound else FAILED
