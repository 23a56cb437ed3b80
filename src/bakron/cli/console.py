"""What the command line shows: progress and plans on stderr, results on stdout, errors in one message."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Table

from bakron.errors import BakronError, ConfigError

PIPE_WIDTH = 160  # columns, when nobody's terminal says how wide it is
LINE_EVERY = 60.0  # seconds between lines of a long stage, when stderr is no terminal
BAD_INPUT, INTERRUPTED = 2, 130
QUALITY = {
    "bits_per_weight": ("bits per weight", "{:.3f}"),
    "perplexity": ("perplexity", "{:.4f}"),
    "kl": ("KL", "{:.5f}"),
    "kl_p99": ("KL, 99th percentile", "{:.4f}"),
    "top1": ("same top token", "{:.2%}"),
    "solve_seconds": ("solve seconds", "{:.1f}"),
}

FACTOR = {
    "size": ("size", "{}"),
    "trace": ("trace", "{:.2e}"),
    "effective_rank": ("rank", "{:.1f}"),
    "peak": ("peak", "{:.1f}"),
    "off_diagonal": ("off diagonal", "{:.1%}"),
    "error": ("error", "{:.1%}"),
    "difference": ("differ", "{:.3f}"),
    "cosine": ("cosine", "{:.3f}"),
}


class Bars:
    """Progress as a bar with the time left, for a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.notes: set[str] = set()
        self.progress: Progress | None = None
        self.task = TaskID(0)

    def start(self, label: str, total: int) -> None:
        """A new bar."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(
            *columns, TextColumn("left"), TimeLeftColumn(), console=self.console, speed_estimate_period=600
        )
        self.task = self.progress.add_task(label, total=total)
        self.progress.start()

    def advance(self, steps: int = 1) -> None:
        """Move the bar."""
        if self.progress:
            self.progress.advance(self.task, steps)

    def finish(self) -> None:
        """Leave the bar as it is."""
        if self.progress:
            self.progress.stop()
        self.progress = None

    def note(self, message: str) -> None:
        """The message, once."""
        if message not in self.notes:
            self.console.print(f"note: {message}", style="yellow", markup=False, highlight=False)
        self.notes.add(message)


class Lines:
    """Progress as a line when a stage starts and ends, and each minute between, for a log."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self.label, self.total, self.done = "", 0, 0
        self.started = self.spoken = 0.0

    def start(self, label: str, total: int) -> None:
        """The first line."""
        self.label, self.total, self.done = label, total, 0
        self.started = self.spoken = time.monotonic()
        typer.echo(f"{label} ...", err=True)

    def advance(self, steps: int = 1) -> None:
        """A line if the last one is a minute ago."""
        self.done += steps
        now = time.monotonic()
        if now - self.spoken >= LINE_EVERY and self.done < self.total:
            self.spoken = now
            left = (now - self.started) * (self.total - self.done) / self.done
            typer.echo(f"{self.label}: {self.done} of {self.total}, {duration(left)} left", err=True)

    def finish(self) -> None:
        """The last line."""
        seconds = time.monotonic() - self.started
        typer.echo(f"{self.label}: {self.done} of {self.total} in {duration(seconds)}", err=True)

    def note(self, message: str) -> None:
        """The message, once."""
        if message not in self.notes:
            typer.echo(f"note: {message}", err=True)
        self.notes.add(message)


def listener(quiet: bool) -> Any:
    """Who listens to the stages: nobody if ``quiet`` (None), else bars on a terminal and lines elsewhere."""
    if quiet:
        return None
    return Bars() if sys.stderr.isatty() else Lines()


@contextmanager
def shared_run(quiet: bool) -> Iterator[tuple[Any, bool]]:
    """Within, the processes of this run (``bakron.run.ranks.Ranks``), and whether this one is to be quiet.

    All but the first are, and what they print goes nowhere.  An error names the process it comes from, and what all run
    into is said by one of them; the others end without an error, so that the launcher gives it the time to.
    """
    from bakron.run.ranks import launched

    ranks = launched()
    if not ranks.first:
        warnings.simplefilter("ignore")
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if ranks.first else nowhere):
            yield ranks, quiet or not ranks.first
        ranks.close()
    except (BakronError, OSError) as error:
        if not ranks.first_to_say(str(error)):
            raise typer.Exit from None
        if ranks.size > 1:
            raise BakronError(f"rank {ranks.rank} of {ranks.size}: {error}") from error
        raise
    except KeyboardInterrupt:
        if not ranks.first:
            raise typer.Exit(INTERRUPTED) from None
        raise


def require_one_process(command: str) -> None:
    """End this process without a word unless it is the first; raise ConfigError if it is the first of several."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise typer.Exit
        raise ConfigError(
            f"bakron {command} does all its work in one process, and {os.environ['WORLD_SIZE']} were started. Run it "
            "without torchrun; quantize, collect, solve and compare share theirs."
        )


@contextmanager
def guarded(kept: Path | None = None) -> Iterator[None]:
    """Within, a named error or one of the file system becomes one message and exit code 2, Ctrl-C one and 130.

    kept: the directory where finished work is kept, if this command has one.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of our output has gone
        raise
    except (BakronError, OSError) as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        message = "\nInterrupted."
        if kept and kept.exists():
            message += f" Finished work is kept in {kept}; run the same command again to resume."
        typer.echo(message, err=True)
        raise typer.Exit(INTERRUPTED) from None


def show_plan(plan: Any) -> None:
    """The plan of a run (``bakron.run.plan.Plan``) on stderr."""
    table = Table(show_header=False)
    parts = (("model", plan.model), ("factors", plan.factors), ("states", plan.boundaries))
    detail = ", ".join(f"{name} {size(n)}" for name, n in (*parts, ("activations", plan.activations)))
    each = f" in each of {plan.n_ranks} processes" if plan.n_ranks > 1 else ""
    table.add_row("memory", f"{size(plan.memory)}{each} ({detail})")
    other = plan.beside_model + (plan.model_whole if plan.offload else plan.model_one_block)
    table.add_row("", f"{size(other)} with offload {'none' if plan.offload else 'disk'}")
    table.add_row("disk", f"{size(plan.disk)} of work, {size(plan.output)} of output")
    if plan.seconds is None:
        table.add_row("time", "little: no calibration data is read")
    else:
        table.add_row("time", f"roughly {duration(plan.seconds)} for {plan.n_tokens} calibration tokens")
    share = f"{plan.share_quantized:.1%} of all parameters"
    table.add_row(
        "quantized", f"{plan.n_linears} linears, {share}, {plan.bits_per_weight:.3f} bits per weight"
    )
    _print("Plan", table, stderr=True)


def show_layers(record: dict[str, Any]) -> None:
    """A row for each kind of linear of a finished checkpoint, summed over the blocks, on stdout."""
    title = f"{record['method']}, {record['bits']} bit, {record['bits_per_weight']:.3f} bits per weight"
    mixed = ("bits",) if "schemes" in record else ()
    table = _table("linears", "count", *mixed, "loss / RTN's", "clipped", "worst certificate")
    for kind, rows in _by_kind(record["layers"]).items():
        rtn = sum(row["loss_rtn"] for row in rows)
        ratio = sum(row["loss"] for row in rows) / rtn if rtn else 1.0
        table.add_row(
            kind,
            str(len(rows)),
            *(_counts(row[key] for row in rows) for key in mixed),
            f"{ratio:.4f}",
            f"{sum(row['clip_rate'] for row in rows) / len(rows):.2%}",
            f"{max(max(row['certificate']) for row in rows):.1e}",
        )
    _print(title, table)
    quality = record.get("quality")
    if quality:
        rows = [{"label": "original", "perplexity": quality["perplexity_before"]}]
        own = {"label": record["method"], "bits_per_weight": record["bits_per_weight"]}
        rows.append({**own, **quality, "perplexity": quality["perplexity_after"]})
        show_quality(rows)


def show_bits(record: dict[str, Any]) -> None:
    """A plan of bits: a row for each kind of linear, and the predicted KL beside that of equal bits, on stdout."""
    labels = [_scheme(row, record["uniform"]) for row in record["uniform"]]
    table = _table("linears", "count", "bits", "KL", *(f"KL at {label}" for label in labels))
    for kind, rows in _by_kind(record["layers"]).items():
        chosen = [_scheme(row, record["uniform"]) for row in rows]
        kl = sum(row["kl"][labels.index(label)] for row, label in zip(rows, chosen, strict=True))
        each = [sum(of) for of in zip(*(row["kl"] for row in rows), strict=True)]
        table.add_row(kind, str(len(rows)), _counts(chosen), *(f"{value:.4g}" for value in (kl, *each)))
    _print("Bits where they matter", table)
    table = _table("", "bits per weight", "predicted KL, nats per token")
    for label, row in [*zip(labels, record["uniform"], strict=True), ("plan", record)]:
        name = label if row is record else f"{label} everywhere"
        table.add_row(name, f"{row['bits_per_weight']:.4f}", f"{row['kl']:.4g}")
    _print("Predicted, layers taken as independent", table)


def _scheme(row: dict[str, Any], candidates: list[dict[str, Any]]) -> str:
    """The bits of ``row``, and its group size if candidates have several."""
    several = len({candidate["group_size"] for candidate in candidates}) > 1
    return str(row["bits"]) + (f"/{row['group_size']}" if several else "")


def show_quality(rows: list[dict[str, Any]]) -> None:
    """A row for each model: bits, perplexity, and how far it is from the original, on stdout."""
    columns = {
        key: column for key, column in QUALITY.items() if any(row.get(key) is not None for row in rows)
    }
    table = _table("", *(name for name, _ in columns.values()))
    for row in rows:
        cells = ["" if row.get(key) is None else form.format(row[key]) for key, (_, form) in columns.items()]
        table.add_row(row["label"], *cells)
    _print("Quality on held-out text", table)


def _counts(values: Iterable[Any]) -> str:
    """Which values there are, and how often: ``3 × 10, 4 × 20``; one value by itself."""
    seen = Counter(values)
    if len(seen) == 1:
        return str(next(iter(seen)))
    return ", ".join(f"{value} × {seen[value]}" for value in sorted(seen))


def show_factors(rows: list[dict[str, Any]]) -> None:
    """A table for each side of a directory of Hessian factors (``bakron.run.spectra``), on stdout."""
    for side in ("H_in", "H_out"):
        here = [row for row in rows if row[side]]
        if not here:
            continue
        columns = [key for key in FACTOR if any(row[side].get(key) is not None for row in here)]
        table = _table("linear", "sequences", "tokens", *(FACTOR[key][0] for key in columns))
        for row in here:
            cells = (
                FACTOR[key][1].format(row[side][key]) if row[side][key] is not None else "" for key in columns
            )
            behind = (str(row[key] or "unknown") for key in ("n_sequences", "n_tokens"))
            table.add_row(row["name"], *behind, *cells)
        _print(side, table)


def print_json(value: Any) -> None:
    """``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=1))


def say(message: str, quiet: bool) -> None:
    """A closing remark on stderr, unless ``quiet``."""
    if not quiet:
        typer.echo(message, err=True)


def size(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.2f} MB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _by_kind(layers: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows grouped by the linear's name with every number in it replaced by ``*``."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in layers:
        kind = ".".join("*" if part.isdigit() else part for part in row["name"].split("."))
        kinds.setdefault(kind, []).append(row)
    return kinds


def _table(first: str, *columns: str) -> Table:
    table = Table()
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _print(title: str, table: Table, stderr: bool = False) -> None:
    stream = sys.stderr if stderr else sys.stdout
    console = Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)
    console.print(title, style="bold", markup=False)
    console.print(table)
