"""``cloudckpt prune``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from cloudckpt import catalog
from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.errors import InvalidStateError, NotFoundError
from cloudckpt.plan.retention import make_policies
from cloudckpt.retention import Removal, Retention
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve


def prune_run(
    run: str,
    storage_options: Mapping[str, Any] | None,
    keep_last: int | None,
    keep_every: int | None,
    orphan_age_s: float,
    *,
    dry_run: bool,
) -> bool:
    """Prints what was removed; whether all of it could be."""
    if not orphan_age_s > 0:
        raise InvalidStateError(f"--orphan-age must be positive, not {orphan_age_s:g}")
    policies = make_policies(keep_last, keep_every)
    store = resolve(run, storage_options)
    try:
        _check_is_run(store)
        removal = Retention(store, policies, orphan_age_s=orphan_age_s).run(dry_run=dry_run)
    finally:
        store.close()
    _print(removal, store.url, dry_run=dry_run)
    return not (removal.failed or removal.faults)


def _check_is_run(store: Store) -> None:
    """A mistyped URL must not look like a run with nothing to remove."""
    steps = catalog.find_steps(store)
    if not (steps.committed or steps.uncommitted or steps.faults):
        raise NotFoundError(f"no steps in {store.url}")


def _print(removal: Removal, url: str, *, dry_run: bool) -> None:
    for complaint in removal.complaints():
        print(printable(complaint), file=sys.stderr)
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(map(str, removal.steps)) or "none"
    what = f"steps: {steps}; {removal.num_objects} objects, {human_bytes(removal.nbytes)}"
    print(f"{verb} from {printable(url)}: {what}")
