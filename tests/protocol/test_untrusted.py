"""What strangers write is no command to whoever reads our logs: not to a terminal, a shell, or a reader of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_swarm.protocol.untrusted import MAX_QUOTED, json_line, plain, printable, quoted
from rl_swarm.protocol.wire import Rejected
from rl_swarm.telemetry.journal import EVENTS, Journal

NASTY = "$(touch ran) `touch ran` \x1b]0;x\x07 \x9b2J \u202e\u2066 ; touch ran & | > x"


@given(st.text(max_size=300))
def test_quoted_text_is_short_and_has_harmless_signs_only(text: str) -> None:
    shown = quoted(text)
    assert shown.isascii() and shown.isprintable() and len(shown) <= 10 * MAX_QUOTED + 5
    assert not set('$`;&|<>(){}[]!*?~#"\n\t') & set(shown.replace("...", ""))
    assert shown.count("'") == 2


@given(st.text(max_size=300))
def test_messages_and_log_lines_hold_no_command_for_a_terminal(text: str) -> None:
    assert plain(text, 100).isascii() and len(plain(text, 100)) <= 100
    assert not set("$`") & set(plain(text, 100))
    assert plain(str(Rejected("x", text)), 999) == str(Rejected("x", text))
    assert all(letter == "\n" or letter.isprintable() for letter in printable(text))
    assert not set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u200e\u200f\u061c") & set(printable(text))


@pytest.mark.parametrize("text", ["ordinary words, 3.5 %", "größer", "日本語", "🙂", "a\nb"])
def test_what_people_write_stays_readable(text: str) -> None:
    assert printable(text) == text


@given(st.dictionaries(st.text(), st.text() | st.lists(st.text())))
def test_a_line_of_json_means_the_same_and_is_no_command_to_a_shell(record: dict) -> None:
    line = json_line(json.dumps(record).encode())
    assert json.loads(line) == record
    assert b"$" not in line and b"`" not in line


def test_a_log_that_a_shell_reads_runs_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "private")
    for text in (NASTY, '"; touch ran; "', "'; touch ran; '", "\\"):
        journal.event("rejected", node=text, detail=text, key=text)
    (entry,) = [line for line in journal.read(EVENTS)[:1]]
    assert entry["node"] == NASTY, "the same when it is read as JSON"
    for shell in ("sh", "bash"):
        subprocess.run([shell, str(tmp_path / "private" / EVENTS)], cwd=tmp_path, capture_output=True)
    assert not (tmp_path / "ran").exists()


def test_the_log_of_a_process_escapes_what_a_terminal_would_obey(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import logging\n"
        "from rl_swarm.telemetry.settings import TelemetrySettings\n"
        "from rl_swarm.telemetry.logs import start_logging; from rl_swarm.storage.settings import StorageSettings\n"
        "start_logging(TelemetrySettings(), StorageSettings(private_path='p'), Path('run'), 'me', terminal=True)\n"
        "logging.getLogger('rl_swarm.x').warning('said: %s', sys.argv[1])\n"
        "try: raise ValueError(sys.argv[1])\n"
        "except ValueError: logging.getLogger('rl_swarm.x').exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, NASTY], cwd=tmp_path, capture_output=True, text=True, check=True)
    for text in (done.stderr, (tmp_path / "run" / "logs" / "swarm.log").read_text()):
        assert "\\x1b" in text and "touch ran" in text and "Traceback" in text
        assert all(letter == "\n" or letter.isprintable() for letter in text)
