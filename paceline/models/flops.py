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

    From the makers' data sheets (dense, without sparsity). The V100 has no bf16 units: its figure is for
    fp16. None where the peak is not known, as for a MIG slice or the H100 variants between PCIe and SXM.
    """
    if "MIG" in device_name:
        return None
    peaks = _PEAKS_FP32 if precision == "float32" else _PEAKS
    return next((peak for pattern, peak in peaks if re.search(pattern, device_name, re.IGNORECASE)), None)


_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bV100\b", 125e12),
    (r"\bA100\b", 312e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 80GB HBM3\b|\bH100 SXM", 989.4e12),
    (r"\bH200\b(?! NVL)", 989.4e12),
    (r"\bGH200\b", 989e12),
    (r"\bB200\b", 2250e12),
    (r"\bGB200\b", 2500e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bL40S\b", 362.05e12),
    (r"\bRTX 4090$", 165.2e12),
)


_PEAKS_FP32: tuple[tuple[str, float], ...] = (
    (r"\bA100\b", 19.5e12),
    (r"\bH100 80GB HBM3\b|\bH100 SXM", 67e12),
    (r"\bH200\b(?! NVL)", 67e12),
    (r"\bMI300X\b", 163.4e12),
    (r"\bL40S\b", 91.6e12),
    (r"\bRTX 4090$", 82.6e12),
)
"""Without TF32, which torch leaves off."""


def _qkv_outputs(c: ModelConfig) -> int:
    return (c.heads + 2 * c.key_value_heads) * c.head_width


def _up_outputs(c: ModelConfig) -> int:
    return (2 if c.activation == "swiglu" else 1) * c.feed_forward


def _block_matrices(c: ModelConfig) -> int:
    """Weights of one block's four matrices: qkv, attention output, feed-forward up and down."""
    return c.width * (_qkv_outputs(c) + c.width + _up_outputs(c) + c.feed_forward)
