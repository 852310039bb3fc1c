"""Measures what malicious peers achieve: six honest and two malicious machines, with and without the defences.

    python -m benchmarks.robustness.attacks [--quick] [--attacks before,adaptive] [--json FILE]

Another model, which must have some skill at the tasks (`rl-swarm warmup`), on a GPU:

    python -m benchmarks.robustness.attacks --model DIRECTORY --tasks ransom_note,syllogism --device cuda \
        --learning-rate 2e-5

Honest nodes are the real ones: bundled model, scoring process, `Node.play`, signed documents read as from a shared
folder, in lock-step. They have the settings of `rl-swarm up` with a higher learning rate and the defaults for
strangers. Attackers (attack_types.py) publish last in every round.

Every attack meets two swarms. Without defences a node believes what the systems we replace believe: every signer, every
question, claimed rewards, any number of rollouts. With defences it is a node as it is. The baseline is both without
attackers. Each row names the attack's aim; 0 is no success.
"""

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.lib.command import parser_of, print_table, progress, write_json
from benchmarks.robustness.attack_outcome import Outcome, Size
from benchmarks.robustness.attack_types import AIMS, ATTACKS, Attack

QUICK = Size(rounds=12, short_rounds=3, every=6, long=("before", "wrong", "adaptive"))
ARMS = ("undefended", "defended")


def run_swarm(name: str | None, defended: bool, size: Size) -> tuple[Outcome, float]:
    import torch

    from benchmarks.robustness.attack_swarm import Swarm

    logging.disable(logging.ERROR)  # rejections are counted
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        attack = ATTACKS[name]() if name else None
        outcome = Swarm(attack, defended, size, Path(folder)).run()
    return outcome, time.monotonic() - started


def success(attack: type[Attack], outcome: Outcome, baseline: Outcome) -> float:
    """Return how far an attack got at its aim."""
    match attack.aim:
        case "phrase" | "cut":
            return outcome.grown(attack.aim)
        case "score":
            return 1 - outcome.held_out / max(baseline.beside(outcome), 1e-9)
        case "learned":
            return outcome.learned / max(outcome.published, 1)
        case "lost":
            return outcome.empty / outcome.node_rounds
        case "time":
            return max(0.0, outcome.waited - baseline.waited) / (attack.peer_timeout or 1.0)
        case "canary":
            return float(outcome.canary)


def row(name: str, off: Outcome, on: Outcome, baselines: tuple[Outcome, Outcome]) -> dict[str, Any]:
    attack = ATTACKS[name]
    return {
        "name": name,
        "what": attack.name,
        "aims_at": attack.aim,
        "success_undefended": success(attack, off, baselines[0]),
        "success_defended": success(attack, on, baselines[1]),
        "held_out_undefended": off.held_out,
        "held_out_defended": on.held_out,
        "baseline": {"undefended": baselines[0].beside(off), "defended": baselines[1].beside(on)},
        "hostile_share_undefended": off.hostile / max(off.external, 1),
        "hostile_share_defended": on.hostile / max(on.external, 1),
        "seconds_per_round": {"undefended": off.waited, "defended": on.waited},
        "refused_defended": dict(on.reasons.most_common()),
        "curves": {"undefended": off.curve, "defended": on.curve},
    }


def measured(names: Sequence[str], size: Size, processes: int) -> dict[str, Any]:
    """Play every swarm, as many at a time as there are processes, and the longest first."""
    jobs: list[tuple[str | None, bool]] = [(name, on) for name in [None, *names] for on in (False, True)]
    jobs.sort(key=lambda job: -(ATTACKS[job[0]].identities if job[0] else 0))
    outcomes: dict[tuple[str | None, bool], Outcome] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        running = {pool.submit(run_swarm, *job, size): job for job in jobs}
        for future in as_completed(running):
            job = running[future]
            if (error := future.exception()) is not None:
                progress(f"{job[0] or 'baseline'}, defences {'on' if job[1] else 'off'}: failed, {error!r}")
                continue
            outcomes[job], seconds = future.result()
            found = outcomes[job]
            progress(
                f"{job[0] or 'baseline'}, defences {'on' if job[1] else 'off'}: {seconds:.0f} s, held-out "
                f"{found.held_out:.3f}, phrase {found.grown('phrase'):.2f}, cut {found.grown('cut'):.2f}, "
                f"hostile groups {found.hostile} of {found.external}, refused: {reasons(found.reasons)}"
            )
    baselines = outcomes[None, False], outcomes[None, True]
    whole = [name for name in names if (name, False) in outcomes and (name, True) in outcomes]
    return {
        "attacks": [row(name, outcomes[name, False], outcomes[name, True], baselines) for name in whole],
        "failed": [name for name in names if name not in whole],
        "baselines": {"undefended": baselines[0].curve, "defended": baselines[1].curve},
        "baseline_refused": dict(baselines[1].reasons),
        "aims": AIMS,
    }


def reasons(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counted.items()) or "-"


def print_figures(figures: dict[str, Any]) -> None:
    header = ["attack", "rounds", "aims at"]
    for what in ("success", "held-out", "hostile groups"):
        header += [f"{what}, off", "on"]
    header.append("refused as")
    rows = [
        [
            attack["what"],
            f"{attack['curves']['defended'][-1]['round']:.0f}",
            attack["aims_at"],
            *(f"{attack[f'success_{arm}']:.2f}" for arm in ARMS),
            *(f"{attack[f'held_out_{arm}']:.3f} of {attack['baseline'][arm]:.3f}" for arm in ARMS),
            *(f"{100 * attack[f'hostile_share_{arm}']:.0f} %" for arm in ARMS),
            reasons(attack["refused_defended"]),
        ]
        for attack in figures["attacks"]
    ]
    ends = [f"{Outcome(curve=figures['baselines'][arm]).held_out:.3f}" for arm in ARMS]
    last = f"{figures['baselines']['defended'][-1]['round']:.0f}"
    rows.append(["no attackers", last, *"---", *ends, *"--", reasons(figures["baseline_refused"])])
    print_table(header, rows)
    start = figures["baselines"]["defended"][0]["held_out"]
    print(f"\nHeld-out score at the start: {start:.3f}. Success is, by what an attack aims at:")
    for aim in dict.fromkeys(attack["aims_at"] for attack in figures["attacks"]):
        print(f"- {aim}: {AIMS[aim]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.rounds} rounds instead of {Size.rounds}")
    parser.add_argument("--attacks", help=f"some of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--model", default="tiny", help="of the honest nodes (default: tiny)")
    parser.add_argument("--tasks", default="auto", help="as rl-swarm takes them (default: those of the model)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--learning-rate", type=float, default=Size.learning_rate)
    parser.add_argument("--rounds", type=int, help="of attacks that need time to work")
    parser.add_argument("--held-out", type=int, default=Size.held_out, help="questions to look at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="swarms at a time")
    options = parser.parse_args()
    from benchmarks.lib.gauge import machine

    names = options.attacks.split(",") if options.attacks else list(ATTACKS)
    if unknown := [name for name in names if name not in ATTACKS]:
        parser.error(f"--attacks {','.join(unknown)}: choose from {', '.join(ATTACKS)}")
    taken = ("model", "tasks", "device", "learning_rate", "held_out", "seed")
    changes: dict[str, Any] = {name: getattr(options, name) for name in taken}
    if options.rounds:
        changes["rounds"] = options.rounds
    size = Size(**{**vars(QUICK if options.quick else Size()), **changes})
    started = time.monotonic()
    figures = measured(names, size, options.processes)
    figures |= {
        "seconds": round(time.monotonic() - started),
        "machine": machine(options.device, 1),
        "options": {**vars(options), **vars(size)},
    }
    if options.json != "-":
        print_figures(figures)
    write_json(options.json, figures)
    if figures["failed"]:
        sys.exit(f"These could not be played: {', '.join(figures['failed'])}.")


if __name__ == "__main__":
    main()
