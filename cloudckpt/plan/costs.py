"""What a load costs every rank, counted from its plan. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from cloudckpt.format.box import Box
from cloudckpt.format.grid import Ints
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import array_leaves, path_text
from cloudckpt.plan.coalesce import coalesce
from cloudckpt.plan.exchange import ExchangePlan, decoded_bytes, plan_exchange
from cloudckpt.plan.parallel import ParallelConfig
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.rules import ShardingRules, check_all_matched, check_recorded, wanted_pieces
from cloudckpt.plan.shard import PieceTable
from cloudckpt.plan.wants import Wants


@dataclass(frozen=True, eq=False)
class RankCosts:
    """By rank: bytes from the store, bytes to other ranks, and ranged reads (the manifest's not among them)."""

    fetched: Ints
    sent: Ints
    requests: Ints

    @staticmethod
    def zero(num_ranks: int) -> RankCosts:
        return RankCosts(*(np.zeros(num_ranks, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, eq=False)
class LoadCosts:
    """``needed``: distinct stored bytes, by rank; ``job_needed``: of all together. ``costs``: by kind of exchange.

    ``num_cut``: the tensors that rules cut; every rank wants all of each other one.
    """

    config: ParallelConfig
    num_tensors: int
    num_cut: int
    needed: Ints
    job_needed: int
    costs: dict[str, RankCosts]


def plain_costs(stored: StoredChunks, wants: Wants, *, read_bytes: int) -> tuple[RankCosts, Ints]:
    """Of a load without exchange; and the stored bytes that each rank needs, which are less by what lies between."""
    plan = plan_load(stored, wants.tables, read_bytes=read_bytes)  # ranks that want the same read the same
    num_tables = len(wants.tables)
    table = np.repeat(np.arange(num_tables), np.diff(plan.read_ranges))
    sizes = np.diff(np.append(0, np.cumsum(stored.nbytes[plan.fetched]))[plan.chunk_starts])
    fetched, needed, requests = (
        np.bincount(table, weights=weights, minlength=num_tables).astype(np.int64)[wants.table]
        for weights in (plan.nbytes, sizes, None)
    )
    return RankCosts(fetched, np.zeros_like(fetched), requests), needed


def exchange_costs(plan: ExchangePlan, *, read_bytes: int) -> RankCosts:
    stored, num_ranks = plan.stored, plan.num_ranks
    order = np.lexsort([stored.byte_offset[plan.chunk], stored.object[plan.chunk], plan.round, plan.reader])
    chunk, reader = plan.chunk[order], plan.reader[order]
    objects, offsets, sizes = stored.object[chunk], stored.byte_offset[chunk], stored.nbytes[chunk]
    turn = reader * (plan.round.max(initial=0) + 1) + plan.round[order]
    starts = coalesce(turn, objects, offsets, sizes, read_bytes=read_bytes)
    ends = np.append(starts[1:], len(chunk)) - 1
    nbytes = offsets[ends] + sizes[ends] - offsets[starts] if len(starts) else starts
    return RankCosts(
        fetched=np.bincount(reader[starts], weights=nbytes, minlength=num_ranks).astype(np.int64),
        sent=np.bincount(plan.reader, weights=_sent(plan), minlength=num_ranks).astype(np.int64),
        requests=np.bincount(reader[starts], minlength=num_ranks),
    )


def _sent(plan: ExchangePlan) -> Ints:
    """Of every chunk, the bytes that its reader sends on, to all ranks together."""
    found, wants = plan.overlaps, plan.wants
    holders = np.bincount(wants.table, minlength=len(wants.tables))[found.table]
    others = holders - (found.table == wants.table[plan.reader[found.row]])
    parts = np.bincount(found.row, weights=found.nbytes * others, minlength=len(plan.chunk)).astype(np.int64)
    sizes = np.array([*map(len, plan.groups), 1], dtype=np.int64)[plan.group]  # -1 is the last one
    return np.where(plan.group >= 0, decoded_bytes(plan.stored, plan.chunk) * (sizes - 1), parts)


def load_costs(
    manifest: Manifest, rules: ShardingRules, *, read_bytes: int, buffer_bytes: int, ranks_per_node: int | None = None
) -> LoadCosts:
    """Of a load of a whole checkpoint under ``rules`` by all ranks of their ``ParallelConfig``.

    ``ranks_per_node`` adds what exchange within nodes costs. Raises InvalidStateError for rules that do
    not fit the stored tensors, or match none.
    """
    config = rules.config()
    nodes = [
        (manifest.array_index[node["array"]], path_text(path), node)
        for path, node in array_leaves(manifest.document.tree)
    ]
    nodes.sort(key=lambda leaf: leaf[0])
    leaves = [(number, path, node["$"] == "tensor") for number, path, node in nodes]
    tensors = [(path, manifest.arrays[number].shape) for number, path, is_tensor in leaves if is_tensor]
    layouts = [rules.layout(path, len(shape)) for path, shape in tensors]
    recorded = [node.get("layout") for _, _, node in nodes if node["$"] == "tensor"]
    for (path, _), layout, told in zip(tensors, layouts, recorded, strict=True):
        if layout is not None:
            check_recorded(layout, config, told, path)
    check_all_matched(rules, [rules.match(path) for path, _ in tensors], [path for path, _ in tensors])
    numbers = np.array([number for number, _, is_tensor in leaves if is_tensor], dtype=np.int64)
    # Numpy arrays have no layout: every rank wants all of them.
    arrays = [number for number, _, is_tensor in leaves if not is_tensor]
    whole = PieceTable.build((n, Box((0,) * len(s), s)) for n, s in ((n, manifest.arrays[n].shape) for n in arrays))
    tables = [_merged(wanted_pieces(tensors, rules, rank), numbers, whole) for rank in range(config.world_size)]
    wants = Wants.of(tables)
    stored = StoredChunks.of(manifest)
    plain, needed = plain_costs(stored, wants, read_bytes=read_bytes)
    everybody = tuple(range(config.world_size))  # the job's own group can broadcast, too
    exchange = plan_exchange(stored, wants, buffer_bytes=buffer_bytes, free_groups=[everybody])
    costs = {"none": plain, "auto": exchange_costs(exchange, read_bytes=read_bytes)}
    if ranks_per_node is not None:
        costs["auto in node"] = _by_node(stored, wants, ranks_per_node, read_bytes, buffer_bytes)
    return LoadCosts(
        config,
        num_tensors=len(tensors),
        num_cut=sum(layout is not None for layout in layouts),
        needed=needed,
        job_needed=exchange.bytes_needed,
        costs=costs,
    )


def _by_node(stored: StoredChunks, wants: Wants, ranks_per_node: int, read_bytes: int, buffer_bytes: int) -> RankCosts:
    num_ranks = len(wants.table)
    total = RankCosts.zero(num_ranks)
    for first in range(0, num_ranks, ranks_per_node):
        ranks = range(first, min(first + ranks_per_node, num_ranks))
        exchange = plan_exchange(stored, wants.among(ranks), buffer_bytes=buffer_bytes)
        costs = exchange_costs(exchange, read_bytes=read_bytes)
        for name, column in asdict(costs).items():
            getattr(total, name)[first : ranks.stop] = column
    return total


def _merged(pieces: PieceTable, numbers: Ints, whole: PieceTable) -> PieceTable:
    """Tensors by the number of their array, and numpy arrays between them."""
    dims = max(pieces.offset.shape[1], whole.offset.shape[1])
    tensor = np.concatenate([numbers[pieces.tensor], whole.tensor])
    order = np.argsort(tensor, kind="stable")
    columns = []
    for name, unused in (("offset", 0), ("shape", 1)):
        parts = [getattr(each, name) for each in (pieces, whole)]
        wide = [np.pad(p, ((0, 0), (0, dims - p.shape[1])), constant_values=unused) for p in parts]
        columns.append(np.concatenate(wide)[order])
    return PieceTable(tensor[order], *columns)
