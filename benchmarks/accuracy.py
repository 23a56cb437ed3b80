"""KL, perplexity and top-1 agreement of bakron and of other libraries on one model, as one Markdown table.

    python benchmarks/accuracy.py demo/smollm2 demo/wikipedia/calibration.jsonl \\
        --heldout wikipedia=demo/wikipedia/heldout.jsonl --settings 4:64 3:64 2:32:asym --draws 0 1 2 \\
        --peer-python gptqmodel=PATH/bin/python --peer-python llmcompressor=PATH/bin/python \\
        --peer-python autoround=PATH/bin/python --peer-python hqq=PATH/bin/python

All rows of a draw see the same token ids and are judged by the same evaluator on the same windows of each held-out text,
with float32 arithmetic; only linears inside the blocks are quantized. What a library cannot do is a row that says so.
Finished rows are appended to ``--results`` at once and are not measured again (accuracy_rows.py has the rows,
peers/*_model.py how each library is called, accuracy_table.py what the columns mean).

The libraries run in virtual environments of their own, since their dependencies differ; rows whose ``--peer-python`` is
not given are left out, unless ``--rows`` names them:

    python3 -m venv peers/gptqmodel && peers/gptqmodel/bin/pip install torch==2.13.0 setuptools wheel
    peers/gptqmodel/bin/pip install torch==2.13.0 gptqmodel==7.6.0
    python3 -m venv peers/llmcompressor && peers/llmcompressor/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python3 -m venv peers/autoround && peers/autoround/bin/pip install torch==2.13.0 auto-round==0.16.1
    python3 -m venv peers/hqq && peers/hqq/bin/pip install torch==2.13.0 hqq==0.2.8.post1 torchao==0.18.0
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accuracy_rows import PEERS, ROWS, Setting, row_of, unsupported
from accuracy_table import table
from safetensors.torch import load_file, save_file
from solver import hardware, set_threads
from torch import Tensor

from bakron.data import fingerprint, load_sequences
from bakron.errors import BakronError, ConfigError
from bakron.evals.quality import Quality, Reference, evaluate_each
from bakron.models import Decoder, load_decoder
from bakron.run.evaluation import Evaluation
from bakron.run.store import model_fingerprint

HERE = Path(__file__).resolve().parent
IN_NAMES = str.maketrans(":/", "-_")


class Failed(Exception):
    """A library's process ended without an answer."""


class Domain:
    """A held-out text: its windows, and what the original model makes of them."""

    def __init__(
        self, name: str, text: Path, original: Decoder, n_sequences: int, sequence_length: int
    ) -> None:
        self.name, self.original = name, original
        self.sequences = Evaluation.of(original, text, n_sequences, sequence_length).sequences
        self.fingerprint = fingerprint(self.sequences)[:12]

    @cached_property
    def reference(self) -> Reference:
        """Its states after the last block."""
        return Reference(self.original, self.sequences)

    @cached_property
    def perplexity(self) -> float:
        """The original's."""
        return evaluate_each(self.original, self.sequences)[0].perplexity

    def judge(self, decoder: Decoder) -> dict[str, Any]:
        """The quality of a model, and for each window its mean KL, perplexity and top-1 agreement."""
        together, each = evaluate_each(decoder, self.sequences, self.reference)
        windows = {
            f"{name}_windows": [getattr(q, name) for q in each] for name in ("kl", "perplexity", "top1")
        }
        names = Quality.__dataclass_fields__
        return {name: getattr(together, name) for name in names} | {"original": self.perplexity} | windows


class Draws:
    """The calibration sequences of each draw, written to files that every library reads."""

    def __init__(self, args: argparse.Namespace, original: Decoder) -> None:
        self.args, self.original = args, original
        self.files: dict[int, tuple[Path, str]] = {}

    def get(self, draw: int) -> tuple[Path, str]:
        """The file of this draw, and the first digits of its ids' digest."""
        if draw not in self.files:
            args = self.args
            sequences = load_sequences(
                args.calibration,
                None if args.calibration.endswith(".safetensors") else self.original.tokenizer,
                n_sequences=args.n_sequences,
                sequence_length=args.sequence_length,
                seed=draw,
                vocab_size=self.original.vocab_size,
            )
            path = args.work / "ids" / f"{fingerprint(sequences)[:12]}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"input_ids": torch.stack(sequences)}, path)
            self.files[draw] = path, path.stem
        return self.files[draw]


def request(
    args: argparse.Namespace, row: str, setting: Setting, draw: int, ids: Path, out: Path
) -> dict[str, Any]:
    """What the script of the row's library is asked for."""
    options = row_of(row).options
    if row_of(row).peer == "bakron":
        data = {"calibration": args.calibration, "n_sequences": args.n_sequences}
        work = args.work / f"draw{draw}"
        options = {
            "settings": {**options, **data, "sequence_length": args.sequence_length},
            "work": str(work / "runs" / f"{row}-{setting}".translate(IN_NAMES)),
            "collected": str(work / "collected"),
        }
    return {
        "model": os.path.abspath(args.model),
        "ids": str(ids) if row_of(row).has_data else None,
        "bits": setting.bits,
        "group_size": setting.group_size,
        "symmetric": setting.symmetric,
        "seed": draw,
        "threads": args.threads,
        "options": options,
        "out": str(out),
    }


def quantize(python: str, peer: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the script in its environment; what it says besides the weights, which it leaves in the request's ``out``.

    An answer to the same request that is there already is taken. Raises Failed with the last lines of its log.
    """
    out = Path(asked["out"])
    question, facts = out / "request.json", out / "result.json"
    text = json.dumps(asked, indent=1)
    if not (facts.exists() and question.read_text() == text):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        question.write_text(text)
        threads = str(asked["threads"])
        limits = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        limits |= {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
        limits["GPTQMODEL_CPU_WORKERS"] = str(max(2, asked["threads"]))  # it sizes its pools by it
        script = HERE / "peers" / f"{peer}_model.py"
        with (out / "log.txt").open("w") as log:
            command = [python, str(script), str(question)]
            environment, folder = {**os.environ, **limits}, None
            if peer != "bakron":
                environment.pop("PYTHONPATH", None)  # it is of this environment
                folder = out  # some leave logs where they are run
            code = subprocess.call(command, cwd=folder, env=environment, stdout=log, stderr=log)
        if code or not facts.exists():
            lines = (out / "log.txt").read_text(errors="replace").splitlines()
            raise Failed(
                "\n".join([*lines[-15:], f"{peer}: ended with status {code}, see {out / 'log.txt'}"])
            )
    return json.loads(facts.read_text())


def apply(decoder: Decoder, weights: dict[str, Tensor]) -> None:
    """Give the decoder these tensors, by name. Raises Failed unless all its linears, and nothing outside blocks, come."""
    linears = {f"{spec.name}.weight": spec.name for block in decoder.linears for spec in block}
    parameters = dict(decoder.model.named_parameters())
    missing = sorted(set(linears) - set(weights))
    strange = sorted(
        name for name in weights if name not in parameters or not name.startswith(f"{decoder.root}.")
    )
    if missing or strange:
        raise Failed(f"weights: missing {missing[:3]}, not expected {strange[:3]}")
    for name, value in weights.items():
        if name in linears:
            decoder.set_weight(linears[name], value)
        else:
            with torch.no_grad():
                parameters[name].copy_(value)


def version_of_bakron() -> str:
    """The commit, and whether the source was changed since."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def read(results: Path) -> list[dict[str, Any]]:
    """The rows measured so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def append(results: Path, row: dict[str, Any]) -> None:
    """Add a row."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def find(rows: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any] | None:
    """The row with this key, or None."""
    return next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)


def wanted(args: argparse.Namespace) -> Iterator[tuple[int, Setting, str]]:
    """(draw, setting, row) in the order of measurement; rows without data only once."""
    for position, draw in enumerate(args.draws):
        for setting in args.settings:
            yield from ((draw, setting, row) for row in args.rows if position == 0 or row_of(row).has_data)


def measure(args: argparse.Namespace, pythons: dict[str, str]) -> list[dict[str, Any]]:
    """The rows asked for, from the results or measured now; those that failed are left out, and said on stderr."""
    original = load_decoder(args.model, dtype=torch.float32)
    domains = [
        Domain(name, Path(text), original, args.eval_n_sequences, args.eval_sequence_length)
        for name, text in (item.split("=", 1) for item in args.heldout)
    ]
    draws, model, done = Draws(args, original), model_fingerprint(Path(args.model))[:12], read(args.results)
    found: list[dict[str, Any]] = []
    for draw, setting, row in wanted(args):
        has_data, reason = row_of(row).has_data, unsupported(row, setting)
        ids, digest = draws.get(draw)
        common = {"row": row, "options": row_of(row).options, **vars(setting), "model": model}
        common |= {"draw": draw, "calibration": digest} if has_data else {"draw": None, "calibration": None}
        keys = {
            domain: {**common, "domain": domain.name, "heldout": domain.fingerprint} for domain in domains
        }
        missing = [domain for domain in domains if not find(done, keys[domain])]
        if missing and reason is None:
            try:
                measured = one(args, pythons, row, setting, draw, ids, missing)
            except (Failed, BakronError) as error:
                print(f"{row} {setting} draw {draw} failed:\n{error}", file=sys.stderr, flush=True)
                keys = {domain: key for domain, key in keys.items() if domain not in missing}
                measured = {}
        else:
            measured = {domain: {"not_supported": reason} for domain in missing}
        for domain, facts in measured.items():
            done.append({**keys[domain], **facts})
            append(args.results, done[-1])
        found += [result for key in keys.values() if (result := find(done, key))]
    return found


def one(
    args: argparse.Namespace,
    pythons: dict[str, str],
    row: str,
    setting: Setting,
    draw: int,
    ids: Path,
    domains: list[Domain],
) -> dict[Domain, dict[str, Any]]:
    """Quantize, and judge on these domains."""
    peer = row_of(row).peer
    out = args.work / "answers" / f"{row}-{setting}-draw{draw}".translate(IN_NAMES)
    print(f"{time.strftime('%H:%M:%S')}  {row} {setting} draw {draw}", file=sys.stderr, flush=True)
    facts = quantize(pythons[peer], peer, request(args, row, setting, draw, ids, out))
    if peer == "bakron":
        facts["version"] = f"{facts['version']} {version_of_bakron()}".strip()
    decoder = load_decoder(args.model, dtype=torch.float32)
    apply(decoder, load_file(out / "weights.safetensors"))
    facts |= {"threads": args.threads, "hardware": hardware(), "date": time.strftime("%Y-%m-%d")}
    measured = {domain: {**facts, **domain.judge(decoder)} for domain in domains}
    for domain, values in measured.items():
        print(f"          {domain.name}: KL {values['kl']:.4f}", file=sys.stderr, flush=True)
    if not args.keep_weights:
        shutil.rmtree(out)
    return measured


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("calibration", help="text, as bakron's --calibration takes it")
    parser.add_argument("--heldout", action="append", required=True, metavar="DOMAIN=TEXT")
    grids = [Setting(4, 64), Setting(3, 64), Setting(2, 32, symmetric=False)]
    parser.add_argument(
        "--settings", type=Setting.parse, nargs="+", default=grids, metavar="BITS:GROUP[:asym]"
    )
    parser.add_argument("--draws", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--rows",
        nargs="+",
        help="default: bakron's and the given peers', without the slow ones; or bakron with other settings, as "
        "compare takes them: bakron:refine=0:inputs=static",
    )
    parser.add_argument("--peer-python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--baseline", default="bakron", help="the row that others' KL is divided by")
    parser.add_argument("--n-sequences", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--eval-n-sequences", type=int, default=24)
    parser.add_argument("--eval-sequence-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=Path("benchmarks/work"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/accuracy.jsonl"))
    parser.add_argument("--keep-weights", action="store_true", help="keep dense weights in --work/answers")
    args = parser.parse_args()
    given = (item.split("=", 1) for item in args.peer_python)
    pythons = {"bakron": sys.executable, **{name: os.path.abspath(path) for name, path in given}}
    args.work = args.work.resolve()
    if unknown := set(pythons) - {"bakron", *PEERS}:
        parser.error(f"--peer-python: {min(unknown)} is not one of {', '.join(PEERS)}")
    args.rows = args.rows or [name for name, row in ROWS.items() if row.peer in pythons and not row.slow]
    try:
        peers = [row_of(name).peer for name in args.rows]
    except ConfigError as error:
        parser.error(str(error))
    if lacking := [peer for peer in peers if peer not in pythons]:
        parser.error(f"--peer-python {lacking[0]}=PATH is needed for its rows")
    set_threads(args.threads)
    print(table(measure(args, pythons), args.baseline))


if __name__ == "__main__":
    main()
