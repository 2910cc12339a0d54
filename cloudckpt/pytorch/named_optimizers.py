"""The state of optimizers and schedulers by parameter name, whatever order and groups the parameters stand in.

torch numbers parameters in the order of an optimizer's groups, and keeps the options of each group in a list. Both
mean something else on every pipeline stage. By name they can be united over stages, and taken apart again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.tree import Node, holds_arrays, is_array, key_token
from cloudckpt.plan.view import View
from cloudckpt.pytorch.optimizers import blank, keyed

Wanted = Callable[..., bool]
"""Of a path below the optimizer: whether it is saved or loaded at all."""

LocalShape = Callable[[values.Path, str, tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
"""Of this rank's part of a plain tensor at a path below the TrainingState: from the name and local shape of the
parameter that it belongs to, and from its own global shape."""

_GROUP_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""What torch's schedulers keep as one item for each parameter group."""

_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter of one optimizer. ``names``: all that it goes by, the one to save under first."""

    optimizer: Any
    group: dict[str, Any]
    param: torch.Tensor
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def options(self) -> dict[str, Any]:
        return {field: value for field, value in self.group.items() if field not in _NOT_OPTIONS}


def find_slots(optimizers: Sequence[Any], names: Mapping[int, tuple[str, ...]]) -> list[Slot]:
    """Every parameter of the optimizers; ``names``: by its id. Raises InvalidStateError for unknown ones."""
    slots: list[Slot] = []
    homes: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        _check_usable(optimizer)
        for i, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                if id(param) not in names:
                    raise InvalidStateError(
                        f"parameter {j} of group {i} of the optimizer, of shape {tuple(param.shape)}, is in no part "
                        "of the model: make the optimizer from the (wrapped) model's own parameters, or name copies "
                        "that it works on with masters={name: tensor}"
                    )
                slot = Slot(optimizer, group, param, names[id(param)])
                if getattr(param, "_fsdp_flattened", False) and param.dim() == 1:
                    _refuse_flat(slot.name)
                if homes.setdefault(slot.name, number) != number:
                    raise InvalidStateError(
                        f"parameter {slot.name!r} is in optimizer {homes[slot.name]} and in optimizer {number}"
                    )
                slots.append(slot)
    return slots


def _refuse_flat(name: str) -> NoReturn:
    raise InvalidStateError(
        f"{name!r} is a part of a flat parameter (FullyShardedDataParallel), whose optimizer state has no shape: "
        "use fully_shard() (FSDP2), or save the optimizer's state as FlatShards"
    )


def _check_usable(optimizer: Any) -> None:
    kind = type(optimizer)
    if not hasattr(optimizer, "param_groups") or not isinstance(getattr(optimizer, "state", None), dict):
        raise InvalidStateError(
            f"{kind.__module__}.{kind.__qualname__} is not an optimizer with param_groups and state; "
            "unwrap it, or save it beside TrainingState"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidStateError(
            "LBFGS keeps one history over all parameters in their order, which has no parameter names: "
            'leave it out of TrainingState and save it as an object of its own, {"optimizer": optimizer}'
        )
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key in optimizer.state:
        if id(key) not in held:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise InvalidStateError(
                f"{kind.__qualname__}.state has an entry for {what}, which is no parameter of its groups and has no "
                "name: remove it, or save the optimizer as an object of its own"
            )


def named_state(slots: Sequence[Slot], wanted: Wanted) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": {name: {option: value}}}``."""
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for slot in slots:
        entry = {k: v for k, v in slot.optimizer.state.get(slot.param, {}).items() if wanted("state", slot.name, k)}
        options = {k: v for k, v in slot.options().items() if wanted("param_groups", slot.name, k)}
        if entry:
            state[slot.name] = entry
        if options:
            groups[slot.name] = options
    return {"state": state, "param_groups": groups}


class NamedTarget:
    """What a load fills, after a stored tree, and how it gets back into the optimizers.

    ``partners``: names that are tied to a name in the checkpoint, or declared so.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        node: Node,
        view: View,
        partners: Mapping[str, Sequence[str]],
        wanted: Wanted,
        local_shape: LocalShape,
    ) -> None:
        stored = dict(keyed(node))
        self._view = view
        self._wanted = wanted
        self._local_shape = local_shape
        self._states = dict(keyed(stored.get("state")))
        self._groups = dict(keyed(stored.get("param_groups")))
        self._partners = partners
        self._entries: list[tuple[Slot, dict[str, Any], dict[str, Any]]] = []
        self.states: list[dict[str, Any]] = [{"state": {}, "param_groups": {}}]
        """To fill: one state, and more where two parameters want what is stored once."""
        for slot in slots:
            self._add(slot)
        self._check_groups(slots)

    def option_names(self, slot: Slot) -> list[str]:
        """The stored names of the options of a parameter's group."""
        return self.stored_names(slot, self._groups) or [slot.name]

    def stored_names(self, slot: Slot, held: Mapping[str, Any]) -> list[str]:
        """The keys that hold this parameter's part: first the one to take, then its equals."""
        names = dict.fromkeys(slot.names)
        for name in slot.names:
            names.update(dict.fromkeys(self._partners.get(name, ())))
        own = [name for name in slot.names if name in held]
        # What only another stage's parameter is called is that stage's to ask for, unless nothing else is there.
        return own or [name for name in names if name in held][:1]

    def _add(self, slot: Slot) -> None:
        names = self.stored_names(slot, self._states) or [slot.name]
        entry = self._filtered("state", names[0], self._state_target(slot, names[0]))
        group_names = self.option_names(slot)
        options = self._filtered("param_groups", group_names[0], self._options_target(slot, group_names[0]))
        for part, keys, target in (("state", names, entry), ("param_groups", group_names, options)):
            for key in keys if target else ():
                # Tensors are shared, so that all names are read into the same memory; containers are not.
                self._put(part, key, target if key == keys[0] else dict(target))
        self._entries.append((slot, entry, options))

    def _put(self, part: str, key: str, target: dict[str, Any]) -> None:
        for state in self.states:
            if key not in state.setdefault(part, {}):
                state[part][key] = target
                return
        self.states.append({part: {key: target}})

    def _state_target(self, slot: Slot, key: str) -> dict[str, Any]:
        own = dict(slot.optimizer.state.get(slot.param, {}))
        for name, child in keyed(self._states.get(key)):
            if own.get(name) is None:
                path = ("optimizer", "state", key, name)
                cut = partial(self._local_shape, path, slot.name, tuple(slot.param.shape))
                own[name] = blank(name, child, self._view, slot.param, slot.group, cut)
        return own

    def _options_target(self, slot: Slot, key: str) -> dict[str, Any]:
        options = slot.options()
        for field, child in keyed(self._groups.get(key)):
            if field not in options:  # "initial_lr" of a scheduler: a stored group replaces the own one, as in torch
                options[field] = blank(field, child, self._view, slot.param, slot.group, tuple)
        return options

    def _filtered(self, part: str, name: str, target: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in target.items() if self._wanted(part, name, key)}

    def _check_groups(self, slots: Sequence[Slot]) -> None:
        """Parameters of one group share its options: they must be equal in the checkpoint."""
        seen: dict[tuple[int, str], tuple[str, Node]] = {}
        for slot in slots:
            for name in self.stored_names(slot, self._groups)[:1]:
                for field, node in keyed(self._groups[name]):
                    if not self._wanted("param_groups", name, field) or is_array(node):
                        continue
                    check_same(seen, (id(slot.group), field), name, node, f"option {field!r}")

    def apply(self) -> None:
        """Into the optimizers, whose tensors have been filled already."""
        for slot, entry, options in self._entries:
            if entry:
                held = slot.optimizer.state.get(slot.param)
                if held is None:
                    slot.optimizer.state[slot.param] = entry
                else:
                    held.update(entry)
            slot.group.update(options)


def check_same(
    seen: dict[tuple[int, str], tuple[str, Node]], key: tuple[int, str], name: str, node: Node, what: str
) -> None:
    first, expected = seen.setdefault(key, (name, node))
    if key_token(expected) != key_token(node):
        a, b = (values.decode(n) if not holds_arrays(n) else "a tensor" for n in (expected, node))
        raise InvalidStateError(
            f"parameters {first!r} and {name!r} are in one group of the target's optimizer, but {what} is {a!r} and "
            f"{b!r} for them in the checkpoint: give them groups of their own"
        )


Names = Callable[[Slot], Sequence[str]]
"""What a parameter is called where a state goes to, or comes from."""


def groups_of(slots: Sequence[Slot], optimizer: Any) -> list[list[Slot]]:
    """The slots of every group of an optimizer, empty groups too."""
    held: dict[int, list[Slot]] = {id(group): [] for group in optimizer.param_groups}
    for slot in slots:
        if slot.optimizer is optimizer:
            held[id(slot.group)].append(slot)
    return [*held.values()]


def lists_by_name(state: Any, groups: Sequence[Sequence[Slot]], names: Names) -> Any:
    """A scheduler's state with its lists by group turned into dicts by parameter name, at any depth."""
    if type(state) is dict:  # a Counter of milestones is left alone
        return {
            key: {name: item for slots, item in zip(groups, value, strict=True) for s in slots for name in names(s)}
            if _is_group_list(key, value, groups)
            else lists_by_name(value, groups, names)
            for key, value in state.items()
        }
    if isinstance(state, list):
        return [lists_by_name(item, groups, names) for item in state]
    return state


def lists_by_group(own: Any, named: Any, groups: Sequence[Sequence[Slot]], names: Names) -> Any:
    """The way back. ``own`` has the lists as they are now, which groups keep that have no parameters."""
    if type(own) is dict and type(named) is dict:
        return {
            key: [next(_held(slots, value, names), item) for slots, item in zip(groups, own[key], strict=True)]
            if key in own and _is_group_list(key, own[key], groups)
            else lists_by_group(own.get(key), value, groups, names)
            for key, value in named.items()
        }
    if isinstance(own, list) and isinstance(named, list) and len(own) == len(named):
        return [lists_by_group(a, b, groups, names) for a, b in zip(own, named, strict=True)]
    return named


def _is_group_list(key: object, value: object, groups: Sequence[Sequence[Slot]]) -> bool:
    return key in _GROUP_LISTS and isinstance(value, list) and len(value) == len(groups)


def _held(slots: Sequence[Slot], named: Mapping[str, Any], names: Names) -> Iterator[Any]:
    return (named[name] for slot in slots for name in names(slot)[:1] if name in named)


def united(states: Sequence[Any], path: str) -> Any:
    """One state from those of several schedulers. Raises InvalidStateError where they disagree."""
    first = states[0]
    if all(type(state) is dict for state in states):
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: united([state[key] for state in states if key in state], f"{path}.{key}") for key in keys}
    if all(isinstance(state, list) and len(state) == len(first) for state in states):
        return [united(items, f"{path}.{i}") for i, items in enumerate(zip(*states, strict=True))]
    for other in states[1:]:
        if type(other) is not type(first) or not _equal(first, other):
            raise InvalidStateError(
                f"{path!r} is {first!r:.80} in one scheduler and {other!r:.80} in another: all schedulers of a "
                "TrainingState must go alike; pass those that do not as extra state"
            )
    return first


def _equal(a: Any, b: Any) -> bool:
    return a is b or (torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b))
