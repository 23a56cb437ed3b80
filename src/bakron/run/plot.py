"""A picture of the spectra of Hessian factors: a panel for each kind of linear and side, a line for each block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bakron.api import PERCDAMP_IN, PERCDAMP_OUT
from bakron.errors import ConfigError, MissingExtraError
from bakron.run.factors import SIDES, Factors
from bakron.run.progress import Progress, Silent, stage

FLOOR = 1e-8  # × the mean eigenvalue: below this, float32 sums have only rounding errors
DAMPING = {"H_in": PERCDAMP_IN, "H_out": PERCDAMP_OUT}
DPI = 150
FORMATS = (".png", ".svg", ".pdf")


def plot_spectra(directory: str | Path, file: str | Path, *, progress: Progress | None = None) -> None:
    """Draw the eigenvalues of all factors of ``directory``, over their mean, into ``file`` (its suffix is the format).

    A linear whose H_in is another's is named in that one's panel.  The dashed line is the default damping: directions
    below it hardly count.  Needs n³ operations for each factor.  Raises MissingExtraError, ConfigError, NonFiniteError.
    """
    if Path(file).suffix not in FORMATS:
        raise ConfigError(f"{file}: expected a name that ends in {', '.join(FORMATS)}.")
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(f'{file}: the plot needs matplotlib: pip install "bakron[bench]"') from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    factors = Factors(directory)
    lines = spectra(factors, progress or Silent())
    rows = [side for side in SIDES if lines[side]]
    columns = max(len(lines[side]) for side in rows)
    figure, axes = pyplot.subplots(
        len(rows), columns, figsize=(2.4 * columns + 0.6, 2.6 * len(rows) + 0.4), sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for side, panels in zip(rows, axes, strict=True):
        for axis in panels[len(lines[side]) :]:
            axis.set_axis_off()
        for axis, (kind, values) in zip(panels, lines[side].items(), strict=False):
            for i, eigenvalues in enumerate(values):
                share = torch.linspace(0, 1, len(eigenvalues)).tolist()
                color = matplotlib.colormaps["viridis"](i / max(len(values) - 1, 1))
                axis.plot(share, eigenvalues.tolist(), color=color, linewidth=0.9)
            axis.axhline(DAMPING[side], color="black", linestyle="--", linewidth=0.8)
            axis.set_yscale("log")
            axis.set_title(kind, fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        panels[0].set_ylabel(f"{side}: eigenvalue / mean", fontsize=8)
    figure.supxlabel(
        "share of directions, largest first; first block dark, last one light; dashed: damping", fontsize=8
    )
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)


def spectra(factors: Factors, progress: Progress) -> dict[str, dict[str, list[Tensor]]]:
    """By side and kind of linear, the eigenvalues of each block in descending order, over their mean, float64."""
    lines: dict[str, dict[str, list[Tensor]]] = {side: {} for side in SIDES}
    with stage(progress, "eigenvalues of the Hessian factors", len(factors.linears)):
        for name in factors.linears:
            for side in SIDES:
                H = factors.load(name, side) if side == "H_out" or factors.shares(name) == name else None
                if H is None:
                    continue
                values = torch.linalg.eigvalsh(H.double()).flip(0)
                same = [
                    other for other in factors.linears if side == "H_in" and factors.shares(other) == name
                ]
                title = "\n".join(_kind(other) for other in [name, *(o for o in same if o != name)])
                mean = float(values.mean()) or 1.0
                lines[side].setdefault(title, []).append((values / mean).clamp(min=FLOOR))
            progress.advance()
    return lines


def _kind(name: str) -> str:
    """What follows the last number in a linear's name: ``self_attn.q_proj`` in every block."""
    parts: list[Any] = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])
