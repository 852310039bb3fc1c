#!/usr/bin/env bash
# Sets up what is missing, then lints, checks imports and types, and runs the tests, three at a time: many tests wait for processes
# most of the time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
(extra=dev && . scripts/setup.sh)
# The page of the dashboard is tested in a real browser; without one those tests are skipped, and fail where CI is set.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 || true
fi
command -v chromium >/dev/null || echo "There is no chromium: the dashboard's page is not tested. Install it, for example: apt install chromium"

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports --no-logo
.venv/bin/mypy &
types=$!
tests=0
.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || tests=$?
wait "$types"
exit "$tests"
