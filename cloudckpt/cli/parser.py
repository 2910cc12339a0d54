"""What can be typed.

Made with argparse, since typer (0.29) imports pydantic and doubles the time until a command begins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from cloudckpt.cli import commands as run


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cloudckpt",
        description="Look at, check, copy and rewrite the checkpoints that cloudckpt has written, "
        "and take over those of others.",
    )
    parser.add_argument("--version", action="version", version=f"cloudckpt {version('cloudckpt')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_looking(commands)
    _add_keeping(commands)
    _add_interchange(commands)
    return parser


def _add_looking(commands: Any) -> None:
    _add(commands, "ls", "RUN", "list the steps of a run: one line each, committed or not", run.ls)
    show = _add(commands, "show", "URL", "describe a checkpoint: tensors, values, grids, who wrote what", run.show)
    show.add_argument("--json", action="store_true", help="everything, as one JSON object")
    _add(commands, "verify", "URL", "read everything, name every fault; exit code 1 if there is one", run.verify)
    plan = _add(commands, "plan", "URL", "tell what a load under a layout would fetch, send and request", run.plan)
    plan.add_argument("--mesh", metavar="AXIS=SIZE,...", required=True, help="the job's axes: dp_shard=2,tp=4")
    plan.add_argument("--order", help="the axes slowest first (pp,dp_shard,tp), or as Megatron has it (tp-cp-ep-dp-pp)")
    plan.add_argument("--rules", metavar="FILE", help="JSON or TOML: a list of [pattern, {axis: dim}, {dim: [sizes]}]")
    plan.add_argument(
        "--rule", metavar="PATTERN=AXIS:DIM,...", action="append", default=[], help="one more rule; may be repeated"
    )
    plan.add_argument("--ranks-per-node", metavar="N", type=int, help="also tell what exchange within nodes costs")
    plan.add_argument("--json", action="store_true", help="everything, as one JSON object")
    plan.set_defaults(fail=plan.error)


def _add_keeping(commands: Any) -> None:
    prune = _add(
        commands, "prune", "RUN", "remove steps that are not to be kept, and what dead attempts have left", run.prune
    )
    prune.add_argument("--keep-last", metavar="N", type=int, help="keep the newest N steps")
    prune.add_argument("--keep-every", metavar="N", type=int, help="keep steps whose number is a multiple of N")
    prune.add_argument(
        "--orphan-age", metavar="SECONDS", type=float, default=86400.0, help="when an attempt counts as dead (86400)"
    )
    prune.add_argument("--dry-run", action="store_true", help="tell what would go, and remove nothing")
    copy = _add_two(commands, "copy", "copy a checkpoint, or all committed steps of a run, to another store", run.copy)
    copy.add_argument(
        "--trust-sizes", action="store_true", help="take what an earlier copy has left by its size, without reading it"
    )
    migrate = _add_two(commands, "migrate", "write a checkpoint anew under other names, cuts or dtypes", run.migrate)
    migrate.add_argument("--to", metavar="VERSION", help="the model version that registered migrations shall lead to")
    migrate.add_argument(
        "--module", metavar="NAME", action="append", default=[], help="a Python module that registers migrations"
    )
    _add_changes(migrate)


def _add_interchange(commands: Any) -> None:
    """Under ``torchrun -m cloudckpt ...`` all processes take part in these."""
    take = _add_two(
        commands,
        "import",
        "make a checkpoint of another format's files",
        run.import_,
        kinds=("hf", "dcp", "torch", "zarr"),
    )
    take.add_argument("--step", metavar="N", type=int, help="the training step of the new checkpoint")
    take.add_argument("--layout", choices=("packed", "zarr"), default="packed", help="of what is stored (packed)")
    take.add_argument("--compression", choices=("zstd",), help="of the chunks (none)")
    take.add_argument(
        "--allow-pickle", action="store_true", help="take over values that are not plain: executes what SRC says"
    )
    _add_changes(take)
    _add_export(commands)
    _add_references(commands)


def _add_export(commands: Any) -> None:
    give = _add_two(commands, "export", "write a checkpoint as another format's files", run.export, kinds=("dcp", "hf"))
    give.add_argument(
        "--include", metavar="PATTERN", action="append", default=[], help="keys to take, such as 'model.*' (all)"
    )
    _add_rename(give)
    give.add_argument(
        "--dtype", metavar="[PATTERN=]DTYPE", action="append", default=[], help="what floats become: bf16 (as they are)"
    )
    give.add_argument("--max-shard-size", metavar="SIZE", help="of one file, with hf (5GB)")
    give.add_argument(
        "--files", metavar="PATH", action="append", default=[], help="to copy along, with hf: config.json, ..."
    )


def _add_references(commands: Any) -> None:
    references = _add(
        commands,
        "references",
        "URL",
        "write the file with which fsspec and stock zarr read a checkpoint",
        run.references,
    )
    references.add_argument("--output", metavar="FILE", help="path or URL, replacing what is there (standard output)")
    references.add_argument(
        "--names", metavar="PATTERN", action="append", help="only arrays with such a dotted path; may be repeated"
    )
    references.add_argument("--template", action="store_true", help="begin all URLs with {{u}}, which readers can set")
    references.add_argument("--base", metavar="URL", help="the URL by which readers know the checkpoint, if another")
    references.add_argument(
        "--plain-types", action="store_true", help="bfloat16 and float8 as integers: zarr alone has no such types"
    )


def _add_rename(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rename", metavar="OLD=NEW", type=_pair, action="append", default=[], help="a pattern of keys and its target"
    )


def _add_changes(command: argparse.ArgumentParser) -> None:
    _add_rename(command)
    command.add_argument(
        "--cast",
        metavar="PATTERN=DTYPE",
        type=_pair,
        action="append",
        default=[],
        help="a dtype for float tensors: '*=bfloat16', '*.exp_avg=float32'; the first that matches counts",
    )


def _pair(text: str) -> tuple[str, str]:
    first, equals, second = text.partition("=")
    if not (first and equals and second):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A=B")
    return first, second


def _add_two(commands: Any, name: str, text: str, run: Any, *, kinds: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A command that reads one place and writes another. ``kinds``: the formats of which one is to be named."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    if kinds:
        command.add_argument("kind", metavar="FORMAT", choices=kinds, help=f"one of {', '.join(kinds)}")
    for place, what in (("src", "read from"), ("dst", "write to")):
        command.add_argument(place, metavar=place.upper(), help=f"URL or folder to {what}")
        command.add_argument(
            f"--{place}-options", metavar="JSON", type=_json_object, help=f"options of the store to {what}"
        )
    command.add_argument("--overwrite", action="store_true", help="replace what is at DST")
    command.set_defaults(run=run)
    return command


def _add(commands: Any, name: str, place: str, text: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    what = "holds step-... checkpoints" if place == "RUN" else "holds one checkpoint"
    command.add_argument("url", metavar=place, help=f"URL or folder that {what}")
    command.add_argument(
        "--storage-options",
        metavar="JSON",
        type=_json_object,
        help='options of the store, such as \'{"endpoint_url": "http://localhost:9000"}\'; '
        "without them the environment and boto3's chain count",
    )
    command.set_defaults(run=run)
    return command


def _json_object(text: str) -> dict[str, Any]:
    # Messages leave out the text itself: it may hold a secret.
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return options
