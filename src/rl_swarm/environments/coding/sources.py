"""Loads tasks from files in the formats of MBPP and CodeContests, on this machine or on the hub.

A swarm's manifest names a file, never a path. Every node looks for it in its own folder of data (the setting
`data_path`), and a digest in the manifest makes sure that all have the same one. Rows are untrusted text. They are
read as data, within limits, and their programs run only in the sandbox.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rl_swarm.environments.coding.task import CodingTask, is_plain
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.protocol.wire import UNREADABLE
from rl_swarm.scoring.sandbox.literals import read
from rl_swarm.scoring.sandbox.sandbox import Test

log = logging.getLogger(__name__)

MAX_ROWS = 20_000  # of a source
MAX_BYTES = 1 << 30  # of its files, and of its unpacked rows
MAX_ROW = 8 << 20  # bytes
BATCH_ROWS = 16  # of a Parquet file, unpacked at a time
MAX_TEXT = 6000  # characters of a description
MAX_TEST = 2000
MAX_TESTS = 12
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(jsonl|parquet)")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
SETTINGS = ("file", "dataset", "edition", "split", "sha256")


class MbppRow(msgspec.Struct, frozen=True):
    test_list: list[str]
    text: str = ""
    prompt: str = ""  # the name of `text` in the sanitized edition
    code: str = ""
    challenge_test_list: list[str] = []
    test_setup_code: str = ""
    test_imports: list[str] = []
    task_id: int = 0


class Cases(msgspec.Struct, frozen=True):
    input: list[str] = []
    output: list[str] = []


class ContestRow(msgspec.Struct, frozen=True):
    name: str
    description: str
    public_tests: Cases = Cases()
    private_tests: Cases = Cases()
    generated_tests: Cases = Cases()


def from_mbpp(row: MbppRow) -> CodingTask | None:
    """Make a task that shows one test, which names the function, and hides the rest."""
    tests = [test for text in (*row.test_list, *row.challenge_test_list) if (test := read_assert(text))]
    description = (row.text or row.prompt).strip()
    setup = "".join((row.test_setup_code, *row.test_imports)).strip()  # which a call cannot contain
    if len(tests) < 2 or not description or setup:
        return None
    reference = row.code.replace("\r\n", "\n")
    return _task(f"mbpp/{row.task_id}", "mbpp", description, tests[:1], tests[1:], reference)


def from_contest(row: ContestRow) -> CodingTask | None:
    """Make a function from the whole input to the whole output of a program that reads and prints."""
    shown = _cases(row.public_tests)
    hidden = [*_cases(row.private_tests), *_cases(row.generated_tests)]
    if not row.description.strip() or not shown or not hidden:
        return None
    description = (
        f"{row.description.strip()}\n\nWrite the Python function solve(text): text is the whole input, and it returns "
        "what is to be printed."
    )
    return _task(f"codecontests/{row.name[:80]}", "codecontests", description, shown[:1], hidden, "")


def _cases(cases: Cases) -> list[Test]:
    """Make tests that ignore white space between words, as the contests do."""
    pairs = zip(cases.input, cases.output, strict=False)
    return [
        Test(f"solve({given!r}).split()", repr(printed.split()))
        for given, printed in pairs
        if max(len(given), len(printed)) <= MAX_TEST
    ]


def _task(
    name: str, subject: str, description: str, shown: Sequence[Test], hidden: Sequence[Test], reference: str
) -> CodingTask | None:
    texts = [description, *(text for test in shown for text in (test.call, test.expected))]
    if max(len(description), len(reference)) > MAX_TEXT or not all(map(is_plain, texts)):
        return None
    return CodingTask(
        name=name,
        level="",
        subject=subject,
        description=description,
        shown=tuple(shown),
        hidden=tuple(hidden[: MAX_TESTS - len(shown)]),
        reference=reference,
    )


def read_assert(text: str) -> Test | None:
    """Read `assert f(1) == 2` as a test; return None where it is too long or something else.

    Only quotes and brackets are parsed. The expected value has to be a literal: `f(1) == set((1, 2))` could only be
    compared beside the code, where an object that equals everything would be right.
    """
    body = text.strip().removeprefix("assert").strip()
    if not text.strip().startswith("assert") or len(text) > MAX_TEST:
        return None
    at, end = _top_level(body)
    if at is None:
        return Test(f"bool({body[:end].strip()})", "True")
    call, expected = body[:at].strip(), body[at + 2 : end].strip()
    if not call or call.startswith("not "):  # `not` would apply to the comparison
        return None
    try:
        read(expected)
    except ValueError:
        return None
    return Test(call, expected)


def _top_level(text: str) -> tuple[int | None, int]:
    """Find the first `==` outside quotes and brackets, and the end of the expression (a message may follow)."""
    quote, depth, at, skip = "", 0, None, False
    for place, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip, quote = letter == "\\", "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth == 0 and letter == ",":
            return at, place
        elif depth == 0 and at is None and text.startswith("==", place):
            at = place
    return at, len(text)


@dataclass(frozen=True)
class Format:
    """Tells how a task's rows are read, and which data set of the hub has them."""

    row: type[msgspec.Struct]
    task: Callable[[Any], CodingTask | None]
    dataset: str


FORMATS = {
    "mbpp": Format(MbppRow, from_mbpp, "google-research-datasets/mbpp"),
    "codecontests": Format(ContestRow, from_contest, "deepmind/code_contests"),
}


def load(task: Task, folder: Path, token: str | None = None) -> list[CodingTask]:
    """Load all usable tasks of a source, in the order of its rows."""
    kind, config = FORMATS[task.name], task.config
    for key, value in config.items():
        if key not in SETTINGS or not isinstance(value, str):
            raise TaskError(f"the task {task.name} has no setting {key}={value!r}; it has {', '.join(SETTINGS)}")
    if "file" in config:
        files = [_local(task.name, str(config["file"]), folder)]
    else:
        dataset, split = str(config.get("dataset", kind.dataset)), str(config.get("split", "train"))
        files = _from_hub(task.name, dataset, split, str(config.get("edition", "")), token)
    if "sha256" in config:
        _check_digest(task.name, files, str(config["sha256"]))
    found, rows = list[CodingTask](), 0
    for row in islice(_rows(files, kind.row), MAX_ROWS):
        rows += 1
        made = None if row is None else kind.task(row)
        if made is not None:
            found.append(made)
    if not found:
        names = ", ".join(file.name for file in files)
        raise TaskError(f"the task {task.name} found no usable task in {rows} rows of {names}")
    log.info("%s: %d tasks from %d rows; the other rows cannot be asked or judged here", task.name, len(found), rows)
    return found


def _local(name: str, file: str, folder: Path) -> Path:
    if not FILE.fullmatch(file):
        raise TaskError(
            f"the task {name} names the file {file[:80]!r}: it must be a name without a path, ending in .jsonl or "
            ".parquet"
        )
    path = folder / file
    if not path.is_file():
        raise TaskError(
            f"the task {name} needs the file {file}, and it is not in {folder.absolute()}. Put it there, or set "
            "DATA_PATH to the folder that has it."
        )
    if path.stat().st_size > MAX_BYTES:
        raise TaskError(f"{path} has more than {MAX_BYTES >> 20} MiB, which is the most that is read of a task")
    return path


def _from_hub(name: str, dataset: str, split: str, edition: str, token: str | None) -> list[Path]:
    """Return the files of a split, downloaded once into the hub's own cache."""
    from huggingface_hub import HfApi, hf_hub_download

    if not REPOSITORY.fullmatch(dataset) or not re.fullmatch(r"\w{1,32}", split, re.ASCII):
        raise TaskError(f"the task {name} names the data set {dataset[:80]!r}, split {split[:32]!r}; write owner/name")
    try:
        files = HfApi(token=token).list_repo_tree(dataset, repo_type="dataset", recursive=True)
        sizes = {file.path: file.size for file in islice(files, 10_000) if hasattr(file, "size")}
        chosen = choose(sizes, split, edition)
        return [Path(hf_hub_download(dataset, path, repo_type="dataset", token=token)) for path in chosen]
    except Exception as error:  # the hub's client raises errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = reason[:300].rstrip(".")
        raise TaskError(
            f"the task {name} takes the data set {dataset} from the hub, and it cannot be loaded: {reason}. Without "
            f"the hub, put its rows into a file and name it: tasks: [{{name: {name}, config: {{file: {name}.jsonl}}}}]"
        ) from error


def choose(sizes: Mapping[str, int], split: str, edition: str) -> list[str]:
    """Choose the files of a split in one edition, so that no task is held out in one and trained on in another.

    Data sets keep a split as train.jsonl, train-00000-of-00003.parquet, or in a folder of its name; the edition is what
    stands before that. Raises ValueError.
    """
    editions: dict[str, list[str]] = {}
    for path in sorted(sizes):
        found = re.fullmatch(rf"(.*[/_-])?{split}([/._-].*)?", path)
        if found and path.endswith((".jsonl", ".parquet")):
            editions.setdefault((found[1] or "").strip("/_-"), []).append(path)
    if not edition and "full" in editions:
        edition = "full"
    elif not edition and len(editions) == 1:
        (edition,) = editions
    files = editions.get(edition)
    if files is None:
        known = f"has the editions {', '.join(editions)}: set edition to one" if editions else "has no file"
        raise ValueError(f"its split {split} {known}")
    chosen, total = list[str](), 0
    for path in files:
        total += sizes[path]
        if total > MAX_BYTES:
            break
        chosen.append(path)
    if not chosen:
        raise ValueError(f"{files[0][:80]} has {total >> 20} MiB, and at most {MAX_BYTES >> 20} MiB are taken")
    return chosen


def _check_digest(name: str, files: Sequence[Path], expected: str) -> None:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    if digest.hexdigest() != expected.lower():
        raise TaskError(
            f"the task {name}: {', '.join(file.name for file in files)} is not the file of this swarm. Its SHA-256 is "
            f"{digest.hexdigest()}, and the manifest says {expected[:64]}."
        )


def _rows(files: Sequence[Path], kind: type[msgspec.Struct]) -> Iterator[Any]:
    """Yield the rows of files within the limits; None for one that cannot be read."""
    left = MAX_BYTES
    for file in files:
        for size, row in (_parquet if file.suffix == ".parquet" else _lines)(file, kind):
            left -= size
            if left < 0:
                return
            yield row


def _lines(file: Path, kind: type[msgspec.Struct]) -> Iterator[tuple[int, Any]]:
    """Yield the size of every row, and the row."""
    decode = msgspec.json.Decoder(kind).decode
    with file.open("rb") as lines:
        while line := lines.readline(MAX_ROW + 1):
            if len(line) > MAX_ROW:
                raise TaskError(f"{file} has a line of more than {MAX_ROW >> 20} MiB")
            if line.strip():
                try:
                    row = decode(line)
                except UNREADABLE:
                    row = None
                yield len(line), row


def _parquet(file: Path, kind: type[msgspec.Struct]) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TaskError(
            f"{file.name} is a Parquet file, and pyarrow is not installed. Install it: pip install "
            "'rl-swarm[parquet]'. Or give the rows as JSON lines."
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(BATCH_ROWS, columns=list(kind.__struct_fields__)):
                for row in (batch.slice(number, 1) for number in range(len(batch))):
                    size = row.nbytes
                    yield size, _converted(row.to_pylist()[0], kind) if size <= MAX_ROW else None
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{file.name} cannot be read: {str(error)[:200]}") from error


def _converted(row: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError:
        return None
