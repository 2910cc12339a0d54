"""pytorch/ao#3314: a tensor subclass is stored as its parts and filled as such, or refused; never dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from cloudckpt.errors import CloudckptError, InvalidStateError, MismatchError
from tests.field.quantised import Codes8, OtherCodes8
from tests.ranks import RankPool
from tests.sharding import error_of, noise, same_bits

CODES, SCALE = noise((512,), torch.uint8, 1), noise((2,), torch.float32, 2)
NAME = "tests.field.quantised.Codes8"


def quantised(codes: torch.Tensor = CODES, scale: torch.Tensor = SCALE, signed: object = True) -> Codes8:
    return Codes8(codes.clone(), scale.clone(), signed)


def blank(kind: type[Codes8] = Codes8, signed: object = True) -> Codes8:
    return kind(torch.zeros_like(CODES), torch.zeros_like(SCALE), signed)


def save(url: str) -> None:
    cloudckpt.save({"opt": {"exp_avg": quantised(), "step": 3}}, url)


def load(url: str) -> list[bool]:
    target: dict[str, Any] = {"opt": {"exp_avg": blank(), "step": 0}}
    held = target["opt"]["exp_avg"]
    codes = held.codes
    cloudckpt.load(target, url)
    return [
        target["opt"]["exp_avg"] is held,
        held.codes is codes,
        same_bits(held.codes, CODES),
        same_bits(held.scale, SCALE),
        target["opt"]["step"] == 3,
    ]


def save_by_rule(url: str) -> CloudckptError | None:
    rules = cloudckpt.ShardingRules([("*.codes", {"tp": 0})], cloudckpt.ParallelConfig(tp=2))
    return error_of(lambda: cloudckpt.save({"x": quantised()}, url, rules=rules))


def save_in_dtensor(url: str) -> CloudckptError | None:
    half = slice(256 * dist.get_rank(), 256 * (dist.get_rank() + 1))
    local = quantised(CODES[half], SCALE[dist.get_rank() : dist.get_rank() + 1])
    tensor = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    return error_of(lambda: cloudckpt.save({"opt": {"exp_avg": tensor}}, url))


def test_inner_tensors_are_stored_and_filled_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path):
    for num_saving in (1, 2):
        url = str(tmp_path / str(num_saving))
        ranks.run(num_saving, save, url)
        for num_loading in (1, 2):
            assert ranks.run(num_loading, load, url) == [[True] * 5] * num_loading


def test_inside_of_a_dtensor_it_is_refused_by_name(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(2, save_in_dtensor, str(tmp_path / "c")):
        assert type(error) is InvalidStateError
        assert f"'opt.exp_avg': unsupported tensor subclass {NAME}" in str(error)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_cut_by_rules_it_is_refused_by_name(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(2, save_by_rule, str(tmp_path / "c")):
        assert type(error) is InvalidStateError
        assert f"'x': unsupported tensor subclass {NAME}: rules cut its inner tensors codes" in str(error)


def test_read_gives_the_parts_without_importing_the_class(tmp_path: Path):
    save(str(tmp_path))
    parts = cloudckpt.read(str(tmp_path))["opt"]["exp_avg"]
    assert type(parts) is cloudckpt.TensorParts
    assert (parts.kind, parts.dtype, parts.shape) == (NAME, "float32", (512,))
    assert parts.context == {"signed": True, "bits": torch.uint8}
    assert list(parts) == ["codes", "scale"]
    rebuilt = Codes8.__tensor_unflatten__(parts, parts.context, parts.shape, None)
    assert same_bits(rebuilt.codes, CODES)
    assert same_bits(rebuilt.scale, SCALE)
    assert rebuilt.shape == (512,)
    # What was read can be saved again, and loaded into the class.
    cloudckpt.save({"opt": {"exp_avg": parts, "step": 3}}, tmp_path / "again")
    assert all(load(str(tmp_path / "again")))


@pytest.mark.parametrize(
    ("target", "own"),
    [
        pytest.param(torch.zeros(512), "tensor", id="plain"),
        pytest.param(blank(OtherCodes8), "tests.field.quantised.OtherCodes8(codes, scale)", id="class"),
        pytest.param(blank(signed=False), f'{NAME}(codes, scale) with context {{"signed":false', id="context"),
    ],
)
def test_another_target_is_a_mismatch_of_kind(tmp_path: Path, target: torch.Tensor, own: str):
    save(str(tmp_path))
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"opt": {"exp_avg": target, "step": 0}}, tmp_path)
    stored, found = caught.value.kinds["opt.exp_avg"]
    assert stored.startswith(f'{NAME}(codes, scale) with context {{"signed":true')
    assert found.startswith(own)
    assert caught.value.missing == caught.value.unexpected == []


def test_a_plain_tensor_is_not_loaded_into_a_subclass(tmp_path: Path):
    cloudckpt.save({"x": torch.zeros(512)}, tmp_path)
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"x": blank()}, tmp_path)
    assert caught.value.kinds["x"][0] == "tensor"


def test_other_sizes_are_a_mismatch_of_shape(tmp_path: Path):
    save(str(tmp_path))
    smaller = Codes8(torch.zeros(256, dtype=torch.uint8), torch.zeros(1), True)
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"opt": {"exp_avg": smaller, "step": 0}}, tmp_path)
    assert caught.value.shapes == {
        "opt.exp_avg": ((512,), (256,)),
        "opt.exp_avg.codes": ((512,), (256,)),
        "opt.exp_avg.scale": ((2,), (1,)),
    }


def test_a_context_that_is_not_plain_is_refused(tmp_path: Path):
    with pytest.raises(InvalidStateError, match=rf"'x': unsupported tensor subclass {NAME}: its context cannot be"):
        cloudckpt.save({"x": quantised(signed=object())}, tmp_path)


def test_subclasses_within_subclasses_and_ties(tmp_path: Path):
    inner = quantised()
    outer = Codes8(inner, SCALE.clone(), "outer", (512,))
    state = {"outer": outer, "tied": inner.codes}
    cloudckpt.save(state, tmp_path)
    assert len(cloudckpt.open_checkpoint(tmp_path).arrays) == 3
    target_inner = blank()
    target = {"outer": Codes8(target_inner, torch.zeros(2), "outer", (512,)), "tied": target_inner.codes}
    cloudckpt.load(target, tmp_path)
    assert same_bits(target_inner.codes, CODES)
    assert same_bits(target["outer"].scale, SCALE)


def test_inner_tensors_can_be_loaded_by_name(tmp_path: Path):
    save(str(tmp_path))
    target = {"opt": {"exp_avg": {"codes": torch.zeros_like(CODES)}}}
    report = cloudckpt.load(target, tmp_path, strict=False)
    assert report.unexpected == ["opt.exp_avg.scale", "opt.step"]
    assert same_bits(target["opt"]["exp_avg"]["codes"], CODES)
