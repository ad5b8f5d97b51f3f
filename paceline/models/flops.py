"""What a model costs, in parameters and floating-point operations, from its shape alone."""

from __future__ import annotations

import re

from paceline.models.config import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied output layer counts once.

    For GPT-2's shape V h + s h + L (4 h^2 + 8 h^2 + 13 h) + 2 h: embeddings of V tokens and s positions,
    L blocks of attention (4 h^2), feed-forward (8 h^2), biases and two norms, and the final norm. Grouped
    queries, swiglu and the absence of biases change the terms as written below.
    """
    c = config
    norm = c.width * (2 if c.norm == "layernorm" and c.bias else 1)
    biases = _qkv_outputs(c) + c.width + _up_outputs(c) + c.width if c.bias else 0
    embeddings = c.vocabulary * c.width + (c.context * c.width if c.position == "learned" else 0)
    output = 0 if c.tied else c.vocabulary * c.width
    return embeddings + c.layers * (_block_matrices(c) + biases + 2 * norm) + norm + output


def matrix_parameters(config: ModelConfig) -> int:
    """Weights that each token is multiplied by: the blocks' matrices and the output layer.

    Embeddings are looked up, not multiplied, so they do not count; a tied output layer does.
    Biases and norms, a thousandth of the whole, are left out.
    """
    return config.layers * _block_matrices(config) + config.vocabulary * config.width


def flops_per_token(config: ModelConfig, context: int, causal: bool = False) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 12 L h s.

    N is `matrix_parameters`: 2 operations a weight forward, 4 backward (Kaplan et al. 2020, section 2.1).
    Attention's two products, of queries with keys and of scores with values, cost 4 h s a token and
    layer forward, three times that with backward (Chowdhery et al. 2022, PaLM, appendix B). Recomputation
    does not count: these are the operations the model needs, which is what MFU divides by the peak.

    Args:
        config: The model's shape.
        context: Tokens per sequence, s.
        causal: Count only the half of the scores that a causal mask leaves, 6 L h s. Published MFU
            figures (PaLM, llm-foundry, torchtitan) count the whole, as the default does.
    """
    attention = 12 * config.layers * config.width * context
    return 6 * matrix_parameters(config) + (attention // 2 if causal else attention)


def peak_flops(device_name: str, precision: str = "bfloat16") -> float | None:
    """Dense peak of a GPU in FLOP/s in a precision, by the name `torch.cuda.get_device_name` gives.

    From the makers' data sheets, without sparsity: the figures that `paceline plan` counts with, whose table says where
    each is from. Those of TF32, half of bf16's, are not in it and recalled. None where the peak is not known,
    as for a MIG slice or the H100 variants between PCIe and SXM, and where there are no units for the precision.

    Args:
        device_name: Such as "NVIDIA H200".
        precision: bfloat16, float16, tf32 or float32, the last without TF32.
    """
    if "MIG" in device_name:
        return None
    peaks = _PEAKS[precision]
    return next((peak for pattern, peak in peaks if re.search(pattern, device_name, re.IGNORECASE)), None)


_V100, _A100, _L40S, _4090 = r"\bV100\b", r"\bA100\b", r"\bL40S\b", r"\bRTX 4090$"
_H100, _H100_PCIE, _H200 = r"\bH100 80GB HBM3\b|\bH100 SXM", r"\bH100 PCIe\b", r"\bH200\b(?! NVL)"
_GH200, _B200, _GB200, _MI300X = r"\bGH200\b", r"\bB200\b", r"\bGB200\b", r"\bMI300X\b"

_HALF: tuple[tuple[str, float], ...] = (
    (_A100, 312e12),
    (_H100_PCIE, 756e12),
    (_H100, 989.4e12),
    (_H200, 989.4e12),
    (_GH200, 989e12),
    (_B200, 2250e12),
    (_GB200, 2500e12),
    (_MI300X, 1307.4e12),
    (_L40S, 362.05e12),
    (_4090, 165.2e12),
)

_PEAKS: dict[str, tuple[tuple[str, float], ...]] = {
    "bfloat16": _HALF,
    "float16": ((_V100, 125e12), *_HALF),
    "tf32": (
        (_A100, 156e12),
        (_H100_PCIE, 378e12),
        (_H100, 494.7e12),
        (_H200, 494.7e12),
        (_MI300X, 653.7e12),
        (_L40S, 183e12),
        (_4090, 82.6e12),
    ),
    "float32": (
        (_V100, 15.7e12),
        (_A100, 19.5e12),
        (_H100_PCIE, 51e12),
        (_H100, 67e12),
        (_H200, 67e12),
        (_GH200, 67e12),
        (_B200, 80e12),
        (_GB200, 80e12),
        (_MI300X, 163.4e12),
        (_L40S, 91.6e12),
        (_4090, 82.6e12),
    ),
}


def _qkv_outputs(c: ModelConfig) -> int:
    return (c.heads + 2 * c.key_value_heads) * c.head_width


def _up_outputs(c: ModelConfig) -> int:
    return (2 if c.activation == "swiglu" else 1) * c.feed_forward


def _block_matrices(c: ModelConfig) -> int:
    """Weights of one block's four matrices: qkv, attention output, feed-forward up and down."""
    return c.width * (_qkv_outputs(c) + c.width + _up_outputs(c) + c.feed_forward)
