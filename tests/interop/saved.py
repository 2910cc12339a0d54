"""Checkpoints to look at, and what is in them."""

import ml_dtypes
import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt

NUMPY = {
    "model.w": np.arange(40, dtype=np.float32).reshape(5, 8),
    "model.b": np.array([1.0, -2.0, 0.5], dtype=ml_dtypes.bfloat16),
    "scalar": np.array(7, dtype=np.int64),
    "flags": np.array([True, False, True]),
    "empty": np.zeros((0, 3), dtype=np.float16),
    "f8": np.array([1.0, -1.5], dtype=ml_dtypes.float8_e4m3fn),
    "e8": np.array([1.0, 4.0], dtype=ml_dtypes.float8_e8m0fnu),
    "c64": np.array([1 + 2j], dtype=np.complex64),
    "be": np.arange(4, dtype=">i4"),
}


def state():
    """Small, of many types."""
    return {
        "model": {
            "w": torch.arange(40, dtype=torch.float32).reshape(5, 8),
            "b": torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16),
        },
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "f8": torch.tensor([1.0, -1.5]).to(torch.float8_e4m3fn),
        "e8": torch.tensor([127, 129], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "c64": torch.tensor([1 + 2j], dtype=torch.complex64),
        "c32": torch.tensor([1, 2, 3, 4], dtype=torch.int32).view(torch.complex32),
        "be": np.arange(4, dtype=">i4"),
        "step": 5,
    }


IRREGULAR = np.arange(60, dtype=np.float32).reshape(10, 6)
IRREGULAR_RAW = np.arange(10, dtype=np.int32)


def save_irregular(url, layout, compression):
    """On 4 ranks: 10 rows in parts of 3, 2, 3 and 2; no zarr name for the second tensor's type."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cut = [Shard(0), Shard(0)]
    w = distribute_tensor(torch.from_numpy(IRREGULAR.copy()), mesh, cut)
    bits = distribute_tensor(torch.from_numpy(IRREGULAR_RAW.copy()), mesh, cut)
    raw = torch.distributed.tensor.DTensor.from_local(
        bits.to_local().view(torch.complex32), mesh, cut, shape=torch.Size([10]), stride=(1,), run_check=False
    )
    cloudckpt.save({"w": w, "raw": raw}, url, layout=layout, compression=compression)


def bits(array):
    """For comparing bit for bit."""
    return array.reshape(-1).view(np.uint8).tobytes()
