"""pytorch/pytorch#118836: what counts are the logical values, whatever the strides of the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from cloudckpt.errors import InvalidStateError
from tests.ranks import RankPool
from tests.safetensors_reader import exported
from tests.sharding import make_mesh, same_bits

FULL = torch.arange(27.0).reshape(3, 9)


def column_shard(full: torch.Tensor) -> DTensor:
    """Columns 0 to 4, and 5 to 8 in a padded buffer, so that its stride is (5, 1)."""
    mesh = make_mesh((2,))
    rank = mesh.get_local_rank()
    buffer = torch.full((3, 5), -7.0)
    local = buffer if rank == 0 else buffer[:, :4]
    local.copy_(full[:, :5] if rank == 0 else full[:, 5:])
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=full.stride())


def save_and_load(url: str) -> tuple[tuple[int, ...], list[list[float]]]:
    held = column_shard(FULL)
    cloudckpt.save({"w": held}, url)
    target = column_shard(torch.zeros(3, 9))
    cloudckpt.load({"w": target}, url)
    return held.to_local().stride(), target.to_local().tolist()


def test_uneven_columns(ranks: RankPool, tmp_path: Path):
    (_, first), (stride, second) = ranks.run(2, save_and_load, str(tmp_path / "c"))
    assert stride == (5, 1)
    assert first == FULL[:, :5].tolist()
    assert second == FULL[:, 5:].tolist()
    assert torch.equal(cloudckpt.read(tmp_path / "c")["w"], FULL)


def image() -> torch.Tensor:
    return torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: FULL.clone().t(),
    "every-second-column": lambda: FULL.clone()[:, ::2],
    "channels-last": lambda: image().to(memory_format=torch.channels_last),
    "permuted": lambda: image().permute(3, 1, 0, 2),
    "storage-offset": lambda: FULL.clone().reshape(-1)[3:],
    "as-strided": lambda: torch.arange(30.0).as_strided((3, 4), (7, 2), 3),
    "imaginary": lambda: torch.complex(FULL, FULL + 1).imag,
    "requires-grad": lambda: FULL.clone().requires_grad_(),
}


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_saved_and_filled(tmp_path: Path, name: str, layout: str):
    held = VIEWS[name]()
    config = cloudckpt.Config(chunk_bytes=64)
    cloudckpt.save({"w": held}, tmp_path / "c", layout=layout, config=config)
    assert same_bits(cloudckpt.read(tmp_path / "c")["w"], held.detach().contiguous())
    target = VIEWS[name]()
    with torch.no_grad():
        target.fill_(-1.0)
    cloudckpt.load({"w": target}, tmp_path / "c")
    assert torch.equal(target.detach(), held.detach())


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_exported_by_value(tmp_path: Path, name: str):
    held = VIEWS[name]()
    cloudckpt.save({"w": held}, tmp_path / "c", config=cloudckpt.Config(chunk_bytes=64))
    cloudckpt.export_hf(tmp_path / "c", tmp_path / "out")
    found = exported(tmp_path / "out")
    assert found is not None
    assert same_bits(found["w"], held.detach().contiguous())


def test_a_view_as_target_leaves_the_memory_around_it_alone(tmp_path: Path):
    cloudckpt.save({"w": FULL[:, ::2]}, tmp_path / "c")
    buffer = torch.full((3, 9), -1.0)
    cloudckpt.load({"w": buffer[:, ::2]}, tmp_path / "c")
    assert torch.equal(buffer[:, ::2], FULL[:, ::2])
    assert (buffer[:, 1::2] == -1.0).all()


def test_an_expanded_tensor_is_saved_whole_but_is_no_target(tmp_path: Path):
    held = torch.arange(3.0).reshape(3, 1).expand(3, 4)
    cloudckpt.save({"w": held}, tmp_path / "c")
    assert torch.equal(cloudckpt.read(tmp_path / "c")["w"], held.contiguous())
    with pytest.raises(InvalidStateError, match=r"'w'.*expanded"):
        cloudckpt.load({"w": torch.zeros(3, 1).expand(3, 4)}, tmp_path / "c")


@pytest.mark.parametrize("negated", [False, True], ids=["conjugated", "negated"])
def test_a_lazy_view_is_saved_by_value_but_is_no_target(tmp_path: Path, negated: bool):
    held = torch.complex(FULL, FULL + 1).conj()
    held = held.imag if negated else held
    cloudckpt.save({"w": held}, tmp_path / "c")
    assert same_bits(cloudckpt.read(tmp_path / "c")["w"], held.resolve_conj().resolve_neg().contiguous())
    with pytest.raises(InvalidStateError, match=r"'w'.*conjugated or negated"):
        cloudckpt.load({"w": held}, tmp_path / "c")


def test_numpy_views(tmp_path: Path):
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    state = {"flipped": array[::-1], "steps": array[:, ::-2], "fortran": np.asfortranarray(array)}
    cloudckpt.save(state, tmp_path / "c")
    target = {name: np.zeros_like(array)[::-1, : view.shape[1]] for name, view in state.items()}
    cloudckpt.load(target, tmp_path / "c")
    found = cloudckpt.read(tmp_path / "c")
    for name, view in state.items():
        np.testing.assert_array_equal(found[name], view)
        np.testing.assert_array_equal(target[name], view)
