from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.plan.llama_memory import block_bytes, block_parameters, stage_parameters

CONFIG = ModelConfig(
    layers=4,
    width=256,
    heads=8,
    kv_heads=2,
    ff=896,
    context=128,
    vocabulary=512,
    norm="rmsnorm",
    position="rotary",
    activation="swiglu",
    bias=False,
    tied=False,
)


class Block(nn.Module):
    """A Llama block as it is usually written: projections one by one, keys and values repeated.

    Its norm is one kernel on CPUs too, as RMSNorm is on GPUs: it keeps its input alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, kv = config.width, config.key_value_heads * config.head_width
        self.config = config
        self.q, self.k, self.v, self.o = (nn.Linear(h, n, bias=False) for n in (h, kv, kv, h))
        self.gate, self.up = (nn.Linear(h, config.feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(config.feed_forward, h, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(h)) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        b, s, h = x.shape
        y = F.layer_norm(x, (h,), self.norms[0])
        q, k, v = (p(y).view(b, s, -1, self.config.head_width) for p in (self.q, self.k, self.v))
        q, k = (self.turned(each, angles) for each in (q, k))
        times = self.config.heads // self.config.key_value_heads
        k, v = (each.repeat_interleave(times, 2) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, h))
        y = F.layer_norm(x, (h,), self.norms[1])
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    @staticmethod
    def turned(x: Tensor, angles: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


def saved_bytes(module: nn.Module, *inputs: Tensor) -> int:
    """Bytes of the storages that autograd saves, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}
    held: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return sum(found.values())


def test_an_eager_block_keeps_what_is_counted() -> None:
    block = Block(CONFIG).to(torch.bfloat16)
    x = torch.randn(2, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.polar(torch.ones(128, 1, 16), torch.randn(128, 1, 16))
    saved = saved_bytes(block, x, angles) - angles.nbytes
    # The last result is the next block's input; what softmax and norms sum up is small.
    assert block_bytes(CONFIG, 2 * 128, "all") == pytest.approx(saved, rel=0.02)


def test_less_is_kept_in_this_order_and_tensor_ranks_divide_it() -> None:
    sizes = [block_bytes(CONFIG, 256, kept) for kept in ("all", "compiled", "operations", "input")]
    assert sizes == sorted(sizes, reverse=True)
    assert block_bytes(CONFIG, 256, "all", 4) == block_bytes(CONFIG, 256, "all") / 4
    assert block_bytes(CONFIG, 256, "all", 4, shared_norms=False) > block_bytes(CONFIG, 256, "all") / 4


def test_parameters_are_those_of_the_block() -> None:
    assert block_parameters(CONFIG) == sum(p.numel() for p in Block(CONFIG).parameters())
    assert stage_parameters(CONFIG) == 4 * block_parameters(CONFIG) + 2 * 512 * 256 + 256
    assert stage_parameters(CONFIG, 2) == 2 * block_parameters(CONFIG) + 512 * 256 + 256
