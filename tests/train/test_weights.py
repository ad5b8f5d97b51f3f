"""A run that begins with the weights of another: straight, and through Hugging Face's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data import Tokenizer
from tests.ranks import RankPool
from tests.train.processes import called, metrics, trained

SHORT = ("--steps", "3", "--log.every", "1", "--log.validate-every", "0", "--log.validate-batches", "1")


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


@pytest.fixture(scope="module")
def folder(ranks: RankPool, nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the run `first` and what `there` is of it for transformers."""
    folder = tmp_path_factory.mktemp("weights")
    status, _, err = trained(ranks, 2, folder, [*nano, *SHORT, "--folder", "first", "--strategy.zero", "3"])
    assert (status, err) == (0, "")
    flags = ("--format", "huggingface", "--out", "there")
    assert called(folder, "checkpoint", "export", "first", *flags)[0] == 0
    return folder


def test_a_run_begins_with_anothers_weights(ranks: RankPool, nano: list[str], folder: Path) -> None:
    flags = [*nano, *SHORT, "--weights", "first", "--folder", "straight"]
    status, out, err = trained(ranks, 2, folder, flags)
    assert (status, err) == (0, "") and "weights: step 3 of first/checkpoints/step-00000003" in out
    # The first batch again, of which it has learned.
    assert losses(folder / "straight")[0] < losses(folder / "first")[0] - 0.01
    assert called(folder, "checkpoint", "import", "there", "--out", "back")[0] == 0
    status, _, err = trained(ranks, 2, folder, ["back/train.yaml", *nano, *SHORT, "--folder", "again"])
    assert (status, err) == (0, "") and losses(folder / "again") == losses(folder / "straight")
    # That it goes on needs what it began with no more.
    flags = ["--resume", "again", "--steps", "4", "--workers", "2"]
    status, out, err = trained(ranks, 2, folder, flags)
    assert (status, err) == (0, "") and "going on after step 3" in out and "weights: step" not in out


def test_another_models_weights_are_refused(ranks: RankPool, nano: list[str], folder: Path) -> None:
    for flags, words in (
        (("--model.activation", "gelu_tanh"), "activation gelu, now gelu_tanh"),
        (("--model.heads", "4"), "heads 2, now 4"),
        (("--model.layers", "1"), "only it has blocks.1.attention_norm.weight"),
        (("--weights", "nowhere"), "nowhere is not there"),
    ):
        status, _, err = trained(ranks, 1, folder, [*nano, *SHORT, "--weights", "first", "--folder", "new", *flags])
        assert status == 2 and words in err and not (folder / "new").exists()


@pytest.mark.full
def test_transformers_reads_the_tokenizer(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(folder / "first" / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "there")
    text = "abc def  ghi\n\tüñ 😀"
    assert theirs.encode(text) == ours.encode(text) and theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == ours.end_of_text and theirs.model_max_length == 64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "there")
    assert model.generation_config.eos_token_id == ours.end_of_text
    inputs = theirs("abc", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
