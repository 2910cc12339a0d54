"""Loading weights in Hugging Face's layout: `load`, with safetensors files as what is stored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudckpt._load import Finder, LoadReport, run_load
from cloudckpt.config import Config
from cloudckpt.interop import hf_index
from cloudckpt.interop.foreign import Foreign, Origin, file_in
from cloudckpt.interop.hf_files import open_hf
from cloudckpt.plan.changes import Cast, Resizes
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.progress import Progress
from cloudckpt.pytorch.compare import LoadCall
from cloudckpt.pytorch.group import make_group
from cloudckpt.pytorch.only_tensors import check_only_tensors
from cloudckpt.pytorch.sharing import ExchangeMode, Groups, Scope
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import shown_url

if TYPE_CHECKING:
    import torch.distributed as dist


def load_hf(
    state: Any,
    url: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: Cast = False,
    exchange: ExchangeMode = "auto",
    exchange_scope: Scope = "world",
    rules: ShardingRules | None = None,
    rename: Rules | None = None,
    resize: Resizes | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    groups: Groups | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> LoadReport:
    """Fill ``state`` in place from the safetensors files at ``url``. Collective over ``group`` (default: all ranks).

    ``url``: a folder with an index, with one safetensors file or with several, or the URL of one file or one index; see
    docs/huggingface.md for what counts where a folder holds more. What is there is a flat dict of tensors.

    ``state``: a model, or its ``state_dict()``, or any nested containers of tensors, DTensors, `ShardedTensor`s and
    modules under the names in the files; ``rename`` leads from these to others. Each rank fetches only what it holds,
    and with ``exchange`` each byte is fetched once. A name that the files lack is not missing where its tensor is the
    memory of one that they have, as with tied weights.

    All arguments are as for `load`, and so are the comparison before anything is changed, and the errors. FormatError:
    a damaged file, or an index that names files or tensors that are not there; it lists all of them. NotFoundError:
    there are no safetensors files. Bytes are not verified: the format has no checksums.
    """
    config = config or Config()
    folder, name = file_in(url, hf_index.SUFFIXES)
    call = LoadCall(
        state=state,
        url=shown_url(url),
        strict=strict,
        cast=cast,
        exchange=exchange,
        exchange_scope=exchange_scope,
        rules=rules,
        rename=rename,
        model_version=None,
        resize=resize,
        groups=groups,
        allow_pickle=False,
        progress=progress,
        config=config,
        ties=True,
    )

    def find(store: Store) -> Foreign:
        found = open_hf(Origin(store, name, config))
        for note in found.notes:
            warnings.warn(note, stacklevel=2)
        return found

    finder = Finder(find, lambda found, _: (found.manifest, found.made), check_only_tensors)
    return run_load(call, make_group(group, config.rank_timeout_s), folder, storage_options, finder)
