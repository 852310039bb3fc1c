"""Besieges a swarm of real nodes in every known way at once, beside a twin without attacks.

    python -m benchmarks.robustness.siege --network p2p --minutes 10 --nodes 8 --seed 0 [--json FILE]
    python -m benchmarks.robustness.siege --network folder --minutes 10 --nodes 8 --seed 0

Both swarms are `rl-swarm up` with the bundled model; rounds end when all have reported (`deadline`). Each hostile
process (siege_peers.py, siege_folder.py) has one way to attack and a bounded share of a core. As many processes run
beside the control and burn, second by second, the processor time that the hostile ones use.

The twins play at the same time, each on half of the cores, and swap halves every `--swap` seconds. Other work on the
machine therefore costs both alike. What the attack makes honest processes do costs the attacked swarm alone. Attacking
one swarm in phases would not do: records, files and members of an attack outlast its phase.

Halfway, one node of each swarm is killed, so that its successor loads a checkpoint under attack. The attacked swarm's
scores are compared, at the same round, with those of the control and of `--scatter` swarms with other seeds, which are
played afterwards. The exit code is 1, with a sentence for every bar that is missed (siege_verdict.py).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.command import parser_of, print_table, progress, write_json
from benchmarks.robustness.siege_swarms import (
    Beside,
    Swarm,
    besiege,
    burn_beside,
    harm_done,
    kinds_of,
    make_outside,
    target_of,
    thirds,
    tree,
    usable_cores,
    wait_until,
)
from benchmarks.robustness.siege_verdict import Side, Siege, doubts, empty, lowest_score, violations

FIRST_ROUND = 2  # from which the siege begins
LOOK_SECONDS = 0.5  # between readings of processor time, which the harmless processes follow
WEIGH_SECONDS = 5.0  # between readings of memory and requests to the dashboard


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    return {
        "rounds": 1_000_000,
        "round_end": "deadline",
        "round_interval": options.deadline,
        "peer_timeout": options.deadline * 2,
        "local_groups": 2,
        "external_groups": 4,
        "negative_scale": 0.0,  # as for nodes of several owners
        "threads": 1,
        "held_out_questions": options.questions,
        "held_out_samples": 2,
        "held_out_every": options.every,
        "checkpoint_every": 5,
        "cleanup_rollouts": "true",
        "keep_rollout_rounds": 3,
        "device": "cpu",
    }


def halves() -> tuple[set[int], set[int]]:
    """Split the cores that this process may use."""
    cores = sorted(usable_cores())
    if len(cores) < 2:
        raise SystemExit("a siege needs two cores, one for each swarm; this process may use one")
    return set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 : len(cores) // 2 * 2])


def play(options: argparse.Namespace, folder: Path) -> tuple[Siege, dict[str, float], dict[str, Swarm]]:
    """Play the attacked swarm and its twin; return the figures, and processor time by hostile kind."""
    cores, kinds = halves(), options.kinds or list(kinds_of(options.network))
    outside = make_outside(folder / "outside")
    before = tree(outside)
    settings = settings_of(options)
    swarms = {
        name: Swarm(name, folder / name, options.network, settings, own, options.nodes, options.seed)
        for name, own in zip(("attack", "control"), cores, strict=True)
    }
    hostile, harmless = list[Beside](), list[Beside]()
    try:
        for swarm in swarms.values():
            swarm.start()
        for swarm in swarms.values():
            swarm.until_round(FIRST_ROUND)
        scratch = folder / "scratch"
        scratch.mkdir()
        target = target_of(swarms["attack"], outside, scratch, options.share)
        progress(f"both swarms play; {len(kinds)} hostile processes start")
        if options.network == "folder":
            from benchmarks.robustness.siege_folder import prepare_crowd

            prepare_crowd(target)
        hostile.append(besiege(options.network, kinds, target, folder))
        hostile[0].pin(cores[0])
        burners, wanted = burn_beside(kinds, cores[1])
        harmless.append(burners)
        progress("all hostile processes are at work")
        time.sleep(options.settle)
        figures = measure(options, swarms, hostile[0], burners, wanted)
        used = hostile[0].used()
    finally:
        for beside in [*hostile, *harmless]:
            beside.end()
        for swarm in swarms.values():
            swarm.stop()
    since, until, shifted, own = figures
    common = set(swarms["attack"].scores()) & set(swarms["control"].scores())
    at = max(common, default=None)
    sides = {name: side_of(swarm, since, until, shifted[name], own[name], at) for name, swarm in swarms.items()}
    harm = harm_done(swarms["attack"], outside, before)
    return Siege(sides["attack"], sides["control"], at, (), harm, ended(hostile[0], folder)), used, swarms


def measure(
    options: argparse.Namespace, swarms: dict[str, Swarm], hostile: Beside, burners: Beside, wanted: Any
) -> tuple[float, float, dict[str, float], dict[str, tuple[float, float]]]:
    """Watch both swarms during the siege; return its begin and end, and the processor times.

    These are of the processes beside the swarms, and of the swarms' own.
    """
    first, second = (set(swarm.cores) for swarm in swarms.values())
    hostile.begin()
    burners.begin()
    burned = dict(zip(burners.children, wanted, strict=True))
    since, started = time.time(), time.monotonic()
    before = {name: swarm.used() for name, swarm in swarms.items()}
    seconds, weigh_at, swap_at, told_at, killed = options.minutes * 60, 0.0, options.swap, 0.0, False
    while (passed := time.monotonic() - started) < seconds:
        used = hostile.used()
        for number, kind in enumerate(burners.children):
            wanted[number] = burned[kind] + used.get(kind, 0.0)
        if passed >= weigh_at:
            weigh_at += WEIGH_SECONDS
            for swarm in swarms.values():
                swarm.weigh()
                swarm.look()
        if passed >= swap_at:
            swap_at += options.swap
            first, second = second, first
            for swarm, beside, cores in zip(swarms.values(), (hostile, burners), (first, second), strict=True):
                swarm.pin(cores)
                beside.pin(cores)
        if not killed and passed >= seconds / 2:
            killed = True
            for swarm in swarms.values():
                swarm.kill_a_node()
        if passed >= told_at:
            told_at += 30
            at = ", ".join(f"{name} at round {swarm.round()}" for name, swarm in swarms.items())
            progress(f"{passed:4.0f} s: {at}; hostile {sum(used.values()):.0f} s of processor time")
        time.sleep(LOOK_SECONDS)
    shifted = {"attack": sum(hostile.used().values()), "control": sum(burners.used().values())}
    after = {name: swarm.used() for name, swarm in swarms.items()}
    own = {name: (all_[0] - before[name][0], all_[1] - before[name][1]) for name, all_ in after.items()}
    return since, time.time(), shifted, own


def side_of(swarm: Swarm, since: float, until: float, beside: float, own: tuple[float, float], at: int | None) -> Side:
    whys = swarm.ended_rounds(since, until)
    memory, largest = thirds(swarm.memory)
    answered = [look for look in swarm.looks if look is not None]
    return Side(
        rounds=len(whys),
        minutes=(until - since) / 60,
        late_rounds=sum(why != "everyone" for why in whys),
        memory=memory,
        largest=largest,
        score=None if at is None else swarm.scores()[at],
        beside_seconds=beside,
        own_seconds=own,
        restarts=swarm.restarts(),
        dashboard=(len(swarm.looks), len(swarm.looks) - len(answered)),
        dashboard_worst=max(answered, default=0.0),
        refused=dict(swarm.refused(since).most_common()),
    )


def ended(hostile: Beside, folder: Path) -> list[str]:
    """Name the hostile processes that failed, with their last words: an attack that does not run shows nothing."""
    found = []
    for number, kind in enumerate(hostile.children):
        if kind in hostile.failed:
            words = (folder / f"hostile-{number}.log").read_text(errors="replace").strip().splitlines()
            found.append(f"the hostile process “{kind}” failed: {(words or ['it said nothing'])[-1][:200]}")
    return found


def plain_scores(options: argparse.Namespace, folder: Path, at: int) -> list[float]:
    """Play swarms without attackers, with other seeds and two at a time, up to the compared round."""
    settings, scores = settings_of(options), list[float]()
    seeds = list(range(options.seed + 1, options.seed + 1 + options.scatter))
    for start in range(0, len(seeds), 2):
        pair = [
            Swarm(f"plain-{seed}", folder / f"plain-{seed}", options.network, settings, cores, options.nodes, seed)
            for seed, cores in zip(seeds[start : start + 2], halves(), strict=False)
        ]
        progress(f"plain swarms with seeds {', '.join(str(swarm.seed) for swarm in pair)} up to round {at}")
        try:
            for swarm in pair:
                swarm.start()
            for swarm in pair:
                swarm.until_round(at + 1, seconds=3600)
            with suppress(TimeoutError):
                wait_until(lambda pair=pair: all(at in swarm.scores() for swarm in pair), 120)  # type: ignore[misc]
        finally:
            for swarm in pair:
                swarm.stop()
        scores += [swarm.scores()[at] for swarm in pair if at in swarm.scores()]
    return scores


def print_siege(siege: Siege, used: dict[str, float]) -> None:
    rows: list[list[str]] = []

    def row(name: str, *cells: str) -> None:
        rows.append([name, *cells])

    attack, control = siege.attack, siege.control
    both = (attack, control)
    row("rounds per minute", *(f"{side.pace:.2f}" for side in both))
    row("rounds", *(f"{side.rounds} in {side.minutes:.1f} min" for side in both))
    row("of them ended without all members", *(str(side.late_rounds) for side in both))
    row("memory, first third", *(f"{side.memory[0]:.0f} MiB" for side in both))
    row("memory, last third", *(f"{side.memory[1]:.0f} MiB" for side in both))
    row("the largest process then", *(f"{side.largest:.0f} MiB" for side in both))
    scores = ["" if side.score is None else f"{side.score:.3f}" for side in both]
    row(f"held-out score after round {siege.round}", *scores)
    row("dashboard, unanswered of looks", *(f"{s.dashboard[1]} of {s.dashboard[0]}" for s in both))
    row("dashboard, slowest answer", *(f"{side.dashboard_worst:.1f} s" for side in both))
    for name, which in (("processor time of a round", 0), ("of it the daemons'", 1)):
        row(name, *(f"{side.own_seconds[which] / max(1, side.rounds):.2f} s" for side in both))
    row("nodes started again", *(str(side.restarts) for side in both))
    row("processor time beside it", *(f"{side.beside_seconds:.0f} s" for side in both))
    refused = [", ".join(f"{why} {count}" for why, count in side.refused.items()) or "none" for side in both]
    row("refused", *refused)
    print_table(["", "attacked", "control"], rows)
    print(f"\nratio of rounds per minute: {siege.ratio:.3f}")
    if siege.plain:
        lowest = lowest_score([*siege.plain, *([control.score] if control.score is not None else [])])
        told = ", ".join(f"{score:.3f}" for score in siege.plain)
        print(f"other seeds without attackers: {told}; so at least {lowest or 0:.3f} is expected")
    print("\nhostile processes, seconds of processor time: " + ", ".join(f"{k} {s:.1f}" for k, s in used.items()))


def parser() -> argparse.ArgumentParser:
    options = parser_of(__doc__)
    options.add_argument("--network", choices=["folder", "p2p"], default="p2p")
    options.add_argument("--minutes", type=float, default=10.0, help="of the siege")
    options.add_argument("--nodes", type=int, default=8, help="honest ones, of each swarm")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--scatter", type=int, default=2, help="swarms without attackers, with other seeds")
    options.add_argument("--share", type=float, default=0.04, help="of a core, for each hostile process")
    options.add_argument("--deadline", type=float, default=20.0, help="seconds after which a round ends at the latest")
    options.add_argument("--every", type=int, default=20, help="rounds between held-out scores")
    options.add_argument("--questions", type=int, default=100, help="of the held-out score")
    options.add_argument("--swap", type=float, default=20.0, help="seconds after which the swarms change cores")
    options.add_argument("--settle", type=float, default=10.0, help="seconds of the attack before it is measured")
    options.add_argument("--kinds", nargs="+", metavar="KIND", help="only these of the hostile processes")
    options.add_argument("--folder", help="keep everything there (default: a temporary folder)")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="siege-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        siege, used, _ = play(options, folder)
        if options.scatter and siege.round is not None:
            siege = Siege(**{**vars(siege), "plain": plain_scores(options, folder, siege.round)})
    if options.json != "-":
        print_siege(siege, used)
    broken, unsure = [*violations(siege), *empty(siege)], list(doubts(siege))
    extra = {"ratio": siege.ratio, "hostile_seconds": used, "violations": broken, "doubts": unsure}
    write_json(options.json, {**asdict(siege), **extra})
    for sentence in [*(f"MISSED: {text}" for text in broken), *(f"note: {text}" for text in unsure)]:
        print(sentence)
    print("every bar was met" if not broken else f"{len(broken)} missed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
