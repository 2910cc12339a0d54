"""Parallel layouts of one model, and pairs of them: saved under the one, loaded under the other.

`run_pairs` runs on real ranks; `tests/recipes/test_layout_pairs.py` asserts what it reports, and
`benchmarks/layout_pairs.py` prints it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cloudckpt
from cloudckpt import FlatLayout, FlatParam, FlatShards, ParallelConfig, Piece, ShardedTensor, ShardingRules
from tests.sharding import make_mesh, noise, numbers, same_bits, shard

NUM_RANKS = 8
MESHES = [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2, 2)]
CONFIG = cloudckpt.Config(chunk_bytes=256 * 1024)
"""Chunks are so large that what stands between two of them in a pack (about 130 bytes) is 0.05 % to 0.5 % of them."""

NUM_LAYERS, NUM_EXPERTS, VOCAB, WIDTH = 4, 8, 2056, 256
QKV = (512, 128, 128)
DENSE: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, WIDTH),
    "wq": (1024, WIDTH),
    "wo": (WIDTH, 1024),
    "qkv": (sum(QKV), WIDTH),
    "norm": (WIDTH,),
    **{f"layers.{n}.w": (WIDTH, WIDTH) for n in range(NUM_LAYERS)},
}
NAMED = {f"experts.{e}.w": (128, WIDTH) for e in range(NUM_EXPERTS)}
STACKED = {"experts.w": (NUM_EXPERTS, 128, WIDTH)}
TP_DIMS = {"embed": 0, "wq": 0, "wo": 1, "qkv": 0, **{f"layers.{n}.w": n % 2 for n in range(NUM_LAYERS)}}
STACK = cloudckpt.Stack("model.experts.{e}.w", "model.experts.w")
UNSTACK = cloudckpt.Unstack("model.experts.w", "model.experts.{e}.w")

Meshes = Mapping[tuple[int, ...], DeviceMesh]
Model = Mapping[str, Any]
"""What a rank holds of the model, by name; or a `FlatShards`."""


@functools.cache
def full(name: str) -> torch.Tensor:
    if name == "experts.w":
        return torch.stack([full(expert) for expert in NAMED])
    return noise({**DENSE, **NAMED}[name], seed=sum(name.encode()))


@dataclass(frozen=True)
class Layout:
    """``hold(rank, meshes)``: what a rank holds. ``stacked``: whether all experts are one tensor."""

    name: str
    num_ranks: int
    hold: Callable[[int, Meshes], Model]
    stacked: bool = True
    rules: ShardingRules | None = None


@dataclass(frozen=True)
class Pair:
    """``nodes``: how many the loading ranks are taken to be on. ``times``: how often each byte must be fetched.

    ``first``: the first rank of those that load (the first that saves is always 0).
    """

    saved: Layout
    loaded: Layout
    options: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    times: int = 1
    first: int = 0

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.saved.name} -> {self.loaded.name}{options}"


@dataclass(frozen=True)
class Row:
    """What a load did. ``wrong``: tensors that this rank has other bits of than it should."""

    pair: str
    ranks: str
    needed: int
    fetched: int
    sent: int
    kind: str
    times: int
    wrong: list[str]


# DTensors


def placed(name: str, mesh: tuple[int, ...], placements: Callable[[str], Sequence[Placement]]) -> Layout:
    def hold(_: int, meshes: Meshes) -> Model:
        return {n: shard(full(n), meshes[mesh], placements(n)) for n in [*DENSE, *STACKED]}

    return Layout(name, math.prod(mesh), hold)


def fsdp(size: int) -> Layout:
    return placed(f"FSDP {size}", (size,), lambda _: [Shard(0)])


def hsdp(replicas: int, size: int) -> Layout:
    return placed(f"HSDP {replicas}x{size}", (replicas, size), lambda _: [Replicate(), Shard(0)])


def tp_placement(name: str) -> Placement:
    return Shard(1) if name == "experts.w" else Shard(TP_DIMS[name]) if name in TP_DIMS else Replicate()


def tp(size: int) -> Layout:
    return placed(f"TP {size}", (size,), lambda name: [tp_placement(name)])


def fsdp_tp(dp: int, size: int) -> Layout:
    """FSDP2 on top of TP: where both cut dim 0, TP cuts first, though its axis is the last."""

    def placements(name: str) -> list[Placement]:
        inner = tp_placement(name)
        return [_StridedShard(0, split_factor=size) if inner.is_shard(0) else Shard(0), inner]

    return placed(f"FSDP {dp} x TP {size}", (dp, size), placements)


def hsdp_tp() -> Layout:
    def placements(name: str) -> list[Placement]:
        inner = tp_placement(name)
        return [Replicate(), _StridedShard(0, split_factor=2) if inner.is_shard(0) else Shard(0), inner]

    return placed("HSDP 2x2 x TP 2", (2, 2, 2), placements)


def blocks(rows: int, columns: int) -> Layout:
    """Along two dims."""
    return placed(
        f"blocks {rows}x{columns}",
        (rows, columns),
        lambda name: [Shard(0), Replicate() if name == "norm" else Shard(1)],
    )


def columns(size: int) -> Layout:
    return placed(f"columns {size}", (size,), lambda name: [Shard(len(full(name).shape) - 1)])


# Plain tensors, by rules and pieces


def replicated(size: int) -> Layout:
    return Layout(f"replicated {size}", size, lambda *_: {n: full(n).clone() for n in [*DENSE, *STACKED]})


def cut(name: str, dim: int, ways: int, number: int) -> torch.Tensor:
    return full(name).chunk(ways, dim)[number].clone()


def packed_qkv(size: int, number: int) -> ShardedTensor:
    """Megatron's way: a rank's part of q, of k and of v, one after another."""
    pieces, local, start = [], 0, 0
    for rows in QKV:
        share = rows // size
        pieces.append(Piece((local, 0), (start + number * share, 0), (share, WIDTH)))
        local, start = local + share, start + rows
    parts = [part.chunk(size)[number] for part in full("qkv").split(QKV)]
    return ShardedTensor(torch.cat(parts), full("qkv").shape, pieces)


def padded_vocabulary(size: int, number: int) -> ShardedTensor:
    rows = -(-VOCAB // (128 * size)) * 128
    first = number * rows
    held = max(0, min(VOCAB - first, rows))
    local = torch.full((rows, WIDTH), -7.0)
    local[:held] = full("embed")[first : first + held]
    return ShardedTensor(local, (VOCAB, WIDTH), [Piece((0, 0), (first, 0), (held, WIDTH))] if held else [], padding=-7)


def megatron(
    *, pp: int = 1, dp: int = 1, tp: int = 1, ep: int = 1, etp: int | None = None, named: bool = False
) -> Layout:
    """Plain tensors cut by rules, packed QKV, a padded vocabulary; stages of layers under their global names."""
    config = ParallelConfig(pp=pp, dp_shard=dp, tp=tp, ep=ep, etp=1 if named else etp)
    rules: list[Any] = [(f"model.{name}", {"tp": dim}) for name, dim in TP_DIMS.items() if name not in ("embed", "qkv")]
    rules += [] if named else [("model.experts.w", {"ep": 0, "etp": 1})]

    def hold(rank: int, _: Meshes) -> Model:
        at = config.coordinates(rank)
        model: dict[str, Any] = {}
        if at["pp"] == 0:
            model["embed"] = padded_vocabulary(tp, at["tp"])
            model["wq"] = cut("wq", 0, tp, at["tp"])
            model["qkv"] = packed_qkv(tp, at["tp"])
        if at["pp"] == pp - 1:
            model["wo"] = cut("wo", 1, tp, at["tp"])
            model["norm"] = full("norm").clone()
            mine = full("experts.w").chunk(ep)[at["ep"]].chunk(config.size("etp"), 1)[at["etp"]].clone()
            first = at["ep"] * NUM_EXPERTS // ep
            model |= {f"experts.{first + i}.w": w.clone() for i, w in enumerate(mine)} if named else {"experts.w": mine}
        for n in range(NUM_LAYERS):
            if n * pp // NUM_LAYERS == at["pp"]:
                model[f"layers.{n}.w"] = cut(f"layers.{n}.w", TP_DIMS[f"layers.{n}.w"], tp, at["tp"])
        return model

    sizes = [("PP", pp), ("DP", dp), ("TP", tp), ("EP", ep), ("ETP", config.size("etp") if etp else 1)]
    name = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) + (" by names" if named else "")
    return Layout(name, config.world_size, hold, not named, ShardingRules(rules, config))


def qkv_by_rules(size: int) -> Layout:
    """With segments, which the checkpoint records."""
    config = ParallelConfig(tp=size)
    rules = [(f"model.{name}", {"tp": dim}) for name, dim in TP_DIMS.items() if name not in ("embed", "qkv")]
    segments = ("model.qkv", {"tp": 0}, {0: list(QKV)})

    def hold(rank: int, _: Meshes) -> Model:
        model = {n: cut(n, TP_DIMS[n], size, rank) for n in TP_DIMS if n not in ("embed", "qkv")}
        whole = {n: full(n).clone() for n in ("embed", "norm", "experts.w")}
        return {**model, **whole, "qkv": packed_qkv(size, rank).local}

    return Layout(f"TP {size} with segments", size, hold, rules=ShardingRules([*rules, segments], config))


def scattered(size: int) -> Layout:
    """Every tensor on one rank, but for one of which each has some squares of 64 x 64."""

    def hold(rank: int, _: Meshes) -> Model:
        model: dict[str, Any] = {}
        for i, name in enumerate([*DENSE, *NAMED]):
            if name == "wq":
                corners = [(64 * r, 64 * c) for r in range(16) for c in range(4)][rank::size][::-1]
                parts = [full("wq")[r : r + 64, c : c + 64] for r, c in corners]
                pieces = [Piece((64 * k, 0), corner, (64, 64)) for k, corner in enumerate(corners)]
                model["wq"] = ShardedTensor(torch.cat(parts), full("wq").shape, pieces)
            elif i % size == rank:
                model[name] = full(name).clone()
        return model

    return Layout(f"scattered {size}", size, hold, stacked=False)


def on_last(size: int) -> Layout:
    """The other ranks hold nothing."""

    def hold(rank: int, _: Meshes) -> Model:
        return {n: full(n).clone() for n in [*DENSE, *STACKED]} if rank == size - 1 else {}

    return Layout(f"last of {size}", size, hold)


# Flat buffers


def flat(size: int, *, align: int = 1, as_boxes: bool = False, tp: int = 1) -> Layout:
    """ZeRO: one buffer, cut in equal parts wherever that is. With TP: of every TP rank's parts."""
    dp = size // tp

    def layout(number: int) -> FlatLayout:
        params, position = [], 0
        for name in [*DENSE, *NAMED]:
            shape = list(full(name).shape)
            where: dict[str, Any] = {}
            if tp > 1 and name in TP_DIMS:
                dim = TP_DIMS[name]
                shape[dim] //= tp
                offset = tuple(number * shape[dim] if d == dim else 0 for d in range(len(shape)))
                where = {"global_shape": tuple(full(name).shape), "offset": offset}
            params.append(FlatParam(name, tuple(shape), position, **where))
            position += -(-params[-1].numel // align) * align
        return FlatLayout(tuple(params), as_boxes=as_boxes)

    def hold(rank: int, _: Meshes) -> FlatShards:
        number, part = rank % tp, rank // tp
        own = layout(number)
        length = -(-own.numel // dp)
        buffer = torch.full((length * dp,), -1.0)
        for param in own.params:
            whole = cut(param.name, TP_DIMS[param.name], tp, number) if param.offset else full(param.name)
            buffer[param.position : param.position + param.numel] = whole.reshape(-1)
        return FlatShards(buffer[part * length : (part + 1) * length].clone(), own, part * length)

    name = f"ZeRO {dp}" + (f" x TP {tp}" if tp > 1 else "") + (" as boxes" if as_boxes else "")
    return Layout(name, size, hold, stacked=False)


PAIRS: list[Pair] = [
    # tensor parallelism
    Pair(tp(2), tp(4)),
    Pair(tp(8), tp(2)),
    Pair(tp(4), fsdp(4)),
    Pair(tp(4), replicated(1)),
    Pair(tp(2), replicated(8)),
    Pair(qkv_by_rules(2), qkv_by_rules(4)),
    Pair(qkv_by_rules(4), replicated(3)),
    # FSDP, HSDP
    Pair(fsdp(8), fsdp(8)),
    Pair(fsdp(8), fsdp(3)),
    Pair(fsdp(3), fsdp(7)),
    Pair(fsdp(2), fsdp(6)),
    Pair(fsdp(4), columns(8)),
    Pair(columns(4), fsdp(8)),
    Pair(fsdp(4), hsdp(2, 4)),
    Pair(fsdp(1), hsdp(4, 2)),
    Pair(hsdp(2, 2), fsdp(4)),
    Pair(hsdp(2, 4), hsdp(4, 2)),
    Pair(hsdp(4, 1), hsdp(4, 1)),
    Pair(hsdp(4, 2), tp(4)),
    # two and three axes, strided
    Pair(fsdp_tp(2, 2), fsdp_tp(4, 2)),
    Pair(fsdp_tp(4, 2), fsdp_tp(2, 4)),
    Pair(fsdp_tp(2, 4), fsdp(4)),
    Pair(fsdp(8), fsdp_tp(2, 2)),
    Pair(fsdp_tp(2, 3), fsdp(5)),
    Pair(fsdp_tp(2, 4), replicated(2)),
    Pair(hsdp_tp(), fsdp_tp(2, 2)),
    Pair(tp(4), hsdp_tp()),
    Pair(blocks(2, 4), blocks(4, 2)),
    Pair(blocks(2, 2), columns(8)),
    # replicas, uneven holders
    Pair(replicated(4), replicated(8)),
    Pair(replicated(1), replicated(4)),
    Pair(replicated(3), scattered(5)),
    Pair(scattered(3), fsdp(8)),
    Pair(on_last(4), on_last(2)),
    Pair(on_last(2), fsdp(4)),
    # pipelines: every rank has names of its own
    Pair(megatron(pp=4), megatron(pp=2)),
    Pair(megatron(pp=2), replicated(1)),
    Pair(megatron(pp=2, tp=2), megatron(pp=4, tp=2)),
    Pair(megatron(pp=4, tp=2), megatron(tp=4)),
    Pair(megatron(pp=2, dp=2, tp=2), fsdp_tp(2, 2)),
    Pair(megatron(tp=2), megatron(pp=2, dp=2, tp=2)),
    # experts
    Pair(megatron(dp=4, ep=4), megatron(dp=2, ep=2)),
    Pair(megatron(dp=4, tp=2, ep=4, etp=2), megatron(dp=8, ep=8)),
    Pair(megatron(dp=4, ep=4, named=True), megatron(dp=4, tp=2, ep=4, etp=2)),
    Pair(megatron(dp=4, tp=2, ep=2, etp=2), megatron(dp=4, ep=4, named=True)),
    Pair(megatron(dp=2, ep=2, named=True), megatron(dp=8, ep=8, named=True)),
    Pair(fsdp(4), megatron(dp=8, ep=8, named=True)),
    # flat buffers
    Pair(flat(4), flat(3, align=64)),
    Pair(flat(2), flat(8, as_boxes=True)),
    Pair(flat(4), tp(2)),
    Pair(flat(4, as_boxes=True), fsdp_tp(2, 2)),
    Pair(flat(8), replicated(4)),
    Pair(fsdp(4), flat(8)),
    Pair(flat(4, tp=2, as_boxes=True), flat(8, tp=4, as_boxes=True)),
    Pair(flat(4, tp=2, as_boxes=True), fsdp(2)),
    Pair(megatron(pp=2, tp=2), flat(4)),
]

_SOME = [
    Pair(tp(2), replicated(8)),
    Pair(fsdp(4), columns(8)),
    Pair(fsdp(4), hsdp(2, 4)),
    Pair(fsdp_tp(4, 2), fsdp_tp(2, 4)),
    Pair(megatron(tp=2), megatron(pp=2, dp=2, tp=2)),
    Pair(flat(8), replicated(4)),
]
FORCED = [replace(pair, options={"exchange": mode}) for mode in ("broadcast", "alltoall") for pair in _SOME]
"""The same with the way of passing on chosen."""

ON_NODES = [
    Pair(fsdp(4), replicated(8), {"exchange_scope": "node"}, nodes=2, times=2),
    Pair(fsdp(4), hsdp(2, 4), {"exchange_scope": "node"}, nodes=2, times=2),
    Pair(fsdp(8), hsdp(4, 2), {"exchange_scope": "node"}, nodes=2, times=2),
    Pair(fsdp(8), fsdp(4), {"exchange_scope": "node"}, nodes=2),
    Pair(tp(4), replicated(3), {"exchange_scope": "node", "exchange": "broadcast"}, nodes=3, times=3),
    Pair(fsdp(4), replicated(8), {"exchange_scope": "world"}, nodes=2),
]
"""Every node fetches what its ranks want."""


ON_OTHERS = [
    Pair(replicated(2), replicated(3), first=5),
    Pair(fsdp(4), flat(4), first=3),
    Pair(megatron(tp=2), megatron(pp=2, tp=2), first=4),
    Pair(flat(4), megatron(pp=2, dp=2, tp=2)),
    Pair(megatron(dp=4, ep=4, named=True), megatron(dp=4, tp=2, ep=4, etp=2)),
    Pair(tp(4), flat(6), {"exchange": "broadcast"}, first=2),
]
"""Groups that are not the first ranks of the job."""

TABLES = {"pairs": PAIRS, "forced": FORCED, "on nodes": ON_NODES, "on others": ON_OTHERS}


def run_pairs(table: str, folder: str) -> list[Row]:
    """On every one of 8 ranks."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {shape: make_mesh(shape) for shape in MESHES}
    pairs = TABLES[table]
    wanted = {(0, pair.saved.num_ranks) for pair in pairs} | {(pair.first, pair.loaded.num_ranks) for pair in pairs}
    groups = {(first, size): dist.new_group(range(first, first + size)) for first, size in sorted(wanted)}
    saved: set[str] = set()
    rows = []
    for pair in pairs:
        url = f"{folder}/{pair.saved.name}"
        if pair.saved.name not in saved:
            saved.add(pair.saved.name)
            save(pair.saved, url, meshes, groups[0, pair.saved.num_ranks])
            dist.barrier()
        rows += load(pair, url, meshes, groups[pair.first, pair.loaded.num_ranks])
    return rows


def save(layout: Layout, url: str, meshes: Meshes, group: Any) -> None:
    if dist.get_rank() < layout.num_ranks:
        state = {"model": layout.hold(dist.get_rank(), meshes), "step": 3}
        cloudckpt.save(state, url, group=group, rules=layout.rules, config=CONFIG)


def load(pair: Pair, url: str, meshes: Meshes, group: Any) -> list[Row]:
    layout, rank = pair.loaded, dist.get_rank() - pair.first
    if not 0 <= rank < layout.num_ranks:
        return []
    right, target = layout.hold(rank, meshes), layout.hold(rank, meshes)
    for _, tensor in parts(target):
        numbers(tensor).add_(1)
    rename = None if pair.saved.stacked == layout.stacked else STACK if layout.stacked else UNSTACK
    state = {"model": target, "step": 0}
    before = os.environ.get("GROUP_RANK")
    os.environ["GROUP_RANK"] = str(rank * pair.nodes // layout.num_ranks)
    try:
        report = cloudckpt.load(
            state, url, group=group, rules=layout.rules, rename=rename, config=CONFIG, **pair.options
        )
    finally:
        del os.environ["GROUP_RANK"]
        if before is not None:
            os.environ["GROUP_RANK"] = before
    both = zip(parts(target), parts(right), strict=True)
    wrong = [name for (name, found), (_, expected) in both if not same_bits(found, expected)]
    wrong += [] if state["step"] == 3 else ["step"]
    return [
        Row(
            str(pair),
            f"{pair.saved.num_ranks} -> {layout.num_ranks}",
            report.bytes_needed,
            report.bytes_fetched,
            report.bytes_sent,
            report.exchange,
            pair.times,
            wrong,
        )
    ]


def parts(model: Model) -> list[tuple[str, torch.Tensor]]:
    """The local memory of everything, padding included but for that of flat buffers, which nothing sets."""
    found = []
    for name, tensor in model.items():
        if isinstance(tensor, DTensor):
            found.append((name, tensor.to_local()))
        else:
            found.append((name, tensor if isinstance(tensor, torch.Tensor) else tensor.local))
    return found


def whole_table(name: str, found: Sequence[Sequence[Row]]) -> list[Row]:
    """From what all ranks report: the loads in order, each with the tensors that are wrong on any rank."""
    table = []
    for pair in TABLES[name]:
        rows = [row for rows in found for row in rows if row.pair == str(pair)]
        assert len(rows) == pair.loaded.num_ranks
        wrong = sorted({tensor for row in rows for tensor in row.wrong})
        assert all(replace(row, wrong=wrong) == replace(rows[0], wrong=wrong) for row in rows), "one report for all"
        table.append(replace(rows[0], wrong=wrong))
    return table


def as_table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [
        "| pair | ranks | needed | fetched | fetched / needed | passed on | how |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mib = [f"{nbytes / 2**20:.2f} MiB" for nbytes in (row.needed, row.fetched, row.sent)]
        ratio = f"{row.fetched / row.needed:.4f}"
        lines.append(f"| {row.pair} | {row.ranks} | {mib[0]} | {mib[1]} | {ratio} | {mib[2]} | {row.kind} |")
    return "\n".join(lines)
