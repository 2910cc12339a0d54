"""What the page's examples have at hand."""

import torch

state = {"w": torch.ones(4)}
