"""The tables and the plot of docs/performance.md, from the rows that benchmarks/solver.py measured."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

Row = dict[str, str]
Shape = tuple[int, int]

NAMES = {
    "bakron": "bakron",
    "bakron-one-sided": "bakron, one-sided",
    "bakron-certified": "bakron, certified",
    "classic": "classic GPTQ",
    "classic-transposed": "classic GPTQ, transposed",
    "gptqmodel": "GPTQModel",
    "llmcompressor": "llm-compressor",
    "quartic": "quartic",
}
BASELINES = ("classic", "classic-transposed", "gptqmodel", "llmcompressor")
GOAL_SHAPES = ((1024, 1024), (2048, 2048), (4096, 4096), (4096, 11008), (11008, 4096))


class Measured:
    """The rows of one commit, machine and number of threads: those of the last row of the file."""

    def __init__(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise SystemExit("there are no results to report; run the benchmark first")
        self.last = rows[-1]
        same = ("commit", "hardware", "threads")
        self.rows = [row for row in rows if all(row[name] == self.last[name] for name in same)]
        shapes = {shape_of(row) for row in self.rows}
        self.shapes = sorted(shapes, key=lambda shape: (shape[0] != shape[1], math.prod(shape), shape))

    def row(self, shape: Shape, method: str, run: str | None = None) -> Row | None:
        """The last row of the method, or the one of a certain run."""
        for row in reversed(self.rows):
            if (shape_of(row), row["method"]) == (shape, method) and run in (None, row["run"]):
                return row
        return None

    def seconds(self, shape: Shape, method: str) -> list[float]:
        """The seconds of each round of the last run; none if it was not measured."""
        row = self.row(shape, method)
        return [float(value) for value in row["seconds"].split()] if row else []

    def ratios(self, shape: Shape, method: str, baseline: str) -> list[float]:
        """method / baseline, round by round, of the last run that timed them in turn."""
        for row in reversed(self.rows):
            if (shape_of(row), row["method"]) != (shape, method):
                continue
            if other := self.row(shape, baseline, row["run"]):
                pairs = zip(row["seconds"].split(), other["seconds"].split(), strict=True)
                return [float(ours) / float(theirs) for ours, theirs in pairs]
        return []

    def peak_ratios(self, shape: Shape) -> list[float]:
        """bakron's seconds over those that its flops take at the rate of the product measured just before."""
        row = self.row(shape, "bakron")
        if row is None:
            return []
        return [float(value) / (flops(shape) / rate(row)) for value in row["seconds"].split()]


def shape_of(row: Row) -> Shape:
    """(m, n) of a row."""
    return int(row["m"]), int(row["n"])


def flops(shape: Shape) -> float:
    """mn(m+n) + (m³+n³)/3: sweep and factorisations of the two-sided solve."""
    m, n = shape
    return m * n * (m + n) + (m**3 + n**3) / 3


def rate(row: Row) -> float:
    """Flops a second of the square float32 product measured before this row."""
    return float(row["gemm_gflops"]) * 1e9


# ------------------------------------------------------------------------------------------------- tables


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def spread(values: Sequence[float]) -> str:
    """Median (least – most), three digits; a dash where nothing was measured."""
    if not values:
        return "–"
    middle = f"{statistics.median(values):.3g}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3g}–{max(values):.3g})"


def name(shape: Shape) -> str:
    """rows × columns."""
    return f"{shape[0]} × {shape[1]}"


def squares(data: Measured, method: str, least: int = 0) -> list[int]:
    """Sizes of the square matrices that the method was measured on."""
    return [m for m, n in data.shapes if m == n and m >= least and data.row((m, n), method)]


def exponent(data: Measured, method: str, least: int = 1024) -> float:
    """Slope of log seconds over log size, least squares over squares of at least ``least``; nan below two."""
    sizes = squares(data, method, least)
    if len(sizes) < 2:
        return math.nan
    seconds = [statistics.median(data.seconds((m, m), method)) for m in sizes]
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def doublings(data: Measured, method: str, least: int = 0) -> list[tuple[int, float]]:
    """(size, seconds at twice the size / seconds at the size) of squares."""
    sizes = squares(data, method, least)
    middle = {m: statistics.median(data.seconds((m, m), method)) for m in sizes}
    return [(m, middle[2 * m] / middle[m]) for m in sizes if 2 * m in middle]


def beyond_factors(data: Measured, shape: Shape, method: str) -> float | None:
    """Peak memory beyond the problem and two float64 factors, in float32 matrices of the weight's shape."""
    row = data.row(shape, method)
    if row is None or not row["memory"]:
        return None
    m, n = shape
    return (int(row["memory"]) - 8 * (m * m + n * n)) / (4 * m * n)


def setting(data: Measured) -> str:
    """Where and what was measured."""
    last = data.last
    rates = [float(row["gemm_gflops"]) for row in data.rows if max(shape_of(row)) >= 1024]
    versions = sorted({f"{NAMES[row['method']]} {row['version']}" for row in data.rows if row["version"]})
    return (
        f"{last['hardware']}; {last['threads']} threads; torch {last['torch']}; solver of commit "
        f"`{last['commit']}`; square float32 products of size 4096 ran at {min(rates, default=0):.0f} to {max(rates, default=0):.0f} "
        f"GFLOP/s{''.join('; ' + version for version in versions)}."
    )


def goals(data: Measured) -> str:
    """What was aimed at, and what came out."""
    lines = []

    def add(what: str, value: float | None, goal: float, strict: bool = False) -> None:
        if value is None or math.isnan(value):
            lines.append([what, f"{'<' if strict else '≤'} {goal:g}", "not measured", "–"])
            return
        met = value < goal if strict else value <= goal
        lines.append([what, f"{'<' if strict else '≤'} {goal:g}", f"{value:.3g}", "yes" if met else "**no**"])

    for baseline, goal in (("classic", 0.8), ("gptqmodel", 1), ("llmcompressor", 1)):
        for shape in GOAL_SHAPES:
            ratios = data.ratios(shape, "bakron", baseline)
            value = statistics.median(ratios) if ratios else None
            add(f"seconds / {NAMES[baseline]}, {name(shape)}", value, goal, goal == 1)
    peak = data.peak_ratios((4096, 4096))
    add("seconds / time of the flops at peak, 4096 × 4096", statistics.median(peak) if peak else None, 2.5)
    steps = [ratio for _, ratio in doublings(data, "bakron", 1024)]
    add("largest ratio when the size doubles, from 1024 up", max(steps, default=None), 8.5)
    add("fitted exponent, squares from 1024 up", exponent(data, "bakron"), 3.1)
    memory = [beyond_factors(data, shape, "bakron") for shape in data.shapes]
    add("peak memory, in weights, beyond factors", max((x for x in memory if x is not None), default=None), 6)
    return table(["two-sided solve, act-order included", "goal", "measured", "met"], lines)


def times(data: Measured) -> str:
    """Seconds of each method."""
    methods = [method for method in NAMES if any(data.row(shape, method) for shape in data.shapes)]
    lines = [[name(s), *(spread(data.seconds(s, method)) for method in methods)] for s in data.shapes]
    return table(["shape", *(NAMES[method] for method in methods)], lines)


def ratios(data: Measured) -> str:
    """bakron over each baseline, and over the time of its flops at peak."""
    lines = [
        [
            name(shape),
            *(spread(data.ratios(shape, "bakron", baseline)) for baseline in BASELINES),
            spread(data.ratios(shape, "bakron-one-sided", "classic")),
            spread(data.peak_ratios(shape)),
        ]
        for shape in data.shapes
    ]
    over = (f"/ {NAMES[baseline]}" for baseline in BASELINES)
    return table(["shape", *over, "one-sided / classic GPTQ", "/ flops at peak"], lines)


def parts(data: Measured) -> str:
    """Where the time goes."""
    lines = []
    for shape in data.shapes:
        row, certified = data.row(shape, "bakron"), data.seconds(shape, "bakron-certified")
        if row is None:
            continue
        total = statistics.median(data.seconds(shape, "bakron"))
        more = f"{statistics.median(certified) - total:.3g}" if certified else "–"
        rest = total - float(row["factorise"]) - float(row["sweep"])
        values = (float(row["factorise"]), float(row["sweep"]), rest, total)
        lines.append([name(shape), *(f"{value:.3g}" for value in values), more])
    header = ["order and factorisations", "sweep", "order undone, dequantized", "total"]
    return table(["shape", *header, "checks and certificate, more"], lines)


def growth(data: Measured) -> str:
    """Doubling ratios and fitted exponents."""
    methods = [method for method in NAMES if doublings(data, method)]
    sizes = sorted({size for method in methods for size, _ in doublings(data, method)})
    steps = {method: dict(doublings(data, method)) for method in methods}
    lines = [
        [
            f"{size} → {2 * size}",
            *(f"{steps[method][size]:.2f}" if size in steps[method] else "–" for method in methods),
        ]
        for size in sizes
    ]
    least = {method: 256 if method == "quartic" else 1024 for method in methods}
    fitted = [exponent(data, method, least[method]) for method in methods]
    lines.append(["exponent", *("–" if math.isnan(value) else f"{value:.2f}" for value in fitted)])
    return table(["square", *(NAMES[method] for method in methods)], lines)


def memory(data: Measured) -> str:
    """Peak memory above the problem."""
    methods = [
        method for method in NAMES if any(row["memory"] for row in data.rows if row["method"] == method)
    ]
    lines = []
    for shape in data.shapes:
        cells = [name(shape)]
        for method in methods:
            row = data.row(shape, method)
            cells.append(f"{int(row['memory']) / 1e6:.0f}" if row and row["memory"] else "–")
        beyond = beyond_factors(data, shape, "bakron")
        if beyond is not None:
            lines.append([*cells, f"{beyond:.2f}"])
    return table(["shape", *(f"{NAMES[m]}, MB" for m in methods), "bakron beyond factors, in weights"], lines)


def work(data: Measured) -> str:
    """Counted flops and steps."""
    lines = []
    for shape in data.shapes:
        row = data.row(shape, "bakron")
        if row and row["product_flops"]:
            m, n = shape
            share = int(row["product_flops"]) / (m * n * (m + n))
            lines.append([name(shape), row["tiles"], row["products"], row["product_flops"], f"{share:.3f}"])
    return table(["shape", "tiles", "products", "flops of products", "/ mn(m+n)"], lines)


def losses(data: Measured) -> str:
    """f of each method, two-sided and one-sided."""
    methods = [m for m in NAMES if m != "bakron-certified" and any(data.row(s, m) for s in data.shapes)]
    lines = []
    for shape in data.shapes:
        cells = [name(shape)]
        for method in methods:
            row = data.row(shape, method)
            pair = (float(row["loss"]), float(row["loss_one_sided"])) if row else ()
            cells.append(" / ".join(f"{value:.4g}" for value in pair) or "–")
        lines.append(cells)
    return table(["shape", *(NAMES[method] for method in methods)], lines)


TABLES = (setting, goals, times, ratios, parts, growth, memory, work, losses)


def write_report(rows: Sequence[Row], page: Path) -> None:
    """Replace what stands between ``<!-- NAME -->`` and ``<!-- end -->`` in ``page``, and draw the plot beside it."""
    data = Measured(rows)
    plot(data, page.with_suffix(".svg"))
    text = page.read_text()
    for make in TABLES:
        pattern = re.compile(rf"(<!-- {make.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
        content = make(data)
        text, found = pattern.subn(lambda match: match[1] + content + "\n" + match[2], text)  # noqa: B023
        if not found:
            raise SystemExit(f"{page} has no place for {make.__name__}")
    page.write_text(text)


def plot(data: Measured, path: Path) -> None:
    """Seconds of square matrices over their size, both axes logarithmic."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit('the plot needs matplotlib: pip install "bakron[bench]"') from None
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "bakron", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4.2), layout="constrained")
    for method, label in NAMES.items():
        if method == "bakron-certified" or not (sizes := squares(data, method)):
            continue
        middle = [statistics.median(data.seconds((m, m), method)) for m in sizes]
        heavy = 2.2 if method == "bakron" else 1.1
        axes.plot(sizes, middle, marker="o", markersize=3, linewidth=heavy, label=label)
    if sizes := squares(data, "bakron"):
        ideal = [flops((m, m)) / rate(data.row((m, m), "bakron") or {}) for m in sizes]
        axes.plot(sizes, ideal, "k--", linewidth=1, label="bakron's flops at peak")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({m for m, n in data.shapes if m == n})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("rows = columns")
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
