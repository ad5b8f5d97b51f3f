"""`paceline plan --hardware`: what a user sees, and what a mistake is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.train.command_line import parse_train_arguments

ISSUE = ["plan", "--model", "llama-8b", "--hardware", "h100", "--devices", "64", "--batch-tokens", "4M"]


def test_a_plan_has_a_table_a_recommendation_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ISSUE, "--context", "8192", "--tokens", "1T", "--price", "2.5", "--power-price", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 120
    assert "a step: 4,194,304 tokens, 512 samples of 8,192, 8 on each device" in shown
    rows = [line for line in shown.splitlines() if line.startswith("zero ")]
    assert {re.split("  +", row)[0] for row in rows} >= {"zero 0", "zero 1", "zero 2", "zero 3"}
    (heads,) = (line.split() for line in shown.splitlines() if line.startswith("strategy") and " bound " in line)
    assert " ".join(heads[1:]) == "bound param grad optim activ logits buckets gathered framework days kWh cost"
    details = {re.split("  +", row)[0]: re.split("  +", row)[1:] for row in rows[len(rows) // 2 :]}
    assert details["zero 0"][0] == "compute" and len(details["zero 0"]) == 9, "it does not fit, and trains no tokens"
    assert float(details["zero 3"][1]) < 1 < float(details["zero 1"][1]) == float(details["zero 2"][1])
    assert float(details["zero 3"][9]) > 20 and details["zero 3"][11].endswith("k")
    for words in ("Take zero", "bound by", "parameters", "sends", "1.00T tokens:", "days", "kWh", "costs"):
        assert words in shown


def test_json_has_what_is_shown_and_parts_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ISSUE, "--tokens", "1T", "--price", "2", "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["devices"], plan["context"], plan["batch_tokens"], plan["parameters"]) == (64, 8192, 2**22, 8030261248)
    for row in plan["settings"]:
        assert 0 <= row["slowed"] < row["compute"]
        parts = row["compute"] + sum(row["exposed"].values()) + row["optimizer"] + row["bubble"]
        assert row["seconds"] == pytest.approx(parts)
        assert row["tokens_per_second"] == pytest.approx(2**22 / row["seconds"])
        assert row["fits"] == (row["spare"] >= 0) and row["spare"] == row["capacity"] - row["memory"]["peak"]
    assert all(("budget" in row) == row["fits"] for row in plan["settings"])
    best = plan["recommended"]
    assert next(row["budget"] for row in plan["settings"] if row["name"] == best["name"]) == plan["budget"]
    assert best["fits"] and best["seconds"] == min(row["seconds"] for row in plan["settings"] if row["fits"])
    hours = 1e12 / best["tokens_per_second"] / 3600
    assert plan["budget"]["cost"] == pytest.approx(hours * 64 * 2)
    assert plan["budget"]["kilowatt_hours"] == pytest.approx(hours * 64 * 0.7)
    assert best["mfu"] == pytest.approx(
        (6 * 7504658432 + 12 * 32 * 4096 * 8192) * 2**22 / 64 / best["seconds"] / 989.4e12, rel=1e-3
    )


def test_where_precisions_are_compared_settings_are_told_with_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "nano", "--hardware", "4090", "--devices", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    best, other = re.findall(r"zero 0 (?:float32|bfloat16)", shown)[:2]
    assert f"Take {best}, 1 micro-batch" in shown and f"; {other} takes" in shown


def test_what_is_written_is_a_run_of_paceline_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    small = ["plan", "--model", "gpt2-124m", *ISSUE[3:]]
    assert main([*small, "--context", "512", "--tokens", "10B", "--write", str(path)]) == 0
    config = parse_train_arguments([str(path)])
    assert (config.model.preset, config.model.context, config.batch) == ("gpt2-124m", 512, 8192)
    assert config.steps == -(-10 * 10**9 // 2**22)
    assert config.strategy.gradients == "sum" and config.strategy.precision == "bfloat16"
    assert config.batch % (64 * config.micro_batch) == 0
    # Of as many samples as ranks compute at once: more are the same ops again.
    assert main(["check", str(path), "--devices", "64", "--batch", str(64 * config.micro_batch)]) == 0
    capsys.readouterr()
    assert main(["plan", str(path), "--hardware", "h100", "--devices", "64", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["batch_tokens"] == 2**22


@pytest.mark.full
def test_a_configuration_is_told_as_it_is_beside_what_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"

    def planned(text: str, hardware: str = "h100") -> tuple[dict[str, Any], str]:
        path.write_text(text)
        asked = ["plan", str(path), "--hardware", hardware, "--devices", "8"]
        assert main([*asked, "--json", "-"]) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert main(asked) == 0
        return numbers, " ".join(capsys.readouterr().out.split())

    numbers, shown = planned("strategy: {zero: 3, recompute: unit, accumulation: each}\nbatch: 16\nmicro_batch: 1\n")
    own, best = numbers["as_it_is"], numbers["recommended"]
    assert (own["strategy"]["zero"], own["strategy"]["recompute"]) == (3, "unit")
    assert own["strategy"]["precision"] == "bfloat16"
    assert own["micro_batch"] * own["micro_batches"] == best["micro_batch"] * best["micro_batches"] == 2
    assert own["seconds"] > 1.05 * best["seconds"]
    slower = f"{100 * (own['seconds'] / best['seconds'] - 1):.0f} % longer"
    assert f"{path} as it is: zero 3, 2 micro-batches of 1 sample" in shown and slower in shown
    # As paceline train would find it there.
    assert planned("", "v100")[0]["as_it_is"]["strategy"]["precision"] == "float32"
    numbers, shown = planned("strategy: {zero: 2, shard: 3}\n")
    assert "as it is: strategy.shard: 8 ranks cannot form groups of 3" in shown and numbers["as_it_is"]["error"]
    assert "as_it_is" not in planned("plan: auto\n")[0]
    # Micro-batches of 3 and 1 samples, and not of 3 and 3.
    uneven = planned("batch: 32\nmicro_batch: 3\n")[0]
    assert uneven["as_it_is"]["tokens_per_second"] * uneven["as_it_is"]["seconds"] == pytest.approx(
        uneven["batch_tokens"]
    )
    assert "tf32 is no part of forecasts" in planned("tf32: true\nstrategy: {precision: float32}\n")[1]


@pytest.mark.full
def test_what_does_not_fit_as_it_is_misses_by_so_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: llama-8b}\nbatch: 64\nmicro_batch: 8\nstrategy: {zero: 0}\n")
    assert main(["plan", str(path), "--hardware", "h100", "--devices", "8"]) == 0
    assert re.search(r"as it is: zero 0, .* which misses by [\d,.]+ GiB\.", " ".join(capsys.readouterr().out.split()))


@pytest.mark.full
def test_nothing_fits_says_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama-1b", "--hardware", "v100", "--devices", "1", "--batch-tokens", "8k"]
    assert main(arguments) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Nothing fits: zero 0, .* misses by [\d.]+ GiB", shown)
    assert re.search(r"It would fit with 2 devices( and a step of 2 samples)? or --hardware \w+", shown)
    assert "Nothing is said" not in shown
    assert main([*arguments, "--what-if", "--tokens", "1B"]) == 1
    assert "Nothing is said of --tokens, --what-if" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--write", "run.yaml"]) == 2
    assert "nothing fits" in capsys.readouterr().err


@pytest.mark.full
def test_a_network_that_nothing_crosses_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt2-124m", "--hardware", "a100", "--network", "0.5", "--devices"]
    assert main([*arguments, "8"]) == 0
    assert "warning: --network 0.5 changes nothing: 8 devices are on one host" in capsys.readouterr().out
    assert main([*arguments, "16"]) == 0
    assert "changes nothing" not in capsys.readouterr().out


def test_what_cannot_be_written_is_told_before_anything_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests.engine.models:Stack", "--hardware", "a100", "--devices", "8"]
    assert main([*arguments, "--write", "run.yaml"]) == 2
    told = capsys.readouterr()
    assert "which tests.engine.models:Stack is none of" in told.err and not told.out


@pytest.mark.full
def test_devices_that_are_advised_may_need_a_larger_step(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama-8b", "--hardware", "h100", "--context", "32768"]
    assert main([*asked, "--devices", "3", "--batch-tokens", str(3 * 32768)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    advised = re.search(r"It would fit with ([\d,]+) devices and a step of ([\d,]+) samples", shown)
    assert advised is not None
    devices, samples = (int(each.replace(",", "")) for each in advised.groups())
    assert main([*asked, "--devices", str(devices), "--batch-tokens", str(samples * 32768)]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "0"], "--devices: expected 1 or more, got 0"),
        (["--devices", "96", "--batch-tokens", "4M"], "96 devices cannot share the step's 4,096 samples equally"),
        (["--devices", "8", "--batch-tokens", "4X"], "--batch-tokens: expected a whole number of tokens"),
        (["--devices", "8", "--tokens", "many"], "--tokens: expected a whole number of tokens"),
        (["--devices", "8", "--hardware", "h10"], "--hardware h10: expected one of v100, .* did you mean"),
        (["--devices", "8", "--hardware", "v100", "--precision", "bfloat16"], "v100 multiplies matrices in float16"),
        (["--devices", "8", "--here"], "expected --hardware or --here, got both"),
        (["--devices", "8", "--price", "2"], "--price: plays no part without --tokens"),
        (["--devices", "8", "--save-seconds", "9"], "--save-seconds: plays no part without --failures"),
        (["--devices", "8", "--micro-batches", "4"], "--micro-batches: is of the exact bytes, .* --batch-tokens"),
        (["--devices", "8", "--shard", "4"], "--shard: is of the exact bytes"),
        (["--devices", "8", "--price", "1e300"], "--price: expected 1,000,000,000 or less, got 1e.300"),
        (["--devices", "8", "--price", "-1"], "--price: expected 0 or more, got -1"),
        (["--devices", "8", "--network", "0"], "--network: expected a factor above 0"),
        (["--devices", "8", "--slow-rank", "0.5"], "--slow-rank: expected 1"),
        (["--devices", "8", "--context", "-5"], "--context: expected 0 or more"),
        (["--devices", "8", "--write", "run.txt"], "--write run.txt: expected a file that ends in .yaml"),
        (["--devices", "8", "--write", "/nowhere/run.yaml"], "--write /nowhere/run.yaml: there is no folder /nowhere"),
        (["run.yaml", "--devices", "8"], "expected --model or a configuration such as run.yaml, got both"),
        ([], "--devices is missing"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = [] if "--hardware" in arguments else ["--hardware", "h100"]
    positional = [each for each in arguments[:1] if each.endswith(".yaml")]
    assert main(["plan", *positional, "--model", "gpt2-124m", *arguments[len(positional) :], *machine]) == 2
    told = capsys.readouterr().err
    assert re.search(words, told) and told.count("\n") == 1


def test_times_need_hardware_and_learned_positions_their_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny", "--devices", "8", "--batch-tokens", "4M"]) == 2
    assert "--batch-tokens: needs to know what the devices are: add --hardware" in capsys.readouterr().err
    assert main(["plan", "--model", "tiny", "--devices", "8", "--network", "0.5"]) == 2
    assert "--network: needs to know what the devices are" in capsys.readouterr().err
    assert main(["plan", "--model", "gpt2-124m", "--devices", "8", "--hardware", "a100", "--context", "4096"]) == 2
    assert "gpt2-124m has learned positions for 1,024 tokens" in capsys.readouterr().err
    assert main(["plan", "--devices", "8", "--hardware", "a100"]) == 2
    assert "got neither" in capsys.readouterr().err


@pytest.mark.full
def test_a_hugging_face_model_takes_as_many_tokens_as_its_configuration_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    arguments = ["plan", "--model", str(path), "--devices", "2", "--hardware", "a100", "--json", "-"]
    common = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    llama = {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 2048}
    path.write_text(json.dumps({**common, **llama}))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 2048
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 128}))
    assert main([*arguments, "--context", "256"]) == 2
    assert "has learned positions for 128 tokens" in capsys.readouterr().err
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8}
    path.write_text(json.dumps({**common, **vit, "intermediate_size": 64}))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


@pytest.mark.full
def test_what_may_be_asked_beside_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt2-124m", "--hardware", "a100", "--devices", "16", "--batch-tokens", "512k"]
    extra = [
        "--what-if",
        "--failures",
        "6",
        "--explain",
        "--all",
        "--json",
        str(tmp_path / "plan.json"),
        "--tokens",
        "1T",
    ]
    assert main([*arguments, *extra]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 120
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert "half the network between hosts" in shown and len(plan["what_if"]) == 4
    assert "save every" in shown and 0.9 < plan["failures"]["goodput"] < 1
    useful = 1e12 / plan["recommended"]["tokens_per_second"]
    assert plan["budget"]["seconds"] == pytest.approx(useful / plan["failures"]["goodput"])
    over_time = [held for _, held in plan["memory_over_time"]]
    memory = plan["recommended"]["memory"]
    assert over_time[-1] == memory["steady"] < max(over_time) <= 1.01 * memory["peak"]
    terms = {term["name"]: term for term in plan["terms"]}
    kernels = {"multiplying", "moving", "launching"}
    assert kernels | {"compute", "update", "MFU", "optimizer", "activations", "fits"} <= terms.keys()
    assert all(term["formula"] and term["source"] and term["value"] in shown for term in plan["terms"])
    assert all(each["name"] in shown and each["written"] and each["read"] for each in plan["buffers"])
    # Adam's two states are the optimizer's own.
    states = memory["optimizer"] * 2 // 3
    held = memory["steady"] - memory["framework"] - states
    assert sum(each["bytes"] for each in plan["buffers"] if each["kind"] != "statistics") == held
    assert 2 * len(plan["settings"]) == len([line for line in shown.splitlines() if line.startswith("zero ")])


@pytest.mark.full
def test_half_the_network_and_a_slow_rank_are_in_all_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt2-124m", "--hardware", "a100", "--devices", "64", "--batch-tokens", "128k"]

    def seconds(*extra: str) -> float:
        assert main([*arguments, *extra, "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)["recommended"]["seconds"]

    plain = seconds()
    assert seconds("--network", "0.5") > 1.05 * plain
    assert seconds("--slow-rank", "1.5") > 1.05 * plain


@pytest.mark.full
def test_the_way_to_many_devices_is_shown_and_drawn(tmp_path: Path, monkeypatch, capsys) -> None:
    from paceline.plan import scaling

    monkeypatch.setattr(scaling.curve, "__defaults__", ((1, 8, 100_000),))
    arguments = ["plan", "--model", "gpt2-124m", "--hardware", "h100", "--devices", "8", "--scaling"]
    pytest.importorskip("matplotlib")
    assert main([*arguments, "--picture", str(tmp_path / "way.svg")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^100,000 +zero", shown, re.M) and "communication takes over" in shown
    assert (tmp_path / "way.svg").read_text().startswith("<?xml")
    assert main([*arguments, "--picture", str(tmp_path / "way.nonsense")]) == 2
    assert "name a .png" in capsys.readouterr().err
