"""All of a training job as one state: model, optimizer, scheduler, data loader, random numbers, anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.tree import Node, is_array
from cloudckpt.plan.names import merge_parts
from cloudckpt.plan.view import View
from cloudckpt.pytorch.module_names import ModelPart
from cloudckpt.pytorch.named_optimizers import (
    LocalShape,
    NamedTarget,
    Names,
    Slot,
    find_slots,
    groups_of,
    lists_by_group,
    lists_by_name,
    named_state,
    united,
)
from cloudckpt.pytorch.optimizers import BY_NAME, convention, keyed
from cloudckpt.pytorch.per_rank import Merge, PerRank
from cloudckpt.pytorch.rng import derived_rng_state, rng_state, set_rng_state
from cloudckpt.pytorch.stateful import is_stateful

Rename = Callable[[str], str] | Mapping[str, str]

_BY_NAME_PARTS = ("state", "master")
"""Below "optimizer": tensors by parameter name, which a tie of two parameters ties, too."""


@dataclass(frozen=True, eq=False)
class TrainingTarget:
    """What a load fills; ``apply`` puts it into place afterwards.

    ``states``: all are filled from the same stored tree. ``kinds``: as in Problems, by the key.
    ``is_open``: what the optimizers' state would hold cannot be told from the checkpoint.
    """

    states: list[dict[str, Any]]
    apply: Callable[[], None]
    is_open: bool
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)


class Within:
    """A TrainingState that is being walked, which stands at ``prefix``."""

    def __init__(self, prefix: values.Path, training: TrainingState) -> None:
        self.prefix = prefix
        self.training = training
        self._shapes = training.parameter_shapes()

    def tie(self, path: values.Path) -> tuple[values.Path | None, bool]:
        """As `TrainingState.tie`, with whole paths."""
        source, is_tied = self.training.tie(path[len(self.prefix) :])
        return (None if source is None else (*self.prefix, *source)), is_tied

    def cut_like(self, path: values.Path, obj: Any) -> values.Path:
        """Where rules for a tensor are found: optimizer state of its parameter's shape is cut like the parameter."""
        inner = path[len(self.prefix) :]
        if len(inner) > 2 and inner[0] == "optimizer" and inner[1] in _BY_NAME_PARTS:
            for name in self.training.names_tied_to(inner[2]):
                if self._shapes.get(name) == tuple(obj.shape):
                    return (*self.prefix, "model", name)
        return path


class TrainingState:
    """A state that holds a training job, or stands within one: ``save({"train": TrainingState(...)}, url)``.

    Stored are ``model.<name>``, ``optimizer.state.<name>.<what>``, ``optimizer.param_groups.<name>.<option>`` for each
    parameter, ``scheduler``, ``dataloader`` and ``rng`` (those two per rank), and each ``extra`` under its keyword;
    extras that are plain values are found in ``.extra`` after a load. Names are those of the bare model, without the
    prefixes of wrappers (DDP, torch.compile, activation checkpointing, FSDP).

    ``model``: a module, or a sequence of model parts (virtual pipeline); ``optimizer`` and ``scheduler``: one or a
    sequence. Schedulers of a sequence must go alike. An optimizer without state gets it from the checkpoint.

    ``names``: local name -> global name, as ``global_layer_names`` makes it: one for all parts, or one for each.
    ``tied``: ``{"head.weight": "embed.weight"}``, the first is a copy of the second, be it on another pipeline stage:
    stored once where both are equal. All ranks must declare the same, and both must be in the model of some rank.
    ``masters``: global name -> tensor that an optimizer updates in the place of the parameter.
    ``include``: names, or patterns with ``*``, ``?`` and ``[...]`` (``*`` crosses dots), of what is saved and loaded,
    with all that is below; scheduler, dataloader, rng and extras are taken whole. A load leaves the rest of the
    checkpoint alone, without calling it unexpected. A pattern that matches nothing on any rank is an error.
    ``dataloader_merge``: ``merge(states, rank, world_size)`` for another number of ranks, see ``PerRank``.

    ``rng`` covers torch's generators on CPU and the current accelerator, numpy's global one and ``random``. On another
    number of ranks every rank gets a new stream, derived from all saved ones, with a warning.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any = None,
        scheduler: Any = None,
        dataloader: Any = None,
        rng: bool = True,
        *,
        names: Rename | Sequence[Rename] | None = None,
        tied: Mapping[str, str] | None = None,
        masters: Mapping[str, torch.Tensor] | None = None,
        include: str | Sequence[str] | None = None,
        dataloader_merge: Merge | None = None,
        **extra: Any,
    ) -> None:
        self._models = [model] if isinstance(model, torch.nn.Module) else _listed(model)
        self._renames = _renames(names, len(self._models))
        self._optimizers = _listed(optimizer)
        self._schedulers = _listed(scheduler)
        self._dataloader = dataloader
        self._rng = rng
        self._tied = dict(tied or {})
        self._masters = dict(masters or {})
        self._include = [include] if isinstance(include, str) else include
        self._dataloader_merge = dataloader_merge
        self.extra = extra
        for name, source in self._tied.items():
            if source in self._tied:
                raise InvalidStateError(
                    f"tied: {name!r} is tied to {source!r}, which is itself tied: name the original"
                )
        known = self.parameter_shapes() if self._masters else {}
        unknown = [name for name in self._masters if name not in known]
        if unknown:
            raise InvalidStateError(
                f"masters: {', '.join(map(repr, unknown[:5]))} is no parameter of the model, which has "
                f"{', '.join(map(repr, [*known][:5]))}, ..."
            )
        for obj in [*self._schedulers, *([] if dataloader is None else [dataloader])]:
            if not is_stateful(obj):
                raise InvalidStateError(
                    f"a {type(obj).__qualname__} has no state_dict() and load_state_dict(): "
                    "pass what it needs to resume as an extra, TrainingState(..., position=PerRank(value))"
                )

    # What a save needs

    def state_dict(self) -> dict[str, Any]:
        """The tensors are those of the job, not copies."""
        state: dict[str, Any] = {}
        self._put(state, "model", self._model_state())
        if self._optimizers and self._wants_below("optimizer"):
            self._put(state, "optimizer", named_state(self._slots(), self._wants_of_optimizer), self._master_state())
        if self._schedulers and self._wants("scheduler"):
            state["scheduler"] = self._scheduler_state(lambda slot: slot.names[:1])
        if self._dataloader is not None and self._wants("dataloader"):
            state["dataloader"] = PerRank(self._dataloader.state_dict())
        if self._rng and self._wants("rng"):
            state["rng"] = PerRank(rng_state())
        return {**state, **self._extras()}

    def tie(self, path: values.Path) -> tuple[values.Path | None, bool]:
        """For a path below: the path that it is declared a copy of, and whether another one may be a copy of it."""
        where = 1 if path[:1] == ("model",) else 2 if path[:1] == ("optimizer",) else 0
        if where == 0 or len(path) <= where or (where == 2 and path[1] not in _BY_NAME_PARTS):
            return None, False
        name = path[where]
        if name in self._tied:
            return (*path[:where], self._tied[name], *path[where + 1 :]), True
        return None, name in self._tied.values()

    def declared(
        self, prefix: values.Path, states: Sequence[Mapping[str, Any]], *, is_open: bool = True
    ) -> dict[str, bool]:
        """What one rank at least must have, and whether this one has it, by the text of the error otherwise.

        ``states``: what is left of this one, which stands at ``prefix``, after ``include``. ``is_open``: optimizers
        without any state may still get some.
        """
        found: dict[str, bool] = {}
        where = f"{values.dotted(prefix)!r}: " if prefix else ""
        if self._include is not None:
            paths = [path for state in states for path in _paths(state)]
            slots = self._slots() if is_open and not any(optimizer.state for optimizer in self._optimizers) else []
            for pattern in self._include:
                text = f"{where}include={pattern!r} matches nothing of the state on any rank"
                found[text] = any(_matches(pattern, path) for path in paths) or any(
                    _may_match_below(pattern, ("optimizer", "state", slot.name)) for slot in slots
                )
        if self._tied:
            stored = states[0].get("model", {}) if self._include is None else self._model()
            held = {*stored, *self.parameter_shapes()}
            for name in [*self._tied, *self._tied.values()]:
                found[f"{where}tied: {name!r} is in the model of no rank that declares it"] = name in held
        return found

    def names_tied_to(self, name: str) -> list[str]:
        """By declaration, the name itself first."""
        source = self._tied.get(name, name)
        return [*dict.fromkeys([name, source, *(n for n, s in self._tied.items() if s == source)])]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Local ones, by all names."""
        return {name: tuple(p.shape) for part in self._parts() for p, name in part.parameter_names()}

    # What a load needs

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into place what ``state_dict()`` returned. ``cloudckpt.load`` does more: it makes an optimizer's state."""
        slots = self._slots()
        self._load_model(state.get("model", {}))
        optimizer = state.get("optimizer", {})
        for slot in slots:
            entry = optimizer.get("state", {}).get(slot.name)
            if entry:
                slot.optimizer.state[slot.param] = dict(entry)
            slot.group.update(optimizer.get("param_groups", {}).get(slot.name, {}))
        for name, master in optimizer.get("master", {}).items():
            with torch.no_grad():
                self._masters[name].copy_(master)
        self._load_rest(state, lambda slot: slot.names[:1])

    def target(self, node: Node, view: View, local_shape: LocalShape) -> TrainingTarget:
        """What to fill from the stored tree ``node``. Raises InvalidStateError where the optimizer's groups cannot."""
        parts = dict(keyed(node))
        state: dict[str, Any] = {}
        kinds: dict[str, tuple[str, str]] = {}
        self._put(state, "model", self._model_state())
        optimizer: NamedTarget | None = None
        if self._optimizers and self._wants_below("optimizer"):
            found = convention(parts.get("optimizer"))
            if found not in (None, BY_NAME):
                kinds["optimizer"] = (str(found), BY_NAME)
            else:
                optimizer = NamedTarget(
                    self._slots(),
                    parts.get("optimizer"),
                    view,
                    self._partners(parts.get("model")),
                    self._wants_of_optimizer,
                    local_shape,
                )
                self._put(state, "optimizer", optimizer.states[0], self._master_state())
        names: Names = optimizer.option_names if optimizer is not None else lambda slot: slot.names[:1]
        if self._schedulers and self._wants("scheduler"):
            state["scheduler"] = self._scheduler_state(names)
        if self._dataloader is not None and self._wants("dataloader"):
            state["dataloader"] = PerRank(merge=self._dataloader_merge)
        if self._rng and self._wants("rng"):
            state["rng"] = PerRank(merge=derived_rng_state)
        state.update(self._extras())

        def apply() -> None:
            self._load_model(state.get("model", {}))
            if optimizer is not None:
                optimizer.apply()
            self._load_rest(state, names)

        more = [{"optimizer": further} for further in (optimizer.states[1:] if optimizer is not None else [])]
        is_open = "optimizer" in parts and not keyed(dict(keyed(parts["optimizer"])).get("state"))
        return TrainingTarget([state, *more], apply, is_open, kinds)

    def includes(self, path: values.Path) -> bool:
        """Whether a stored key below is asked for at all."""
        if path[:1] in (("model",), ("optimizer",)) or not path:
            return self._wants(*path)
        return self._wants(path[0])

    # Parts

    def _put(self, state: dict[str, Any], name: str, *parts: Mapping[str, Any]) -> None:
        """An empty part is a key, too, unless ``include`` leaves nothing of it."""
        is_whole = self._wants(name)
        held = {k: value for part in parts for k, value in part.items() if is_whole or not _is_empty(value)}
        if held or is_whole:
            state[name] = held

    def _model_state(self) -> dict[str, Any]:
        return {name: value for name, (_, _, value) in self._model().items() if self._wants("model", name)}

    def _model(self) -> dict[str, tuple[ModelPart, str, Any]]:
        """By name: the part, the key in its ``state_dict()``, and the value."""
        return merge_parts(
            *({name: (part, raw, value) for name, (raw, value) in part.state().items()} for part in self._parts())
        )

    def _parts(self) -> list[ModelPart]:
        return [ModelPart.of(model, rename) for model, rename in zip(self._models, self._renames, strict=True)]

    def _load_model(self, state: Mapping[str, Any]) -> None:
        by_part: dict[int, tuple[ModelPart, dict[str, Any]]] = {}
        for name, (part, raw, value) in self._model().items():
            _, full = by_part.setdefault(id(part.module), (part, {}))
            full[raw] = state.get(name, value)
        for part, full in by_part.values():
            part.module.load_state_dict(full)

    def _slots(self) -> list[Slot]:
        names: dict[int, dict[str, None]] = {}
        for part in self._parts():
            for parameter, name in part.parameter_names():
                names.setdefault(id(parameter), {})[name] = None
        for name, master in self._masters.items():
            names.setdefault(id(master), {})[name] = None
        # Of several names the original's comes first.
        ordered = {key: tuple(sorted(found, key=lambda name: name in self._tied)) for key, found in names.items()}
        return find_slots(self._optimizers, ordered)

    def _partners(self, model: Node) -> dict[str, list[str]]:
        """Names that are the same tensor: in the stored model, or as declared."""
        by_array: dict[str, list[str]] = {}
        for name, node in keyed(model):
            if is_array(node):
                by_array.setdefault(str(node["array"]), []).append(str(name))
        partners = {name: names for names in by_array.values() if len(names) > 1 for name in names}
        for name, source in self._tied.items():
            partners[name] = [source, *partners.get(name, [])]
            partners[source] = [*partners.get(source, []), name]
        return partners

    def _master_state(self) -> dict[str, Any]:
        masters = {name: m for name, m in self._masters.items() if self._wants("optimizer", "master", name)}
        return {"master": masters} if masters else {}

    def _scheduler_state(self, names: Names) -> Any:
        states = [lists_by_name(s.state_dict(), self._groups(s), names) for s in self._schedulers]
        return united(states, "scheduler")

    def _groups(self, scheduler: Any) -> list[list[Slot]]:
        optimizer = getattr(scheduler, "optimizer", None)
        if not any(optimizer is own for own in self._optimizers):
            return []
        return groups_of(self._slots(), optimizer)

    def _load_rest(self, state: Mapping[str, Any], names: Names) -> None:
        if "scheduler" in state:
            for scheduler in self._schedulers:
                groups = self._groups(scheduler)
                scheduler.load_state_dict(lists_by_group(scheduler.state_dict(), state["scheduler"], groups, names))
        if "dataloader" in state and self._dataloader is not None:
            self._dataloader.load_state_dict(state["dataloader"].value)
        for name in self.extra:
            if name in state and not is_stateful(self.extra[name]):
                self.extra[name] = state[name]
        # Last: whatever was done above may have drawn random numbers.
        if "rng" in state and self._rng:
            set_rng_state(state["rng"].value)

    def _extras(self) -> dict[str, Any]:
        return {name: value for name, value in self.extra.items() if self._wants(name)}

    # Names

    def _wants(self, *path: Any) -> bool:
        if self._include is None:
            return True
        return any(_matches(pattern, path) for pattern in self._include)

    def _wants_below(self, part: str) -> bool:
        return True if self._include is None else any(fnmatchcase(part, p.split(".")[0]) for p in self._include)

    def _wants_of_optimizer(self, *path: Any) -> bool:
        return self._wants("optimizer", *path)


def _listed(objects: Any) -> list[Any]:
    if objects is None:
        return []
    return list(objects) if isinstance(objects, (list, tuple, torch.nn.ModuleList)) else [objects]


def _paths(state: Mapping[str, Any]) -> Iterator[values.Path]:
    """What ``include`` is compared with."""
    for key, value in state.items():
        yield (key,)
        if key == "model":
            yield from ((key, name) for name in value)
        elif key == "optimizer":
            for part, held in value.items():
                for name, inner in held.items():
                    yield key, part, name
                    yield from ((key, part, name, item) for item in (inner if isinstance(inner, dict) else ()))


def _matches(pattern: str, path: values.Path) -> bool:
    text = values.dotted(path) + "."
    # What is below a match comes with it; "scheduler.*" means all of a part that is taken whole.
    texts = [text[:i] for i, letter in enumerate(text) if letter == "."] + [text] * (len(path) == 1)
    return any(fnmatchcase(text, pattern) for text in texts)


def _may_match_below(pattern: str, path: values.Path) -> bool:
    """Whether the pattern may match something below the path, or matches the path."""
    text = values.dotted(path) + "."
    return _matches(pattern, path) or any(fnmatchcase(text, pattern[:end]) for end in range(len(pattern)))


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _renames(names: Rename | Sequence[Rename] | None, count: int) -> list[Callable[[str], str]]:
    given = [names] * count if names is None or callable(names) or isinstance(names, Mapping) else list(names)
    if len(given) != count:
        raise InvalidStateError(f"names= has {len(given)} entries for {count} model parts")
    return [_rename(item) for item in given]


def _rename(names: Rename | None) -> Callable[[str], str]:
    if isinstance(names, Mapping):
        held = dict(names)
        return lambda name: held.get(name, name)
    return names or (lambda name: name)
