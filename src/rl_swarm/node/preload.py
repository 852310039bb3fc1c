"""Imports what all nodes need, mostly torch, once, in the process that they are forked from."""

import rl_swarm.learning.preload
import rl_swarm.node.node  # noqa: F401
