"""The settings of a run as options of the command line: a line for each, and how a command gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer


class Option(NamedTuple):
    """A setting's type, its default (as text: the settings themselves are too heavy to import here), and its help.

    parser: what makes a value of the text, where the type alone does not say it.
    """

    type: Any
    default: str
    help: str
    flags: tuple[str, ...] = ()
    parser: Callable[[str], Any] | None = None


def number_or_auto(text: str) -> float | str:
    """The number that ``text`` says, or "auto". Raises ValueError."""
    return text if text == "auto" else float(text)


GRID, METHOD, DATA, MACHINE = "Grid and format", "Method", "Calibration", "Machine"
MODEL = "Model"

OPTIONS: dict[str, dict[str, Option]] = {
    GRID: {
        "bits": Option(int, "4", "Bits per weight, 2 to 8."),
        "group_size": Option(int, "64", "Input columns that share a scale; -1 is the whole row."),
        "symmetric": Option(
            bool, "symmetric", "Grid with or without a zero point.", ("--symmetric/--asymmetric",)
        ),
        "scale": Option(
            Literal["minmax", "mse", "hessian"],
            "hessian",
            "Scales of least squared error, of least error as the Hessian weighs it, or of no clipping.",
        ),
        "format": Option(
            str, "compressed-tensors", "Checkpoint format: compressed-tensors (vLLM, transformers) or dense."
        ),
        "skip": Option(
            list[str], "none", "Leave linears alone whose name matches this regular expression; repeatable."
        ),
    },
    METHOD: {
        "method": Option(
            Literal["bakron", "gptq", "rtn"],
            "bakron",
            "Two-sided, one-sided (GPTQ), or round to nearest.",
        ),
        "estimator": Option(
            str,
            "the method's",
            "Where Hessians come from: shampoo, kfac, sequence, token, mlp_local, attention_local, gram or identity.",
        ),
        "labels": Option(
            Literal["model", "data"],
            "model",
            "Labels of the gradients: drawn from the model's own distribution, or the text's next tokens.",
        ),
        "label_samples": Option(
            int,
            "1",
            "Labels drawn for each token, each with a backward pass of its own; less noise for more time.",
        ),
        "inputs": Option(
            Literal["sequential", "static"],
            "sequential",
            "H_in from the already quantized prefix, or from the original model.",
        ),
        "hessians": Option(
            str,
            "none",
            "Directory of Hessian factors to solve with instead of collecting any; needs --inputs static.",
        ),
        "aim": Option(
            float,
            "the method's",
            "How far sequential layers that write to the hidden state go to undo its drift, 0 to 1.",
        ),
        "percdamp_aim": Option(
            float,
            "1.0",
            "Damping of that move, relative to each input's own size; more follows less of the noise.",
        ),
        "percdamp_in": Option(float, "0.01", "Damping of H_in, in multiples of its mean diagonal."),
        "percdamp_out": Option(
            float,
            "auto",
            "Damping of H_out, in multiples of its mean diagonal; auto chooses it for each linear from its noise.",
            parser=number_or_auto,
        ),
        "shrink_out": Option(float, "0.0", "Shrinkage of H_out to its diagonal, 0 to 1."),
        "act_order": Option(
            Literal["none", "in", "out", "both"],
            "both",
            "Sides that are rounded in descending order of their Hessian's diagonal.",
        ),
        "refine": Option(
            int,
            "4",
            "At most so many passes of coordinate descent over scales and codes after rounding.",
        ),
        "tune": Option(
            int,
            "0",
            "Passes over the calibration sequences that tune all scales together, after the solve, to the original model's "
            "predictions.",
        ),
        "kernel": Option(str, "auto", "Code that rounds a tile: auto, numba (CPU), triton (CUDA) or torch."),
    },
    MODEL: {
        "transform": Option(
            str,
            "none",
            "Weights made easier to round, for the same function: fold, rotate, heads, rescale, joined by +.",
        ),
    },
    DATA: {
        "calibration": Option(
            str,
            "none",
            "Text (.txt, .jsonl), token ids (.safetensors), or the name of a hub dataset.",
        ),
        "n_sequences": Option(int, "128", "Calibration sequences."),
        "sequence_length": Option(int, "2048", "Tokens in each; clamped to the model's maximum."),
        "sampling": Option(
            Literal["pack", "per-sample"],
            "pack",
            "Join documents and cut windows, or take one document a sequence.",
        ),
        "seed": Option(int, "0", "Seed of the draw of sequences and of sampled labels."),
    },
    MACHINE: {
        "device": Option(str, "auto", "Where to compute, for example cpu or cuda:0."),
        "dtype": Option(
            Literal["auto", "float32", "bfloat16", "float16"],
            "auto",
            "Of the model while calibrating; auto is float32 on a CPU, else bfloat16.",
        ),
        "offload": Option(
            Literal["none", "disk"],
            "none",
            "Have the weights of one block at a time in memory, and leave the others on disk.",
        ),
    },
}
SOLVE = tuple(name for name in (*OPTIONS[GRID], *OPTIONS[METHOD]) if name != "format")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No plan, no progress; only results and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")]
Recipe = Annotated[
    Path | None, typer.Option("--recipe", help="TOML file of settings, under the same names; options win.")
]
Work = Annotated[
    Path | None, typer.Option("--work", help="Directory of unfinished work, from which a run resumes.")
]
KeepWork = Annotated[bool, typer.Option("--keep-work", help="Keep the work directory after success.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint in OUT.")]
HeldOut = Annotated[
    str | None,
    typer.Option("--text", "--evaluation", help="Held-out text on which to measure perplexity and KL."),
]


def all_options() -> dict[str, Option]:
    """Every setting by name."""
    return {name: option for group in OPTIONS.values() for name, option in group.items()}


def with_settings(*, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A decorator: the command's ``**settings`` become options, all of them, ``only`` these, or ``without`` those.

    An option that is not given arrives as None, so that a recipe can say something else than the default.
    """

    def decorate(command: Any) -> Any:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = own + [
            _parameter(name, option, panel)
            for panel, options in OPTIONS.items()
            for name, option in options.items()
            if name not in without and (not only or name in only)
        ]
        command.__signature__ = signature.replace(parameters=parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(name: str, option: Option, panel: str) -> inspect.Parameter:
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    text = f"{option.help} Default: {option.default}."
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            option.type | None,
            typer.Option(*flags, help=text, rich_help_panel=panel, parser=option.parser),
        ],
    )
