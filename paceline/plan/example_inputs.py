"""What a model is called with in a micro-batch: token ids for language models, else what is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.errors import UserError
from paceline.models.transformer import Transformer
from paceline.plan.hugging_face_inputs import ids, named_inputs

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a model is called with: one tensor, arguments, or named arguments."""


@dataclass(frozen=True)
class Example:
    """One micro-batch.

    Attributes:
        arguments: Positional ones and named ones; of tensors the shapes and dtypes count.
        samples: In the micro-batch.
        tokens: Of all of them; for models that are no language models, samples.
        vocabulary: How many columns logits have; 0 where that is not known.
        doubt: What may not be as it is taken, or nothing.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    samples: int
    tokens: int
    vocabulary: int = 0
    doubt: str = ""


def example_inputs(model: nn.Module, samples: int, length: int = 0, inputs: Inputs | None = None) -> Example:
    """The micro-batch that a model is traced with.

    Args:
        model: The reference Transformer and transformers' language models get token ids and targets, transformers'
            models of images and of sound get those.
        samples: Samples in it.
        length: Tokens of a sequence; 0: as many as the model takes, of transformers' models 1,024 at most.
        inputs: What to call the model with instead; first dimensions that are those of the first tensor are made
            `samples` long.

    Raises:
        UserError: What to call the model with is not known.
    """
    if inputs is not None:
        return replace(_given(inputs, samples), doubt=_sequences_first(model) or _bags(model, inputs))
    if isinstance(model, Transformer):
        length = length or model.config.context
        tokens = ids(samples, length)
        return Example(((tokens, tokens), {}), samples, samples * length, model.config.vocabulary)
    if (known := named_inputs(model, samples, length)) is not None:
        return Example(((), known.arguments), samples, known.tokens, known.vocabulary, known.doubt)
    raise UserError(
        f"{type(model).__name__}: what it is called with is not known, so it cannot be traced; plan it as "
        "module:function, and let that function return (model, example), where example is a tensor, a tuple of "
        "arguments or a dict of named ones"
    )


def _sequences_first(model: nn.Module) -> str:
    for name, part in model.named_modules():
        if getattr(part, "batch_first", True) is False:
            return (
                f"the example's first dimension is taken for samples, but {type(part).__name__} {name}".rstrip()
                + " takes sequences first: where the model does not turn them round, as many steps of time are planned "
                "instead. Let it take samples first (batch_first=True)"
            )
    return ""


def _bags(model: nn.Module, inputs: Inputs) -> str:
    tensors = (each for each in tree_leaves(inputs) if isinstance(each, Tensor))
    lists = {each.shape[0] for each in tensors if each.dim() == 1 and not each.is_floating_point()}
    for name, part in model.named_modules():
        if isinstance(part, nn.EmbeddingBag) and len(lists) > 1:
            return (
                f"the example's first dimension is taken for samples, but EmbeddingBag {name}".rstrip()
                + " may take indices of several bags in it, with offsets: what a sample costs is then counted several "
                "times. Give it bags of one length, in two dimensions"
            )
    return ""


def _given(inputs: Inputs, samples: int) -> Example:
    first = next((each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dim()), None)
    if first is None:
        raise UserError("the example that a model is called with holds no tensor with a first dimension, of samples")

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != first.shape[0]:
            return value
        return torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")

    made: Any = tree_map(resized, inputs)
    if isinstance(made, Mapping):
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(made))
    else:
        arguments = (made if isinstance(made, tuple) else (made,)), {}
    # As embeddings take them.
    is_ids = first.dtype in (torch.int64, torch.int32) and first.dim() == 2
    return Example(arguments, samples, samples * first.shape[1] if is_ids else samples)
