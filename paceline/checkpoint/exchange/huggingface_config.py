"""A model's shape as Hugging Face's config.json says it, and back: the families GPT-2 and Llama."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig


class Gpt2(msgspec.Struct, kw_only=True):
    """The fields of a `GPT2Config` that decide what is computed; with their defaults there."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    quantization_config: dict[str, Any] | None = None


class Llama(msgspec.Struct, kw_only=True):
    """The fields of a `LlamaConfig` that decide what is computed; with their defaults there.

    Releases of transformers before 5 read `rope_theta` and `rope_scaling`, later ones `rope_parameters`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None


FAMILIES: dict[str, type[Gpt2] | type[Llama]] = {"gpt2": Gpt2, "llama": Llama}
"""By their `model_type`."""

_CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
_UNDROPPED = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "llama": ("attention_dropout",)}
_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_GELU_OF: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_UNSCALED = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}


def family_of(config: ModelConfig) -> str:
    """Which family a model belongs to: a key of `FAMILIES`.

    Raises:
        UserError: Neither; names what differs.
    """
    if config.position == "learned":
        family, name, wanted = "gpt2", "GPT-2", {"norm": "layernorm", "bias": True, "key_value_heads": config.heads}
        gated = {"activation": "gelu or gelu_tanh"} if config.activation not in _GELUS else {}
    else:
        family, name, wanted = "llama", "Llama", {"norm": "rmsnorm", "activation": "swiglu"}
        gated = {}
    other = {key: value for key, value in wanted.items() if getattr(config, key) != value} | gated
    if other:
        raise UserError(
            f"with position {config.position} Hugging Face has the family {name}, from which this model differs: "
            + ", ".join(f"{key} is {getattr(config, key)}, there {value}" for key, value in other.items())
            + "; export it as safetensors, under its own names"
        )
    return family


def to_huggingface(config: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """What config.json says of a model.

    Args:
        config: Its shape.
        dtype: Of its weights, without the module.
        end_of_text: The token that ends a text; None where it is not known.

    Raises:
        UserError: See `family_of`.
    """
    family = family_of(config)
    said: Gpt2 | Llama
    if family == "gpt2":
        said = Gpt2(
            vocab_size=config.vocabulary,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.feed_forward,
            activation_function=_GELUS[config.activation],
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tied,
        )
    else:
        said = Llama(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.feed_forward,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.context,
            num_key_value_heads=config.key_value_heads,
            head_dim=config.head_width,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attention_bias=config.bias,
            mlp_bias=config.bias,
            tie_word_embeddings=config.tied,
        )
    fields = {key: value for key, value in msgspec.to_builtins(said).items() if value is not None}
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **fields,
        **dict.fromkeys(_UNDROPPED[family], 0.0),
        # Otherwise it would be the families' own, which may be another token here, or none.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
    }


def from_huggingface(text: bytes) -> ModelConfig:
    """The model's shape that a config.json says.

    Raises:
        UserError: It is none, of another family, or of a model that is computed otherwise; says what.
    """
    try:
        values = msgspec.json.decode(text, type=dict[str, Any])
        family = values.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(f"model_type is {family!r}: expected {' or '.join(FAMILIES)}")
        said = msgspec.convert(values, FAMILIES[family])
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(str(error)) from None
    return _gpt2(said) if isinstance(said, Gpt2) else _llama(said)


def _gpt2(said: Gpt2) -> ModelConfig:
    _require(said, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    if said.activation_function not in _GELU_OF:
        raise UserError(f"activation_function is {said.activation_function!r}: expected {' or '.join(_GELU_OF)}")
    return ModelConfig(
        layers=said.n_layer,
        width=said.n_embd,
        heads=said.n_head,
        ff=0 if said.n_inner in (None, 4 * said.n_embd) else said.n_inner,
        context=said.n_positions,
        vocabulary=said.vocab_size,
        activation=_GELU_OF[said.activation_function],
        tied=said.tie_word_embeddings,
        norm_eps=said.layer_norm_epsilon,
    )


def _llama(said: Llama) -> ModelConfig:
    _require(said, hidden_act="silu", mlp_bias=said.attention_bias)
    config = ModelConfig(
        layers=said.num_hidden_layers,
        width=said.hidden_size,
        heads=said.num_attention_heads,
        kv_heads=said.num_key_value_heads or said.num_attention_heads,
        ff=said.intermediate_size,
        context=said.max_position_embeddings,
        vocabulary=said.vocab_size,
        norm="rmsnorm",
        position="rotary",
        activation="swiglu",
        bias=said.attention_bias,
        tied=said.tie_word_embeddings,
        rope_theta=_theta(said),
        norm_eps=said.rms_norm_eps,
    )
    _require(said, head_dim=said.head_dim and config.head_width)
    return config


def _theta(said: Llama) -> float:
    """The base of the rotary frequencies, where nothing else changes them."""
    for name, rope in (("rope_scaling", said.rope_scaling), ("rope_parameters", said.rope_parameters)):
        for key, value in (rope or {}).items():
            if key != "rope_theta" and _UNSCALED.get(key) != value:
                raise UserError(f"{name} has {key} {value!r}: expected rotary positions that are not scaled")
    theta = (said.rope_parameters or {}).get("rope_theta", said.rope_theta)
    if not isinstance(theta, (int, float, type(None))):
        raise UserError(f"rope_theta is {theta!r}: expected a number")
    return 10_000.0 if theta is None else float(theta)


def _require(said: Gpt2 | Llama, **wanted: Any) -> None:
    """Refuses what would compute something else than a model of paceline's."""
    for key, value in {**wanted, "quantization_config": None}.items():
        if getattr(said, key) != value:
            raise UserError(f"{key} is {getattr(said, key)!r}: expected {value!r}, as models here are computed")
