"""Which tensors of a Hugging Face model are which of a `Transformer`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.checkpoint.exchange.huggingface_config import family_of
from paceline.models.config import ModelConfig


class Link(NamedTuple):
    """One tensor of a `Transformer` and what it is called there.

    Attributes:
        ours: Its name.
        theirs: Names of the tensors that it is made of, one below the other, and how many rows each has: 0 for all.
        transposed: Whether their one tensor has rows for columns, as GPT-2's linear layers have.
    """

    ours: str
    theirs: tuple[tuple[str, int], ...]
    transposed: bool = False


PREFIX = {"gpt2": "transformer.", "llama": "model."}
"""How names begin that are not the output layer's; not in files of the model without that layer."""
UNUSED = r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)"
"""Names of tensors that older releases stored beside parameters: masks and frequencies, which are computed."""


def links(config: ModelConfig) -> Iterator[Link]:
    """All of a model.

    Raises:
        UserError: It belongs to no family.
    """
    family = family_of(config)
    yield from _gpt2(config) if family == "gpt2" else _llama(config)
    if not config.tied:
        yield Link("head.weight", (("lm_head.weight", 0),))


def _gpt2(config: ModelConfig) -> Iterator[Link]:
    def pair(ours: str, theirs: str, transposed: bool = False) -> Iterator[Link]:
        yield Link(f"{ours}.weight", ((f"transformer.{theirs}.weight", 0),), transposed)
        yield Link(f"{ours}.bias", ((f"transformer.{theirs}.bias", 0),))

    yield Link("embedding.weight", (("transformer.wte.weight", 0),))
    yield Link("positions.weight", (("transformer.wpe.weight", 0),))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        yield from pair(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from pair(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", transposed=True)
        yield from pair(f"{ours}.attention.out", f"{theirs}.attn.c_proj", transposed=True)
        yield from pair(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
        yield from pair(f"{ours}.feed_forward.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from pair(f"{ours}.feed_forward.down", f"{theirs}.mlp.c_proj", transposed=True)
    yield from pair("norm", "ln_f")


def _llama(config: ModelConfig) -> Iterator[Link]:
    # Both turn the pairs (i, i + head_width / 2) by the same angles: no rows are to be put in another order.
    queries, keys = config.width, config.key_value_heads * config.head_width
    attention = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    gated = (("gate_proj", config.feed_forward), ("up_proj", config.feed_forward))
    kinds = ("weight", "bias") if config.bias else ("weight",)
    yield Link("embedding.weight", (("model.embed_tokens.weight", 0),))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield Link(f"{ours}.attention_norm.weight", ((f"{theirs}.input_layernorm.weight", 0),))
        yield Link(f"{ours}.feed_forward_norm.weight", ((f"{theirs}.post_attention_layernorm.weight", 0),))
        for kind in kinds:
            qkv = tuple((f"{theirs}.self_attn.{name}.{kind}", rows) for name, rows in attention)
            yield Link(f"{ours}.attention.qkv.{kind}", qkv)
            yield Link(f"{ours}.attention.out.{kind}", ((f"{theirs}.self_attn.o_proj.{kind}", 0),))
            up = tuple((f"{theirs}.mlp.{name}.{kind}", rows) for name, rows in gated)
            yield Link(f"{ours}.feed_forward.up.{kind}", up)
            yield Link(f"{ours}.feed_forward.down.{kind}", ((f"{theirs}.mlp.down_proj.{kind}", 0),))
    yield Link("norm.weight", (("model.norm.weight", 0),))
