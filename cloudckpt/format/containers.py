"""The containers that a tree of plain values may have, and what their nodes hold beside the children."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from cloudckpt.format.scalars import Fields, InexactError


def _no_fields(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Container:
    """``build(children, node)`` makes the value; it may raise what ``scalars.MALFORMED`` lists.

    The children are a list for "sequence" and "set", and a dict for "mapping" and "attributes".
    ``fields(value)`` may raise InexactError.
    """

    kind: type
    form: Literal["sequence", "set", "mapping", "attributes"]
    build: Callable[[Any, Fields], Any]
    fields: Callable[[Any], dict[str, Any]] = _no_fields

    @property
    def tag(self) -> str:
        return self.kind.__name__


_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, int, float, set, str, tuple, bool)}


def _factory_field(value: defaultdict[Any, Any]) -> dict[str, Any]:
    factory: Any = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise InexactError(f"of the default factories only None, {', '.join(_FACTORIES)} are plain")
    return {"factory": name}


def _build_defaultdict(children: dict[Any, Any], node: Fields) -> defaultdict[Any, Any]:
    name = node["factory"]
    return defaultdict(None if name is None else _FACTORIES[name], children)


def _build_deque(children: list[Any], node: Fields) -> deque[Any]:
    maxlen = node["maxlen"]
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(children)):
        raise ValueError("field 'maxlen' does not fit the items")
    return deque(children, maxlen)


def _build_set(children: list[Any], node: Fields) -> Any:
    members = set(children) if node["$"] == "set" else frozenset(children)
    if len(members) != len(children):
        raise ValueError("the same member stands twice")
    return members


def _build_namespace(children: dict[str, Any], node: Fields) -> Any:
    value: Any = SimpleNamespace() if node["$"] == "SimpleNamespace" else Namespace()
    vars(value).update(children)  # not setattr, which would let a file replace __class__
    return value


LIST = Container(list, "sequence", lambda children, _: children)
DICT = Container(dict, "mapping", lambda children, _: children)

_ALL = (
    LIST,
    DICT,
    Container(tuple, "sequence", lambda children, _: tuple(children)),
    Container(deque, "sequence", _build_deque, lambda value: {"maxlen": value.maxlen}),
    Container(set, "set", _build_set),
    Container(frozenset, "set", _build_set),
    Container(OrderedDict, "mapping", lambda children, _: OrderedDict(children)),
    Container(Counter, "mapping", lambda children, _: Counter(children)),
    Container(defaultdict, "mapping", _build_defaultdict, _factory_field),
    Container(SimpleNamespace, "attributes", _build_namespace),
    Container(Namespace, "attributes", _build_namespace),
)
BY_TYPE = {container.kind: container for container in _ALL}
BY_TAG = {container.tag: container for container in _ALL if container is not LIST}
