"""`qdeepseek verify FOLDER`: prove an export without a GPU and without the model that made it."""

from pathlib import Path
from typing import Annotated

import typer

from qdeepseek.export.verify import verify as verify_folder

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """QDeepSeek: INT4 in the loop, exported bit for bit as trained."""


@app.command()
def verify(folder: Annotated[Path, typer.Argument(help="an export: it holds qdeepseek_manifest.json")]) -> None:
    """Check hashes, shapes, scales and codes of an export; exit code 1 when anything is wrong."""
    try:
        report = verify_folder(folder)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)
