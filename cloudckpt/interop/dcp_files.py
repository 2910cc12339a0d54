"""Checkpoints of ``torch.distributed.checkpoint``: `.metadata`, and files of many archives of ``torch.save`` each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloudckpt.errors import FormatError, NotFoundError
from cloudckpt.format.box import Box
from cloudckpt.interop.collected import Collected
from cloudckpt.interop.dcp_metadata import METADATA_KEY, DcpItem, DcpMetadata, DcpTensor, read_metadata
from cloudckpt.interop.foreign import Foreign, Origin
from cloudckpt.interop.megatron import COMMON, is_megatron, read_common
from cloudckpt.interop.nesting import nested
from cloudckpt.interop.pickle_reader import Inert
from cloudckpt.interop.pickled_values import Left
from cloudckpt.interop.ranges import Part as Bytes
from cloudckpt.interop.ranges import Ranges, prefetch
from cloudckpt.interop.torch_archive import TorchArchive, first_reads, open_archive
from cloudckpt.interop.torch_state import state_of, without_left
from cloudckpt.interop.torch_tensors import saved_tensor
from cloudckpt.plan.overlap import first_overlap
from cloudckpt.plan.virtual import Part

ITEMS_AT_A_TIME = 4096
"""So that what is read of them beforehand stays within some MiB."""
REQUESTS_PER_THREAD = 4
"""Requests of a few KiB are all latency: more of them at a time than of large ones."""


def open_dcp(origin: Origin) -> Foreign:
    """What a DCP checkpoint holds, nested as its planner noted it, else under its flat keys.

    Of Megatron's ``torch_dist`` also what is in ``common.pt``. Raises NotFoundError without `.metadata`, FormatError
    with all that is missing or does not fit.
    """
    store = origin.store
    try:
        data = store.get(METADATA_KEY)
    except NotFoundError as error:
        alone = any(info.key.startswith("__") and info.key.endswith(METADATA_KEY) for info in store.list(""))
        why = "its ranks have saved without collectives, each for itself" if alone else "which is written last"
        raise NotFoundError(f"{store.url}: no DCP checkpoint: there is no {METADATA_KEY}, {why}") from error
    metadata = read_metadata(data, f"{METADATA_KEY} of {store.url}")
    sizes = {info.key: info.nbytes for info in store.list("")}
    found = Collected()
    megatron = is_megatron(store, sizes)
    flat = _Reader(origin, metadata, sizes, found, leaves_out=megatron).read()
    common = read_common(origin, sizes, found) if megatron else None
    found.check(f"{store.url}: the DCP checkpoint cannot be imported")
    state = nested(flat, metadata.paths, store.url)
    if common is None:
        return found.foreign(state)
    if COMMON in state:
        raise FormatError(f"{store.url}: the state has a key {COMMON!r}, where the values of common.pt would be")
    return found.foreign({**state, COMMON: common.values}, common.step)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An item and what should be in it; ``box`` is None for what is no tensor."""

    key: str
    item: DcpItem
    tensor: DcpTensor | None = None
    box: Box | None = None

    @property
    def name(self) -> str:
        whole = self.tensor is None or self.box is None or self.box.shape == self.tensor.shape
        return self.key if whole else f"{self.key}{self.box}"


class _Reader:
    """One checkpoint being read; what is wrong with it goes to ``found.problems``.

    ``leaves_out``: whether values that are not plain are noted, and left out, and no problem.
    """

    def __init__(
        self,
        origin: Origin,
        metadata: DcpMetadata,
        sizes: Mapping[str, int],
        found: Collected,
        *,
        leaves_out: bool,
    ) -> None:
        self._origin = origin
        self._leaves_out = leaves_out
        self._metadata = metadata
        self._sizes = sizes
        self._found = found
        self._ranges: dict[str, Ranges] = {}
        self._parts: dict[str, list[Part]] = {}
        self._values: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The state by flat key, as far as there were no problems."""
        wanted = sorted(self._wanted(), key=lambda want: (want.item.key, want.item.byte_offset))
        wanted = [want for want in wanted if self._is_there(want)]
        for start in range(0, len(wanted), ITEMS_AT_A_TIME):
            self._read_batch(wanted[start : start + ITEMS_AT_A_TIME])
        state = {}
        for key, tensor in self._metadata.entries.items():
            if tensor is not None:
                state[key] = self._found.refer(key, tensor.dtype, tensor.shape, self._parts.get(key, ()))
            elif key in self._values:
                state[key] = self._values[key]
        return state

    def _wanted(self) -> Iterator[_Wanted]:
        items = self._metadata.items
        for key, tensor in self._metadata.entries.items():
            if tensor is None:
                item = items.get((key, None))
                if item is None:
                    self._found.problems.append(f"{key}: listed, but it is nowhere said where it lies")
                else:
                    yield _Wanted(key, item)
                continue
            for box in self._boxes(key, tensor):
                item = items.get((key, box.offset)) or (items.get((key, None)) if box.shape == tensor.shape else None)
                if item is None:
                    self._found.problems.append(f"{key}: nowhere said where its part {box} lies")
                else:
                    yield _Wanted(key, item, tensor, box)

    def _boxes(self, key: str, tensor: DcpTensor) -> Sequence[Box]:
        """The distinct chunks that have elements, or any one if none has; they must tile the tensor."""
        problem = _tiling_problem(tensor)
        if problem is not None:
            self._found.problems.append(f"{key}: {problem}")
            return []
        boxes = list(dict.fromkeys(tensor.boxes))
        return [box for box in boxes if box.num_elements] or [box for box in boxes if box.shape == tensor.shape][:1]

    def _is_there(self, want: _Wanted) -> bool:
        item, size = want.item, self._sizes.get(want.item.key)
        if size is None:
            self._found.problems.append(f"{want.name}: its file {item.key} is missing")
        elif item.byte_offset + item.nbytes > size:
            end = item.byte_offset + item.nbytes
            self._found.problems.append(f"{want.name}: ends at byte {end} of {item.key}, which has {size} bytes")
        elif item.transforms:
            self._found.problems.append(
                f"{want.name}: its bytes went through {', '.join(item.transforms)}, which is not undone here; load it"
                " with torch and save it without _extensions"
            )
        else:
            return True
        return False

    def _read_batch(self, batch: Sequence[_Wanted]) -> None:
        reads: dict[Ranges, list[tuple[int, int]]] = {}
        for want in batch:
            item = want.item
            reads.setdefault(self._file(item.key), []).extend(first_reads(item.byte_offset, item.nbytes))
        prefetch(reads, num_threads=self._origin.config.num_threads * REQUESTS_PER_THREAD)
        for want in batch:
            item = want.item
            where = f"{item.key} at byte {item.byte_offset}"
            part = Bytes(self._file(item.key), item.byte_offset, item.nbytes)
            try:
                if want.box is not None and _is_safetensors(part):
                    raise FormatError(
                        f"{where}: in the safetensors form of FileSystemWriter; save it in the default one"
                    )
                self._take(want, open_archive(part, where))
            except FormatError as error:
                self._found.problems.append(f"{want.name}: {error}")
        for ranges in reads:
            ranges.keep((), ())

    def _file(self, key: str) -> Ranges:
        if key not in self._ranges:
            self._ranges[key] = Ranges(self._origin.store, key, self._sizes[key])
        return self._ranges[key]

    def _take(self, want: _Wanted, archive: TorchArchive) -> None:
        if want.tensor is None or want.box is None:
            self._take_value(want.key, archive)
            return
        if type(archive.value) is not Inert:
            raise FormatError(f"{archive.where}: no tensor")
        try:
            tensor = saved_tensor(archive.value)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise FormatError(f"{archive.where}: a malformed tensor ({error!s:.100})") from error
        if (tensor.dtype, tensor.shape) != (want.tensor.dtype, want.box.shape):
            raise FormatError(
                f"{archive.where}: {tensor.dtype} {tensor.shape}, where {METADATA_KEY} says {want.tensor.dtype}"
                f" {want.box.shape}"
            )
        offset = archive.storage_offset(tensor)
        parts = self._found.parts(tensor, want.item.key, self._sizes[want.item.key], offset, want.name)
        self._parts.setdefault(want.key, []).extend(_shifted(part, want.box) for part in parts)

    def _take_value(self, key: str, archive: TorchArchive) -> None:
        value, left = state_of(archive, self._found, key, allow_pickle=self._origin.allow_pickle)
        if type(value) is not Left:
            self._values[key] = without_left(value)
        texts = [f"{text}, which only code can make (allow_pickle=True runs it)" for text in left]
        if self._leaves_out:
            self._found.notes += [f"left out: {text}" for text in texts]
        else:
            self._found.problems += texts


def _is_safetensors(part: Bytes) -> bool:
    """Whether a header of safetensors begins here: its length, and a JSON object."""
    start = part.read(0, 9)
    return start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") < 2**32


def _shifted(part: Part, box: Box) -> Part:
    """A part of a chunk as one of the tensor."""
    offset = tuple(a + b for a, b in zip(part.box.offset, box.offset, strict=True))
    return replace(part, box=Box(offset, part.box.shape))


def _tiling_problem(tensor: DcpTensor) -> str | None:
    shape = tensor.shape
    for box in tensor.boxes:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            return f"its part {box.offset} {box.shape} has not the dims of its shape {shape}"
        if any(end > extent for end, extent in zip(box.end, shape, strict=True)):
            return f"its part {box} reaches out of its shape {shape}"
    boxes = [box for box in dict.fromkeys(tensor.boxes) if box.num_elements]
    pair = first_overlap(boxes)
    if pair is not None:
        return f"its parts {boxes[pair[0]]} and {boxes[pair[1]]} overlap"
    missing = math.prod(shape) - sum(box.num_elements for box in boxes)
    return f"its parts leave out {missing} of its {math.prod(shape)} elements" if missing else None
