"""What the page's example has at hand."""

import torch

state = {"w": torch.ones(4)}
url, step = "run/step-00000001", 1
