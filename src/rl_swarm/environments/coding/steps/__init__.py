"""Collects the steps of tasks, by subject."""

from rl_swarm.environments.coding.steps.algorithms import ALGORITHMS
from rl_swarm.environments.coding.steps.dictionaries import DICTIONARIES
from rl_swarm.environments.coding.steps.lists import LISTS
from rl_swarm.environments.coding.steps.numbers import NUMBERS
from rl_swarm.environments.coding.steps.recursion import RECURSION
from rl_swarm.environments.coding.steps.strings import STRINGS

SIMPLE = (*NUMBERS, *LISTS, *STRINGS, *DICTIONARIES)
DEMANDING = (*RECURSION, *ALGORITHMS)
