"""One function a command. What it needs is imported when it runs: ``--help`` answers at once."""

from __future__ import annotations

import argparse


def ls(options: argparse.Namespace) -> int:
    from cloudckpt.cli.listing import list_run

    list_run(options.url, options.storage_options)
    return 0


def show(options: argparse.Namespace) -> int:
    from cloudckpt.cli.showing import show_checkpoint

    show_checkpoint(options.url, options.storage_options, as_json=options.json)
    return 0


def prune(options: argparse.Namespace) -> int:
    from cloudckpt.cli.pruning import prune_run

    chosen = (options.keep_last, options.keep_every, options.orphan_age)
    return 0 if prune_run(options.url, options.storage_options, *chosen, dry_run=options.dry_run) else 1


def plan(options: argparse.Namespace) -> int:
    from cloudckpt.cli.planning import Request, plan_checkpoint

    chosen = Request(options.mesh, options.order, options.rules, options.rule, options.ranks_per_node, options.fail)
    plan_checkpoint(options.url, options.storage_options, chosen, as_json=options.json)
    return 0


def copy(options: argparse.Namespace) -> int:
    from cloudckpt.cli.copying import copy_checkpoints

    copy_checkpoints(
        options.src,
        options.dst,
        options.src_options,
        options.dst_options,
        overwrite=options.overwrite,
        trust_sizes=options.trust_sizes,
    )
    return 0


def migrate(options: argparse.Namespace) -> int:
    from cloudckpt.cli.migrating import Wanted, migrate_checkpoint

    wanted = Wanted(options.to, options.module, options.rename, options.cast, options.overwrite)
    migrate_checkpoint(options.src, options.dst, options.src_options, options.dst_options, wanted)
    return 0


def import_(options: argparse.Namespace) -> int:
    from cloudckpt.cli.importing import Wanted, import_checkpoint

    wanted = Wanted(
        step=options.step,
        rename=options.rename,
        cast=options.cast,
        layout=options.layout,
        compression=options.compression,
        allow_pickle=options.allow_pickle,
        overwrite=options.overwrite,
    )
    import_checkpoint(options.kind, options.src, options.dst, options.src_options, options.dst_options, wanted)
    return 0


def export(options: argparse.Namespace) -> int:
    from cloudckpt.cli.exporting import Wanted, export_checkpoint

    wanted = Wanted(
        include=options.include,
        rename=options.rename,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        files=options.files,
        overwrite=options.overwrite,
    )
    export_checkpoint(options.kind, options.src, options.dst, options.src_options, options.dst_options, wanted)
    return 0


def references(options: argparse.Namespace) -> int:
    from cloudckpt.cli.referencing import write_references
    from cloudckpt.interop.zarr_references import ReferenceOptions

    chosen = ReferenceOptions(options.names, options.template, options.base, options.plain_types)
    write_references(options.url, options.storage_options, chosen, options.output)
    return 0


def verify(options: argparse.Namespace) -> int:
    from cloudckpt.cli.verifying import verify_checkpoint

    return 0 if verify_checkpoint(options.url, options.storage_options) else 1
