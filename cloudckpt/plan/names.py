"""Names of a whole model from the names of its parts: layers of pipeline stages, experts of expert-parallel ranks.

A stage numbers its own layers from 0, and a rank its own experts. Under their global numbers they have the same
name whatever the number of stages or ranks, which is all that a load under another one needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cloudckpt.errors import InvalidStateError

V = TypeVar("V")


@dataclass(frozen=True)
class GlobalNames:
    """A function from local to global names: the number after the first ``marker`` is looked up in ``numbers``.

    ``marker`` is one or more elements of the dotted name ("layers", "decoder.layers"). Names without a number after
    it stay as they are. ``numbers[i]`` is the global number of what is ``i`` here.
    """

    marker: str
    numbers: tuple[int, ...]

    def __call__(self, name: str) -> str:
        """Raises InvalidStateError for a local number that has no global one."""
        elements = name.split(".")
        end = self._number_at(elements)
        if end is None:
            return name
        local = int(elements[end])
        if local >= len(self.numbers):
            raise InvalidStateError(
                f"{name!r} is number {local} of {self.marker!r} here, but this part has {len(self.numbers)}: "
                f"{list(self.numbers)} in global numbers"
            )
        return ".".join([*elements[:end], str(self.numbers[local]), *elements[end + 1 :]])

    def apply(self, state: Mapping[str, V]) -> dict[str, V]:
        """The same values under global names. As a target of ``load`` too: tensors are filled where they are.

        Raises InvalidStateError as `check` does.
        """
        self.check(state)
        return {self(name): value for name, value in state.items()}

    def check(self, names: Iterable[str]) -> None:
        """Raises InvalidStateError for names of a part that should have numbered ones, and has none."""
        held = list(names)
        if held and self.numbers and not any(self._number_at(name.split(".")) is not None for name in held):
            raise InvalidStateError(
                f"no name here has a number after {self.marker!r}, but this part has {list(self.numbers)} in global "
                f"numbers: the names are {', '.join(map(repr, held[:3]))}, ...; pass marker= as they have it"
            )

    def _number_at(self, elements: Sequence[str]) -> int | None:
        marker = self.marker.split(".")
        ends = range(len(marker), len(elements))
        return next((e for e in ends if elements[e - len(marker) : e] == marker and _is_number(elements[e])), None)


def _is_number(element: str) -> bool:
    return element.isascii() and element.isdecimal() and str(int(element)) == element


def global_layer_names(
    num_layers: int | None = None,
    *,
    stage: int,
    pp: int | None = None,
    chunk: int = 0,
    vpp: int = 1,
    layers: Sequence[Sequence[Any]] | None = None,
    marker: str = "layers",
) -> GlobalNames:
    """Global names for the layers of model part ``chunk`` of pipeline stage ``stage``.

    With ``num_layers``, ``pp`` and ``vpp``: ``pp * vpp`` equal blocks of layers, of which part v of stage p holds
    block v * pp + p (Megatron's assignment; for ``vpp=1`` the contiguous one). By hand: ``layers[stage][chunk]``
    lists the global numbers, in local order; ``layers[stage]`` may be that list itself where a stage has one part.
    By hand every layer must stand exactly once, and a stage or a part may be empty.

    Raises InvalidStateError for a layout that is not whole, and for a stage or part that it has not.
    """
    if layers is None:
        if num_layers is None or pp is None:
            raise InvalidStateError("global_layer_names() needs num_layers and pp, or layers=[[...], ...] by hand")
        layout = _blocks(num_layers, pp, vpp)
    else:
        layout = [_chunks(held) for held in layers]
        if (pp not in (None, len(layout))) or (num_layers is not None and num_layers != _count(layout)):
            raise InvalidStateError(
                f"layers= holds {_count(layout)} layers on {len(layout)} stages, not num_layers={num_layers} on pp={pp}"
            )
        _check_whole("layer", layout)
    _check_index("stage", stage, len(layout))
    _check_index("chunk", chunk, len(layout[stage]))
    return GlobalNames(marker, tuple(layout[stage][chunk]))


def global_expert_names(
    num_experts: int | None = None,
    *,
    rank: int,
    ep: int | None = None,
    experts: Sequence[Sequence[int]] | None = None,
    marker: str = "experts",
) -> GlobalNames:
    """Global names for the experts of expert-parallel rank ``rank``, whose local numbers start at 0.

    Equal blocks of ``num_experts / ep``, or, by hand, the global numbers of every rank's experts, each exactly once.
    """
    if experts is None:
        if num_experts is None or ep is None:
            raise InvalidStateError("global_expert_names() needs num_experts and ep, or experts=[[...], ...] by hand")
        layout = _equal("experts", num_experts, ep)
    else:
        layout = [list(held) for held in experts]
        _check_whole("expert", [layout])
    _check_index("rank", rank, len(layout))
    return GlobalNames(marker, tuple(layout[rank]))


def check_found(parts: Iterable[Mapping[str, bool]]) -> None:
    """What ranks were told of by name, and whether they have it: one of them must.

    By the text that says what is wrong otherwise. Raises InvalidStateError with those texts.
    """
    found: dict[str, bool] = {}
    for part in parts:
        for text, here in part.items():
            found[text] = found.get(text, False) or here
    wrong = [text for text, somewhere in found.items() if not somewhere]
    if wrong:
        raise InvalidStateError("; ".join(wrong[:5]))


def merge_parts(*parts: Mapping[str, V]) -> dict[str, V]:
    """One dict from the state dicts of a rank's model parts. Raises InvalidStateError where two hold the same key."""
    merged: dict[str, V] = {}
    homes: dict[str, int] = {}
    for number, part in enumerate(parts):
        for name, value in part.items():
            first = homes.setdefault(name, number)
            if first != number:
                raise InvalidStateError(
                    f"{name!r} is in model part {first} and in model part {number}: give every part its global names "
                    "(global_layer_names), or keep what they share in one of them"
                )
            merged[name] = value
    return merged


def _blocks(num_layers: int, pp: int, vpp: int) -> list[list[list[int]]]:
    blocks = _equal("layers", num_layers, pp * vpp if pp > 0 and vpp > 0 else 0)
    return [[blocks[chunk * pp + stage] for chunk in range(vpp)] for stage in range(pp)]


def _equal(what: str, count: int, num_blocks: int) -> list[list[int]]:
    if num_blocks < 1 or count < 0 or count % num_blocks:
        raise InvalidStateError(
            f"{count} {what} do not divide into {num_blocks} equal parts: give the layout by hand, {what}=[[...], ...]"
        )
    size = count // num_blocks
    return [list(range(i * size, (i + 1) * size)) for i in range(num_blocks)]


def _chunks(held: Sequence[Any]) -> list[list[int]]:
    """A stage with one part may list its layers at once."""
    if all(type(item) is int for item in held):
        return [list(held)]
    return [list(chunk) for chunk in held]


def _count(layout: Sequence[Sequence[Sequence[int]]]) -> int:
    return sum(len(chunk) for stage in layout for chunk in stage)


def _check_whole(what: str, layout: Sequence[Sequence[Sequence[int]]]) -> None:
    numbers = sorted(number for stage in layout for chunk in stage for number in chunk)
    for expected, number in enumerate(numbers):
        if type(number) is not int or number != expected:
            fault = f"{what} {number} stands twice" if number == expected - 1 else f"{what} {expected} is missing"
            raise InvalidStateError(f"the layout by hand is not whole: {fault} in {layout}")


def _check_index(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise InvalidStateError(f"there is no {what} {value}: the layout has {count}")
