"""A Transformer in float64 written out from its definition, to hold the real one against."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models import ModelConfig


def reference_logits(weights: dict[str, Tensor], config: ModelConfig, tokens: Tensor) -> Tensor:
    c = config
    count = tokens.shape[1]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if c.bias else y

    def norm(x: Tensor, name: str) -> Tensor:
        if c.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weights[f"{name}.weight"]
        return x + weights[f"{name}.bias"] if c.norm == "layernorm" and c.bias else x

    def turned(x: Tensor) -> Tensor:
        """Multiply pair (i, i + d/2) at position p by exp(1j * p * theta^(-2i/d))."""
        half = c.head_width // 2
        frequency = torch.tensor([c.rope_theta ** (-2 * i / c.head_width) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(count).double()[:, None] * frequency
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag), -1)

    x = weights["embedding.weight"][tokens]
    if c.position == "learned":
        x = x + weights["positions.weight"][:count]
    for layer in range(c.layers):
        block = f"blocks.{layer}"
        qkv = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv")
        d, outputs = c.head_width, []
        for head in range(c.heads):
            group = head // (c.heads // c.key_value_heads)
            q = qkv[..., head * d : (head + 1) * d]
            k = qkv[..., (c.heads + group) * d : (c.heads + group + 1) * d]
            v_start = (c.heads + c.key_value_heads + group) * d
            v = qkv[..., v_start : v_start + d]
            if c.position == "rotary":
                q, k = turned(q), turned(k)
            scores = (q @ k.transpose(1, 2)) / d**0.5
            allowed = torch.ones(count, count, dtype=torch.bool).tril()
            weight = torch.where(allowed, scores, float("-inf")).exp()
            outputs.append(weight / weight.sum(-1, keepdim=True) @ v)
        x = x + linear(torch.cat(outputs, -1), f"{block}.attention.out")
        y = linear(norm(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward.up")
        if c.activation == "swiglu":
            gate, value = y[..., : c.feed_forward], y[..., c.feed_forward :]
            y = gate / (1 + (-gate).exp()) * value
        else:
            y = y * (1 + torch.erf(y / 2**0.5)) / 2
        x = x + linear(y, f"{block}.feed_forward.down")
    output = weights["embedding.weight" if c.tied else "head.weight"]
    return norm(x, "norm") @ output.T


def reference_loss(weights: dict[str, Tensor], config: ModelConfig, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = reference_logits(weights, config, tokens)
    counted = targets != -100
    probability = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -probability[counted].gather(1, targets[counted][:, None]).log().sum()
