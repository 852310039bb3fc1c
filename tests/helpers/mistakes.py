"""Lists what people get wrong: what they type, what `rl-swarm` says in one line, and its exit code.

The tables of docs/mistakes.md are printed from here: `PYTHONPATH=. python tests/helpers/mistakes.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PEER = "12D3KooWNAoTsvM6b9kpiRVvgGSGjLsCNEoqCgvbqLZSAh2vETfU"
NO_RUN = "There is no run in runs/ here."
NO_SWARM = "is no swarm: it has no readable manifest.json."
NO_KEY = "IDENTITY_PATH=swarm.pem: there is no key yet."


@dataclass(frozen=True)
class Mistake:
    typed: str  # after `rl-swarm`, as in a shell
    said: str  # a part of the line
    code: int = 2
    files: Mapping[str, str] = field(default_factory=dict)  # in the folder; a name that ends with / is a folder
    environ: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    missing: str = ""  # a package that is not installed
    in_run: bool = False  # in a folder with the finished run `runs/mine`
    shown: str = ""  # the command in the table, where `typed` is too long for it


WORDS = [
    Mistake("stauts", "No such command 'stauts'. Did you mean 'status'?"),
    Mistake("identity shwo", "No such command 'shwo'. Did you mean 'show'?"),
    Mistake("help uup", "No such command 'uup'. Did you mean 'up'?"),
    Mistake("up now", "Got unexpected extra argument(s) (now). `rl-swarm help up` explains it."),
    Mistake("up --rouns 5", "There is no option --rouns. Did you mean --rounds?"),
    Mistake("up --rounds", "Option '--rounds' requires an argument."),
    Mistake("evaluate", "Missing argument 'model'. `rl-swarm help evaluate` explains it."),
    Mistake("experiment sapo", "Missing option '--out'."),
    Mistake("up --set rounds", "--set rounds: write it as --set name=value."),
    Mistake("up --from-base", "--from-base goes with --resume: a new run always begins with the model."),
    Mistake("up --run a --resume a", "--run a and --resume a contradict each other"),
    Mistake("watch . --tui --port 9000", "--tui shows the swarm in this terminal, which has no --port and no --host."),
    Mistake(
        "chat tiny --node otter", "--node otter names a node of a run, and tiny is no run. `rl-swarm runs` lists yours."
    ),
]
VALUES = [
    Mistake("up --rounds ten", "rounds='ten' (flag --rounds) cannot be used. What can: whole number, at least 1."),
    Mistake("up --rounds -3", "What can: whole number, at least 1. The default is 60."),
    Mistake("coordinate c --rounds 0", "What can: whole number, at least 1. The default is 2000."),
    Mistake("experiment sapo --out e --nodes 0", "What can: whole number, at least 1, at most 64. The default is 8."),
    Mistake("up --env coding --set rounds=0", "The default is 40."),
    Mistake("up --nodes 100", "nodes='100' (flag --nodes) cannot be used. What can:"),
    Mistake("up --set local_groups=-1", "What can: whole number, at least 0, at most 1024. The default is 4."),
    Mistake("up --set temperature=hot", "temperature='hot' (--set temperature) cannot be used."),
    Mistake("up --set held_out_every=", "held_out_every='' (--set held_out_every) cannot be used."),
    Mistake("up --learning-rate 7", "What can: number, above 0, at most 1."),
    Mistake("up --set lerning_rate=1e-4", "(--set lerning_rate). Did you mean `learning_rate`?"),
    Mistake("up --model tinny", "MODEL_NAME=tinny: there is no such model. Did you mean `tiny`?"),
    Mistake("up --model smollm2", "Did you mean `smollm2-135m`?"),
    Mistake("evaluate tinny", "Did you mean `tiny`?"),
    Mistake("chat tinny", "Did you mean `tiny`?"),
    Mistake("warmup tinny", "Did you mean `tiny`?"),
    Mistake("up --model ./nowhere", "MODEL_NAME=./nowhere: there is no such directory."),
    Mistake("up --model .", "there is no config.json, so this is no directory of a model."),
    Mistake("up --model a.ipynb", "MODEL_NAME=a.ipynb is a file. A model is a directory", files={"a.ipynb": "{}"}),
    Mistake("up --model nobody/nothing", "is not on this machine, and the hub cannot be asked for it", code=1),
    Mistake("up --tasks gdc", "reasoning-gym has no task 'gdc' that a swarm can use. Did you mean 'gcd'?"),
    Mistake("coordinate c --tasks gdc", "Did you mean 'gcd'?"),
    Mistake("up --tasks 'gcd chain_sum'", "Several are separated by commas, such as gcd,chain_sum."),
    Mistake("up --env debat", "Installed: coding, debate, reasoning. Did you mean `debate`?"),
    Mistake("up --set strategy=saop", "strategy=saop: there is no strategy of that name."),
    Mistake("up --set strategy=mine:Gate", "strategy=mine:Gate cannot be imported: No module named 'mine'."),
    Mistake("up --set role=boss", "What can: in every swarm `worker`, `coordinator`; in coding"),
    Mistake("up --device gpu", "device='gpu' (flag --device) cannot be used. What can: `auto`, `cpu`, `cuda`, `mps`."),
    Mistake("up --device cuda", "device='cuda', but this machine has no CUDA GPU. Use --device auto or cpu."),
    Mistake("up --set web_token=abc", "SWARM_WEB_TOKEN (web_token): use at least 12 letters, digits and signs"),
    Mistake("watch --port 99999", "What can: whole number, at least 1, at most 65535. The default is 8080."),
    Mistake("up --web --set web_host=nowhere.invalid", "Use an address of this machine.", code=1),
    Mistake("up --set metrics_sinks=wanb", "there is no 'wanb'. What can be used, comma-separated:"),
    Mistake("up --set hub_repo=mine", "HUB_REPO='mine' (hub_repo) is no repository of the hub. Write it as owner/name"),
    Mistake("up --set experiment_name=a/b", "What can: letters, digits, `.`, `_`, `-`."),
    Mistake("up --set p2p_listen=4000", "P2P_LISTEN=4000 is no multiaddress; one looks like /ip4/0.0.0.0/tcp/31000."),
    Mistake("experiment sapo --out e --configs 4-4", "--configs 4-4: write own/external groups, such as 4/4"),
    Mistake("experiment sapo --out e --strategies saop", "Did you mean `sapo`?"),
    Mistake("experiment sapo --out e --seeds x", "--seeds x: write whole numbers from 0 to 9999"),
    Mistake("experiment sapo --out e --rates 7", "--rates 7: write numbers above 0, at most 1, comma-separated"),
    Mistake("experiment sapo --out e --configs 2/0 --nodes 2 --node 2:model=tinny", "Did you mean `tiny`?"),
]
FILES = [
    Mistake("up --config no.yaml", "The settings file no.yaml cannot be read: No such file or directory."),
    Mistake("up --config .", "The settings file . cannot be read: Is a directory."),
    Mistake(
        "up --config a.yaml", "The settings file a.yaml, line 2 is not valid YAML", files={"a.yaml": "rounds: [1\n"}
    ),
    Mistake("up --config a.yaml", "must hold `name: value` lines.", files={"a.yaml": "- rounds\n"}),
    Mistake(
        "up --config a.yaml",
        "There is no setting `round` (a.yaml). Did you mean `rounds`?",
        files={"a.yaml": "round: 3\n"},
    ),
    Mistake("up", "rounds='many' (MAX_ROUNDS in .env) cannot be used.", files={".env": "MAX_ROUNDS=many\n"}),
    Mistake("up", "rounds='many' (MAX_ROUNDS) cannot be used.", environ={"MAX_ROUNDS": "many"}),
    Mistake("up", "log_level='loud' (LOG_LEVEL) cannot be used.", environ={"LOG_LEVEL": "loud"}),
    Mistake("up", "but EXPERIMENT_NAME is not set.", environ={"GDRIVE_PATH": "/mnt/drive"}),
    Mistake(
        "up",
        "IDENTITY_PATH=swarm.pem is not a private key this node can use",
        code=1,
        files={"swarm.pem": "x"},
        modes={"swarm.pem": 0o600},
    ),
    Mistake("up --run a", "--run a: File exists. Choose a directory that can be written.", code=1, files={"a": "x"}),
    Mistake("up --run /proc/x", "Choose a directory that can be written.", code=1),
    Mistake("up --run .", "--run names this folder itself. Give a folder of its own, such as runs/mine."),
    Mistake(f"up --run {'a' * 300}", "File name too long", code=1, shown="up --run aaaaaaaaaa… (300 letters)"),
    Mistake("up --resume runs/none", "--resume runs/none: that is no run of `rl-swarm up`.", code=1),
    Mistake("coordinate /proc/x", "/proc/x cannot be made", code=1),
    Mistake("join no/such/drive", "no/such/drive: the folder does not exist. Is the drive mounted", code=1),
    Mistake("status", NO_RUN, code=1),
    Mistake("watch", NO_RUN, code=1),
    Mistake("validate", NO_RUN, code=1),
    Mistake("chat", "There is no run in runs/ here to talk to. Train one: `rl-swarm up`", code=1),
    Mistake("status runs/none", f"runs/none {NO_SWARM}", code=1),
    Mistake("watch empty", f"empty {NO_SWARM}", code=1, files={"empty/": ""}),
    Mistake("status a.json", f"a.json {NO_SWARM}", code=1, files={"a.json": "{}"}),
    Mistake("show none.json", "none.json: No such file or directory. Give a file of a swarm", code=1),
    Mistake("show a.json", "a.json is no document of a swarm", code=1, files={"a.json": "{"}),
    Mistake("runs --remove none", "--remove none: there is no such run in runs. `rl-swarm runs` lists them.", code=1),
    Mistake("runs --root a", "--root a is a file. Give the folder with the runs.", files={"a": ""}),
    Mistake("experiment report none", "none: there is no such directory.", code=1),
    Mistake("identity show", NO_KEY, code=1),
    Mistake("invite .", NO_KEY, code=1),
    Mistake("identity new", "swarm.pem: the file exists and is not overwritten.", code=1, files={"swarm.pem": "x"}),
    Mistake("identity import a.pem", "a.pem is no private key that a node can use", code=1, files={"a.pem": "x"}),
    Mistake("identity import none.pem", "none.pem: No such file or directory", code=1),
    Mistake("members none", "Is none the folder of a swarm?", code=1),
    Mistake(
        "watch",
        "The dashboard needs more packages: pip install 'rl-swarm[web]'",
        code=1,
        missing="fastapi",
        in_run=True,
    ),
    Mistake(
        "up --resume runs/mine",
        "runs/mine has finished, round 1 was its last. Start a new run: rl-swarm up",
        code=1,
        in_run=True,
    ),
    Mistake("up --run runs/mine", "--run runs/mine: there is a run already. Resume it with", code=1, in_run=True),
    Mistake("status runs/mien", "runs/mien is no swarm. Did you mean runs/mine?", code=1, in_run=True),
    Mistake(
        "chat mine --node otter",
        "--node otter: no node of runs/mine with a checkpoint is called that.",
        code=1,
        in_run=True,
    ),
    Mistake(
        "deny runs/mine bob",
        "'bob' is neither a peer id (12D3KooW... or Qm...) nor the name of an invitation.",
        in_run=True,
    ),
]
ADDRESSES = [
    Mistake("join", "Which swarm? Give its address, or set GDRIVE_PATH and EXPERIMENT_NAME."),
    Mistake("join http://example.org/x", "nodes cannot write to a http:// address."),
    Mistake("join s4://bucket/x", "s4:// is no known kind of address. Use a path, s3://bucket/name"),
    Mistake("join s3://bucket", "a swarm needs a bucket or server, and a folder in it"),
    Mistake(
        "join s3://key:secret@bucket/x",
        "it carries neither credentials nor parameters: s3://bucket/x is what is meant?",
    ),
    Mistake(
        "join s3://bucket/x", "a swarm at a s3:// address needs a package that is not installed", code=1, missing="s3fs"
    ),
    Mistake("join chain://x", "swarms at a chain:// address are not supported."),
    Mistake("join p2p://", "p2p:// is no address of a peer. One looks like /ip4/203.0.113.7/tcp/31000/p2p/12D3KooW…"),
    Mistake("coordinate p2p://nobody", "nobody is no address of a peer."),
    Mistake(
        f"join /ip4/127.0.0.1/tcp/9/p2p/{PEER}",
        "is the address of a peer. Write p2p:// before it",
        shown="join /ip4/127.0.0.1/tcp/9/p2p/12D3KooW…",
    ),
    Mistake("bootnode --initial-peers junk", "junk is no address of a peer."),
    Mistake(
        f"status p2p:///ip4/127.0.0.1/tcp/9/p2p/{PEER}",
        "pip install 'rl-swarm[p2p]'",
        code=1,
        missing="hivemind",
        shown="status p2p:///ip4/127.0.0.1/tcp/9/p2p/12D3KooW…",
    ),
]
TABLES = {
    "The command line": WORDS,
    "Settings": VALUES,
    "Files and folders": FILES,
    "Addresses and packages": ADDRESSES,
}
MISTAKES = [mistake for table in TABLES.values() for mistake in table]


def markdown() -> str:
    """Return the tables of docs/mistakes.md."""
    lines: list[str] = []
    for title, table in TABLES.items():
        lines += [f"## {title}", "", "| typed | said, on one line | exit code |", "| --- | --- | --- |"]
        for one in table:
            variables = "".join(f"{name}={value} " for name, value in one.environ.items())
            typed = f"`{variables}rl-swarm {one.shown or one.typed}`{_given(one)}"
            lines.append(f"| {typed} | {one.said} | {one.code} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _given(one: Mistake) -> str:
    """Say what is in the folder, where that matters."""
    if one.missing:
        return f" without {one.missing}"
    held = [f"`{name}` holds `{text.strip()}`" for name, text in one.files.items() if text.strip()]
    return f", where {', '.join(held)}" if held else ""


if __name__ == "__main__":
    print(markdown(), end="")
