"""Holds the paper's results, arXiv:2509.08721: 8 nodes of Qwen2.5-0.5B, nine tasks, 2000 rounds."""

TOTALS = {"8/0": 561.79, "6/2": 854.43, "4/4": 1093.31, "2/6": 945.87}  # reward, over all nodes and rounds
CHANGES = {"6/2": 0.52, "4/4": 0.94, "2/6": 0.68}  # against the first, as stated
BASE = "8/0"
STRATEGIES = ("sapo", "alone")
