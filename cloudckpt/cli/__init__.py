"""The command line. What a command needs is imported when it runs: ``--help`` answers at once.

Made with argparse, since typer (0.29) imports pydantic and doubles the time until a command begins.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any

from cloudckpt.errors import CloudckptError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 for a fault or an error. Wrong usage exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # keys may hold what a terminal cannot show
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except CloudckptError as error:
        from cloudckpt.cli.text import printable

        print(f"cloudckpt: {printable(str(error), keep_lines=True)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cloudckpt", description="Look at, check, copy and rewrite the checkpoints that cloudckpt has written."
    )
    parser.add_argument("--version", action="version", version=f"cloudckpt {version('cloudckpt')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(commands, "ls", "RUN", "list the steps of a run: one line each, committed or not", _ls)
    show = _add(commands, "show", "URL", "describe a checkpoint: tensors, values, chunk grids, who wrote what", _show)
    show.add_argument("--json", action="store_true", help="everything, as one JSON object")
    _add(commands, "verify", "URL", "read everything, name every fault; exit code 1 if there is one", _verify)
    prune = _add(
        commands, "prune", "RUN", "remove steps that are not to be kept, and what dead attempts have left", _prune
    )
    prune.add_argument("--keep-last", metavar="N", type=int, help="keep the newest N steps")
    prune.add_argument("--keep-every", metavar="N", type=int, help="keep steps whose number is a multiple of N")
    prune.add_argument(
        "--orphan-age", metavar="SECONDS", type=float, default=86400.0, help="when an attempt counts as dead (86400)"
    )
    prune.add_argument("--dry-run", action="store_true", help="tell what would go, and remove nothing")
    plan = _add(commands, "plan", "URL", "tell what a load under a layout would fetch, send and request", _plan)
    plan.add_argument("--mesh", metavar="AXIS=SIZE,...", required=True, help="the job's axes: dp_shard=2,tp=4")
    plan.add_argument("--order", help="the axes slowest first (pp,dp_shard,tp), or as Megatron has it (tp-cp-ep-dp-pp)")
    plan.add_argument("--rules", metavar="FILE", help="JSON or TOML: a list of [pattern, {axis: dim}, {dim: [sizes]}]")
    plan.add_argument(
        "--rule", metavar="PATTERN=AXIS:DIM,...", action="append", default=[], help="one more rule; may be repeated"
    )
    plan.add_argument("--ranks-per-node", metavar="N", type=int, help="also tell what exchange within nodes costs")
    plan.add_argument("--json", action="store_true", help="everything, as one JSON object")
    plan.set_defaults(fail=plan.error)
    copy = _add_two(commands, "copy", "copy a checkpoint, or all committed steps of a run, to another store", _copy)
    copy.add_argument(
        "--trust-sizes", action="store_true", help="take what an earlier copy has left by its size, without reading it"
    )
    migrate = _add_two(commands, "migrate", "write a checkpoint anew under other names, cuts or dtypes", _migrate)
    migrate.add_argument("--to", metavar="VERSION", help="the model version that registered migrations shall lead to")
    migrate.add_argument(
        "--module", metavar="NAME", action="append", default=[], help="a Python module that registers migrations"
    )
    migrate.add_argument(
        "--rename", metavar="OLD=NEW", type=_pair, action="append", default=[], help="a pattern of keys and its target"
    )
    migrate.add_argument(
        "--cast",
        metavar="PATTERN=DTYPE",
        type=_pair,
        action="append",
        default=[],
        help="a dtype for float tensors: '*=bfloat16', '*.exp_avg=float32'; the first that matches counts",
    )
    return parser


def _pair(text: str) -> tuple[str, str]:
    first, equals, second = text.partition("=")
    if not (first and equals and second):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A=B")
    return first, second


def _add_two(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    """A command that reads one place and writes another."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    for place, what in (("src", "read from"), ("dst", "write to")):
        command.add_argument(place, metavar=place.upper(), help=f"URL or folder to {what}")
        command.add_argument(
            f"--{place}-options", metavar="JSON", type=_json_object, help=f"options of the store to {what}"
        )
    command.add_argument("--overwrite", action="store_true", help="replace another checkpoint at DST")
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


def _ls(options: argparse.Namespace) -> int:
    from cloudckpt.cli.listing import list_run

    list_run(options.url, options.storage_options)
    return 0


def _show(options: argparse.Namespace) -> int:
    from cloudckpt.cli.showing import show_checkpoint

    show_checkpoint(options.url, options.storage_options, as_json=options.json)
    return 0


def _prune(options: argparse.Namespace) -> int:
    from cloudckpt.cli.pruning import prune_run

    chosen = (options.keep_last, options.keep_every, options.orphan_age)
    return 0 if prune_run(options.url, options.storage_options, *chosen, dry_run=options.dry_run) else 1


def _plan(options: argparse.Namespace) -> int:
    from cloudckpt.cli.planning import Request, plan_checkpoint

    chosen = Request(options.mesh, options.order, options.rules, options.rule, options.ranks_per_node, options.fail)
    plan_checkpoint(options.url, options.storage_options, chosen, as_json=options.json)
    return 0


def _copy(options: argparse.Namespace) -> int:
    from cloudckpt.cli.copying import copy_checkpoints

    copy_checkpoints(
        options.src,
        options.dst,
        options.src_options,
        options.dst_options,
        overwrite=options.overwrite,
        trust_sizes=options.trust_sizes,
    )
    return 0


def _migrate(options: argparse.Namespace) -> int:
    from cloudckpt.cli.migrating import Wanted, migrate_checkpoint

    wanted = Wanted(options.to, options.module, options.rename, options.cast, options.overwrite)
    migrate_checkpoint(options.src, options.dst, options.src_options, options.dst_options, wanted)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from cloudckpt.cli.verifying import verify_checkpoint

    return 0 if verify_checkpoint(options.url, options.storage_options) else 1
