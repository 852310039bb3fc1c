"""The API, asked whatever its own description allows and much that it does not, about a run that was really played."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
import schemathesis
from browsing import address_of
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from processes import QUICK, end, run, start
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
EXAMPLES = 8  # of every endpoint
SMALL = ["--local-groups", "2", "--generations", "2", *QUICK]
UNENDING = "/api/stream"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    here = tmp_path_factory.mktemp("fuzzed")
    code, output = run(
        here, "up", "--run", "runs/small", "--nodes", "2", "--rounds", "3", "--no-web", *SMALL, timeout=240
    )
    assert code == 0, output
    process = start(here, "watch", "runs/small", "--port", "19200", SWARM_WEB_TOKEN="only-for-this-test")
    yield address_of(process)
    end(process)


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_breaks_the_api_and_every_answer_is_as_described(url: str, mode: GenerationMode) -> None:
    """Positive requests fit the description, negative ones do not."""
    schema = schemathesis.openapi.from_url(f"{url}/api/openapi.json")
    node = httpx.get(f"{url}/api/nodes").json()["nodes"][0]["node"]
    answers: Counter[tuple[str, int]] = Counter()
    for found in schema.exclude(path=UNENDING).get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            if mode is GenerationMode.POSITIVE and "node" in case.path_parameters:
                case.path_parameters["node"] = node  # nobody guesses the name of one
            response = case.call_and_validate(checks=CHECKS, timeout=240)
            answers[f"{case.method} {case.path}", response.status_code] += 1

        with suppress(Unsatisfiable):  # what has no parameters cannot be asked wrongly
            ask()
    if mode is GenerationMode.POSITIVE:
        assert len({what for what, status in answers if status < 300}) >= 20
        assert answers["GET /api/nodes/{node}/tables/{table}", 200] and answers["POST /api/stop", 401]
    else:
        assert len({what for what, status in answers if 400 <= status < 500}) >= 9
