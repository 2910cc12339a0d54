"""The containers that a tree of plain values may have, and what their nodes hold beside the children."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from cloudckpt.format.scalars import Fields, InexactError


class TensorParts(dict[str, Any]):
    """A tensor subclass as the tensors that it is made of, by the names of its attributes.

    What ``read()`` gives for one: the class is not imported, so nothing of its own code runs. Call its
    ``__tensor_unflatten__(parts, parts.context, parts.shape, None)`` for the tensor.

    ``kind``: module and name of the class. ``dtype`` (torch's name) and ``shape`` are those that the
    whole claims to have.
    """

    def __init__(self, parts: Mapping[str, Any], *, kind: str, dtype: str, shape: Sequence[int], context: Any) -> None:
        super().__init__(parts)
        self.kind = kind
        self.dtype = dtype
        self.shape = tuple(shape)
        self.context_node = context

    @property
    def context(self) -> Any:
        """What else the class needs to rebuild it; plain values."""
        from cloudckpt.format import values  # which knows this module

        return values.decode(self.context_node)

    def __repr__(self) -> str:
        return f"TensorParts({dict(self)}, kind={self.kind!r}, dtype={self.dtype!r}, shape={self.shape})"


def _parts_fields(value: TensorParts) -> dict[str, Any]:
    shape = list(value.shape)
    return {"class": value.kind, "dtype": value.dtype, "shape": shape, "context": value.context_node}


def _build_parts(children: dict[Any, Any], node: Fields) -> TensorParts:
    kind, dtype, shape = node["class"], node["dtype"], node["shape"]
    if type(kind) is not str or type(dtype) is not str:
        raise ValueError("fields 'class' and 'dtype' must be strings")
    if type(shape) is not list or not all(type(n) is int for n in shape):
        raise ValueError("field 'shape' must be a list of ints")
    if not all(type(name) is str for name in children):
        raise ValueError("the name of an attribute is not a string")
    return TensorParts(children, kind=kind, dtype=dtype, shape=shape, context=node["context"])


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
    Container(TensorParts, "mapping", _build_parts, _parts_fields),
)
BY_TYPE = {container.kind: container for container in _ALL}
BY_TAG = {container.tag: container for container in _ALL if container is not LIST}
