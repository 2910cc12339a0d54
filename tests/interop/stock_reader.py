"""Reads shared checkpoints with zarr, TensorStore, xarray and dask, on any Python. Imports nothing of cloudckpt.

``python stock_reader.py FOLDER [--installed]``: FOLDER is what `shared_set` has written. Prints a JSON object: how many
arrays were read with what (``read``), and all ``faults``. The reader sees nothing of cloudckpt even where it is
installed, neither its modules nor its entry points; with ``--installed`` it does, and zarr reads all data types.
"""

import importlib.metadata
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

OURS = "cloudckpt"


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".", maxsplit=1)[0] == OURS:
            raise ImportError(f"{name} is not to be imported here")


def hide_cloudckpt():
    every = importlib.metadata.distributions
    importlib.metadata.distributions = lambda **chosen: (found for found in every(**chosen) if found.name != OURS)
    sys.meta_path.insert(0, Block())


class Report:
    def __init__(self):
        self.read = Counter()
        self.faults = []

    def compare(self, how, name, data, expected):
        import numpy as np

        found = [list(data.shape), np.ascontiguousarray(data).reshape(-1).view(np.uint8).tobytes().hex()]
        self.read[how] += 1
        if found != [expected["stored_shape"], expected["bits"]]:
            self.faults.append(f"{how}: {name} has {found}, not {expected}")

    def attempt(self, how, name, read, expected):
        try:
            self.compare(how, name, read(), expected)
        except Exception as error:  # noqa: BLE001  # all of them are told
            self.faults.append(f"{how}: {name}: {type(error).__name__}: {error}")


def wanted(checkpoint, *, irregular, extended=True):
    return {
        name: array
        for name, array in checkpoint["arrays"].items()
        if (irregular or array["regular"]) and (extended or not array["extended"])
    }


def read_with_tensorstore(report, folder, checkpoint):
    import tensorstore

    if checkpoint["layout"] == "zarr":
        places = [lambda name: {"driver": "file", "path": f"{folder / checkpoint['root']}/{name}/"}]
    elif len(checkpoint["packs"]) == 1:
        pack = {"driver": "file", "path": str(folder / checkpoint["packs"][0])}
        places = [lambda name: {"driver": "zip", "base": pack, "path": f"{name}/"}]
    else:
        return
    for name, array in wanted(checkpoint, irregular=False).items():
        # It has no such type; and an array without chunks is in no pack.
        if array["dtype"] == "float8_e8m0fnu" or (not array["bits"] and checkpoint["layout"] == "packed"):
            continue
        for place in places:
            spec = {"driver": "zarr3", "kvstore": place(name)}
            report.attempt(
                "tensorstore", name, lambda spec=spec: tensorstore.open(spec).result().read().result(), array
            )


def read_with_zarr(report, folder, checkpoint, *, irregular, extended):
    import zarr

    arrays = wanted(checkpoint, irregular=irregular, extended=extended)
    if checkpoint["layout"] == "zarr":
        group = zarr.open_group(folder / checkpoint["root"], mode="r")
        for name, array in arrays.items():
            report.attempt("zarr folder", name, lambda name=name: group[name][...], array)
    elif len(checkpoint["packs"]) == 1:
        group = zarr.open_group(zarr.storage.ZipStore(folder / checkpoint["packs"][0], mode="r"), mode="r")
        for name, array in arrays.items():
            if array["bits"]:
                report.attempt("zarr pack", name, lambda name=name: group[name][...], array)


def options_of(folder, checkpoint, kind):
    """As a user has them: those of the reference file, and those of the store that its URLs are of."""
    remote = {"remote_options": {**checkpoint["remote_options"], "asynchronous": True}} if checkpoint["remote"] else {}
    return {"fo": str(folder / checkpoint[kind]), **remote, **checkpoint["reference_options"]}


def read_references(report, folder, checkpoint, *, irregular, extended):
    import zarr

    options = options_of(folder, checkpoint, "references")
    group = zarr.open_group("reference://", mode="r", storage_options=options)
    for name, array in wanted(checkpoint, irregular=irregular, extended=extended).items():
        report.attempt("zarr references", name, lambda name=name: group[name][...], array)


def read_plain_references(report, folder, checkpoint, *, irregular):
    import zarr

    options = options_of(folder, checkpoint, "plain_references")
    group = zarr.open_group("reference://", mode="r", storage_options=options)
    for name, array in wanted(checkpoint, irregular=irregular).items():
        report.attempt("zarr plain references", name, lambda name=name: group[name][...], array)


def read_with_xarray_and_dask(report, folder, checkpoint, *, irregular):
    import dask.array
    import xarray

    options = options_of(folder, checkpoint, "plain_references")
    arrays = wanted(checkpoint, irregular=False)
    for name, array in arrays.items():
        made = dask.array.from_zarr("reference://", component=name, storage_options=options)
        report.attempt("dask", name, lambda made=made: made.compute(scheduler="threads"), array)
    if len(arrays) < len(checkpoint["arrays"]) and not irregular:
        return  # xarray opens a group as a whole
    dataset = xarray.open_zarr("reference://", storage_options=options, consolidated=False)
    for name, array in wanted(checkpoint, irregular=irregular).items():
        report.attempt("xarray", name, lambda name=name: dataset[name].to_numpy(), array)


def main(folder, *flags):
    warnings.simplefilter("error")
    installed = "--installed" in flags
    if not installed:
        hide_cloudckpt()
    import zarr

    # Irregular grids came with zarr 3.2.
    irregular = tuple(map(int, zarr.__version__.split(".")[:2])) >= (3, 2)
    if irregular:
        zarr.config.set({"array.rectilinear_chunks": True})
    folder, report = Path(folder), Report()
    for checkpoint in json.loads((folder / "set.json").read_text()):
        if not checkpoint["remote"]:
            read_with_zarr(report, folder, checkpoint, irregular=irregular, extended=installed)
        read_references(report, folder, checkpoint, irregular=irregular, extended=installed)
        if installed:
            continue
        if not checkpoint["remote"]:
            read_with_tensorstore(report, folder, checkpoint)
        read_plain_references(report, folder, checkpoint, irregular=irregular)
        read_with_xarray_and_dask(report, folder, checkpoint, irregular=irregular)
    assert installed or OURS not in sys.modules
    print(json.dumps({"zarr": zarr.__version__, "read": report.read, "faults": report.faults}))


if __name__ == "__main__":
    main(*sys.argv[1:])
