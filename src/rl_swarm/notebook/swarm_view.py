"""Shows a swarm in a notebook: its table, its curves."""

from pathlib import Path

from rl_swarm.errors import UserError
from rl_swarm.monitor import snapshot
from rl_swarm.monitor.drawing import Drawing
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.notebook.picture import HEIGHT, WIDTH, Picture
from rl_swarm.notebook.plots import Plot, plotted

SHOWN = ("reward_local", snapshot.HELD_OUT, "tokens_per_second", "external_accepted")
POINTS = 200  # of a curve
DRIVE = "/content/drive"  # where Colab mounts Google Drive


def look(address: str | Path) -> "Swarm":
    """Open the swarm at an address: a run directory, a shared folder or a bucket."""
    return Swarm(RunView.open(address))


class Swarm:
    """Shows a swarm at the end of a cell: its phase, and the table of its nodes."""

    def __init__(self, view: RunView) -> None:
        self.drawing = Drawing(view)
        self.drawing.refresh()

    def plot(self, *metrics: str) -> Plot:
        """Plot every node and the mean; any metric of `metrics.jsonl` (docs/metrics.md), or `held_out`."""
        self.drawing.refresh()
        for metric in metrics:
            if metric not in self.metrics():
                raise UserError(f"There is no curve of {metric!r}. There are: {', '.join(self.metrics())}.")
        follower = self.drawing.follower
        return plotted([snapshot.lines(follower, metric, POINTS) for metric in metrics or SHOWN])

    def metrics(self) -> list[str]:
        """List the metrics that have curves."""
        follower = self.drawing.follower
        with follower.lock:
            return sorted({snapshot.HELD_OUT, *(name for t in follower.histories.values() for name in t.curves.sums)})

    def _repr_html_(self) -> str:
        return self._picture().html

    def __repr__(self) -> str:
        return self._picture().text

    def _picture(self) -> Picture:
        self.drawing.refresh()
        return Picture(self.drawing.draw(WIDTH, HEIGHT))


def mount_drive(address: str | Path) -> None:
    """Mount Google Drive in Colab if the address is on it; do nothing elsewhere."""
    if Path(DRIVE) not in Path(address).parents:
        return
    try:
        from google.colab import drive
    except ImportError:
        return
    drive.mount(DRIVE)
