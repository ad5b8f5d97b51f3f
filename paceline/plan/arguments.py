"""The arguments of `paceline plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value


@dataclass(frozen=True)
class PlanArguments:
    """What a run costs before anything is launched: which strategies fit, how long a step takes, what binds it.

        paceline plan --model llama-8b --hardware h100 --devices 64 --batch-tokens 4M --context 8192
        paceline plan run.yaml --hardware a100 --devices 8

    Without --hardware it shows each stage's exact bytes, held and sent, which need no hardware. How wrong forecasts
    are, on published measurements and on your own, is told by paceline plan --validate [FILE.csv].
    """

    config: Annotated[str, Value("[FILE.yaml]", positional=True)] = ""
    """A configuration of paceline train, whose model and batch are planned for."""
    model: str = ""
    """A preset such as llama-70b, the path of a Hugging Face config.json, or module:function for one of your own."""
    devices: int | None = None
    """Number of devices, one rank on each."""
    hardware: str | None = None
    """What they are: h100, a100, a100-40gb, h200, b200, v100 ..., or the file of a profile."""
    here: bool = False
    """Measures this machine for a minute, once, and plans for devices like it."""
    collectives: Annotated[str, Value("FILE.json")] = ""
    """What collectives within a host take: a profile that paceline bench comm --profile measured there."""
    batch_tokens: Annotated[str, Value("N")] = ""
    """Tokens of an optimizer step over all devices, such as 4M. By default those of the preset's settings."""
    context: int = 0
    """Tokens of a sample. 0: the model's longest."""
    tokens: Annotated[str, Value("N")] = ""
    """A budget such as 1.5T, for which days, energy and cost are told."""
    price: Annotated[float, Value("NUMBER")] = 0.0
    """Of a device for an hour, in any currency."""
    power_price: Annotated[float, Value("NUMBER")] = 0.0
    """Of a kilowatt-hour."""
    precision: Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] = "auto"
    """What is computed in. auto: what is fastest; float32 leaves the model as it is."""
    all: bool = False
    """Show every strategy that was looked at."""
    explain: bool = False
    """Show each term of the recommended setting with its formula and source, and the buffers of a rank."""
    write: Annotated[str, Value("FILE.yaml")] = ""
    """Write the recommended setting as a configuration of paceline train."""
    json: JsonFile = ""
    """Where to write the numbers as JSON, in bytes and seconds; - prints them and nothing else."""
    network: float = 1.0
    """What if the links between hosts had so many times their bandwidth, such as 0.5."""
    slow_rank: float = 1.0
    """What if one rank computed so many times as long, such as 1.2."""
    failures: float = 0.0
    """What if something failed every so many hours: how often to save, and which share of the time is useful."""
    save_seconds: float = 0.0
    """What saving takes then. 0: the model's states at 2 GB/s a host."""
    restart_seconds: float = 300.0
    """What starting again takes then."""
    what_if: bool = False
    """Show what half the network, twice the devices and a slow rank would do."""
    scaling: bool = False
    """Show the way from 1 to 100,000 devices, and where communication takes over."""
    picture: Annotated[str, Value("FILE.png")] = ""
    """Draw that way (needs paceline[plot])."""
    shard: int = 0
    """With exact bytes: also show zero 3 in groups of so many ranks, each group one copy of the model."""
    micro_batches: int = 1
    """With exact bytes: micro-batches in an optimizer step."""
