"""Saving: what is on this rank is prepared, and written together with what the others have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt._tries import RunPolicy, run_tries
from cloudckpt._write import Commit, Prepared
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values as plain
from cloudckpt.format.keys import step_dir
from cloudckpt.plan.migrations import check_version
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.plan.skeleton import split
from cloudckpt.progress import Progress
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.group import make_group
from cloudckpt.pytorch.pause import paused_gc
from cloudckpt.pytorch.state import encode_state, piece_table
from cloudckpt.transfer.description import RankLayout, SaveOptions

if TYPE_CHECKING:
    import torch.distributed as dist

Layout = Literal["packed", "zarr"]


def save(
    state: Any,
    url: str | os.PathLike[str],
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "packed",
    compression: Literal["zstd"] | None = None,
    overwrite: bool = False,
    incremental: bool = False,
    rules: ShardingRules | None = None,
    metadata: Mapping[str, Any] | None = None,
    model_version: str | None = None,
    values: Literal["check", "rank0"] = "check",
    allow_pickle: bool = False,
    progress: Progress = None,
    config: Config | None = None,
    policy: RunPolicy | None = None,
) -> Commit:
    """Write ``state`` as a committed checkpoint at ``url``. Collective over ``group`` (default: all ranks).

    ``state`` is a nested dict, list or tuple of tensors, DTensors, ShardedTensors, numpy arrays, plain
    values and objects with ``state_dict()``. ``rules`` say which part of the whole the plain tensors
    are; those without a rule must be equal on all ranks that hold them. The state must not change before
    this returns. Either the checkpoint is whole and durable afterwards, or an error is raised on every rank
    and nothing is visible.

    ``incremental``: chunks whose bytes are those of the run's last committed checkpoint are referred to, not
    written. ``url`` is then that of a step in a run (``.../run/step-00001000``), and the other steps must stay
    beside it; what a step still needs of another must not be deleted with it (`Checkpointer` knows). Warns where no
    floating-point tensor has changed.

    ``values``: plain values must be equal on all ranks ("check"), or those of rank 0 are kept
    ("rank0"). ``metadata``: plain values for people and tools, beside the state.
    ``model_version``: your name for the keys and shapes of this state, see `cloudckpt.migration`. ``progress``: True
    for a bar on rank 0, or a function of (bytes done, bytes in all) of the rank. ``policy``: what a
    `Checkpointer` has said about steps of its run.

    Raises InvalidStateError, AlreadyCommittedError, NotFoundError (no such bucket), StoreError, and
    RankError where a part of the ranks failed.
    """
    config = config or Config()
    ranks = make_group(group, config.rank_timeout_s)
    options = SaveOptions(
        step=step,
        layout=layout,
        compression=compression,
        overwrite=overwrite,
        incremental=incremental,
        values=values,
        check_replicas=config.check_replicas,
        chunk_bytes=config.chunk_bytes,
        model_version=model_version,
    )

    def prepared() -> Prepared:
        return prepare(
            state, options, rules=rules, metadata=metadata, allow_pickle=allow_pickle, rank=ranks.rank, size=ranks.size
        )

    return run_tries(
        lambda _url, _options, _number: nullcontext(ranks),
        prepared,
        url,
        policy=policy,
        storage_options=storage_options,
        progress=progress,
        config=config,
    )


def prepare(
    state: Any,
    options: SaveOptions,
    *,
    rules: ShardingRules | None,
    metadata: Mapping[str, Any] | None,
    allow_pickle: bool,
    rank: int,
    size: int,
    defer_pickles: bool = False,
) -> Prepared:
    """This rank's part of a save: plain values are taken as they are now, tensors stay where they are. Local.

    ``defer_pickles``: see `encode_state`.

    Raises InvalidStateError for options and states that cannot be saved.
    """
    _check_options(options)
    describer = Describer(rules, rank, size)
    with paused_gc():
        encoded = encode_state(state, allow_pickle=allow_pickle, describer=describer, defer_pickles=defer_pickles)
        skeleton, held = split(encoded.tree.node)
        pieces = piece_table(encoded.shards, {name: i for i, name in enumerate(encoded.shards)})
    matched = tuple(sorted(describer.matched))
    layout = RankLayout(skeleton, encoded.tree.leaves, pieces, encoded.meshes, matched)
    digest = None if rules is None else rules.digest
    return Prepared(replace(options, rules=digest), encoded, layout, held, plain.encode(dict(metadata or {})), rules)


def _check_options(options: SaveOptions) -> None:
    for name, value, allowed in (
        ("layout", options.layout, ("packed", "zarr")),
        ("compression", options.compression, (None, "zstd")),
        ("values", options.values, ("check", "rank0")),
    ):
        if value not in allowed:
            raise InvalidStateError(f"{name} must be one of {allowed}, not {value!r}")
    if options.incremental and options.layout != "packed":
        raise InvalidStateError(
            'incremental=True needs layout="packed": in a plain zarr hierarchy, readers other than this one would take '
            "the chunks that other steps hold for missing, and fill them with zeros"
        )
    check_version(options.model_version)
    if options.step is not None:
        step_dir(options.step)  # refuses what cannot name a step
