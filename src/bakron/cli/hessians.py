"""The commands about directories of Hessian factors: show and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bakron.cli.console import guarded, listener, print_json, say, show_factors
from bakron.cli.options import Json, Quiet

hessians = typer.Typer(
    name="hessians", no_args_is_help=True, help="Look into Hessian factors, or merge those of several texts."
)

DIR = "Directory of factors, or a work directory with one collection."


@hessians.command()
def show(
    directory: Annotated[Path, typer.Argument(help=DIR, metavar="DIR")],
    other: Annotated[
        Path | None,
        typer.Argument(help="Another one, of another seed or text, to compare with.", metavar="OTHER"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the spectra of DIR into this .png, .svg or .pdf; needs matplotlib.", metavar="FILE"
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Tell of each linear how much data is behind its factors and how they are spread.

    Rank is tr(H)²/‖H‖², peak the largest eigenvalue over the mean one, off diagonal the share of ‖H‖² off the diagonal.
    With OTHER, of factors over their trace: differ is ‖A − B‖ over the larger norm, cosine that of the angle between them.
    """
    with guarded():
        from bakron.run.plot import plot_spectra
        from bakron.run.spectra import show_hessians

        if plot is not None:
            plot_spectra(directory, plot, progress=listener(quiet))
        rows = show_hessians(directory, other, progress=listener(quiet))
        print_json(rows) if as_json else show_factors(rows)


@hessians.command()
def merge(
    out: Annotated[Path, typer.Argument(help="New directory for the merged factors.", metavar="OUT")],
    directories: Annotated[list[Path], typer.Argument(help=f"{DIR} Two or more.", metavar="DIR...")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Merge collections over different text of one model: the factors of all the text, for --inputs static.

    All must be of the same model, estimator and labels, and have no calibration sequence in common.
    """
    with guarded():
        from bakron.run.merge import merge_hessians

        facts = merge_hessians(out, directories, progress=listener(quiet))
        if as_json:
            print_json(facts)
        say(
            f"Merged {facts['n_sequences']} sequences, {facts['n_tokens']} tokens. "
            f"Next: bakron quantize MODEL OUT --hessians {out} --inputs static",
            quiet,
        )
