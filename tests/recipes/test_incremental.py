"""Saves that refer to what earlier steps of the run have stored."""

from __future__ import annotations

import secrets
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, InvalidStateError, StoreError
from cloudckpt.format.keys import parse_lease, split_key
from cloudckpt.format.manifest import Manifest
from cloudckpt.pytorch.group import Alone
from cloudckpt.store.memory import MemoryStore
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.reuse import LastSaves
from cloudckpt.verify import verify
from tests.ranks import RankPool
from tests.servers.process import S3Server
from tests.sharding import error_of, make_mesh

CHUNK = Config(chunk_bytes=4096)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> None:
    forget()


def forget() -> None:
    """As after a restart."""
    Alone().kept(LastSaves)._by_run.clear()


def make_state(step: int, *, elements: int = 10_000) -> dict[str, Any]:
    """Nine tenths are frozen."""
    frozen = torch.arange(9 * elements, dtype=torch.float32).reshape(9, elements)
    return {"frozen": frozen, "trained": torch.arange(elements) + 0.5 * step, "step": step}


def step_url(run: Path | str, step: int) -> str:
    return f"{run}/step-{step:08d}"


def save(run: Path | str, step: int, state: Any = None, **options: Any) -> cloudckpt.Commit:
    options = {"incremental": True, "config": CHUNK, **options}
    return cloudckpt.save(make_state(step) if state is None else state, step_url(run, step), step=step, **options)


def check(run: Path | str, step: int, **options: Any) -> None:
    found = cloudckpt.read(step_url(run, step), **options)
    assert found["step"] == step
    for name, tensor in make_state(step).items():
        assert name == "step" or torch.equal(found[name], tensor), name
    report = verify(step_url(run, step), **options)
    assert report.faults == ()


def manifest_of(run: Path | str, step: int, **options: Any) -> Manifest:
    store = resolve(step_url(run, step), options.get("storage_options"))
    try:
        return catalog.read_manifest(store)
    finally:
        store.close()


def files(run: Path, step: int) -> dict[str, int]:
    folder = run / f"step-{step:08d}"
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def dirs_of(manifest: Manifest) -> set[str | None]:
    return {split_key(entry.key)[0] for entry in manifest.objects}


def test_only_what_changed_is_written(tmp_path: Path):
    config = Config(chunk_bytes=256 * 1024)
    full = save(tmp_path, 1, make_state(1, elements=2**20), config=config)
    part = save(tmp_path, 2, make_state(2, elements=2**20), config=config)
    assert full.nbytes == full.nbytes_new == part.nbytes
    written = [sum(files(tmp_path, step).values()) for step in (1, 2)]
    assert part.nbytes_new <= 0.11 * full.nbytes
    assert written[1] <= 0.11 * written[0]
    assert dirs_of(manifest_of(tmp_path, 2)) == {None, "step-00000001"}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("restart", [False, True])
def test_references_say_where_the_bytes_lie(tmp_path: Path, compression: str | None, restart: bool):
    for step in range(1, 5):
        if restart:
            forget()
        commit = save(tmp_path, step, compression=compression)
        assert (commit.nbytes_new == commit.nbytes) == (step == 1)
        check(tmp_path, step)
    assert dirs_of(manifest_of(tmp_path, 4)) == {None, "step-00000001"}
    # So that the steps between are not needed.
    shutil.rmtree(tmp_path / "step-00000002")
    shutil.rmtree(tmp_path / "step-00000003")
    check(tmp_path, 4)
    target = {"frozen": torch.zeros(9, 10_000), "trained": torch.zeros(10_000), "step": 0}
    cloudckpt.load(target, step_url(tmp_path, 4))
    assert torch.equal(target["trained"], make_state(4)["trained"])
    assert torch.equal(target["frozen"], make_state(4)["frozen"])
    group = cloudckpt.open_zarr(step_url(tmp_path, 4))
    assert group["frozen"][8, -1] == 89_999
    group.store.close()


def test_a_warm_save_reads_only_the_head_of_the_last_manifest(monkeypatch: pytest.MonkeyPatch):
    run = "memory://incremental-warm"
    save(run, 1)
    read: list[str] = []

    def get(self: MemoryStore, key: str) -> bytes:
        read.append(key)
        return original(self, key)

    original = MemoryStore.get
    monkeypatch.setattr(MemoryStore, "get", get)
    warm = save(run, 2)
    assert read == []
    forget()
    cold = save(run, 3)
    assert read == ["step-00000002/manifest.json"]
    assert cold.nbytes_new == warm.nbytes_new < warm.nbytes / 2
    check(run, 3)


def test_leases_are_gone_after_a_save(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path, step)
    with pytest.raises(InvalidStateError):
        save(tmp_path, 3, {"f": torch.zeros(3), "bad": object()})
    run = resolve(tmp_path)
    assert [info.key for info in run.list("") if parse_lease(info.key)] == []


def test_a_chunk_that_moved_back_is_referred_to_no_more(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    commit = save(tmp_path, 3, make_state(1) | {"step": 3})  # as step 1, but step 2 is what is compared with
    assert 0 < commit.nbytes_new < commit.nbytes / 5
    found = cloudckpt.read(step_url(tmp_path, 3))
    assert torch.equal(found["trained"], make_state(1)["trained"])


def test_equal_chunks_of_one_step_do_not_share_bytes(tmp_path: Path):
    save(tmp_path, 1, {"a": torch.zeros(5000), "n": torch.zeros(3)})
    state = {"a": torch.zeros(5000), "b": torch.zeros(5000), "n": torch.ones(3)}
    commit = save(tmp_path, 2, state)
    assert commit.nbytes_new > 5000 * 4
    found = cloudckpt.read(step_url(tmp_path, 2))
    assert found["b"].tolist() == found["a"].tolist() == [0.0] * 5000


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.arange(5000.0).double()},
        {"a": torch.arange(5000.0).view(torch.int32)},
        {"a": torch.arange(5000.0).reshape(50, 100)},
        {"a": torch.arange(5000.0)[:4999]},
    ],
    ids=["type", "bits", "shape", "length"],
)
def test_arrays_that_became_others_are_written(tmp_path: Path, change: dict[str, torch.Tensor]):
    save(tmp_path, 1, {"a": torch.arange(5000.0), "t": torch.zeros(1)})
    commit = save(tmp_path, 2, {**change, "t": torch.ones(1)})
    found = cloudckpt.read(step_url(tmp_path, 2))["a"]
    assert found.dtype == change["a"].dtype
    assert torch.equal(found, change["a"])
    assert commit.nbytes_new <= commit.nbytes
    assert verify(step_url(tmp_path, 2)).ok


def test_a_compressed_base_serves_compressed_saves_only(tmp_path: Path):
    save(tmp_path, 1, compression="zstd")
    commit = save(tmp_path, 2)
    assert commit.nbytes_new == commit.nbytes
    check(tmp_path, 2)


def test_a_base_without_digests_serves_nobody(tmp_path: Path):
    save(tmp_path, 1, incremental=False)
    assert manifest_of(tmp_path, 1).columns.digest is None
    commit = save(tmp_path, 2)
    assert commit.nbytes_new == commit.nbytes
    assert save(tmp_path, 3).nbytes_new < commit.nbytes / 5


def test_never_on_an_uncommitted_or_unreadable_predecessor(tmp_path: Path):
    save(tmp_path, 1)
    for step in (2, 3):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000002/manifest.json").unlink()
    (tmp_path / "step-00000003/manifest.json").write_bytes(b"{}")
    (tmp_path / "step-final").mkdir()
    forget()
    save(tmp_path, 4)
    assert dirs_of(manifest_of(tmp_path, 4)) == {None, "step-00000001"}


def test_a_base_that_is_gone_is_not_relied_on(tmp_path: Path):
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "step-00000001")
    commit = save(tmp_path, 2)
    assert commit.nbytes_new == commit.nbytes
    check(tmp_path, 2)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_a_base_that_lacks_objects_is_named_and_does_not_pass_its_damage_on(tmp_path: Path, restart: bool, cut: bool):
    save(tmp_path, 1)
    save(tmp_path, 2)
    pack = next((tmp_path / "step-00000001").rglob("*.zip"))
    if cut:
        pack.write_bytes(pack.read_bytes()[:-1])
    else:
        shutil.rmtree(tmp_path / "step-00000001")  # by hand, since the disk was full
    if restart:
        forget()
    with pytest.warns(UserWarning, match=r"zarr.zip, which step-00000002 needs, is missing or cut off"):
        commit = save(tmp_path, 3)
    assert commit.nbytes_new == commit.nbytes
    check(tmp_path, 3)
    assert save(tmp_path, 4).nbytes_new < commit.nbytes / 5
    check(tmp_path, 4)


def test_a_base_that_was_replaced_is_read_again(tmp_path: Path):
    save(tmp_path, 1)
    last = Alone().kept(LastSaves).get(str(tmp_path))
    save(tmp_path, 1, make_state(1) | {"frozen": torch.zeros(9, 10_000)}, overwrite=True)
    assert last is not None
    Alone().kept(LastSaves).keep(str(tmp_path), last)  # as if another job had done it
    commit = save(tmp_path, 2)
    assert commit.nbytes_new == commit.nbytes
    check(tmp_path, 2)


def test_overwriting_a_step_that_later_ones_refer_to(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    forget()
    commit = save(tmp_path, 1, overwrite=True)
    # Step 2 refers to the replaced attempt of step 1, and so does step 1 now: as its own.
    assert commit.nbytes_new < commit.nbytes / 5
    assert dirs_of(manifest_of(tmp_path, 1)) == {None}
    assert not manifest_of(tmp_path, 1).is_new.all()
    check(tmp_path, 1)
    check(tmp_path, 2)
    save(tmp_path, 2, overwrite=True)
    check(tmp_path, 2)


def test_a_run_that_was_moved(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path / "run", step)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    check(tmp_path / "elsewhere", 2)
    forget()
    save(tmp_path / "elsewhere", 3)
    assert dirs_of(manifest_of(tmp_path / "elsewhere", 3)) == {None, "step-00000001"}


def test_links_to_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    for step in (1, 2):
        save(run, step)
    (tmp_path / "latest").symlink_to(run / "step-00000002")
    assert cloudckpt.read(tmp_path / "latest")["step"] == 2
    shutil.move(run / "step-00000002", tmp_path / "disk")
    (run / "step-00000002").symlink_to(tmp_path / "disk")
    check(run, 2)
    monkeypatch.chdir(run)
    check(".", 2)
    cloudckpt.save(make_state(3), "step-00000003", step=3, incremental=True, config=CHUNK)
    assert dirs_of(manifest_of(run, 3)) == {None, "step-00000001"}


def test_damage_in_a_referenced_object_is_found_and_named(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path, step)
    pack = next((tmp_path / "step-00000001").rglob("*.zip"))
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)
    faults = verify(step_url(tmp_path, 2)).faults
    assert faults[0].path == "frozen"
    assert faults[0].key.startswith("../step-00000001/")
    pack.unlink()
    assert "the object is missing" in verify(step_url(tmp_path, 2)).faults[0].what


def test_unchanged_weights_are_warned_of(tmp_path: Path):
    state = {"w": torch.ones(100), "i": torch.zeros(100, dtype=torch.int64)}
    save(tmp_path, 1, state)
    state["i"] += 1
    with pytest.warns(
        UserWarning, match="all floating-point tensors of step 2 equal those of step 1: is the optimizer"
    ):
        save(tmp_path, 2, state)
    state["w"][7] = 3
    save(tmp_path, 3, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2):
            save(tmp_path / "ints", step, {"i": torch.zeros(100, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("run/step-00000001", {"layout": "zarr"}, 'needs layout="packed"'),
        ("run/final", {}, "must be that of a step in a run"),
        ("memory://step-00000001", {}, "must be that of a step in a run"),
    ],
)
def test_what_incremental_saves_cannot_do(tmp_path: Path, url: str, options: dict[str, Any], said: str):
    url = url if "://" in url else str(tmp_path / url)
    with pytest.raises(InvalidStateError, match=said):
        cloudckpt.save({"a": torch.ones(2)}, url, incremental=True, **options)
    assert not list(tmp_path.iterdir())


def test_a_lease_that_was_swept_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1)
    commit = catalog.commit
    removed: list[str] = []

    def sweep(done: int, in_all: int) -> None:
        run = resolve(tmp_path)
        leases = [info.key for info in run.list("") if parse_lease(info.key)]
        run.delete(leases)
        removed.extend(leases)

    with pytest.raises(StoreError, match="passed for dead"):
        save(tmp_path, 2, progress=sweep)
    assert len(removed) == 1
    assert catalog.commit is commit
    assert not (tmp_path / "step-00000002/manifest.json").exists()
    assert save(tmp_path, 3).nbytes_new > 0
    check(tmp_path, 3)


def test_a_commit_that_may_have_happened_keeps_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1)

    def lost(*args: Any, **options: Any) -> None:
        raise StoreError("no answer", key="manifest.json", retryable=True)

    with monkeypatch.context() as patched:
        patched.setattr(catalog, "commit", lost)
        with pytest.raises(StoreError, match="no answer"):
            save(tmp_path, 2)
    assert any(parse_lease(info.key) for info in resolve(tmp_path).list(""))


def test_topologies_are_told_apart(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2, compression="zstd")
    save(tmp_path, 3, {"frozen": torch.zeros(9, 10_000), "trained": torch.zeros(10_001), "step": 1})
    first, second, third = (manifest_of(tmp_path, step).document.topology for step in (1, 2, 3))
    assert first == second != third
    assert len(first or "") == 32


def sharded(step: int, placements: Any, size: int) -> dict[str, Any]:
    mesh = make_mesh((size,))
    frozen = torch.arange(9 * 512 * 16, dtype=torch.float32).reshape(9 * 512, 16)
    trained = torch.arange(512 * 16, dtype=torch.float32).reshape(512, 16) + step
    state = {"frozen": frozen, "trained": trained}
    cut = {name: DTensor.from_local(shard_of(t, placements), mesh, placements) for name, t in state.items()}
    return {**cut, "buffer": torch.ones(64), "step": step}


def shard_of(tensor: torch.Tensor, placements: Any) -> torch.Tensor:
    (placement,) = placements
    if isinstance(placement, Shard):
        return tensor.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()].contiguous()
    return tensor


def save_sharded(run: str, steps: list[int], dim: int | None, **options: Any) -> list[tuple[int, int]]:
    placements = [Replicate() if dim is None else Shard(dim)]
    found = []
    for step in steps:
        state = sharded(step, placements, dist.get_world_size())
        commit = cloudckpt.save(state, step_url(run, step), step=step, incremental=True, config=CHUNK, **options)
        found.append((commit.nbytes_new, commit.nbytes))
    return found


def check_sharded(run: Path, step: int) -> None:
    found = cloudckpt.read(step_url(run, step))
    assert torch.equal(found["frozen"], torch.arange(9 * 512 * 16, dtype=torch.float32).reshape(9 * 512, 16))
    assert torch.equal(found["trained"], torch.arange(512 * 16, dtype=torch.float32).reshape(512, 16) + step)
    assert verify(step_url(run, step)).ok


@pytest.mark.parametrize("dim", [0, None])
def test_of_several_ranks(ranks: RankPool, tmp_path: Path, dim: int | None):
    for new, nbytes in ranks.run(4, save_sharded, str(tmp_path), [1, 2, 3], dim)[0][1:]:
        assert new <= 0.11 * nbytes
    check_sharded(tmp_path, 3)
    # Other ranks, who have kept nothing, and of whom there are fewer: the ranks of the packs are those that wrote them.
    ((new, nbytes), *_) = ranks.run(2, save_sharded, str(tmp_path), [4], dim)[0]
    assert new <= 0.11 * nbytes
    assert {entry.rank for entry in manifest_of(tmp_path, 4).objects if split_key(entry.key)[0]} == {0, 1, 2, 3}
    check_sharded(tmp_path, 4)


def test_fewer_ranks_replace_a_step_that_its_base_refers_to(ranks: RankPool, tmp_path: Path):
    """What it keeps of its own directory was written by ranks that it does not have."""
    ranks.run(4, save_sharded, str(tmp_path), [1, 2], 0)
    ranks.run(2, partial(save_sharded, overwrite=True), str(tmp_path), [1], 0)
    assert {0, 1, 2, 3} <= {entry.rank for entry in manifest_of(tmp_path, 1).objects if not split_key(entry.key)[0]}
    check_sharded(tmp_path, 1)
    check_sharded(tmp_path, 2)


def test_of_ranks_that_cut_in_another_way(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_sharded, str(tmp_path), [1, 2], 0)
    ((new, nbytes), *_) = ranks.run(2, save_sharded, str(tmp_path), [3], 1)[0]
    assert 0 < new <= nbytes  # other chunks are other bytes; what is equal is found all the same
    check_sharded(tmp_path, 3)


def save_where_one_forgets(run: str) -> list[tuple[int, int]]:
    from cloudckpt.pytorch.group import make_group

    found = save_sharded(run, [1, 2], 0)
    if dist.get_rank() == 1:
        make_group(None, 60).kept(LastSaves)._by_run.clear()
    return found + save_sharded(run, [3], 0)


def test_a_rank_that_has_kept_nothing_is_told(ranks: RankPool, tmp_path: Path):
    new, nbytes = ranks.run(2, save_where_one_forgets, str(tmp_path))[0][-1]
    assert new <= 0.11 * nbytes
    check_sharded(tmp_path, 3)


def save_where_replicas_differ(run: str) -> CloudckptError | None:
    save_sharded(run, [1], 0)
    state = sharded(2, [Shard(0)], dist.get_world_size()) | {"buffer": torch.ones(64) + dist.get_rank()}
    error = error_of(lambda: cloudckpt.save(state, step_url(run, 2), step=2, incremental=True, config=CHUNK))
    save_sharded(run, [3], 0)
    return error


def test_a_save_that_failed_leaves_no_lease_and_is_no_base(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(2, save_where_replicas_differ, str(tmp_path)):
        assert "hold different values" in str(error)
    assert files(tmp_path, 2) == {}
    assert dirs_of(manifest_of(tmp_path, 3)) == {None, "step-00000001"}
    assert [info.key for info in resolve(tmp_path).list("") if parse_lease(info.key)] == []
    check_sharded(tmp_path, 3)


@pytest.mark.parametrize("server", ["moto_s3", "juicefs_s3"])
@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_on_s3(request: pytest.FixtureRequest, server: str, engine: str):
    s3: S3Server = request.getfixturevalue(server)
    run = f"s3://{s3.make_bucket(f'incremental-{secrets.token_hex(4)}')}/runs/a"
    options: dict[str, Any] = {"storage_options": s3.storage_options}
    config = Config(chunk_bytes=4096, engine=engine)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        if step == 3:
            forget()
        commit = save(run, step, config=config, **options)
        assert (commit.nbytes_new < commit.nbytes / 5) == (step > 1)
    check(run, 3, **options, config=config)
    store = resolve(run, s3.storage_options, config)
    assert [info.key for info in store.list("") if parse_lease(info.key)] == []
    store.close()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_in_the_background(tmp_path: Path, executor: Any):
    for step in (1, 2, 3):
        pending = cloudckpt.async_save(
            make_state(step), step_url(tmp_path, step), step=step, incremental=True, config=CHUNK, executor=executor
        )
        commit = pending.result(60)
        assert (commit.nbytes_new < commit.nbytes / 5) == (step > 1)
    check(tmp_path, 3)
