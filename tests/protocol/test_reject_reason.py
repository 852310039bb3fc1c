"""Reasons to reject are words of one list, which the documentation has in full."""

import re
from pathlib import Path

from rl_swarm.protocol import reject_reason
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.wire import Rejected

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
SOURCE = Path(reject_reason.__file__)


def test_the_page_has_every_reason_in_the_words_of_the_code() -> None:
    section = PAGE.read_text().partition("### Reasons to reject\n")[2].partition("\n## ")[0]
    on_page = re.findall(r"^\| `([a-z]+)` \| (.+) \|$", section, re.MULTILINE)
    in_code = re.findall(r'^    [A-Z]+ = "([a-z]+)"  # (.+)$', SOURCE.read_text(), re.MULTILINE)
    assert on_page == in_code
    assert [reason for reason, _ in in_code] == [reason.value for reason in RejectReason]


def test_a_rejection_shows_its_reason_as_a_word() -> None:
    assert str(Rejected(RejectReason.PLACE, "of another round")) == "place: of another round"
    assert f"{RejectReason.PLACE}" == str(RejectReason.PLACE) == RejectReason.PLACE.value == "place"
