"""`qdeepseek plan`, `qdeepseek verify FOLDER` and `qdeepseek export RUN`: what needs neither a GPU nor the process that
trains.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from qdeepseek.export.verify import verify as verify_folder

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """QDeepSeek: INT4 in the loop, exported bit for bit as trained."""


@app.command()
def plan(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="model=… strategy=… quant=… nodes=… gpus=… tp=…")
    ] = None,
    conf: Annotated[Path | None, typer.Option(help="configuration folder; default ./conf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of text")] = False,
) -> None:
    """Coverage, memory by ZeRO stage, step time, size of the export and kernels that take it: from a config.json alone.

    Words are those of train.py, and nodes, gpus (of one node), tp (of the runtime), length, hardware=… and its keys.
    """
    from qdeepseek.plan.compose import configuration
    from qdeepseek.plan.plan import make_plan
    from qdeepseek.plan.report import text

    try:
        made = make_plan(*configuration(overrides or [], conf))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(made.to_dict(), indent=1) if as_json else text(made))


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="an export: it holds qdeepseek_manifest.json")
    ],
) -> None:
    """Check hashes, shapes, scales and codes of an export; exit code 1 when anything is wrong."""
    try:
        report = verify_folder(folder)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a run: it holds config.yaml and checkpoints/")],
    checkpoint: Annotated[Path | None, typer.Option(help="default: the newest of checkpoints/qat")] = None,
    output: Annotated[Path | None, typer.Option(help="default: RUN/export/FORMAT")] = None,
) -> None:
    """Export a run's QAT student from its checkpoint, plain or ZeRO-1, 2, 3, a tensor at a time, and verify it."""
    from qdeepseek.train.config import USER_ERRORS
    from qdeepseek.train.export_saved import export_saved

    try:
        done = export_saved(run, checkpoint, output)
    except USER_ERRORS as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    saved, result = done.saved, done.result
    typer.echo(f"{saved.path}: {saved.kind}, step {saved.step}, {len(saved.tensors)} tensors")
    typer.echo(f"{result.folder}: {result.bytes / 1e9:.3f} GB\n{done.proof}")
    if not done.proof.ok:
        raise typer.Exit(1)
