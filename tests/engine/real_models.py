"""Tiny models of well-known families, with random weights, and batches for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 61
LENGTH = 7

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        build: Gives a model with random weights.
        inputs: (generator, samples) -> a batch.
        units: Names of the units that it is cut into, in registration order.
        shared: Parameters that belong to no single unit.
        tolerance: How far two computations may differ: more where a part of the model computes in float32.
        generates: Whether it has a method `generate`.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Batch]
    units: list[str]
    shared: list[str] = field(default_factory=list)
    tolerance: float = 1e-10
    generates: bool = False

    def make(self, seed: int = 0) -> nn.Module:
        """The model in float64, the same for the same seed."""
        torch.manual_seed(seed)
        return self.build().double()

    def batch(self, step: int, samples: int) -> Batch:
        """The inputs of one step."""
        return self.inputs(torch.Generator().manual_seed(step), samples)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy in float64 (a model's own would be in float32), and what the model adds to balance experts."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    loss = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
    balance = getattr(output, "aux_loss", None)
    return loss if balance is None else loss + balance


def _integers(generator: torch.Generator, *shape: int, below: int = VOCABULARY) -> Tensor:
    return torch.randint(0, below, shape, generator=generator)


# ---- from transformers


def _tokens(generator: torch.Generator, samples: int) -> Batch:
    return {name: _integers(generator, samples, LENGTH) for name in ("input_ids", "labels")}


def _pairs(generator: torch.Generator, samples: int) -> Batch:
    names = ("input_ids", "decoder_input_ids", "labels")
    return {name: _integers(generator, samples, LENGTH) for name in names}


_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_DECODER: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
_TRANSLATOR: dict[str, Any] = {
    **_TOKENS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        **_TOKENS, n_positions=32, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _mixtral() -> nn.Module:
    import transformers

    # 14 tokens, 2 of 16 experts each: some experts see none. The loss that balances them depends on the whole batch.
    options: dict[str, Any] = {"num_local_experts": 16, "output_router_logits": True, "experts_implementation": "eager"}
    config = transformers.MixtralConfig(**_DECODER, **options)
    return transformers.MixtralForCausalLM(config)


def _switch() -> nn.Module:
    import transformers

    # Its experts are modules of their own: one that no token chooses gets no gradient at all.
    config = transformers.SwitchTransformersConfig(
        **_TRANSLATOR,
        num_decoder_layers=3,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=24,
        expert_capacity=8,
        router_jitter_noise=0.0,
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.dtype = torch.float64  # type: ignore[assignment]  # its configuration allows float32 at most
    return model


def _t5() -> nn.Module:
    import transformers

    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_TRANSLATOR))


# ---- without it


class ViT(nn.Module):
    """A vision Transformer whose class token and position table belong to the model itself."""

    def __init__(self, width: int = 16, patch: int = 4, blocks: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
                for _ in range(blocks)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Residual(nn.Module):
    """A block of two convolutions beside a shortcut, with activations in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        return self.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Two stages of two residual blocks."""

    def __init__(self, width: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class LSTM(nn.Module):
    """Two recurrent layers; a unit that returns a tuple of tuples."""

    def __init__(self, width: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.recurrent(self.embedding(x))
        return self.head(hidden[-1])


def _images(generator: torch.Generator, samples: int) -> Batch:
    x = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": _integers(generator, samples, below=5)}


def _sentences(generator: torch.Generator, samples: int) -> Batch:
    return {"x": _integers(generator, samples, LENGTH), "labels": _integers(generator, samples, below=5)}


def _names(*parts: str | tuple[str, int]) -> list[str]:
    """Unit names; ("layers", 2) stands for layers.0 and layers.1."""
    listed = ([p] if isinstance(p, str) else [f"{p[0]}.{i}" for i in range(p[1])] for p in parts)
    return list(itertools.chain.from_iterable(listed))


_DECODER_UNITS = _names("model.embed_tokens", ("model.layers", 4), "model.norm", "lm_head")
_TRANSLATOR_UNITS = _names(
    "shared",
    "encoder.embed_tokens",
    ("encoder.block", 3),
    "encoder.final_layer_norm",
    "decoder.embed_tokens",
    ("decoder.block", 3),
    "decoder.final_layer_norm",
    "lm_head",
)
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _gpt2,
        _tokens,
        _names("transformer.wte", "transformer.wpe", ("transformer.h", 4), "transformer.ln_f", "lm_head"),
        shared=["transformer.wte.weight"],
        generates=True,
    ),
    "llama": Family(_llama, _tokens, _DECODER_UNITS, tolerance=1e-6, generates=True),
    "mixtral": Family(_mixtral, _tokens, _DECODER_UNITS, tolerance=1e-6),
    "t5": Family(_t5, _pairs, _TRANSLATOR_UNITS, shared=["shared.weight"], tolerance=1e-6, generates=True),
    "switch": Family(_switch, _pairs, _TRANSLATOR_UNITS, shared=["shared.weight"], tolerance=1e-6),
    "vit": Family(ViT, _images, _names("patches", ("blocks", 3), "norm", "head"), shared=["token", "positions"]),
    "resnet": Family(ResNet, _images, _names("stem", ("layer1", 2), ("layer2", 2), "head")),
    "lstm": Family(LSTM, _sentences, ["embedding", "recurrent", "head"]),
}


# ---- shapes that training takes


def _freeze_middle(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if any(f".{block}." in name for block in ("h.1", "layers.1", "block.1")):
            parameter.requires_grad_(False)


def _checkpoint(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _checkpoint_and_freeze(model: nn.Module) -> None:
    _checkpoint(model, reentrant=False)
    _freeze_middle(model)


SHAPES: dict[str, Callable[[nn.Module], None]] = {
    "as it is": lambda model: None,
    "middle frozen": _freeze_middle,
    "reentrant checkpoints": lambda model: _checkpoint(model, reentrant=True),
    "checkpoints, middle frozen": _checkpoint_and_freeze,
}
"""What is done to a model of transformers before it is trained."""
