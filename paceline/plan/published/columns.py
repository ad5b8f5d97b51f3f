"""What published tables call their columns: one name for each thing, with the unit that it is read in. Pure."""

from __future__ import annotations

import re

SYNONYMS: dict[str, str] = {
    # who measured it
    "source": "source url reference",
    "table": "table set case title section",
    "label": "golden_file environment framework software version date prov provenance image container",
    "notes": "notes note comment comments remark",
    "split": "split",
    "suspect": "suspect",
    # the model
    "model": "model model_name name model_size size arch architecture",
    "n_params": "n_params params parameters num_params n_parameters model_params param_count n_params_formula",
    "width": "d_model width hidden hidden_size hidden_dim n_embd dim embed_dim h",
    "heads": "n_heads heads num_heads num_attention_heads attention_heads n_head a",
    "kv_heads": "n_kv_heads kv_heads num_kv_heads num_key_value_heads kv_groups query_groups num_query_groups",
    "layers": "n_layers layers num_layers num_hidden_layers n_layer l",
    "ff": "ffn d_ff ff ffn_hidden ffn_hidden_size ffn_dim intermediate_size feed_forward",
    "expansion": "expansion_ratio expansion",
    "vocabulary": "vocab vocab_size vocabulary n_vocab padded_vocab padded_vocab_size",
    "context": (
        "seq_len seq sequence sequence_length seqlen context context_length ctx_len max_seq_len s seq_length "
        "max_seq_length max_sequence_length tokens_per_sample"
    ),
    "positions": "max_pos max_position_embeddings max_positions",
    "swiglu": "swiglu gated glu",
    "activation": "activation act_fn",
    "untied": "untied untie_embeddings",
    "tied": "tied tied_embeddings tie_word_embeddings",
    "position": "pos_emb position position_embedding position_embedding_type",
    "norm": "norm normalization",
    "no_bias": "no_bias disable_bias",
    "experts": "experts n_experts num_experts moe",
    # the machines
    "gpu": "gpu gpu_type gpu_name device device_type accelerator hardware gpu_model",
    "devices": "n_gpus gpus num_gpus n_gpu devices n_devices num_devices world_size ngpu",
    "hosts": "nodes n_nodes num_nodes hosts n_hosts",
    "devices_per_host": "gpus_per_node gpus_per_host devices_per_host",
    "network": "interconnect network inter_node internode fabric",
    # the batch
    "samples": (
        "microbatch microbatch_size micro_batch micro_batch_size mbs local_batch local_batch_size batch_size_per_gpu "
        "batch_per_gpu per_gpu_batch per_gpu_batch_size per_device_batch_size device_train_microbatch_size local_bs "
        "lbs batch_per_rank per_rank_batch_size batch_per_device batch_per_dp_rank microbatch_per_gpu sequences_per_gpu"
    ),
    "micro_batches": (
        "grad_accum grad_accumulation gradient_accumulation gradient_accumulation_steps batch_accum "
        "batch_accumulation_per_replica accumulation n_microbatches num_microbatches micro_batches"
    ),
    "global_batch": "global_batch global_batch_size gbs global_bs batch batch_size total_batch_size",
    "global_batch_tokens": "global_batch_tokens batch_tokens tokens_per_step tokens_per_batch gbs_tokens",
    # how ranks share it
    "tp": "tp tensor tensor_parallel tensor_parallel_size tp_size tensor_model_parallel_size",
    "pp": "pp pipeline pipeline_parallel pipeline_parallel_size pp_size pipeline_model_parallel_size",
    "cp": "cp context_parallel context_parallel_size cp_size",
    "ep": "ep expert_parallel expert_parallel_size",
    "dp": "dp data_parallel data_parallel_size dp_size dp_degree",
    "dp_shard": "dp_shard shard data_parallel_shard_degree fsdp_size fsdp fsdp_degree",
    "dp_replicate": "dp_replicate replicate replicas data_parallel_replicate_degree hsdp_replicas",
    "chunks": "vp vpp virtual_pp virtual_pipeline virtual_stages interleave n_chunks virtual_pipeline_size vp_size",
    "layers_per_chunk": "layers_per_virtual_stage num_layers_per_virtual_pipeline_stage",
    "schedule": "schedule pp_schedule pipeline_schedule",
    "parallelism": "parallelism parallel techniques strategy config configuration setup",
    "sharding": "sharding sharding_strategy zero zero_stage stage fsdp_strategy dp_type",
    "dist_opt": "dist_opt distributed_optimizer use_distributed_optimizer",
    "seq_parallel": "seq_parallel sequence_parallel sp",
    "async_tp": "async_tp tp_comm_overlap async_tensor_parallel",
    "overlap_grad": "overlap_grad overlap_grad_reduce",
    "overlap_param": "overlap_param overlap_param_gather",
    "recompute": (
        "recompute activation_checkpointing activation_checkpoint activation_recompute act_ckpt ac ckpt checkpointing "
        "recomputation recompute_granularity activation_ckpt selective_ac"
    ),
    "recompute_method": "recompute_method",
    "recompute_layers": "recompute_layers recompute_num_layers",
    "offload": "act_cpu_offload cpu_offload offload",
    "optimizer": "optimizer optim optimizer_name",
    # what it computes in, and with which kernels
    "precision": "precision dtype compute_dtype param_dtype training_precision",
    "mode": "mp_mode mixed_precision",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8 float8 fp8_recipe",
    "compile": "compile torch_compile compiled",
    "attention": "attn_backend attention attention_impl attn_impl attention_backend flash_attention",
    # what was measured
    "seconds": (
        "step_time iter_time iteration_time step_seconds iter_seconds seconds_per_step sec_per_step iter_time_median "
        "time_per_step time_per_iteration seconds step_time_median"
    ),
    "tokens_per_second": "tokens_per_s tokens_per_sec tokens_s throughput_tokens_per_s total_tps",
    "tokens_per_second_device": (
        "tokens_per_s_per_gpu tokens_per_sec_per_gpu tokens_s_gpu tps_per_gpu tokens_per_gpu_per_s "
        "tokens_per_second_per_gpu tps tgs wps wps_per_gpu tokens_per_s_gpu tok_s_gpu tok_per_s_per_gpu "
        "tokens_per_gpu_s tokens_per_gpu_per_second tokens_per_sec_gpu"
    ),
    "samples_per_second": "samples_per_s samples_per_sec sequences_per_s throughput_samples_per_s",
    "model_flops": "model_tflops_per_gpu tflops_per_gpu_model model_tflop_per_s_per_gpu model_tflops",
    "flops": (
        "tflops_per_gpu tflops tflop_per_s_per_gpu achieved_tflops_per_gpu achieved_tflops tflop_per_sec_per_gpu "
        "tflops_per_s_per_gpu tflop_s_per_gpu tflops_s_per_gpu"
    ),
    "hardware_flops": "hw_tflops_per_gpu hardware_tflops_per_gpu hfu_tflops_per_gpu hw_tflops hardware_tflops",
    "mfu": "mfu model_flops_utilization",
    "hfu": "hfu hardware_flops_utilization pct_of_peak percent_of_peak peak",
    "peak_bytes": (
        "peak_alloc peak_memory memory peak_mem max_memory memory_peak mem peak_allocated max_allocated memory_per_gpu "
        "peak_memory_per_gpu memory_allocated max_reserved peak_reserved reserved memory_reserved max_memory_reserved "
        "mem_alloc mem_reserved max_memory_allocated peak_memory_reserved peak_memory_allocated peak_mem_reserved "
        "max_mem"
    ),
    "steady_bytes": "steady_alloc steady_memory steady_allocated",
    "memory_share": "memory_share memory_utilization",
    "states": "published published_value model_states formula_value",
    "formula": "formula",
    "unit": "unit units",
    # printed beside them and checked elsewhere
    "checked": (
        "mfu_recomputed mfu_diff_pct_points measured_rank steps loss iterations aggregate_pflops days mfu_diff "
        "peak_tflops total_pflops aggregate_tflops mfu_recomputed_pct rel_gap_pct kind"
    ),
    "settings": (
        "act_ckpt_reentrant_yaml limit_all_gathers_yaml limit_all_gathers torch_fsdp2 megatron_fsdp "
        "no_grad_accum_fusion fp32_attn_softmax ce_fusion mock_data"
    ),
}
"""Names of columns, separated by spaces, by what they are; units at their end are left out."""

_UNITS: dict[str, dict[str, float]] = {
    "time": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0},
    "share": {"pct": 0.01, "percent": 0.01},
    "size": {"bytes": 1.0, "mb": 1e6, "mib": 2.0**20, "gb": 1e9, "gib": 2.0**30},
    "number": {"m": 1e6, "b": 1e9, "millions": 1e6, "billions": 1e9, "yaml": 1.0},
}
"""Units at the end of a column's name, and what a number in them is worth in seconds, shares, bytes or ones."""

_MEASURED_IN = {
    **dict.fromkeys(("mfu", "hfu", "memory_share"), "share"),
    **dict.fromkeys(("peak_bytes", "steady_bytes", "states"), "size"),
    "seconds": "time",
}
"""What columns are measured in that are no plain numbers."""

_DEFAULTS = {"mfu": 0.01, "hfu": 0.01, "model_flops": 1e12, "hardware_flops": 1e12, "flops": 1e12}
"""What numbers are worth where the name has no unit."""

_NAMES = {name: canonical for canonical, names in SYNONYMS.items() for name in names.split()}


def resolve(header: str) -> tuple[str, float] | None:
    """What a column is, and what its numbers are to be multiplied by; None where that is not known.

    Case, spaces and signs make no difference: "Step time (ms)", step_time_ms and StepTime_ms are one.
    """
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", header.strip())
    text = text.replace("%", " pct ").replace("/", " per ").lower()
    name = "_".join(re.findall(r"[a-z0-9]+", text))
    if name in _NAMES:
        canonical = _NAMES[name]
        return canonical, _DEFAULTS.get(canonical, 1.0)
    stem, _, unit = name.rpartition("_")
    kind = next((kind for kind, units in _UNITS.items() if unit in units), None)
    if kind is not None and stem in _NAMES:
        canonical = _NAMES[stem]
        # A share of the device's memory is no size, and a peak in bytes is none of arithmetic.
        canonical = {("peak_bytes", "share"): "memory_share", ("hfu", "size"): "peak_bytes"}.get(
            (canonical, kind), canonical
        )
        return (canonical, _UNITS[kind][unit]) if kind == _MEASURED_IN.get(canonical, "number") else None
    for whose in ("_per_gpu", "_per_device", "_per_rank"):
        # Memory is of one device, whether a name says it or not.
        if name.endswith(whose) and (found := resolve(name.removesuffix(whose))) and found[0] in _OF_A_DEVICE:
            return found
    return None


_OF_A_DEVICE = frozenset({"peak_bytes", "steady_bytes", "memory_share"})
