#!/usr/bin/env bash
# Sets up what is missing and starts a swarm on this machine.
#
#   ./run_rl_swarm.sh                  the default swarm: 4 nodes, the bundled model
#   ./run_rl_swarm.sh --nodes 2        options go to `rl-swarm up`
#   ./run_rl_swarm.sh status runs/x    any other command of `rl-swarm`
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
(cd "$here" && extra=web && . scripts/setup.sh)

case "${1:-}" in
--version) ;;
"" | -*) set -- up "$@" ;;
esac
RL_SWARM_PROGRAM=$0 exec "$here/.venv/bin/rl-swarm" "$@"
