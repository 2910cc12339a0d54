"""What a rename rule does: which leaves of the stored tree go, and what comes in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node, TreePath, is_array, path_text
from cloudckpt.plan import recorded, virtual
from cloudckpt.plan.patterns import Pattern, Target, keys_like, names_in, retarget
from cloudckpt.plan.recorded import Recorded, recorded_of
from cloudckpt.plan.rename import Concatenate, Split, Stack, Transpose, Unstack, shown
from cloudckpt.plan.virtual import VirtualArray, array_of


@dataclass(frozen=True, slots=True)
class Leaf:
    """``old``: where it (or the first of what it was made of) was, with the containers that it keeps."""

    path: TreePath
    old: TreePath
    node: Node

    @property
    def text(self) -> str:
        return path_text(self.path)


Move: TypeAlias = tuple[list[Leaf], list[Leaf]]
"""Leaves that go, and those that come where the first of them was."""


class Moves:
    """The stored leaves as the rules so far have left them. ``made``: arrays that no checkpoint stores, by name."""

    def __init__(self, manifest: Manifest, found: list[Leaf], made: Mapping[str, VirtualArray]) -> None:
        self.manifest = manifest
        self.leaves = found
        self.made = dict(made)

    def apply(self, rule: Any, *, may_be_idle: bool = False) -> None:
        moves = self._moves(rule)
        if not moves and may_be_idle:
            return
        if not moves:
            raise InvalidStateError(
                f"rename rule {shown(rule)} matches nothing that is stored (or left by the rules before it)"
            )
        gone = {id(leaf) for sources, _ in moves for leaf in sources}
        arrivals = {id(sources[0]): made for sources, made in moves}
        kept = (arrivals.get(id(leaf), () if id(leaf) in gone else (leaf,)) for leaf in self.leaves)
        self.leaves = list(chain.from_iterable(kept))
        taken: dict[TreePath, Leaf] = {}
        for leaf in self.leaves:
            other = taken.setdefault(leaf.path, leaf)
            if other is not leaf:
                raise InvalidStateError(
                    f"rename rule {shown(rule)}: {path_text(other.old)!r} and {path_text(leaf.old)!r} "
                    f"both become {leaf.text!r}"
                )

    def _moves(self, rule: Any) -> list[Move]:
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
                ([leaf], [Leaf(retarget(leaf.path, target, found), leaf.old, leaf.node)])
                for leaf, found in self._matching(pattern, target)
            ]
        raise InvalidStateError(
            f"{shown(rule)} is no rename rule: give (pattern, target), Stack, Split, ... or a function"
        )

    def _matching(
        self, pattern: Pattern, *targets: Any, extra: Sequence[str] = ()
    ) -> list[tuple[Leaf, dict[str, str]]]:
        for target in targets:
            unknown = [name for name in names_in(target) if name not in pattern.names and name not in extra]
            if unknown:
                raise InvalidStateError(f"rename target {target!r} has {unknown}, which {pattern.text!r} has not")
        matches = ((leaf, pattern.match(leaf.text)) for leaf in self.leaves)
        return [(leaf, found) for leaf, found in matches if found is not None]

    def _mapped(self, rule: Callable[[str], Any]) -> list[Move]:
        moves = []
        for leaf in self.leaves:
            text = rule(leaf.text)
            if not isinstance(text, str):
                raise InvalidStateError(
                    f"rename function {shown(rule)} returned {text!r:.200} for {leaf.text!r}, not a string"
                )
            if text != leaf.text:
                moves.append(([leaf], [Leaf(keys_like(leaf.path, text), leaf.old, leaf.node)]))
        return moves

    def _gather(
        self,
        rule: Any,
        sources: tuple[str, ...],
        target: Target,
        join: Callable[[Sequence[VirtualArray]], VirtualArray],
        tell: Callable[[Sequence[Recorded], int, Sequence[tuple[int, ...]]], Recorded],
    ) -> list[Move]:
        """Several tensors become one, for every way to fill the target's placeholders."""
        patterns = [Pattern(source) for source in sources]
        counter = _counter(rule, patterns[0].names, names_in(target)) if len(patterns) == 1 else None
        common = [name for name in patterns[0].names if name != counter]
        moves = []
        for key, members in self._grouped(rule, patterns, target, counter, common).items():
            first = members[min(members)]
            held = _without_gaps(rule, members, sources if counter is None else None)
            made = self._call(rule, held, lambda arrays: [join(arrays)])
            path = retarget(first.path, target, dict(zip(common, key, strict=True)))
            dim = rule.dim % len(made[0].shape)
            told = [recorded_of(leaf.node, leaf.text) for leaf in held]
            shapes = [self._array(rule, leaf).shape for leaf in held]
            node = self._add(held[0].node, made[0], tell(told, dim, shapes))
            moves.append((held, [Leaf(path, first.old, node)]))
        return moves

    def _grouped(
        self, rule: Any, patterns: Sequence[Pattern], target: Target, counter: str | None, common: Sequence[str]
    ) -> dict[tuple[str, ...], dict[int, Leaf]]:
        """By what the ``common`` placeholders stand for: the numbered parts of one tensor.

        The placeholder ``counter`` numbers them; without one the place of their pattern does.
        """
        groups: dict[tuple[str, ...], dict[int, Leaf]] = {}
        for number, pattern in enumerate(patterns):
            if {*pattern.names} != {*patterns[0].names}:
                raise InvalidStateError(f"rename rule {shown(rule)}: its sources have different placeholders")
            for leaf, found in self._matching(pattern, target):
                index = number if counter is None else _index(rule, leaf, found[counter])
                members = groups.setdefault(tuple(found[name] for name in common), {})
                other = members.setdefault(index, leaf)
                if other is not leaf:
                    raise InvalidStateError(
                        f"rename rule {shown(rule)}: {other.text!r} and {leaf.text!r} are both part {index}"
                    )
        return groups

    def _scatter(
        self,
        rule: Any,
        targets: Sequence[Any],
        cut: Callable[[VirtualArray], list[VirtualArray]],
        tell: Callable[[Recorded, int, Sequence[tuple[int, ...]]], list[Recorded]],
    ) -> list[Move]:
        """One tensor becomes several, or another one."""
        pattern = Pattern(rule.source)
        more = len(targets) == 1 and not {*names_in(targets[0])} <= {*pattern.names}
        counter = _counter(rule, names_in(targets[0]), pattern.names) if more or isinstance(rule, Unstack) else None
        moves = []
        for leaf, found in self._matching(pattern, *targets, extra=(counter,) if counter else ()):
            made = self._call(rule, [leaf], lambda arrays: cut(arrays[0]))
            if counter is None and len(made) != len(targets):
                raise InvalidStateError(f"rename rule {shown(rule)}: {len(made)} parts for {len(targets)} targets")
            into = []
            dims = len(self._array(rule, leaf).shape)
            told = tell(recorded_of(leaf.node, leaf.text), dims, [array.shape for array in made])
            for number, (array, layout) in enumerate(zip(made, told, strict=True)):
                fields = found if counter is None else {**found, counter: str(number)}
                path = retarget(leaf.path, targets[0] if counter else targets[number], fields)
                into.append(Leaf(path, leaf.old, self._add(leaf.node, array, layout)))
            moves.append(([leaf], into))
        return moves

    def _call(
        self, rule: Any, held: Sequence[Leaf], change: Callable[[list[VirtualArray]], list[VirtualArray]]
    ) -> list[VirtualArray]:
        arrays = [self._array(rule, leaf) for leaf in held]
        kinds = {(leaf.node["$"], leaf.node.get("numpy")) for leaf in held}
        names = [leaf.text for leaf in held]
        if len(kinds) > 1:
            raise InvalidStateError(
                f"rename rule {shown(rule)}: {names} are of different kinds: {sorted(map(str, kinds))}"
            )
        try:
            return change(arrays)
        except InvalidStateError as error:
            raise InvalidStateError(f"rename rule {shown(rule)}, {', '.join(names)[:300]}: {error}") from None

    def _array(self, rule: Any, leaf: Leaf) -> VirtualArray:
        if not is_array(leaf.node):
            raise InvalidStateError(f"rename rule {shown(rule)}: {leaf.text!r} is no tensor")
        array = self.made.get(leaf.node["array"]) or array_of(self.manifest, leaf.node)
        if leaf.node["$"] == "ndarray" and leaf.node.get("shape") != list(array.shape):
            raise InvalidStateError(
                f"rename rule {shown(rule)}: {leaf.text!r} is stored as raw bytes, which no rule can rearrange"
            )
        return array

    def _add(self, node: Node, array: VirtualArray, layout: Recorded) -> Node:
        name = f"@{len(self.made)}"  # no stored array can have this name
        self.made[name] = array
        if node["$"] == "ndarray":
            return {"$": "ndarray", "array": name, "numpy": node.get("numpy"), "shape": list(array.shape)}
        return {"$": node["$"], "array": name} | ({"layout": layout} if layout is not None else {})


def _without_gaps(rule: Any, members: Mapping[int, Leaf], sources: Sequence[str] | None) -> list[Leaf]:
    """``sources``: one for every part, where parts are not numbered."""
    wanted = 1 + max(members) if sources is None else len(sources)
    absent = [i for i in range(wanted) if i not in members]
    if absent:
        what = f"numbers {absent[:20]}" if sources is None else [sources[i] for i in absent]
        raise InvalidStateError(f"rename rule {shown(rule)}: beside {members[min(members)].text!r} there is no {what}")
    return [members[i] for i in range(wanted)]


def _counter(rule: Any, more: Iterable[str], fewer: Iterable[str]) -> str:
    counters = list(dict.fromkeys(name for name in more if name not in {*fewer}))
    if len(counters) != 1:
        raise InvalidStateError(
            f"rename rule {shown(rule)}: just one placeholder must number the parts, on the side of the parts only; "
            f"it has {len(counters)}"
        )
    return counters[0]


def _index(rule: Any, leaf: Leaf, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidStateError(f"rename rule {shown(rule)}: {text!r} in {leaf.text!r} is no number")
    return int(text)
