"""The run that the page looks at."""

import torch

import cloudckpt

cloudckpt.save({"model": {"w": torch.ones(2, 2), "b": torch.ones(3)}, "step": 1}, "run/step-00000001", step=1)
