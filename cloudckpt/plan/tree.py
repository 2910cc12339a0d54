"""One tree from the trees of all ranks. Ranks may hold different keys; what they share must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.array_names import array_names
from cloudckpt.format.tree import (
    Node,
    TreePath,
    children,
    holds_arrays,
    is_array,
    is_mapping,
    key_token,
    map_arrays,
    path_text,
)
from cloudckpt.format.values import decode, dotted


@dataclass(frozen=True, slots=True)
class Tie:
    """What a rank says about an array that is declared as tied.

    ``to``: the id of the array that it is a copy of, and ``text`` its dotted path; None for that array itself.
    ``digests``: (box, digest) of every piece that the rank holds, equal where the bytes are. ``is_needed``: whether
    ``to`` must be in the state.
    """

    to: str | None
    digests: frozenset[Any]
    text: str = ""
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array as one rank describes it. ``id`` is a function of the path alone, and the node's ``array``.

    ``checked``: a plain tensor, which must be equal on all ranks that hold it.
    ``alias_of``: the id of an earlier leaf that is the same memory. ``note``: for the error where ranks disagree.
    """

    id: str
    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    checked: bool = False
    alias_of: str | None = None
    note: str = ""
    tie: Tie | None = None


@dataclass(frozen=True)
class RankTree:
    node: Node
    leaves: tuple[LeafSpec, ...]


@dataclass(frozen=True)
class MergedTree:
    """``leaves``: distinct arrays, in tree order; ``names``: id to the array's final name, aliases too.

    ``notes``: what the caller should be told: ties that turned out to be none. ``declared``: all arrays before
    ties were looked at; empty where none is declared.
    """

    node: Node
    leaves: tuple[LeafSpec, ...]
    names: dict[str, str]
    notes: tuple[str, ...] = ()
    declared: tuple[LeafSpec, ...] = ()


def merge(trees: Sequence[RankTree], *, values: str = "check", shared: AbstractSet[int] = frozenset()) -> MergedTree:
    """Unite the ranks' trees. Raises InvalidStateError naming the key and the ranks that disagree.

    ``values``: "check" demands equal plain values, "rank0" keeps those of the lowest rank. ``shared``:
    see `merge_again`.
    """
    merged = _merge_leaves(trees)
    declared = merged if any(spec.tie is not None for spec in merged) else []
    by_id = {spec.id: spec for spec in merged}
    notes = _tie_equal(by_id)
    order = [spec for spec in by_id.values() if spec.alias_of is None]
    unique = dict(zip((s.id for s in order), array_names([s.path for s in order]), strict=True))
    names = {i: unique[_root(by_id, spec)] for i, spec in by_id.items()}
    known = MergedTree(None, tuple(order), names, tuple(notes), tuple(declared))
    return merge_again(known, [tree.node for tree in trees], values=values, shared=shared)


def merge_again(
    known: MergedTree, nodes: Sequence[Node], *, values: str = "check", shared: AbstractSet[int] = frozenset()
) -> MergedTree:
    """`merge` for trees with the same arrays as those that ``known`` was merged from, but other plain values.

    ``shared``: ids of nodes that may be the same object in several trees; nothing in them differs per rank.
    """
    merged = _Merger(values == "rank0", shared).nodes(dict(enumerate(nodes)), ())
    named = map_arrays(merged, lambda leaf: {**leaf, "array": known.names[leaf["array"]]})
    return replace(known, node=named)


def ties_hold(known: MergedTree, digests: Mapping[str, frozenset[Any]]) -> bool:
    """Whether the declared ties come out as when ``known`` was merged.

    ``digests``: by id, what all ranks together hold of the declared arrays now; see `Tie`.
    """
    then = {spec.id: spec for spec in known.declared}
    now = {
        spec.id: spec if spec.tie is None else replace(spec, tie=replace(spec.tie, digests=digests[spec.id]))
        for spec in known.declared
    }
    notes_then, notes_now = _tie_equal(then), _tie_equal(now)
    return notes_then == notes_now and all(then[i].alias_of == now[i].alias_of for i in then)


def _tie_equal(by_id: dict[str, LeafSpec]) -> list[str]:
    """Make aliases of the declared copies that are proved equal; says which are not, and are stored as they are."""
    notes = []
    for spec in [*by_id.values()]:
        if spec.tie is None or spec.tie.to is None or spec.alias_of is not None:
            continue
        name, source_name = dotted(spec.path), spec.tie.text
        source = by_id.get(spec.tie.to)
        if source is None:
            if spec.tie.is_needed:
                raise InvalidStateError(
                    f"{name!r} is declared to be tied to {source_name!r}, which no rank holds: correct tied="
                )
            continue
        if source.tie is None:
            raise InvalidStateError(
                f"{source_name!r} is tied to {name!r} on some ranks only: pass the same tied= on all ranks"
            )
        fault = _untied(spec, spec.tie, source, source.tie)
        if fault is not None:
            notes.append(f"{name!r} is declared to be tied to {source_name!r}, but {fault}: both are stored")
        elif by_id[_root(by_id, source)] is not spec:
            by_id[spec.id] = replace(spec, alias_of=source.id)
    return notes


def _untied(spec: LeafSpec, tie: Tie, source: LeafSpec, source_tie: Tie) -> str | None:
    if (spec.shape, spec.dtype) != (source.shape, source.dtype):
        return f"they are of {spec.shape} {spec.dtype} and {source.shape} {source.dtype}"
    if tie.digests == source_tie.digests:
        return None
    if {box for box, _ in tie.digests} != {box for box, _ in source_tie.digests}:
        return "the ranks cut them differently, so that they cannot be compared"
    return "they differ"


def _root(by_id: dict[str, LeafSpec], spec: LeafSpec) -> str:
    while spec.alias_of is not None:
        spec = by_id[spec.alias_of]
    return spec.id


def _merge_leaves(trees: Sequence[RankTree]) -> list[LeafSpec]:
    merged: dict[str, tuple[int, LeafSpec]] = {}
    for rank, tree in enumerate(trees):
        for spec in tree.leaves:
            if spec.id not in merged:
                merged[spec.id] = (rank, spec)
                continue
            first, seen = merged[spec.id]
            _check_agree(seen, first, spec, rank)
            # Tied on one rank only: stored apart, so that no rank loses what it holds.
            tied = seen.alias_of if seen.alias_of == spec.alias_of else None
            tie = _joined(seen, first, spec, rank)
            merged[spec.id] = (first, replace(seen, checked=seen.checked or spec.checked, alias_of=tied, tie=tie))
    return [spec for _, spec in merged.values()]


def _check_agree(seen: LeafSpec, first: int, spec: LeafSpec, rank: int) -> None:
    for field in ("shape", "dtype"):
        a, b = getattr(seen, field), getattr(spec, field)
        if a != b:
            path = dotted(spec.path)
            raise InvalidStateError(f"{path!r} has {field} {a} on rank {first} but {b} on rank {rank}{spec.note}")


def _joined(seen: LeafSpec, first: int, spec: LeafSpec, rank: int) -> Tie | None:
    a, b = seen.tie, spec.tie
    if (a is None) != (b is None) or (a is not None and b is not None and a.to != b.to):
        raise InvalidStateError(
            f"{dotted(spec.path)!r} is declared to be tied otherwise on rank {first} than on rank {rank}: "
            "pass the same tied= on all ranks"
        )
    return a if a is None or b is None else replace(a, digests=a.digests | b.digests)


def _kind(node: Node) -> str:
    """What two ranks must agree on before their contents are compared."""
    if is_array(node):
        return str(node["$"])
    if is_mapping(node):
        return str(node.get("$", "dict"))
    if isinstance(node, list):
        return "list"
    if isinstance(node, dict):
        return str(node["$"])
    return type(node).__name__


@dataclass(frozen=True)
class _Merger:
    keep_first: bool
    shared: AbstractSet[int]

    def nodes(self, nodes: dict[int, Node], path: TreePath) -> Node:
        """``nodes``: of every rank that has the key."""
        ranks = list(nodes)
        first = nodes[ranks[0]]
        if id(first) in self.shared and all(node is first for node in nodes.values()):
            return first
        kind = _kind(first)
        if kind == "per_rank":
            return _merge_per_rank(nodes, path)
        for rank in ranks[1:]:
            if _kind(nodes[rank]) != kind and not (
                self.keep_first and not _structural(first) and not _structural(nodes[rank])
            ):
                raise InvalidStateError(
                    f"{path_text(path)!r} is a {kind} on rank {ranks[0]} but a {_kind(nodes[rank])} on rank {rank}"
                )
        if is_array(first):
            _check_equal(nodes, path, keep_first=False)
            return first
        inner = {rank: children(node) for rank, node in nodes.items()}
        if any(c is None for c in inner.values()):
            _check_equal(nodes, path, keep_first=self.keep_first)
            return first
        if is_mapping(first):
            return self.mappings(nodes, path)
        lengths = {rank: len(c or ()) for rank, c in inner.items()}
        if len(set(lengths.values())) > 1:
            if self.keep_first and not any(holds_arrays(node) for node in nodes.values()):
                return first
            raise InvalidStateError(f"{path_text(path)!r} has a different length per rank: {lengths}{_WAYS_OUT}")
        items = [
            self.nodes({r: (inner[r] or [])[i][1] for r in ranks}, (*path, str(i))) for i in range(lengths[ranks[0]])
        ]
        return items if isinstance(first, list) else {**first, "items": items}

    def mappings(self, nodes: dict[int, Node], path: TreePath) -> Node:
        keys: dict[str, Node] = {}
        members: dict[str, dict[int, Node]] = {}
        for rank, node in nodes.items():
            for key, child in children(node) or ():
                token = key_token(key)
                keys.setdefault(token, key)
                members.setdefault(token, {})[rank] = child
        distinct: dict[Any, str] = {}
        for token, key in keys.items():
            other = distinct.setdefault(decode(key), token)
            if other != token:
                raise InvalidStateError(
                    f"{path_text(path)!r} has the keys {other} and {token} on different ranks, which are equal"
                )
        merged = [[keys[token], self.nodes(held, (*path, token))] for token, held in members.items()]
        tagged = next((node for node in nodes.values() if "$" in node), None)
        if tagged is None:
            return dict(merged)
        if not self.keep_first:
            _check_equal({r: {k: v for k, v in n.items() if k != "items"} for r, n in nodes.items() if "$" in n}, path)
        return {**tagged, "items": merged}


def _structural(node: Node) -> bool:
    return is_mapping(node) or holds_arrays(node)


def _merge_per_rank(nodes: dict[int, Node], path: TreePath) -> Node:
    values: dict[str, Node] = {}
    for rank, node in nodes.items():
        if _kind(node) != "per_rank":
            raise InvalidStateError(f"{path_text(path)!r} is a PerRank value on some ranks, but not on rank {rank}")
        values[str(rank)] = node["value"]
    return {"$": "per_rank", "values": values}


_WAYS_OUT = '; wrap state that differs per rank in PerRank(...), or pass values="rank0" to keep rank 0\'s'


def _check_equal(nodes: dict[int, Node], path: TreePath, *, keep_first: bool = False) -> None:
    if keep_first:
        return
    texts = {rank: key_token(node) for rank, node in nodes.items()}
    ranks = list(texts)
    differing = [rank for rank in ranks[1:] if texts[rank] != texts[ranks[0]]]
    if differing:
        raise InvalidStateError(
            f"{path_text(path)!r} differs between ranks {ranks[0]} and {differing}: "
            f"{texts[ranks[0]][:80]} and {texts[differing[0]][:80]}{_WAYS_OUT}"
        )
