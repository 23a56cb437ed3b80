"""The commands: each reads its options, calls one function of ``bakron.run``, and shows what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bakron.cli.console import (
    guarded,
    listener,
    print_json,
    require_one_process,
    say,
    shared_run,
    show_bits,
    show_layers,
    show_plan,
    show_quality,
)
from bakron.cli.hessians import hessians
from bakron.cli.options import SOLVE, HeldOut, Json, KeepWork, Overwrite, Quiet, Recipe, Work, with_settings

app = typer.Typer(
    name="bakron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantize language models after training, in the metric of two-sided, Kronecker-factored Hessians.",
)

app.add_typer(hessians)

SHARED = ("quantize", "collect", "solve", "compare")  # commands whose work several processes can share

Model = Annotated[str, typer.Argument(help="Directory or hub name of the original model.", metavar="MODEL")]
Out = Annotated[Path, typer.Argument(help="New directory for the checkpoint.", metavar="OUT")]
WorkDir = Annotated[Path, typer.Argument(help="Directory in which the stages meet.", metavar="WORK")]
EvalSequences = Annotated[int, typer.Option(help="Windows of the held-out text.")]
EvalLength = Annotated[int, typer.Option(help="Tokens in each window.")]


def _version(wanted: bool) -> None:
    if wanted:
        import bakron

        typer.echo(f"bakron {bakron.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand not in SHARED:
        with guarded():
            require_one_process(str(context.invoked_subcommand))


@app.command()
@with_settings()
def quantize(
    model: Model,
    out: Out,
    recipe: Recipe = None,
    text: HeldOut = None,
    work: Work = None,
    keep_work: KeepWork = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Quantize a model and write a checkpoint that other programs load.

    Run the same command again after an interruption: finished work is used again.
    """
    work = work or out.with_name(out.name + ".work")
    with guarded(work), shared_run(quiet) as (ranks, quiet):
        from bakron.run.pipeline import quantize as run

        record = run(
            model,
            out,
            work=work,
            keep_work=keep_work,
            overwrite=overwrite,
            evaluation=text,
            recipe=recipe,
            progress=listener(quiet),
            on_plan=None if quiet else show_plan,
            ranks=ranks,
            **settings,
        )
        _show_record(record, out, quiet, as_json)


@app.command()
@with_settings()
def collect(
    model: Model, work: WorkDir, recipe: Recipe = None, quiet: Quiet = False, **settings: Any
) -> None:
    """Stage 1: make WORK, with the settings and the Hessian factors."""
    with guarded(work), shared_run(quiet) as (ranks, quiet):
        from bakron.run.stages import collect as run

        run(
            model,
            work,
            recipe=recipe,
            progress=listener(quiet),
            on_plan=None if quiet else show_plan,
            ranks=ranks,
            **settings,
        )
        say(f"Collected. Next: bakron solve {work}", quiet)


@app.command()
@with_settings(only=SOLVE)
def solve(work: WorkDir, quiet: Quiet = False, **settings: Any) -> None:
    """Stage 2: round the linears of what was collected in WORK; options change what collect was told."""
    with guarded(work), shared_run(quiet) as (ranks, quiet):
        from bakron.run.stages import solve as run

        on_plan = None if quiet else show_plan
        run(work, progress=listener(quiet), on_plan=on_plan, ranks=ranks, **settings)
        say(f"Solved. Next: bakron export {work} OUT", quiet)


@app.command()
@with_settings(only=("format",))
def export(
    work: WorkDir,
    out: Out,
    text: HeldOut = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Stage 3: write the checkpoint of what was solved in WORK. WORK stays: remove it yourself."""
    with guarded(work):
        from bakron.run.stages import export as run

        record = run(work, out, evaluation=text, overwrite=overwrite, progress=listener(quiet), **settings)
        _show_record(record, out, quiet, as_json)


@app.command("eval")
@with_settings(only=("device", "dtype", "offload"))
def evaluate(
    model: Annotated[str, typer.Argument(help="Checkpoint to measure.", metavar="DIR")],
    text: Annotated[
        str, typer.Option("--text", "--evaluation", help="Held-out text, in any calibration format.")
    ],
    reference: Annotated[
        str | None, typer.Option(help="The original model, for KL and top-1 agreement.")
    ] = None,
    sequence_length: EvalLength = 512,
    n_sequences: EvalSequences = 24,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Measure perplexity, and against a reference KL divergence and top-1 agreement."""
    with guarded():
        from bakron.run.measure import measure

        result = measure(
            model,
            text,
            reference=reference,
            n_sequences=n_sequences,
            sequence_length=sequence_length,
            progress=listener(quiet),
            **settings,
        )
        if as_json:
            print_json(result)
            return
        rows = [{"label": str(model), **result}]
        if reference is not None:
            rows.insert(0, {"label": str(reference), "perplexity": result["perplexity_reference"]})
        show_quality(rows)


@app.command()
@with_settings(without=("method", "bits"))
def compare(
    model: Model,
    text: Annotated[
        str, typer.Option("--text", "--evaluation", help="Held-out text, the same for all methods.")
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated; each may have settings of its own, such as gptq:inputs=static:aim=0.5."
        ),
    ] = "rtn,gptq,bakron",
    bits: Annotated[
        list[str] | None, typer.Option(help="One or several, such as 3,4. Default: the recipe's, or 4.")
    ] = None,
    eval_sequence_length: EvalLength = 512,
    eval_n_sequences: EvalSequences = 24,
    recipe: Recipe = None,
    work: Work = None,
    keep_work: KeepWork = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Compare methods on one model: one collection, one held-out text, one table."""
    work = work or Path(Path(model).resolve().name + ".compare.work")
    with guarded(work), shared_run(quiet) as (ranks, quiet):
        from bakron.run.compare import compare as run
        from bakron.run.variants import make_variants

        rows = run(
            model,
            make_variants(methods.split(","), _numbers(bits), recipe, **settings),
            text,
            work,
            keep_work=keep_work,
            n_sequences=eval_n_sequences,
            sequence_length=eval_sequence_length,
            progress=listener(quiet),
            on_plan=None if quiet else show_plan,
            ranks=ranks,
        )
        print_json(rows) if as_json else show_quality(rows)


@app.command()
@with_settings(without=("bits", "group_size"))
def plan(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="New recipe file, for quantize --recipe.")],
    bpw: Annotated[float, typer.Option(help="Bits per weight to spend, scales and zeros included.")],
    bits: Annotated[list[str] | None, typer.Option(help="Candidates. Default: 2,3,4.")] = None,
    group_size: Annotated[
        list[str] | None, typer.Option(help="One or several, such as 32,128. Default: the recipe's, or 64.")
    ] = None,
    recipe: Recipe = None,
    work: Work = None,
    keep_work: KeepWork = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing recipe file.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Choose bits for every layer: least predicted KL divergence within a number of bits per weight."""
    work = work or output.with_name(output.name + ".work")
    with guarded(work):
        from bakron.run.allocate import BITS
        from bakron.run.allocate import plan as run

        record = run(
            model,
            output,
            bpw=bpw,
            bits=_numbers(bits) or BITS,
            group_sizes=_numbers(group_size, "group_size"),
            work=work,
            keep_work=keep_work,
            overwrite=overwrite,
            recipe=recipe,
            progress=listener(quiet),
            on_plan=None if quiet else show_plan,
            **settings,
        )
        print_json(record) if as_json else show_bits(record)
        say(f"Wrote {output}. Next: bakron quantize {model} OUT --recipe {output}", quiet)


@app.command()
@with_settings(only=("transform",))
def transform(
    model: Model, out: Out, overwrite: Overwrite = False, quiet: Quiet = False, **settings: Any
) -> None:
    """Write a model with transformed weights and nothing quantized, for other programs and for comparisons."""
    with guarded():
        from bakron.run.settings import Settings
        from bakron.run.transformed import write_transformed

        write_transformed(model, out, Settings.load(**settings).transforms, overwrite=overwrite)
        say(f"Wrote {out}. To check that it loads as written: bakron verify {out}", quiet)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint that bakron wrote.", metavar="DIR")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Load a checkpoint by transformers and compare every quantized weight with the solved one."""
    with guarded():
        from bakron.run.verify import verify as run

        result = run(directory)
        if as_json:
            print_json(result)
        elif not quiet:
            typer.echo(
                f"{directory}: all {result['layers']} new weights load as they were made; logits are finite."
            )


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(help="Everything is made in here.", metavar="DIR")] = Path(
        "demo"
    ),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare RTN, GPTQ and BaKron on SmolLM2-135M and write the BaKron checkpoint; needs no hub."""
    with guarded(directory):
        from bakron.run.demonstration import demonstrate

        rows, out = demonstrate(directory, progress=listener(quiet), on_plan=None if quiet else show_plan)
        print_json(rows) if as_json else show_quality(rows)
        say(
            f"The BaKron checkpoint is in {out}, and loads as solved. Its README.md says how to use it.",
            quiet,
        )


def _show_record(record: dict[str, Any], out: Path, quiet: bool, as_json: bool) -> None:
    """What a finished checkpoint says of itself."""
    if as_json:
        print_json(record)
    elif not quiet:
        show_layers(record)
    say(f"Wrote {out}. To check that it loads as solved: bakron verify {out}", quiet)


def _numbers(texts: list[str] | None, name: str = "bits") -> list[int]:
    """``["3,4", "8"]`` as [3, 4, 8]."""
    parts = [part.strip() for text in texts or [] for part in text.split(",")]
    wrong = [part for part in parts if not part.removeprefix("-").isdigit()]
    if wrong:
        from bakron.errors import ConfigError

        raise ConfigError(f"{name}: {wrong[0]!r} is not a whole number.")
    return [int(part) for part in parts]
