"""What the examples have at hand, and the module that the command line names."""

from pathlib import Path

import torch
from safetensors.torch import save_file

model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"wq": torch.nn.Linear(8, 8)})])})
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
last_step = 3000


def train_one_step():
    scheduler.step()


Path("my_migrations.py").write_text(
    """
import cloudckpt


@cloudckpt.migration(None, "v2")
def nothing_changed():
    return []
"""
)

Path("models/llama").mkdir(parents=True)
save_file(model.state_dict(), "models/llama/model.safetensors")
