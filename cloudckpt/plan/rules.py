"""From name patterns to the part of a tensor that each rank holds. Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cloudckpt._cached import cached_property
from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.grid import Ints
from cloudckpt.plan.parallel import AXES, DATA_AXES, DENSE_AXES, EXPERT_AXES, ParallelConfig
from cloudckpt.plan.shard import DimShard, PieceBox, PieceTable, Runs, cut_in_segments, dim_runs, pieces_from_runs


@dataclass(frozen=True)
class Rule:
    """``axes``: (axis, dim), in the order in which they cut; ``segments``: (dim, sizes). Dims may be negative."""

    pattern: str
    axes: tuple[tuple[str, int], ...]
    segments: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(fnmatch.translate(self.pattern))

    def __str__(self) -> str:
        segments = {dim: list(sizes) for dim, sizes in self.segments}
        return f"({self.pattern!r}, {dict(self.axes)}{f', {segments}' if segments else ''})"


@dataclass(frozen=True)
class Layout:
    """A rule, laid on tensors of one number of dims: per dim the axes that cut it, in order, and the segments in it."""

    axes: tuple[tuple[str, ...], ...]
    segments: tuple[tuple[int, ...] | None, ...]

    def runs(self, shape: Sequence[int], coordinates: Mapping[str, int], config: ParallelConfig) -> list[Runs]:
        """The indices along every dim of a global tensor that the rank at ``coordinates`` holds."""
        found = []
        for extent, axes, segments in zip(shape, self.axes, self.segments, strict=True):
            shards = [(axis in DATA_AXES, DimShard(config.size(axis), coordinates[axis])) for axis in axes]
            if segments is None or len(segments) == 1:
                found.append(dim_runs(extent, [shard for _, shard in shards]))
            else:
                each = [shard for is_data, shard in shards if not is_data]
                found.append(cut_in_segments(extent, segments, each, [shard for is_data, shard in shards if is_data]))
        return found

    def global_shape(self, local: Sequence[int], config: ParallelConfig) -> tuple[int, ...]:
        """Where all ranks' shares are alike; a dim with segments is as long as they are."""
        return tuple(
            sum(segments) if segments is not None else extent * math.prod(config.size(axis) for axis in axes)
            for extent, axes, segments in zip(local, self.axes, self.segments, strict=True)
        )

    def adds_up(self, shape: Sequence[int]) -> bool:
        """Whether the segments are those of a tensor of this shape."""
        return all(sizes is None or sum(sizes) == n for sizes, n in zip(self.segments, shape, strict=True))

    def cut_dims(self, config: ParallelConfig) -> set[int]:
        """The dims that model-parallel axes really cut."""
        return {d for d, axes in enumerate(self.axes) if any(a not in DATA_AXES and config.size(a) > 1 for a in axes)}

    @lru_cache(maxsize=1024)  # noqa: B019  # layouts are values; one object for all tensors pickles in a few bytes
    def encode(self, config: ParallelConfig) -> dict[str, Any] | None:
        """What a checkpoint records of it; see "Tree leaves" in docs/format.md. Not to be changed."""
        axes = {axis: [d, config.size(axis)] for d, names in enumerate(self.axes) for axis in names}
        segments = {str(d): list(sizes) for d, sizes in enumerate(self.segments) if sizes is not None}
        if not axes and not segments:
            return None
        return {"axes": axes} | ({"segments": segments} if segments else {})


class ShardingRules:
    """Which part of its global tensor each rank holds, for plain tensors, by the names of the tensors.

    ``rules``: ``(pattern, {axis: dim})`` or ``(pattern, {axis: dim}, {dim: [sizes]})``.

    The pattern (``*``, ``?``, ``[...]``; ``*`` crosses dots) is matched with the whole dotted path in
    the state: ``"*.wq.weight"`` does not match ``optim.wq.weight.exp_avg``, which needs a rule of its own.
    Every axis of ``parallel`` (see `ParallelConfig`) that is named cuts its dim, the first named
    first, as ``torch.chunk`` does; over the others the tensor is replicated. Dims may be negative.

    The sizes are those of global segments that were packed into one dim (q, k and v). Model-parallel
    axes cut each segment by itself, and a rank holds its parts of all of them, one after another;
    data-parallel ones (``dp_shard``, ``cp``, ``edp``, ``dp_replicate``) cut that as one, as FSDP does.
    A single size states the extent of a dim that is cut unevenly.

    All rules that match a tensor must say the same. Raises InvalidStateError for what is no rule.
    """

    def __init__(self, rules: Iterable[Sequence[Any]], parallel: ParallelConfig | None = None) -> None:
        if parallel is not None and not isinstance(parallel, ParallelConfig):
            raise InvalidStateError(f"parallel must be a ParallelConfig, not {type(parallel).__name__}")
        self.rules = tuple(_rule(given) for given in rules)
        self.parallel = parallel
        self._matches: dict[str, tuple[int, ...]] = {}
        self._layouts: dict[tuple[Rule, int], Layout] = {}
        self._found: dict[tuple[str, int], Layout | None] = {}

    def __repr__(self) -> str:
        return f"ShardingRules([{', '.join(map(str, self.rules))}], {self.parallel})"

    @property
    def digest(self) -> str:
        """A short text, equal for equal rules and configs only."""
        config = None if self.parallel is None else asdict(self.parallel)
        data = json.dumps([[asdict(rule) for rule in self.rules], config])
        return f"{len(self.rules)} rules, {hashlib.sha256(data.encode()).hexdigest()[:16]}"

    def config(self, num_ranks: int | None = None) -> ParallelConfig:
        """The ParallelConfig; InvalidStateError where there is none, or it is not for ``num_ranks``."""
        if self.parallel is None:
            raise InvalidStateError(
                "these ShardingRules do not say how the ranks are laid out: "
                "pass ShardingRules(rules, ParallelConfig(...))"
            )
        if num_ranks is not None and self.parallel.world_size != num_ranks:
            raise InvalidStateError(
                f"the ShardingRules are for {self.parallel.world_size} ranks ({self.parallel}), the job has {num_ranks}"
            )
        return self.parallel

    def match(self, path: str) -> tuple[int, ...]:
        """The numbers of all rules for a dotted path."""
        found = self._matches.get(path)
        if found is None:  # every save of a run asks for the same paths
            found = tuple(number for number, rule in enumerate(self.rules) if rule.regex.match(path))
            self._matches[path] = found
        return found

    def layout(self, path: str, num_dims: int) -> Layout | None:
        """The layout of a tensor; None without a rule. InvalidStateError where rules do not fit it, or each other."""
        if (path, num_dims) not in self._found:
            self._found[path, num_dims] = self._find(path, num_dims)
        return self._found[path, num_dims]

    def unmatched(self, matched: Iterable[Iterable[int]]) -> list[Rule]:
        """The rules that are not among the numbers of any rank."""
        found = {number for numbers in matched for number in numbers}
        return [rule for number, rule in enumerate(self.rules) if number not in found]

    def _find(self, path: str, num_dims: int) -> Layout | None:
        matching = [self.rules[number] for number in self.match(path)]
        if not matching:
            return None
        layouts = [self._layout(rule, num_dims, path) for rule in matching]
        for rule, layout in zip(matching[1:], layouts[1:], strict=True):
            if layout != layouts[0]:
                raise InvalidStateError(f"{path!r}: the rules {matching[0]} and {rule} contradict each other")
        return layouts[0]

    def _layout(self, rule: Rule, num_dims: int, path: str) -> Layout:
        key = (rule, num_dims)
        if key not in self._layouts:
            self._layouts[key] = _lay(rule, num_dims, path)
        return self._layouts[key]


def check_all_matched(rules: ShardingRules | None, matched: Iterable[Iterable[int]], paths: Iterable[str] = ()) -> None:
    """Raises InvalidStateError for rules that no rank found a tensor for; ``paths``: some of those that there are."""
    left = [] if rules is None else rules.unmatched(matched)
    if left:
        some = [repr(path) for path, _ in zip(paths, range(3), strict=False)]
        there = f"; the tensors are {', '.join(some)}, ..." if some else ""
        raise InvalidStateError(f"no tensor on any rank matches the rule {', '.join(map(str, left[:5]))}{there}")


def local_shape(runs: Sequence[Runs]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in dim) for dim in runs)


def agrees(layout: Layout, pieces: Iterable[PieceBox], shape: Sequence[int], rank: int, config: ParallelConfig) -> bool:
    """Whether a rank whose shard says itself where it is holds nothing that the layout gives to another rank.

    It may hold less, and data-parallel axes may have cut in another order.
    """
    if not layout.adds_up(shape):
        return False
    model_only = tuple(tuple(axis for axis in axes if axis not in DATA_AXES) for axes in layout.axes)
    coordinates = config.coordinates(rank)
    held = list(pieces)
    return any(
        all(_inside(piece, runs) for piece in held)
        for runs in (
            Layout(axes, layout.segments).runs(shape, coordinates, config) for axes in (model_only, layout.axes)
        )
    )


def _inside(piece: PieceBox, runs: Sequence[Runs]) -> bool:
    return all(
        extent == 0 or any(a <= offset and offset + extent <= b for a, b in dim)
        for offset, extent, dim in zip(piece.global_offset, piece.shape, runs, strict=True)
    )


def wanted_pieces(tensors: Sequence[tuple[str, Sequence[int]]], rules: ShardingRules, rank: int) -> PieceTable:
    """What a rank holds of ``(dotted path, global shape)``: by rule, or, without one, all of it.

    Tensors are numbered as given. Raises InvalidStateError as `ShardingRules.layout` does, and where
    segments do not add up to the shape.
    """
    config = rules.config()
    coordinates = config.coordinates(rank)
    # Tensors of one kind have the same pieces, and a model has thousands of tensors of a few kinds.
    kinds: dict[tuple[int, tuple[int, ...]], int] = {}
    bounds: list[Ints] = []
    kind = np.zeros(len(tensors), dtype=np.int64)
    for number, (path, given) in enumerate(tensors):
        shape = tuple(given)
        layout = rules.layout(path, len(shape))
        found = kinds.setdefault((id(layout), shape), len(bounds))
        if found == len(bounds):
            bounds.append(_bounds(layout, shape, path, coordinates, config))
        kind[number] = found
    dims = max((rows.shape[1] // 2 for rows in bounds), default=0)
    count = np.array([len(rows) for rows in bounds], dtype=np.int64)[kind]
    first = np.cumsum([0, *(len(rows) for rows in bounds)], dtype=np.int64)[kind]
    row = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    offset = np.concatenate([np.zeros((0, dims), dtype=np.int64), *(_padded(rows, 0, dims) for rows in bounds)])
    extent = np.concatenate([np.zeros((0, dims), dtype=np.int64), *(_padded(rows, 1, dims) for rows in bounds)])
    return PieceTable(np.repeat(np.arange(len(tensors)), count), offset[row], extent[row])


def _bounds(
    layout: Layout | None, shape: tuple[int, ...], path: str, coordinates: Mapping[str, int], config: ParallelConfig
) -> Ints:
    """``int64[k, 2 * dims]``: offset and shape of the pieces that hold anything."""
    if layout is None:
        pieces = [PieceBox((0,) * len(shape), (0,) * len(shape), shape)]
    else:
        check_segments(layout, shape, path)
        pieces = pieces_from_runs(layout.runs(shape, coordinates, config))
    rows = [(*piece.global_offset, *piece.shape) for piece in pieces if piece.box.num_elements]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2 * len(shape))


def _padded(rows: Ints, fill: int, dims: int) -> Ints:
    """The offsets (fill 0) or the shapes (fill 1) for tensors of more dims."""
    own = rows.shape[1] // 2
    padded = np.full((len(rows), dims), fill, dtype=np.int64)
    padded[:, :own] = rows[:, own:] if fill else rows[:, :own]
    return padded


def check_segments(layout: Layout, shape: Sequence[int], path: str) -> None:
    for d, (extent, segments) in enumerate(zip(shape, layout.segments, strict=True)):
        if segments is not None and sum(segments) != extent:
            raise InvalidStateError(
                f"{path!r}: the segments {list(segments)} add up to {sum(segments)}, "
                f"but dim {d} of {tuple(shape)} has {extent}"
            )


def check_recorded(layout: Layout, config: ParallelConfig, recorded: Any, path: str) -> None:
    """Raises InvalidStateError where a target's segments are not those that the checkpoint was cut by.

    ``recorded``: what `Layout.encode` gave to the job that saved, or None. The packed tensor would be
    cut across its segments, and every rank would get a part of the wrong ones.
    """
    if recorded is None:
        return
    axes, segments = decode_recorded(recorded, path)
    for d in sorted(layout.cut_dims(config)):
        was_cut = any(dim == d and size > 1 and axis not in DATA_AXES for axis, dim, size in axes)
        theirs = segments.get(d, ())
        if not was_cut and len(theirs) < 2:
            continue
        mine = layout.segments[d] or ()
        if (mine if len(mine) > 1 else ()) != (theirs if len(theirs) > 1 else ()):
            raise InvalidStateError(
                f"{path!r}: dim {d} was saved with {_segments(theirs)}, but the rule of the target has "
                f"{_segments(mine)}; its ranks would get parts of the wrong segments: "
                "give the rule the segments of the checkpoint"
            )


def _segments(sizes: tuple[int, ...]) -> str:
    return f"the segments {list(sizes)}" if len(sizes) > 1 else "no segments"


def decode_recorded(recorded: Any, path: str) -> tuple[list[tuple[str, int, int]], dict[int, tuple[int, ...]]]:
    """``(axis, dim, size)`` of every cut, and the segments by dim. FormatError if it is malformed."""
    try:
        axes = [(str(axis), _count(dim), _count(size)) for axis, (dim, size) in recorded["axes"].items()]
        segments = {int(dim): tuple(map(_count, sizes)) for dim, sizes in recorded.get("segments", {}).items()}
    except (TypeError, ValueError, KeyError, AttributeError, InvalidStateError) as error:
        raise FormatError(f"{path!r}: malformed layout: {error!r:.100}") from error
    return axes, segments


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} is no count")
    return value


def _rule(given: Sequence[Any]) -> Rule:
    """Check one rule as the caller wrote it."""
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3) or not isinstance(given[0], str):
        raise InvalidStateError(
            "a rule is (pattern, {axis: dim}) or (pattern, {axis: dim}, {dim: [segment sizes]}), "
            f"not {given!r:.200}"
        )
    pattern, axes, segments = given[0], given[1], given[2] if len(given) == 3 else {}
    if not isinstance(axes, Mapping) or not isinstance(segments, Mapping):
        raise InvalidStateError(f"rule {pattern!r}: axes and segments must be dicts")
    for axis in axes:
        if axis not in AXES:
            raise InvalidStateError(f"rule {pattern!r}: there is no axis {axis!r}; the axes are {', '.join(AXES)}")
    dense = [axis for axis in axes if axis in DENSE_AXES and axis != "pp"]
    expert = [axis for axis in axes if axis in EXPERT_AXES]
    if dense and expert:
        raise InvalidStateError(
            f"rule {pattern!r} names axes of dense tensors ({', '.join(dense)}) and of experts ({', '.join(expert)}), "
            "which divide the same ranks twice: experts are cut over ep, etp and edp"
        )
    sizes = []
    for dim, parts in segments.items():
        if isinstance(parts, (str, bytes)) or not isinstance(parts, Iterable):
            raise InvalidStateError(f"rule {pattern!r}: the segments of dim {dim!r} must be a list of sizes")
        counts = tuple(_int(part, f"rule {pattern!r}: a segment of dim {dim!r}") for part in parts)
        if not counts or min(counts) < 0:
            raise InvalidStateError(f"rule {pattern!r}: the segments of dim {dim!r} must be sizes, not {list(counts)}")
        sizes.append((_int(dim, f"rule {pattern!r}: a dim with segments"), counts))
    dims = tuple((axis, _int(dim, f"rule {pattern!r}: the dim of {axis}")) for axis, dim in axes.items())
    return Rule(pattern, dims, tuple(sizes))


def _int(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidStateError(f"{what} must be an int, not {value!r:.50}")
    return int(value)


def _lay(rule: Rule, num_dims: int, path: str) -> Layout:
    axes: list[list[str]] = [[] for _ in range(num_dims)]
    segments: list[tuple[int, ...] | None] = [None] * num_dims

    def place(dim: int) -> int:
        if not -num_dims <= dim < num_dims:
            raise InvalidStateError(f"{path!r} has {num_dims} dims; the rule {rule} speaks of dim {dim}")
        return dim % num_dims

    for axis, dim in rule.axes:
        axes[place(dim)].append(axis)
    for dim, sizes in rule.segments:
        if segments[place(dim)] is not None:
            raise InvalidStateError(f"the rule {rule} has two lists of segments for one dim of {path!r}")
        segments[place(dim)] = sizes
    for dim, names in enumerate(axes):
        first_data = next((i for i, axis in enumerate(names) if axis in DATA_AXES), len(names))
        if len(segments[dim] or ()) > 1 and any(axis not in DATA_AXES for axis in names[first_data:]):
            raise InvalidStateError(
                f"the rule {rule}: of a dim with segments data-parallel axes cut last; name {names[first_data]} last"
            )
    return Layout(tuple(map(tuple, axes)), tuple(segments))
