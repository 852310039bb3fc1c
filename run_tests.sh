#!/usr/bin/env bash
# Sets up what is missing, then lints, checks types and runs the tests, two files at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
(extra=dev && . scripts/setup.sh)

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy &
types=$!
tests=0
.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" || tests=$?
wait "$types"
exit "$tests"
