from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.plan.published.megatron_memory import megatron_run

ROW = {
    "case": "gpt3_mcore_te_tp2_pp2_something",
    "golden_file": "golden_values_dev_dgx_a100.json",
    "environment": "dev",
    "gpu": "a100",
    "n_gpus": "8",
    "tp": "2",
    "pp": "2",
    "n_layers": "12",
    "d_model": "512",
    "n_heads": "8",
    "seq_len": "1024",
    "microbatch": "4",
    "global_batch": "32",
    "bf16": "true",
}


def test_a_row_s_options_make_the_run() -> None:
    run = megatron_run(ROW)
    assert (run.config.vocabulary, run.tensor, run.pipeline, run.shards) == (50432, 2, 2, 1)
    assert run.transformer_engine and run.deterministic and run.attention == "flash"
    assert megatron_run({**ROW, "dist_opt": "true"}).shards == 2
    assert megatron_run({**ROW, "swiglu": "true"}).config.feed_forward == 1344
    assert megatron_run({**ROW, "vocab_size": "131073"}).config.vocabulary == 131328


def test_what_options_leave_out_is_read_from_the_test_s_name() -> None:
    assert not megatron_run({**ROW, "case": "gpt3_mcore_tp1_pp2"}).transformer_engine
    assert not megatron_run({**ROW, "case": "x_cp2_nondeterministic"}).deterministic
    gb200 = {**ROW, "gpu": "gb200", "n_gpus": "", "dist_opt": "true"}
    assert megatron_run(gb200).shards == 2 and megatron_run({**gb200, "case": "x_1node"}).shards == 1
    old = {**ROW, "environment": "lts", "golden_file": "golden_values_lts_dgxa100_dracooci.json"}
    assert megatron_run(old).attention == "unfused"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case": "gpt3_mcore_te_tp2_pp2_mla"}, "latent attention"),
        ({"case": "gpt3_15b_8t_release", "global_batch": ""}, "global_batch"),
        ({"n_gpus": "6"}, "n_gpus"),
        ({"gpu": "abacus"}, "gpu"),
        ({"d_model": "wide"}, "d_model: expected a whole number, got 'wide'"),
        ({"experts": "8"}, "experts"),
    ],
)
def test_rows_that_are_not_predicted_say_why(change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_run({**ROW, **change})
