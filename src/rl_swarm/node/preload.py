"""Imports once, in the process that nodes are forked from, what all of them need: most of that is torch."""

import rl_swarm.learning.preload
import rl_swarm.node.node  # noqa: F401
