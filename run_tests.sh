#!/usr/bin/env bash
# Sets up what is missing, then lints, checks imports and types, and runs the tests, three at a time: many tests wait for processes
# most of the time. --help lists the options; all other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

mode=""
case "${1-}" in --fast | --slow | --gpu | --coverage | --help)
  mode=$1
  shift
  ;;
esac
if [ "$mode" = --help ]; then
  cat <<'END'
Usage: ./run_tests.sh [OPTION] [ARGUMENT OF PYTEST ...]

Sets up what is missing, lints, checks imports and types, and runs the tests, as CI does.

  --fast      lint, and run the short tests, which start no processes: for every minute of work
  --slow      run the tests that take long, and no others
  --gpu       run the tests that need a CUDA GPU, and no others
  --coverage  run the tests, and tell which lines of the package they reach
  --help      show this
END
  exit
fi
(extra=dev && . scripts/setup.sh)
python=.venv/bin/python
unset PYTHONDONTWRITEBYTECODE # each process that a test starts would compile the package again

# The page of the dashboard is tested in a real browser; without one those tests are skipped, and fail where CI is set.
if [ "$mode" != --fast ] && [ "$mode" != --gpu ] && ! command -v chromium >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 || true
  fi
  command -v chromium >/dev/null ||
    echo "There is no chromium: the dashboard's page is not tested. Install it, for example: apt install chromium"
fi

case "$mode" in
  --slow) exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not gpu" "$@" ;;
  --gpu) exec "$python" -m pytest -n 0 -m gpu "$@" ;;
  --coverage)
    "$python" -m coverage --version >/dev/null 2>&1 ||
      "$python" -m pip install --quiet --disable-pip-version-check "coverage>=7.10"
    "$python" -m coverage erase
    "$python" -m coverage run -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
    "$python" -m coverage combine --quiet
    exec "$python" -m coverage report
    ;;
esac

.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [ "$mode" = --fast ]; then
  exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not processes and not slow and not gpu" \
    --ignore tests/benchmarks --ignore tests/learning/test_cuda.py "$@"
fi
.venv/bin/lint-imports --no-logo
.venv/bin/mypy &
types=$!
tests=0
"$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || tests=$?
wait "$types"
exit "$tests"
