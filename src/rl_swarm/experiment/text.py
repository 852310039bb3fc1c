"""Writes the tables of an experiment's report, in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_swarm.experiment import paper
from rl_swarm.experiment.measures import SKILL, percent
from rl_swarm.node import strategies
from rl_swarm.plural import counted

Arms = Mapping[str, Mapping[str, Any]]  # by label, as in report.json


def whole(numbers: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Write the report; `pictures` are files by what they show."""
    parts = ["# What sharing rollouts is worth", *head(numbers)]
    for title, section in sections(numbers).items():
        parts += [f"## {title}", section]
    parts += [f"![{title}]({name})" for title, name in pictures.items()]
    if not pictures:
        parts.append(
            "Figures need matplotlib: `pip install 'rl-swarm[experiment]'`, then `rl-swarm experiment report`."
        )
    return "\n\n".join(parts) + "\n"


def sections(numbers: Mapping[str, Any]) -> dict[str, str]:
    arms: Arms = numbers["configurations"]
    rivals = numbers.get("compared_at_equal_tokens", ())
    found = {
        "Rewards": _rewards(arms, numbers["compared_with"]),
        "Held-out score": _held_out(arms, numbers["compared_with"]),
        "Against the paper": _paper(arms),
        "At equal cost": _costs(arms, numbers["equal_budgets_per_node"]),
        "Changes at equal tokens": _equal(arms, rivals),
        "How it learns": _learning(arms),
        "By task: held-out score at the end, sampled": _tasks(arms),
        "Learning rates": _rates(arms),
    }
    return {title: section for title, section in found.items() if section}


def head(numbers: Mapping[str, Any]) -> list[str]:
    """Describe in a few lines what was compared."""
    arms: Arms = numbers["configurations"]
    seeds = sorted({seed for arm in arms.values() for seed in arm["seeds"]})
    machine = numbers["machine"]
    made = f"written {numbers['made']}"
    if {"processor", "cores"} <= machine.keys():
        gpu = f", {machine['gpu']}" if "gpu" in machine else ""
        made = f"played on {machine['processor']}, {machine['cores']} cores{gpu}; {made}"
    about = [_one_of(arms, "nodes", "node"), _one_of(arms, "rounds", "round"), _one_of(arms, "model")]
    about += [f"{_one_of(arms, 'generations', 'answer')} to a question"]
    parts = [
        f"{', '.join(about)}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; {made}.",
        _what(arms),
        f"In brackets: 95 % intervals by bootstrap over seeds and nodes.{_narrow(arms)}",
    ]
    for given in dict.fromkeys(_given(arm) for arm in arms.values() if _given(arm)):
        parts.append(f"Settings that differ from the defaults: {given}.")
    if numbers["unfinished"]:
        parts.append(f"Left out, because unfinished: {', '.join(numbers['unfinished'])}.")
    return parts


def _narrow(arms: Arms) -> str:
    """Warn about intervals from few seeds."""
    once = [label for label, arm in arms.items() if len(arm["seeds"]) == 1]
    if not once:
        return " Few seeds make them somewhat too narrow." if min(len(a["seeds"]) for a in arms.values()) < 6 else ""
    whose = "" if len(once) == len(arms) else f" ({', '.join(once)})"
    return f" With one seed{whose} they show how nodes differ, not how seeds do: they are too narrow."


def _one_of(arms: Arms, name: str, unit: str = "") -> str:
    """Format a number that all arms have in common, or all values that occur."""
    *others, last = dict.fromkeys(arm[name] for arm in arms.values())
    return " or ".join([*map(str, others), counted(last, unit) if unit else str(last)])


def _what(arms: Arms) -> str:
    """Explain the names of these arms."""
    says = ["`I/J`: in a round a node answers I questions and trains on J groups of peers, too."]
    if any("x" in arm["configuration"] for arm in arms.values()):
        says.append("`xN`: N updates a round, all on the same groups.")
    if any("@" in arm["configuration"] for arm in arms.values()):
        says.append("`@N`: an update on every N groups that carry signal, one after the other.")
    if any(arm["configuration"].endswith("-pooled") for arm in arms.values()):
        says.append("`-pooled`: one learner that has the questions of all nodes.")
    for name in dict.fromkeys(arm["strategy"] for arm in arms.values() if arm["strategy"] != "alone"):
        kind = strategies.STRATEGIES.get(name)
        about = " ".join((kind.__doc__ or "").split()) if kind else "a class of your own."
        says.append(f"`{name}`: {about[0].lower()}{about[1:]}")
    return " ".join(says)


def _given(arm: Mapping[str, Any]) -> str:
    common = [f"{name}={value}" for name, value in arm["settings"].items() if name not in ("model", "device")]
    single = [
        f"{name}={value} (node {number})"
        for number, of_node in arm["settings_of_nodes"].items()
        for name, value in of_node.items()
    ]
    return ", ".join(common + single)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(measure: Mapping[str, float] | None, digits: int = 3) -> str:
    if measure is None:
        return ""
    mean, low, high = (f"{measure[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _percent(measure: Mapping[str, float] | None) -> str:
    if measure is None:
        return ""
    mean, low, high = (percent(measure[name]) for name in ("mean", "low", "high"))
    return f"{mean} % ({low} to {high})"


def _against(arm: Mapping[str, Any], base: str, what: str) -> str:
    return _percent(arm["against"].get(base, {}).get(what))


def _rewards(arms: Arms, bases: Sequence[str]) -> str:
    head = ["arm", "seeds", "training set, total", "fresh local, total", "fresh local, per round"]
    head += [f"{what} against {base}" for base in bases for what in ("training set", "fresh local")]
    rows = []
    for label, arm in arms.items():
        row = [label, str(len(arm["seeds"]))]
        row += [_number(arm[what]["total"], 1) for what in ("training_set", "fresh_local")]
        row.append(_number(arm["fresh_local"]["per_round"]))
        row += [_against(arm, base, what) for base in bases for what in ("training_set", "fresh_local")]
        rows.append(row)
    return (
        _table(head, rows)
        + "\n\nTotals are over all nodes and rounds, of the mean reward of a round. `training set` is what a node "
        "trained on, external groups included, as the paper seems to log it; these were chosen, so it does not say "
        "what a model can do. `fresh local` is what its own model has just written. A pooled learner counts as all "
        "nodes whose questions it has."
    )


def _held_out(arms: Arms, bases: Sequence[str]) -> str:
    head = ["arm", "start", "end", *(f"end, against {base}" for base in bases), "greedy, start", "greedy, end"]
    rows = []
    for label, arm in arms.items():
        found = arm["held_out"]
        ends = [_number(found[how][when]) for how in ("sampled", "greedy") for when in ("start", "end")]
        ends[2:2] = [_against(arm, base, "held_out") for base in bases]
        rows.append([label, *ends])
    return _table(head, rows) + "\n\nQuestions that training never sees, sampled at temperature 1 and greedily."


def _paper(arms: Arms) -> str:
    """Compare the arms that the paper has too; return nothing where there are none."""
    same = {
        label: arm["configuration"]
        for label, arm in arms.items()
        if arm["configuration"] in paper.TOTALS and arm["strategy"] in paper.STRATEGIES
    }
    rows = []
    for label, configuration in same.items():
        experiment, colon, _ = label.rpartition(": ")
        base = f"{experiment}{colon}{paper.BASE}"
        if base in arms:
            change = f"{100 * paper.CHANGES[configuration]:+.0f} %" if label != base else ""
            ours = [_against(arms[label], base, what) for what in ("training_set", "fresh_local", "held_out")]
            rows.append([label, f"{paper.TOTALS[configuration]:.2f}", change, *ours])
    if len(rows) < 2:
        return ""
    head = ["arm", "paper: total", "change", "here: training set", "fresh local", "held out, end"]
    return (
        _table(head, rows)
        + f"\n\nChanges against {paper.BASE}. The paper (arXiv:2509.08721) has 8 nodes of Qwen2.5-0.5B, 2000 rounds "
        "and other "
        "tasks, so changes can be compared and totals cannot. It seems to log the reward of the training set."
    )


def _costs(arms: Arms, equal: Mapping[str, float]) -> str:
    spent, earned = [], []
    for label, arm in arms.items():
        names = ("generated_tokens_per_node", "trained_tokens_per_node", "seconds_per_node")
        fresh, scores = arm["fresh_local"], arm["held_out"]
        spent.append(
            [label, *(f"{arm[name]['mean']:,.0f}" for name in names),
             *(_number(of[f"at_equal_{what}"]) for what in ("tokens", "seconds") for of in (fresh, scores))]
        )  # fmt: skip
        earned.append(
            [label, *(_number(fresh[name]) for name in ("per_1000_tokens", "per_second")),
             _number(scores["gain_per_million_tokens"], 2), _number(scores["gain_per_hour"], 2)]
        )  # fmt: skip
    return "\n\n".join(
        [
            _table(
                ["arm", "generated tokens", "trained tokens", "seconds", "equal tokens: fresh local", "held out",
                 "equal seconds: fresh local", "held out"],
                spent,
            ),
            f"Per node. `equal tokens`: when a node had generated {equal['tokens']:,.0f} tokens, the fewest of all "
            f"arms; `equal seconds`: when it had worked for {equal['seconds']:,.0f} s. Seconds are those of its own "
            "work, in its turn.",
            _table(
                ["arm", "fresh local per 1000 tokens", "per second", "held-out gain per million tokens", "per hour"],
                earned,
            ),
        ]
    )  # fmt: skip


def _equal(arms: Arms, rivals: Sequence[str]) -> str:
    """Compare arms at the same number of generated tokens."""
    if len(arms) < 2 or not rivals:
        return ""
    kinds = ("fresh_local", "held_out")
    head = ["arm", *(f"{kind.replace('_', ' ')} against {rival}" for rival in rivals for kind in kinds)]
    rows = [
        [
            label,
            *(_percent(arm["against_at_equal_tokens"].get(rival, {}).get(kind)) for rival in rivals for kind in kinds),
        ]
        for label, arm in arms.items()
    ]
    return _table(head, rows)


def _learning(arms: Arms) -> str:
    head = ["arm", "signal", "external groups a round", "oscillation", "tasks learned", "reach", "after"]
    rows = [
        [
            label,
            _number(arm["groups_with_signal"]),
            f"{arm['external_groups_per_round']['mean']:.2f}",
            _number(arm["oscillation"]),
            f"{arm['spread_of_skills']['tasks_learned']:g}",
            _number(arm["spread_of_skills"]["reach"], 2),
            _number(arm["spread_of_skills"]["rounds"], 0),
        ]
        for label, arm in arms.items()
    ]
    return (
        _table(head, rows)
        + "\n\n`signal`: the share of own groups whose rewards differ. `oscillation`: how far the fresh local reward, "
        "in windows, lies below the highest it had reached before, on average; it jumps more by chance where a node "
        f"answers fewer questions. `reach`: of the tasks in which some node rose by {SKILL} or more, the share of the "
        "other nodes that did so too by the end; `after`: how many rounds later than the first, as finely as "
        "held-out scores were taken."
    )


def _tasks(arms: Arms) -> str:
    tasks = list(next(iter(arms.values()))["held_out"]["by_task"])
    rows = []
    for task in tasks:
        ends = [arm["held_out"]["by_task"].get(task, {}).get("sampled", {}) for arm in arms.values()]
        rows.append([task, *(_number(end.get("end"), 2) for end in ends)])
    return _table(["task", *arms], rows)


def _rates(arms: Arms) -> str:
    says: dict[str, list[str]] = {}
    for label, arm in arms.items():
        chosen = arm["learning_rate_chosen"]
        line = f"{arm['learning_rate']:g}"
        if chosen:
            scores = ", ".join(f"{rate}: {score:.3f}" for rate, score in chosen["scores"].items())
            line += (
                f", the best of {scores} (held-out score after {chosen['rounds']} rounds, "
                f"seeds {', '.join(map(str, chosen['seeds']))})"
            )
        else:
            line += ", not tuned"
        says.setdefault(line, []).append(label)
    return "\n".join(f"- {', '.join(labels)}: {line}" for line, labels in says.items())
