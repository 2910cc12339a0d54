"""``cloudckpt plan``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from cloudckpt.checkpoint import Checkpoint, open_checkpoint
from cloudckpt.cli.text import human_bytes, printable, table
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.costs import LoadCosts, load_costs
from cloudckpt.plan.parallel import AXES, DENSE_AXES, ParallelConfig
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.transfer.download import effective_read_bytes

MAX_RANK_LINES = 64


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line, as texts. ``fail`` ends the program for wrong usage."""

    mesh: str
    order: str | None
    rules: str | None
    rule: Sequence[str]
    ranks_per_node: int | None
    fail: Callable[[str], NoReturn]


def plan_checkpoint(url: str, storage_options: Mapping[str, Any] | None, request: Request, *, as_json: bool) -> None:
    rules = _rules(request)
    with open_checkpoint(url, storage_options=storage_options) as checkpoint:
        config = Config()
        plan = load_costs(
            checkpoint.manifest,
            rules,
            read_bytes=effective_read_bytes(config),
            buffer_bytes=config.memory_bytes // 2,
            ranks_per_node=request.ranks_per_node,
        )
        if as_json:
            print(json.dumps(_everything(checkpoint, plan), indent=2))
        else:
            print(*_lines(checkpoint, plan), sep="\n")


def _rules(request: Request) -> ShardingRules:
    if request.ranks_per_node is not None and request.ranks_per_node < 1:
        request.fail("--ranks-per-node must be at least 1")
    try:
        given = [_rule_of_text(text) for text in request.rule]
        given += _rules_of_file(Path(request.rules)) if request.rules is not None else []
        return ShardingRules(given, _config(request.mesh, request.order))
    except (InvalidStateError, ValueError) as error:
        request.fail(printable(str(error)))


def _config(mesh: str, order: str | None) -> ParallelConfig:
    sizes: dict[str, Any] = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        given = [name for name in AXES if name != "edp"]  # which follows from the others
        if axis not in given or axis in sizes or not size.isdecimal():
            raise ValueError(f"--mesh is a list of AXIS=SIZE, each axis once, of {', '.join(given)}; not {mesh!r}")
        sizes[axis] = int(size)
    if order is not None:
        sizes["order"] = order if "-" in order else tuple(order.split(","))
    return ParallelConfig(**sizes)


def _rule_of_text(text: str) -> tuple[Any, ...]:
    pattern, _, places = text.rpartition("=")
    axes: dict[str, int] = {}
    for place in places.split(","):
        axis, _, dim = place.partition(":")
        if not pattern or not axis or axis in axes or not dim.removeprefix("-").isdecimal():
            raise ValueError(f"--rule is PATTERN=AXIS:DIM[,AXIS:DIM...], each axis once; not {text!r}")
        axes[axis] = int(dim)
    return pattern, axes


def _rules_of_file(file: Path) -> list[Any]:
    """JSON: a list of ``[pattern, {axis: dim}]``, perhaps with ``{dim: [sizes]}``; TOML: the same, as ``rules``."""
    try:
        text = file.read_text(encoding="utf-8")
        rules = tomllib.loads(text).get("rules") if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the rules in {file}: {error}") from error
    if not isinstance(rules, list) or not all(isinstance(rule, list) for rule in rules):
        raise ValueError(f"{file} must hold a list of rules, each a list [pattern, {{axis: dim}}]")
    return [[*rule[:2], *map(_with_int_keys, rule[2:])] for rule in rules]


def _with_int_keys(segments: Any) -> Any:
    """Keys are strings in both kinds of file."""
    if not isinstance(segments, dict):
        return segments
    return {int(dim) if dim.removeprefix("-").isdecimal() else dim: sizes for dim, sizes in segments.items()}


def _lines(checkpoint: Checkpoint, plan: LoadCosts) -> Iterator[str]:
    config = plan.config
    used = [axis for axis in (AXES if config.ep > 1 else DENSE_AXES) if config.size(axis) > 1]
    yield f"url      {printable(checkpoint.url)}"
    yield f"ranks    {config.world_size}:{''.join(f' {axis}={config.size(axis)}' for axis in used)}"
    yield f"tensors  {plan.num_tensors}, {plan.num_cut} of them cut by rules, the others wanted whole by every rank"
    yield f"needed   {human_bytes(plan.job_needed)} of stored bytes, by the job"
    yield ""
    rows = [
        [
            name,
            human_bytes(total["fetched"]),
            f"{total['fetched'] / max(1, plan.job_needed):.2f}",
            human_bytes(total["sent"]),
            str(total["requests"]),
        ]
        for name, total in _totals(plan).items()
    ]
    yield from table(("exchange", "fetched", "/ needed", "sent", "requests"), rows, right="1234")
    yield ""
    head = ["rank", *used, "needed"]
    for name in plan.costs:
        head += [f"{name}: fetched", *(["sent"] if name != "none" else []), "requests"]
    shown = range(min(MAX_RANK_LINES, config.world_size))
    cells = [_rank_row(plan, rank, used) for rank in shown]
    yield from table(head, cells, right="".join(map(str, range(len(head)))))
    if len(shown) < config.world_size:
        yield f"... and {config.world_size - len(shown)} more ranks (--json has them all)"


def _rank_row(plan: LoadCosts, rank: int, axes: Sequence[str]) -> list[str]:
    where = plan.config.coordinates(rank)
    row = [str(rank), *(str(where[axis]) for axis in axes), human_bytes(int(plan.needed[rank]))]
    for name, costs in plan.costs.items():
        row.append(human_bytes(int(costs.fetched[rank])))
        row += [human_bytes(int(costs.sent[rank]))] if name != "none" else []
        row.append(str(costs.requests[rank]))
    return row


def _totals(plan: LoadCosts) -> dict[str, dict[str, int]]:
    return {
        name: {kind: int(column.sum()) for kind, column in asdict(costs).items()} for name, costs in plan.costs.items()
    }


def _everything(checkpoint: Checkpoint, plan: LoadCosts) -> dict[str, Any]:
    return {
        "url": checkpoint.url,
        "mesh": asdict(plan.config),
        "num_ranks": plan.config.world_size,
        "num_tensors": plan.num_tensors,
        "num_cut": plan.num_cut,
        "bytes_needed": plan.job_needed,
        "exchange": _totals(plan),
        "ranks": [
            {
                "rank": rank,
                "coordinates": plan.config.coordinates(rank),
                "bytes_needed": int(plan.needed[rank]),
                "exchange": {
                    name: {kind: int(column[rank]) for kind, column in asdict(costs).items()}
                    for name, costs in plan.costs.items()
                },
            }
            for rank in range(plan.config.world_size)
        ],
    }
