"""What models of transformers are called with, by their configurations and the names of their arguments."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_WITH_LOSS = ("CausalLM", "LMHead", "MaskedLM", "ForConditionalGeneration")
"""Parts of the names of classes that compute a loss of `labels` of the inputs' shape."""

_IMAGE, _SECONDS, _RATE = 224, 10, 16_000


class Named(NamedTuple):
    """Named arguments of one micro-batch.

    Attributes:
        arguments: Of tensors the shapes and dtypes count.
        tokens: Of all samples; where a sample is no sequence of tokens, samples.
        vocabulary: How many columns logits have; 0 where there are none.
        doubt: What was assumed, or nothing.
    """

    arguments: dict[str, Any]
    tokens: int
    vocabulary: int = 0
    doubt: str = ""


def named_inputs(model: nn.Module, samples: int, length: int) -> Named | None:
    """What a model is called with; None where that is not known.

    Args:
        model: With a `config`.
        samples: Of the micro-batch.
        length: Tokens of a sequence; 0: as many as the model takes, 1,024 at most.
    """
    config: Any = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" in accepted and isinstance(vocabulary := getattr(config, "vocab_size", None), int):
        tokens = length or min(1024, getattr(config, "max_position_embeddings", None) or 1024)
        named: dict[str, Any] = {"input_ids": ids(samples, tokens)}
        if "labels" in accepted and any(word in type(model).__name__ for word in _WITH_LOSS):
            named["labels"] = named["input_ids"]
        if "use_cache" in accepted:
            named["use_cache"] = False
        return Named(named, samples * tokens, vocabulary)
    if {"input_ids", "pixel_values", "return_loss"} <= accepted.keys():
        # A text beside each image, and a loss of all pairs.
        longest = getattr(getattr(config, "text_config", None), "max_position_embeddings", 0)
        if longest:
            images = _images(getattr(config, "vision_config", None), samples)
            return Named({"input_ids": ids(samples, longest), "pixel_values": images, "return_loss": True}, samples)
    if "pixel_values" in accepted and "input_ids" not in accepted:
        told = isinstance(getattr(config, "image_size", None), int)
        doubt = (
            "" if told else f"images are taken to have {_IMAGE} x {_IMAGE} points, as the configuration says nothing"
        )
        return Named({"pixel_values": _images(config, samples)}, samples, doubt=doubt)
    bands, frames = getattr(config, "num_mel_bins", 0), getattr(config, "max_source_positions", 0)
    if "input_features" in accepted and "labels" in accepted and bands and frames:
        # Its first convolutions halve the frames.
        words = ids(samples, config.max_target_positions)
        sound = torch.empty(samples, bands, 2 * frames, device="meta")
        return Named({"input_features": sound, "labels": words}, samples, config.vocab_size)
    if "input_values" in accepted and getattr(config, "conv_stride", None):
        sound = torch.empty(samples, _SECONDS * _RATE, device="meta")
        return Named({"input_values": sound}, samples, doubt=f"samples are taken for {_SECONDS} s of sound at 16 kHz")
    return None


def ids(samples: int, length: int) -> Tensor:
    """Token ids, without memory: (samples, length)."""
    return torch.empty(samples, length, dtype=torch.int64, device="meta")


def _images(config: Any, samples: int) -> Tensor:
    size = getattr(config, "image_size", None)
    size = size if isinstance(size, int) else _IMAGE
    return torch.empty(samples, getattr(config, "num_channels", 3), size, size, device="meta")
