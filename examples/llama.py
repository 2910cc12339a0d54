"""A small Llama-style transformer on bytes, the text it learns, and how both are spread over a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    vocab: int = 256  # bytes
    dim: int = 192
    num_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2  # grouped-query attention
    hidden: int = 512


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of ``x`` [batch, heads, sequence, head_dim]."""
    length, head_dim = x.shape[-2:]
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), frequencies)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.num_heads
        self.wq = nn.Linear(size.dim, size.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(size.dim, size.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(size.dim, size.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(size.num_heads * self.head_dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is left open (-1): under tensor parallelism a rank has its share of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.dim, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)
        self.w3 = nn.Linear(size.dim, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.RMSNorm(size.dim)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.dim)
        self.output = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting ``targets`` [batch, sequence] from ``tokens`` [batch, sequence]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


def build_model(mesh: DeviceMesh) -> Llama:
    """The model with the same initial weights on every mesh, sharded over its axes ``dp`` and ``tp``."""
    torch.manual_seed(0)
    model = Llama(Size())
    tp, dp = mesh["tp"], mesh["dp"]
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tp, ends)
    for layer in model.layers:
        by_columns = ["attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"]
        plan = {name: ColwiseParallel() for name in by_columns}
        parallelize_module(layer, tp, plan | {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()})
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def warmup_then_cosine(step: int, *, warmup: int = 10, total: int = 200) -> float:
    """The factor on the learning rate."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))


class Batches:
    """Random excerpts of Python's own help texts. Its state is a random generator's and a count.

    Every rank draws the same whole batch and takes its rows of it, so that the data do not depend
    on the mesh, and the state is the same on all ranks.
    """

    def __init__(self, *, batch: int = 8, length: int = 64, seed: int = 1) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.batch, self.length = batch, length
        self.generator = torch.Generator().manual_seed(seed)
        self.num_tokens_seen = 0

    def draw(self, part: int, num_parts: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch / num_parts, length] of one of ``num_parts`` data-parallel ranks."""
        starts = torch.randint(len(self.tokens) - self.length, (self.batch,), generator=self.generator)
        self.num_tokens_seen += self.batch * self.length
        rows = torch.stack([self.tokens[start : start + self.length + 1] for start in starts])
        rows = rows.chunk(num_parts)[part]
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "num_tokens_seen": self.num_tokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.num_tokens_seen = state["num_tokens_seen"]
