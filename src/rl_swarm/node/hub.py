"""Pushes the trained model to the Hugging Face hub, with a card that says how good it has become.

It does so only where a token and a repository are given. A push links the files of a finished checkpoint aside, where
nothing changes or removes them, and uploads them in a thread of its own while training goes on. A failure is counted,
logged and written to the journal, and never stops the node.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl_swarm import __version__
from rl_swarm.learning.settings import BUNDLED
from rl_swarm.node.model_card import Trained, card, prompting
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.untrusted import printable
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import EVENTS, METRICS, Journal, read_lines

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from rl_swarm.learning.policy import Policy

log = logging.getLogger(__name__)

DELAYS = (5.0, 30.0, 120.0)  # seconds before the second, third and fourth attempt
PATIENCE = 600.0  # seconds that a node waits for its last push
NAMES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # models the hub names otherwise
WEIGHTS = ["model*.safetensors", "model*.safetensors.index.json"]
FILES = [  # a checkpoint holds more, which stays private
    "config.json", "generation_config.json", *WEIGHTS, "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "spiece.model", "chat_template.*", "additional_chat_templates/*.jinja",
]  # fmt: skip


class Push:
    """Pushes one checkpoint at a time, in the background. A newer one takes the place of one that waits."""

    def __init__(self, settings: NodeSettings, aside: Path, journal: Journal, stop: threading.Event) -> None:
        self.settings, self.aside, self.journal, self.stop = settings, aside, journal, stop
        self.repo = settings.checkpoint.hub_repo or ""
        self.delays, self.endpoint = DELAYS, os.environ.get("HF_ENDPOINT") or None
        self.failures = self.number = 0
        self.lock, self.busy, self.ended = threading.Lock(), False, False
        self.waiting: tuple[Path, Trained] | None = None
        self.folders = [aside]
        self._tidy()  # after a process that was killed

    @classmethod
    def wanted(cls, settings: NodeSettings, aside: Path, journal: Journal, stop: threading.Event) -> "Push | None":
        """Return a push if the settings ask for one; `aside` is the folder for what is not uploaded yet."""
        if settings.checkpoint.hub_repo and settings.model.hf_token:
            return cls(settings, aside, journal, stop)
        if settings.checkpoint.hub_repo:
            log.warning("HUB_REPO=%s without HF_TOKEN: the model will not be pushed", settings.checkpoint.hub_repo)
        return None

    def __call__(self, folder: Path, policy: "Policy", manifest: Manifest) -> None:
        """Take a finished checkpoint and return at once."""
        lines = self.journal.read(METRICS)
        trained = Trained(
            repo=self.repo,
            base=NAMES.get(policy.name, policy.name),
            base_is=_where(policy.name),
            prompting=prompting(policy.tokenizer),
            system_prompt=policy.system_prompt,
            settings=self.settings,
            manifest=manifest,
            rounds=len({line["round"] for line in lines if line["kind"] == "round"}),
            held_out=[line for line in lines if line["kind"] == "held_out"],
        )
        self.number += 1
        try:
            staged = put_aside(folder, self.aside / str(self.number))
        except OSError as error:
            return self._failed(f"{folder} cannot be put aside: {error}", attempt=0, again=None)
        self.folders.append(staged)
        with self.lock:
            replaced, self.waiting = self.waiting, (staged, trained)
            start, self.busy = not self.busy, True
        if replaced:
            shutil.rmtree(replaced[0], ignore_errors=True)
        if start:
            threading.Thread(target=self._work, daemon=True, name="push").start()
        return None

    def finish(self, seconds: float = PATIENCE) -> None:
        """Wait for the push under way, at most `seconds`, and not at all once the node is told to stop.

        With HF_HUB_DISABLE_XET the library uploads several large files in a pool of threads. At its end
        Python waits for those until a silent server hangs up.
        """
        deadline = time.monotonic() + seconds
        if self.busy:
            log.info("waiting for the push to %s, at most %.0f s; Ctrl-C ends it", self.repo, seconds)
        while self.busy and time.monotonic() < deadline and not self.stop.wait(0.05):
            pass
        if self.busy:
            self._failed("the node ended before the upload did", attempt=0, again=None)
        self.ended = True
        self._tidy()

    def _work(self) -> None:
        try:
            while True:
                with self.lock:
                    job, self.waiting = self.waiting, None
                    if job is None:
                        self.busy = False
                        return
                self._push(*job)
                shutil.rmtree(job[0], ignore_errors=True)
        except BaseException:  # a panic of the uploading library is one
            self.busy = False
            raise

    def _push(self, staged: Path, trained: Trained) -> None:
        for attempt, delay in enumerate([*self.delays, None], start=1):
            try:
                url = self._upload(staged, trained)
            except Exception as error:  # noqa: BLE001 whatever the library raises, training goes on
                reason, final = explain(error, self.repo)
                again = None if final else delay
                self._failed(reason, attempt, again)
                if again is None or self.stop.wait(again) or self.waiting or self.ended:
                    return
            else:
                log.info("pushed the model to %s, %d rounds played", url, trained.rounds)
                self.journal.event("pushed", repo=self.repo, url=url, rounds=trained.rounds, attempts=attempt)
                return

    def _upload(self, staged: Path, trained: Trained) -> str:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        api = HfApi(
            self.endpoint, token=self.settings.model.hf_token, library_name="rl-swarm", library_version=__version__
        )
        text = card(trained, license_of(trained.base, trained.base_is, api))
        (staged / "README.md").write_text(text, encoding="utf-8")
        url = api.create_repo(self.repo, exist_ok=True)
        api.upload_folder(
            repo_id=self.repo,
            folder_path=staged,
            commit_message=f"RL Swarm: {trained.rounds} of {trained.manifest.rounds} rounds",
            delete_patterns=WEIGHTS,  # of an older model, which would be loaded instead
        )
        return str(url)

    def _failed(self, reason: str, attempt: int, again: float | None) -> None:
        if self.ended:
            return
        self.failures += 1
        next_step = "it is given up" if again is None else f"next attempt in {again:g} s"
        log.warning("the push to %s failed (%d so far): %s; %s", self.repo, self.failures, reason, next_step)
        self.journal.event("push_failed", repo=self.repo, reason=reason, attempt=attempt, again=again is not None)

    def _tidy(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def put_aside(folder: Path, target: Path) -> Path:
    """Link the model's files of a checkpoint aside; copy them where that is impossible, as on a mounted drive."""
    files = {path.relative_to(folder) for pattern in FILES for path in folder.glob(pattern) if path.is_file()}
    if not files:
        raise FileNotFoundError(f"{folder} holds no model")
    try:
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / file, target / file)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        target = Path(tempfile.mkdtemp(prefix="rl-swarm-push-"))
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, target / file)
    return target


def explain(error: BaseException, repo: str) -> tuple[str, bool]:
    """Explain an error in words that name the setting, and tell whether another attempt is useless."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status, cause = None, error
    while status is None and cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set. Unset it to push", True
        cause = cause.__cause__  # type: ignore[assignment]
    if status == 401:
        return "HF_TOKEN is not accepted (401): it is wrong or has expired", True
    if status == 403:
        return (f"HF_TOKEN may not write to HUB_REPO={repo} (403): it needs write access to that owner's models", True)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", False


def license_of(base: str, base_is: str, api: "HfApi") -> dict[str, str]:
    """Return the licence that the base model's card states; nothing if it cannot be found out."""
    from huggingface_hub import ModelCard

    if base_is == "bundled":
        return {"license": "apache-2.0"}
    try:
        if base_is == "hub":
            data = api.model_info(base, timeout=10).card_data
        else:
            data = ModelCard.load(Path(base).expanduser() / "README.md").data
        found = data.to_dict() if data else {}
    except Exception as error:  # noqa: BLE001 a card without a licence is a card all the same
        log.debug("the licence of %s is not known: %s", base, error)
        return {}
    return {key: found[key] for key in ("license", "license_name", "license_link") if isinstance(found.get(key), str)}


def _where(model: str) -> Literal["bundled", "local", "hub"]:
    if model in BUNDLED:
        return "bundled"
    return "local" if Path(model).expanduser().is_dir() else "hub"


def outcomes(run: Path, nodes: Iterable[str]) -> list[str]:
    """Tell how the last push of each of these nodes of a run ended."""
    found, files = [], LocalFiles(run)
    for node in nodes:
        lines = read_lines(files, f"logs/{node}/{EVENTS}")[0]
        events = [line for line in lines if line.get("event") in ("pushed", "push_failed")]
        if events:
            last = events[-1]
            url, repo, reason = (printable(str(last.get(name)))[:300] for name in ("url", "repo", "reason"))
            done = last["event"] == "pushed"
            found.append(f"pushed to {url}" if done else f"not pushed to {repo}: {reason}")
    return found
