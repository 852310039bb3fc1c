"""Runs and shows swarms in Jupyter and Colab.

    from rl_swarm import notebook

    notebook.join("/content/drive/MyDrive/rl-swarm/experiments/first", local_groups=4, external_groups=4)  # a node
    notebook.look("/content/drive/MyDrive/rl-swarm/experiments/first").plot()  # the swarm's curves
    notebook.experiment("/content/drive/MyDrive/rl-swarm/sapo", configs="paper")  # the SAPO experiment
    notebook.results("/content/drive/MyDrive/rl-swarm/sapo").plot()  # and its results

`cells.py` runs commands of `rl-swarm` below a cell, `swarm_view.py` shows a swarm, `experiments.py` the experiment, and
`plots.py` draws curves. The notebooks in `notebooks/` are a few lines around them.
"""

from rl_swarm.errors import UserError
from rl_swarm.notebook.cells import coordinate, join, up, watch
from rl_swarm.notebook.experiments import Results, experiment, results
from rl_swarm.notebook.swarm_view import Swarm, look, mount_drive

__all__ = [
    "Results", "Swarm", "UserError", "coordinate", "experiment", "join", "look", "mount_drive", "results", "up",
    "watch",
]  # fmt: skip
