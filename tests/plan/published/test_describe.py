from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.models.flops import flops_per_token, parameter_count
from paceline.models.presets import PRESETS
from paceline.plan.published.describe import Described, describe
from paceline.plan.published.measured import measured_seconds
from paceline.plan.published.shapes import FAMILIES
from paceline.plan.published.table import Row, read


def row(tmp_path: Path, **cells: object) -> Row:
    file = tmp_path / "row.csv"
    file.write_text(",".join(cells) + "\n" + ",".join(f'"{cell}"' for cell in cells.values()) + "\n", encoding="utf-8")
    return read(file).rows[0]


MPT = {"source": "mosaicml/llm-foundry", "model": "7b", "n_gpus": 16, "gpu": "a100_40gb", "seq_len": 2048}


def test_named_models_have_the_published_parameters() -> None:
    for family, size, parameters in (
        ("llama2", "7b", 6.74e9),
        ("llama2", "13b", 13.0e9),
        ("llama2", "34b", 33.7e9),
        ("llama2", "70b", 69.0e9),
        ("llama3", "1b", 1.24e9),
        ("llama3", "3b", 3.21e9),
        ("llama3", "8b", 8.03e9),
        ("llama3", "70b", 70.6e9),
        ("llama3", "405b", 405.9e9),
        ("llama1", "65b", 65.3e9),
        ("llama1", "30b", 32.5e9),
        ("mpt", "7b", 6.66e9),
        ("mpt", "70b", 64.9e9),
        ("gpt", "175b", 174.6e9),
        ("gpt", "1t", 1008e9),
        ("mistral", "7b", 7.24e9),
        ("nemotron", "15b", 15.6e9),
    ):
        assert parameter_count(FAMILIES[family][size]) == pytest.approx(parameters, rel=0.02), (family, size)


@pytest.mark.parametrize("name", ["llama-8b", "llama-70b", "gpt2-124m", "llama2-7b"])
def test_a_users_own_row_may_name_a_preset(tmp_path: Path, name: str) -> None:
    cells = {"gpu": "h100", "n_gpus": 8, "microbatch_size": 1, "seq_len": 1024}
    assert describe(row(tmp_path, model=name, **cells)).run.config == replace(PRESETS[name], context=1024)


@pytest.mark.parametrize(("name", "of"), [("Llama 8B", "llama3"), ("llama 405b", "llama3"), ("llama 13b", "llama2")])
def test_a_llama_of_no_version_is_one_that_has_the_size(tmp_path: Path, name: str, of: str) -> None:
    cells = {"gpu": "h100", "n_gpus": 8, "microbatch_size": 1, "seq_len": 1024, "source": "a blog"}
    config = FAMILIES[of][name.split()[1].lower()]
    assert describe(row(tmp_path, model=name, **cells)).run.config == replace(config, context=1024)


def test_a_row_of_llm_foundry(tmp_path: Path) -> None:
    cells = {**MPT, "microbatch_size": 6, "global_batch": 192, "sharding": "SHARD_GRAD_OP", "precision": "bf16"}
    described = describe(row(tmp_path, **cells, mp_mode="PURE", activation_checkpointing=True))
    run = described.run
    assert (run.samples, run.micro_batches, run.data, run.zero, run.recompute) == (6, 2, 16, 2, "unit")
    assert (run.gathered, run.reduced, described.stack) == (2, 2, "composer")


def test_a_row_of_torchtitan_names_its_model_alone(tmp_path: Path) -> None:
    cells = {"source": "pytorch/torchtitan", "model": "Llama 3.1 8B", "n_gpus": 128, "gpu": "h100", "seq_len": 8192}
    one = describe(
        row(tmp_path, **cells, local_batch_size=2, parallelism="FSDP 16, TP 8", compile="yes", float8="True")
    )
    assert (one.run.config.kv_heads, one.run.tensor, one.run.data) == (8, 8, 16)
    assert (one.run.dtype, one.compiled, one.run.zero, one.run.sequence_parallel) == ("float8", True, 3, True)
    hybrid = describe(row(tmp_path, **cells, local_batch_size=1, dp_shard=8, dp_replicate=16))
    assert (hybrid.run.zero, hybrid.run.shard, hybrid.run.samples) == (3, 8, 1)


def test_rows_of_ibm_are_of_llama_2_and_reduce_in_what_they_compute_in(tmp_path: Path) -> None:
    cells = {"model": "70b", "n_gpus": 128, "gpu": "a100", "seq_len": 4096, "local_batch_size": 2}
    for source in ("foundation-model-stack/fms-fsdp", "pytorch.org/blog/maximizing-training", "IBM"):
        described = describe(row(tmp_path, source=source, **cells, activation_checkpointing="Selective"))
        run = described.run
        assert (described.stack, run.config.vocabulary, run.reduced) == ("fms", 32000, 2)
        assert (run.recompute, run.recompute_share) == ("unit", 0.5)


def test_a_model_of_no_known_family_is_said_to_be_taken_for_another(tmp_path: Path) -> None:
    cells = {"n_gpus": 8, "gpu": "a100", "Seq length": 2048, "local_batch_size": 1}
    qwen = describe(row(tmp_path, model="Qwen2.5-7B", **cells))
    assert qwen.run.config.context == 2048
    assert qwen.assumed[0] == "the shape of llama2 of that size"
    for known in ("Llama 3.1 8B", "llama-8b", "mpt-7b"):
        assert describe(row(tmp_path, model=known, **cells)).assumed == ("one micro-batch a step",)


def test_sizes_that_are_not_those_of_the_model_that_is_named_are_told(tmp_path: Path) -> None:
    cells = {**MPT, "microbatch_size": 6, "global_batch": 192}
    assert "d_model 1024 where 7b has 4096" in describe(row(tmp_path, **cells, d_model=1024)).assumed
    assert not describe(row(tmp_path, **cells, d_model=4096, n_layers=32)).assumed


def test_words_that_are_not_known_are_told_and_others_mean_what_they_say(tmp_path: Path) -> None:
    cells = {**MPT, "microbatch_size": 6, "global_batch": 192}

    def of(**said: object) -> tuple[str, int, str, bool]:
        described = describe(row(tmp_path, **cells, **said))
        run = described.run
        return run.dtype, run.zero, run.recompute, any("is not predicted" in each for each in described.assumed)

    assert of() == ("bfloat16", 3, "none", False)
    assert of(precision="bf17") == ("bfloat16", 3, "none", True)
    assert of(sharding="thirds") == ("bfloat16", 3, "none", True)
    assert of(sharding="zero9") == of(sharding="ZeRO stage 5") == ("bfloat16", 3, "none", True)
    assert of(sharding="ZeRO stage 1") == ("bfloat16", 1, "none", False)
    assert of(compile="maybe") == of(seq_parallel="perhaps") == ("bfloat16", 3, "none", True)
    assert of(activation_checkpointing="perhaps") == ("bfloat16", 3, "unit", True)
    assert of(sharding="none", precision="32-true", mp_mode="DEFAULT") == ("float32", 0, "none", False)
    assert of(activation_checkpointing="per-op SAC") == ("bfloat16", 3, "attention", False)
    assert of(sharding="ZeRO-2", precision="16-mixed") == ("float16", 2, "none", False)
    assert of(precision="bf16-mixed", activation_checkpointing="True") == ("bfloat16", 3, "unit", False)
    assert of(optimizer="Adafactor") == of(cpu_offload="True") == ("bfloat16", 3, "none", True)
    assert of(optimizer="fused AdamW", cpu_offload="False") == ("bfloat16", 3, "none", False)


def test_hosts_and_devices_must_go_together(tmp_path: Path) -> None:
    cells = {**MPT, "microbatch_size": 6, "global_batch": 192, "n_gpus": 16}
    assert describe(row(tmp_path, **cells, nodes=4)).devices_per_host == 4
    for wrong in ({"nodes": 3}, {"nodes": 2, "gpus_per_node": 4}):
        with pytest.raises(UserError, match="nodes: expected 16 devices"):
            describe(row(tmp_path, **{**cells, **wrong}))


@pytest.mark.parametrize(("degree", "zero"), [(0, 1), (16, 3)])
def test_nemo_s_column_fsdp_is_0_for_none(tmp_path: Path, degree: int, zero: int) -> None:
    cells = {**MPT, "source": "NeMo", "model": "LLAMA3_8B", "fsdp": degree}
    run = describe(row(tmp_path, **cells, microbatch_size=6, global_batch=192)).run
    assert (run.zero, run.devices) == (zero, 16)


def test_groups_of_tensor_and_pipeline_ranks_are_marked(tmp_path: Path) -> None:
    cells = {"d_model": 12288, "n_layers": 96, "n_heads": 96, "seq_len": 2048, "gpu": "a100", "vocab": 51200}
    described = describe(row(tmp_path, **cells, n_gpus=64, tp=8, pp=4, microbatch=1, global_batch=64, recompute="full"))
    assert (described.run.data, described.run.micro_batches) == (2, 32)
    assert any("formula" in each for each in described.assumed)


def test_throughputs_utilisation_and_flops_tell_the_same_step(tmp_path: Path) -> None:
    def of(**cells: object) -> float:
        one = row(tmp_path, **MPT, microbatch_size=6, global_batch=96, **cells)
        return measured_seconds(one, describe(one), 312e12)[0]

    config = FAMILIES["mpt"]["7b"]
    flops = flops_per_token(config, 2048) * 6 * 2048
    seconds = flops / 0.5 / 312e12
    assert of(mfu_pct=50) == pytest.approx(seconds)
    assert of(model_tflops_per_gpu=156) == pytest.approx(seconds)
    assert of(tokens_per_s_per_gpu=6 * 2048 / seconds) == pytest.approx(seconds)
    assert of(tokens_per_s=16 * 6 * 2048 / seconds) == pytest.approx(seconds)
    assert of(samples_per_s=96 / seconds) == pytest.approx(seconds)
    assert of(iter_time_ms=1e3 * seconds) == pytest.approx(seconds)
    assert of(hfu_pct=50, activation_checkpointing="full") == pytest.approx(seconds * 4 / 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_gpus": ""}, "n_gpus: expected the number of devices"),
        ({"gpu": ""}, "gpu: expected the device's name"),
        ({"global_batch": 100}, "expected a global batch that 16 ranks x 6 samples divide, got 100"),
        ({"global_batch": "", "microbatch_size": ""}, "expected a micro-batch or a global batch"),
        ({"tp": 3}, "divides"),
        ({"dp": 4}, "expected dp = n_gpus"),
        ({"model": "Mixtral 8x7b"}, "only dense Transformers"),
        ({"experts": 8}, "only dense Transformers"),
        ({"ep": 8}, "only dense Transformers"),
        ({"model": "Qwen3_30B_a3B"}, "only dense Transformers"),
        ({"model": "GPT OSS 120B"}, "only dense Transformers"),
        ({"model": "mystery", "source": ""}, "model 'mystery' is not known"),
        ({"n_heads": 7}, "multiple of heads"),
        ({"precision": "fp4"}, "8 bits or more"),
        ({"n_gpus": "-8"}, "n_gpus: expected a whole number from 1 to"),
        ({"n_params": "6.7"}, "n_params: expected a number of parameters, got '6.7'; write billions as 8B"),
    ],
)
def test_what_a_row_lacks_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(row(tmp_path, **{**MPT, "microbatch_size": 6, "global_batch": 192, **change}))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"mfu_pct": 440}, "mfu_pct: 440 is 440 % of the device's peak, 312 TFLOP/s: is it in other units"),
        ({"step_time_s": 0.0187}, "step_time_s: 0.0187 is [0-9,]+ % of the device's peak"),
        ({"tokens_per_s_per_gpu": 8e6}, "of the device's peak"),
    ],
)
def test_what_no_device_computes_is_told(tmp_path: Path, cells: dict[str, object], words: str) -> None:
    one = row(tmp_path, **MPT, microbatch_size=6, global_batch=96, **cells)
    with pytest.raises(UserError, match=words):
        measured_seconds(one, describe(one), 312e12)


def test_a_row_without_a_measurement_says_so(tmp_path: Path) -> None:
    one = row(tmp_path, **MPT, microbatch_size=6)
    described: Described = describe(one)
    with pytest.raises(UserError, match="expected a measured step time"):
        measured_seconds(one, described, 312e12)
