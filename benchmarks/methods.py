"""KL of several methods on one model, over calibration draws and bit widths, as one Markdown table.

    python benchmarks/methods.py demo/smollm2 demo/wikipedia/calibration.jsonl demo/wikipedia/heldout.jsonl \\
        --bits 3 4 --draws 0 1 2 --rows gptq bakron

Every row of a draw sees the same tokens, the same kind of grid and the same held-out windows. The rows of a finished draw
are appended to ``--results`` and are not measured again; what an unfinished one has solved is kept in ``--work``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from bakron.run.compare import compare
from bakron.run.progress import Silent
from bakron.run.settings import Settings

ROWS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "gptq-static": {"method": "gptq", "inputs": "static"},
    "bakron-static-one-sided": {"method": "gptq", "inputs": "static", "estimator": "shampoo"},
    "bakron-static": {"method": "bakron", "inputs": "static"},
    "gptq": {"method": "gptq"},
    "gptq-aimed": {"method": "gptq", "aim": 1.0},
    "bakron-one-sided": {"method": "gptq", "estimator": "shampoo", "aim": 1.0},
    "bakron-not-aimed": {"method": "bakron", "aim": 0.0},
    "bakron": {"method": "bakron"},
}


class Timed(Silent):
    """Prints each stage with its seconds."""

    def start(self, label: str, total: int) -> None:
        """Remember when."""
        self.label, self.started = label, time.perf_counter()

    def finish(self) -> None:
        """Say how long."""
        print(
            f"{time.strftime('%H:%M:%S')}  {self.label}: {time.perf_counter() - self.started:.0f} s",
            flush=True,
        )


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("heldout")
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["bakron", "gptq"])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--n-sequences", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=JSON", help="further settings of all rows"
    )
    parser.add_argument("--work", type=Path, default=Path("benchmarks/work"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/methods.jsonl"))
    args = parser.parse_args()
    further = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    done = (
        [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    )

    for draw in args.draws:
        missing = {}
        for row in args.rows:
            for bits in args.bits:
                key = {"row": row, "bits": bits, "draw": draw, "changed": further}
                if any(all(seen[name] == value for name, value in key.items()) for seen in done):
                    continue
                settings = Settings(
                    **{**ROWS[row], **further},
                    bits=bits,
                    group_size=args.group_size,
                    calibration=args.calibration,
                    n_sequences=args.n_sequences,
                    sequence_length=args.sequence_length,
                    seed=draw,
                )
                label = "-".join([row, str(bits), *(f"{name}={value}" for name, value in further.items())])
                missing[label] = (key, settings)
        if not missing:
            continue
        variants = {label: settings for label, (_, settings) in missing.items()}
        results = compare(args.model, variants, args.heldout, args.work / f"draw{draw}", progress=Timed())
        new = [{**missing[result["label"]][0], **result} for result in results[1:]]
        done += new
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
    print(table([row for row in done if row["draw"] in args.draws], args.bits))


def table(results: list[dict[str, Any]], bits: list[int]) -> str:
    """A line for each row, with mean KL, KL of each draw, the ratio to ``gptq`` of the same draws, and perplexity."""
    lines = [
        "| bits | row | mean KL | KL by draw | KL / gptq, same draws | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    for width in bits:
        here = [r for r in results if r["bits"] == width]
        baseline = {r["draw"]: r["kl"] for r in here if r["row"] == "gptq"}
        for name in dict.fromkeys((r["row"], json.dumps(r["changed"])) for r in here):
            rows = sorted(
                (r for r in here if (r["row"], json.dumps(r["changed"])) == name), key=lambda r: r["draw"]
            )
            kls = [r["kl"] for r in rows]
            shared = [r["draw"] for r in rows if r["draw"] in baseline]
            ratio = (
                f"{sum(r['kl'] for r in rows if r['draw'] in shared) / sum(baseline[d] for d in shared):.3f}"
                if shared
                else ""
            )
            label = name[0] if name[1] == "{}" else f"{name[0]} {name[1]}"
            each = " ".join(f"{kl:.4f}" for kl in kls)
            perplexity = statistics.mean(r["perplexity"] for r in rows)
            lines.append(
                f"| {width} | {label} | {statistics.mean(kls):.4f} | {each} | {ratio} | {perplexity:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
