"""Rename rules: the stored state seen under other names, with tensors stacked, cut and turned on the way.

A rule names keys by their dotted paths, whole. ``{name}`` in a pattern stands for a text without
dots, ``{name:d}`` for digits only, ``{name:*}`` for any text, also one with dots, also an empty one.
The same name stands for the same text throughout a rule. Rules are applied one after another, each
to what those before it have left; within one rule everything moves at once.

A target may also be a tuple of keys: then these are the keys of the new path, ints as ints, and
``"{name:d}"`` alone as the int that it stands for. For a dotted target, the keys of the old path
that its text shares with the new one stay what they were; see `retarget`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.document import MAX_DIMS
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node, TreePath, array_leaves, is_array, leaves, path_text
from cloudckpt.plan import recorded, virtual
from cloudckpt.plan.changes import Changes, fits
from cloudckpt.plan.migrations import Migration
from cloudckpt.plan.patterns import Pattern, Target, keys_like, names_in, retarget
from cloudckpt.plan.recorded import Recorded, recorded_of
from cloudckpt.plan.regrow import regrow
from cloudckpt.plan.virtual import VirtualArray, stored_array


@dataclass(frozen=True)
class Stack:
    """Tensors that differ in one placeholder become one, with a new dim ``dim`` that it counts: 0, 1, ... without gaps.

    ``Stack("{p:*}.experts.{e}.w1", "{p:*}.experts.w1")``: the placeholder is the one that ``target`` has not.
    """

    source: str
    target: Target
    dim: int = 0


@dataclass(frozen=True)
class Unstack:
    """The inverse of `Stack`: a tensor for each index of ``dim``, numbered by the placeholder that ``source`` lacks."""

    source: str
    target: Target
    dim: int = 0


@dataclass(frozen=True)
class Concatenate:
    """Tensors become one along ``dim``: several sources in order, or one with a placeholder more than ``target``."""

    sources: str | tuple[str, ...]
    target: Target
    dim: int = 0


@dataclass(frozen=True)
class Split:
    """The inverse of `Concatenate`. ``sizes``: the extents along ``dim``, or a number of equal parts.

    ``targets``: one for every part, or one with a placeholder more than ``source``, which counts the parts.
    """

    source: str
    targets: str | tuple[Target, ...]
    sizes: int | tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Transpose:
    """Dim k of the result is dim ``dims[k]`` of the stored tensor, as ``torch.permute``. ``target``: as it was."""

    source: str
    dims: tuple[int, ...] = (1, 0)
    target: Target | None = None


Rule: TypeAlias = tuple[str, Target] | Stack | Unstack | Concatenate | Split | Transpose | Callable[[str], str]
"""``(pattern, target)`` moves whatever stands there; a function gets every dotted path, and returns the new one."""

Rules: TypeAlias = Rule | Sequence[Rule] | Mapping[str, Target]


class View:
    """The stored state as a load sees it, and what the load may change on the way.

    ``migrations``: those that led to it, before the caller's own rules.
    """

    def __init__(
        self,
        manifest: Manifest,
        tree: Node,
        made: Mapping[str, VirtualArray],
        changes: Changes,
        migrations: Sequence[Migration] = (),
    ) -> None:
        self.tree = tree
        self.changes = changes
        self.migrations = migrations
        self._manifest = manifest
        self._made = made

    @property
    def world_size(self) -> int:
        """Of the job that saved."""
        return self._manifest.document.world_size

    def array(self, node: Mapping[str, Any]) -> VirtualArray:
        """What a leaf of ``tree`` refers to. FormatError if its ``logical_shape`` does not fit the stored array."""
        found = self._made.get(node["array"])
        return found if found is not None else _stored(self._manifest, node)

    def shape_for(self, node: Mapping[str, Any], owner: tuple[int, ...]) -> tuple[int, ...]:
        """Of a target that is yet to be made for a leaf that belongs to a tensor of shape ``owner``.

        The stored shape, or that of its owner where ``resize`` lets it grow along (or shrink). Extents
        of 1 do not: there an optimizer keeps one number for a whole dim.
        """
        stored = self.array(node).shape
        found = self.changes.resize(self.text(node))
        if found is None or not fits(stored, owner, found[1]):
            return stored
        return stored if any(a == 1 < b for a, b in zip(stored, owner, strict=True)) else owner

    def text(self, node: Mapping[str, Any]) -> str:
        """The dotted path of the first leaf that refers to the same array, for messages."""
        return self._texts.get(node["array"], str(node["array"]))

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {node["array"]: path_text(path) for path, node in reversed([*array_leaves(self.tree)])}

    def digest(self) -> str:
        """Equal for equal views; for views of equal manifests only."""
        made = sorted(self._made.items())
        return hashlib.sha256(msgspec.json.encode(self.tree) + repr(made).encode()).hexdigest()[:16]


def renamed(
    manifest: Manifest, rules: Rules | None, changes: Changes | None = None, migrations: Sequence[Migration] = ()
) -> View:
    """Raises InvalidStateError for rules that match nothing, lead to one name twice, or do not fit the tensors.

    ``migrations`` come before ``rules``; theirs may match nothing.
    """
    tree = manifest.document.tree
    changes = changes or Changes()
    if rules is None and not migrations:
        return View(manifest, tree, {}, changes)
    state = _State(manifest, [_Leaf(path, path, node) for path, node in leaves(tree)])
    for migration in migrations:
        try:
            for rule in _listed(migration.make_rules()):
                state.apply(rule, may_be_idle=True)
        except InvalidStateError as error:
            raise InvalidStateError(f"migration {migration}: {error}") from None
    for rule in _listed(rules) if rules is not None else ():
        state.apply(rule)
    grown = regrow(tree, [(leaf.path, leaf.old, leaf.node) for leaf in state.leaves])
    return View(manifest, grown, state.made, changes, migrations)


def describe_rules(rules: Rules | None, view: View) -> str:
    """For the comparison between ranks. Functions cannot be compared, but what comes of them can."""
    if rules is None and not view.migrations:
        return "no rename"
    listed = [] if rules is None else _listed(rules)
    migrated = f"migrations [{', '.join(map(str, view.migrations))}], " if view.migrations else ""
    return f"{migrated}rename=[{', '.join(map(_shown, listed))[:300]}] (which comes to {view.digest()})"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """``old``: where it (or the first of what it was made of) was, with the containers that it keeps."""

    path: TreePath
    old: TreePath
    node: Node

    @property
    def text(self) -> str:
        return path_text(self.path)


class _State:
    def __init__(self, manifest: Manifest, found: list[_Leaf]) -> None:
        self.manifest = manifest
        self.leaves = found
        self.made: dict[str, VirtualArray] = {}

    def apply(self, rule: Any, *, may_be_idle: bool = False) -> None:
        moves = self._moves(rule)
        if not moves and may_be_idle:
            return
        if not moves:
            raise InvalidStateError(
                f"rename rule {_shown(rule)} matches nothing that is stored (or left by the rules before it)"
            )
        gone = {id(leaf) for sources, _ in moves for leaf in sources}
        arrivals = {id(sources[0]): made for sources, made in moves}
        kept = (arrivals.get(id(leaf), () if id(leaf) in gone else (leaf,)) for leaf in self.leaves)
        self.leaves = list(chain.from_iterable(kept))
        taken: dict[TreePath, _Leaf] = {}
        for leaf in self.leaves:
            other = taken.setdefault(leaf.path, leaf)
            if other is not leaf:
                raise InvalidStateError(
                    f"rename rule {_shown(rule)}: {path_text(other.old)!r} and {path_text(leaf.old)!r} "
                    f"both become {leaf.text!r}"
                )

    def _moves(self, rule: Any) -> list[tuple[list[_Leaf], list[_Leaf]]]:
        """Which leaves go, and what comes in their place."""
        if isinstance(rule, Stack):
            return self._gather(
                rule, (rule.source,), rule.target, lambda arrays: virtual.stack(arrays, rule.dim), recorded.stacked
            )
        if isinstance(rule, Concatenate):
            sources = (rule.sources,) if isinstance(rule.sources, str) else tuple(rule.sources)
            return self._gather(
                rule, sources, rule.target, lambda arrays: virtual.concatenate(arrays, rule.dim), recorded.joined
            )
        if isinstance(rule, Unstack):
            return self._scatter(
                rule,
                (rule.target,),
                lambda array: virtual.unstack(array, rule.dim),
                lambda told, dims, shapes: [recorded.unstacked(told, rule.dim % dims)] * len(shapes),
            )
        if isinstance(rule, Split):
            targets = (rule.targets,) if isinstance(rule.targets, str) else tuple(rule.targets)
            return self._scatter(
                rule,
                targets,
                lambda array: virtual.split(array, rule.dim, rule.sizes),
                lambda told, dims, shapes: recorded.parted(told, rule.dim % dims, [s[rule.dim] for s in shapes]),
            )
        if isinstance(rule, Transpose):
            target = rule.source if rule.target is None else rule.target
            return self._scatter(
                rule,
                (target,),
                lambda array: [virtual.permute(array, rule.dims)],
                lambda told, dims, _: [recorded.permuted(told, [d % dims for d in rule.dims])],
            )
        if callable(rule):
            return self._mapped(rule)
        if isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str):
            source, target = rule
            pattern = Pattern(source)
            return [
                ([leaf], [_Leaf(retarget(leaf.path, target, found), leaf.old, leaf.node)])
                for leaf, found in self._matching(pattern, target)
            ]
        raise InvalidStateError(
            f"{_shown(rule)} is no rename rule: give (pattern, target), Stack, Split, ... or a function"
        )

    def _matching(
        self, pattern: Pattern, *targets: Any, extra: Sequence[str] = ()
    ) -> list[tuple[_Leaf, dict[str, str]]]:
        for target in targets:
            unknown = [name for name in names_in(target) if name not in pattern.names and name not in extra]
            if unknown:
                raise InvalidStateError(f"rename target {target!r} has {unknown}, which {pattern.text!r} has not")
        matches = ((leaf, pattern.match(leaf.text)) for leaf in self.leaves)
        return [(leaf, found) for leaf, found in matches if found is not None]

    def _mapped(self, rule: Callable[[str], Any]) -> list[tuple[list[_Leaf], list[_Leaf]]]:
        moves = []
        for leaf in self.leaves:
            text = rule(leaf.text)
            if not isinstance(text, str):
                raise InvalidStateError(
                    f"rename function {_shown(rule)} returned {text!r:.200} for {leaf.text!r}, not a string"
                )
            if text != leaf.text:
                moves.append(([leaf], [_Leaf(keys_like(leaf.path, text), leaf.old, leaf.node)]))
        return moves

    def _gather(
        self,
        rule: Any,
        sources: tuple[str, ...],
        target: Target,
        join: Callable[[Sequence[VirtualArray]], VirtualArray],
        tell: Callable[[Sequence[Recorded], int, Sequence[tuple[int, ...]]], Recorded],
    ) -> list[tuple[list[_Leaf], list[_Leaf]]]:
        """Several tensors become one, for every way to fill the target's placeholders."""
        patterns = [Pattern(source) for source in sources]
        counter = _counter(rule, patterns[0].names, names_in(target)) if len(patterns) == 1 else None
        groups: dict[tuple[str, ...], dict[int, _Leaf]] = {}
        common = [name for name in patterns[0].names if name != counter]
        for number, pattern in enumerate(patterns):
            if {*pattern.names} != {*patterns[0].names}:
                raise InvalidStateError(f"rename rule {_shown(rule)}: its sources have different placeholders")
            for leaf, found in self._matching(pattern, target):
                index = number if counter is None else _index(rule, leaf, found[counter])
                members = groups.setdefault(tuple(found[name] for name in common), {})
                other = members.setdefault(index, leaf)
                if other is not leaf:
                    raise InvalidStateError(
                        f"rename rule {_shown(rule)}: {other.text!r} and {leaf.text!r} are both part {index}"
                    )
        moves = []
        for key, members in groups.items():
            wanted = len(patterns) if counter is None else 1 + max(members)
            first = members[min(members)]
            absent = [i for i in range(wanted) if i not in members]
            if absent:
                what = [sources[i] for i in absent] if counter is None else f"numbers {absent[:20]}"
                raise InvalidStateError(f"rename rule {_shown(rule)}: beside {first.text!r} there is no {what}")
            held = [members[i] for i in range(wanted)]
            made = self._call(rule, held, lambda arrays: [join(arrays)])
            path = retarget(first.path, target, dict(zip(common, key, strict=True)))
            dim = rule.dim % len(made[0].shape)
            told = [recorded_of(leaf.node, leaf.text) for leaf in held]
            shapes = [self._array(rule, leaf).shape for leaf in held]
            node = self._add(held[0].node, made[0], tell(told, dim, shapes))
            moves.append((held, [_Leaf(path, first.old, node)]))
        return moves

    def _scatter(
        self,
        rule: Any,
        targets: Sequence[Any],
        cut: Callable[[VirtualArray], list[VirtualArray]],
        tell: Callable[[Recorded, int, Sequence[tuple[int, ...]]], list[Recorded]],
    ) -> list[tuple[list[_Leaf], list[_Leaf]]]:
        """One tensor becomes several, or another one."""
        pattern = Pattern(rule.source)
        more = len(targets) == 1 and not {*names_in(targets[0])} <= {*pattern.names}
        counter = _counter(rule, names_in(targets[0]), pattern.names) if more or isinstance(rule, Unstack) else None
        moves = []
        for leaf, found in self._matching(pattern, *targets, extra=(counter,) if counter else ()):
            made = self._call(rule, [leaf], lambda arrays: cut(arrays[0]))
            if counter is None and len(made) != len(targets):
                raise InvalidStateError(f"rename rule {_shown(rule)}: {len(made)} parts for {len(targets)} targets")
            into = []
            dims = len(self._array(rule, leaf).shape)
            told = tell(recorded_of(leaf.node, leaf.text), dims, [array.shape for array in made])
            for number, (array, layout) in enumerate(zip(made, told, strict=True)):
                fields = found if counter is None else {**found, counter: str(number)}
                path = retarget(leaf.path, targets[0] if counter else targets[number], fields)
                into.append(_Leaf(path, leaf.old, self._add(leaf.node, array, layout)))
            moves.append(([leaf], into))
        return moves

    def _call(
        self, rule: Any, held: Sequence[_Leaf], change: Callable[[list[VirtualArray]], list[VirtualArray]]
    ) -> list[VirtualArray]:
        arrays = [self._array(rule, leaf) for leaf in held]
        kinds = {(leaf.node["$"], leaf.node.get("numpy")) for leaf in held}
        names = [leaf.text for leaf in held]
        if len(kinds) > 1:
            raise InvalidStateError(
                f"rename rule {_shown(rule)}: {names} are of different kinds: {sorted(map(str, kinds))}"
            )
        try:
            return change(arrays)
        except InvalidStateError as error:
            raise InvalidStateError(f"rename rule {_shown(rule)}, {', '.join(names)[:300]}: {error}") from None

    def _array(self, rule: Any, leaf: _Leaf) -> VirtualArray:
        if not is_array(leaf.node):
            raise InvalidStateError(f"rename rule {_shown(rule)}: {leaf.text!r} is no tensor")
        array = self.made.get(leaf.node["array"]) or _stored(self.manifest, leaf.node)
        if leaf.node["$"] == "ndarray" and leaf.node.get("shape") != list(array.shape):
            raise InvalidStateError(
                f"rename rule {_shown(rule)}: {leaf.text!r} is stored as raw bytes, which no rule can rearrange"
            )
        return array

    def _add(self, node: Node, array: VirtualArray, layout: Recorded) -> Node:
        name = f"@{len(self.made)}"  # no stored array can have this name
        self.made[name] = array
        if node["$"] == "ndarray":
            return {"$": "ndarray", "array": name, "numpy": node.get("numpy"), "shape": list(array.shape)}
        return {"$": node["$"], "array": name} | ({"layout": layout} if layout is not None else {})


def _stored(manifest: Manifest, node: Mapping[str, Any]) -> VirtualArray:
    number = manifest.array_number(node)
    entry = manifest.arrays[number]
    logical = node.get("logical_shape") if node["$"] == "tensor" else None
    if logical is None:
        return stored_array(number, entry.dtype, entry.shape)
    if (
        not isinstance(logical, list)
        or not all(type(extent) is int and extent >= 0 for extent in logical)
        or len(logical) > MAX_DIMS
        or math.prod(extent or 1 for extent in logical) >= 2**58  # what torch can count in bytes, too
    ):
        raise FormatError(f"array {entry.name!r}: malformed logical shape")
    if entry.shape != (math.prod(logical),):
        raise FormatError(f"array {entry.name!r}: logical shape {logical} does not fit its stored shape {entry.shape}")
    return stored_array(number, entry.dtype, tuple(logical), flat=len(logical) != 1)


def _counter(rule: Any, more: Iterable[str], fewer: Iterable[str]) -> str:
    counters = list(dict.fromkeys(name for name in more if name not in {*fewer}))
    if len(counters) != 1:
        raise InvalidStateError(
            f"rename rule {_shown(rule)}: just one placeholder must number the parts, on the side of the parts only; "
            f"it has {len(counters)}"
        )
    return counters[0]


def _index(rule: Any, leaf: _Leaf, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidStateError(f"rename rule {_shown(rule)}: {text!r} in {leaf.text!r} is no number")
    return int(text)


def _listed(rules: Any) -> list[Any]:
    if isinstance(rules, Mapping):
        return list(rules.items())
    single = isinstance(rules, (Stack, Unstack, Concatenate, Split, Transpose)) or callable(rules)
    if single or (isinstance(rules, tuple) and len(rules) == 2 and isinstance(rules[0], str)):
        return [rules]
    if isinstance(rules, (list, tuple)):
        return list(rules)
    raise InvalidStateError(f"rename must be a list of rules, not {rules!r:.200}")


def _shown(rule: Any) -> str:
    """Functions by name: their addresses are others on every rank."""
    return str(getattr(rule, "__qualname__", type(rule).__qualname__)) if callable(rule) else repr(rule)[:300]
