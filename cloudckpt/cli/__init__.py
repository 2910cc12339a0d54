"""The command line. What a command needs is imported when it runs: ``--help`` answers at once."""

from __future__ import annotations

import json
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from cloudckpt.errors import CloudckptError

app = typer.Typer(
    help="Look at and check the checkpoints that cloudckpt has written.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing rich takes as long as all the rest
    pretty_exceptions_enable=False,
)

StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON",
        help='Options of the store as a JSON object, such as \'{"endpoint_url": "http://localhost:9000"}\'. '
        "Without them the environment and boto3's chain count.",
    ),
]


@app.command()
def ls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="URL or folder that holds step-... checkpoints.")],
    storage_options: StorageOptions = None,
) -> None:
    """List the steps of a run: one line each, committed or not."""
    from cloudckpt.cli.listing import list_run

    list_run(run, _parsed(storage_options))


@app.command()
def show(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL or folder of one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Describe a checkpoint: its tensors, values, chunk grids, and who wrote what."""
    from cloudckpt.cli.showing import show_checkpoint

    show_checkpoint(url, _parsed(storage_options), as_json=as_json)


@app.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL or folder of one checkpoint.")],
    storage_options: StorageOptions = None,
) -> None:
    """Read everything, and name every fault. Exit code 1 if there is one."""
    from cloudckpt.cli.verifying import verify_checkpoint

    if not verify_checkpoint(url, _parsed(storage_options)):
        raise typer.Exit(1)


def main() -> None:
    """Exit codes: 0, 1 for a fault or an error, 2 for wrong usage."""
    from cloudckpt.cli.text import printable

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # keys may hold what a terminal cannot show
    try:
        app(prog_name="cloudckpt")
    except CloudckptError as error:
        print(f"cloudckpt: {printable(str(error), keep_lines=True)}", file=sys.stderr)
        sys.exit(1)


def _parsed(storage_options: str | None) -> dict[str, Any] | None:
    if storage_options is None:
        return None
    try:
        options = json.loads(storage_options)
    except ValueError as error:
        # Not the text itself: it may hold a secret.
        raise typer.BadParameter(f"--storage-options is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise typer.BadParameter("--storage-options must be a JSON object")
    return options
