"""What a user asks of the planner, looked up and checked: model, machines, batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.comm.profile import read_profile
from paceline.core.errors import UserError
from paceline.launch.screen import show
from paceline.models.config import ModelConfig
from paceline.models.presets import PRESETS
from paceline.plan import profiles, quantities
from paceline.plan.arguments import PlanArguments
from paceline.plan.case import Case
from paceline.plan.estimate import Setting
from paceline.plan.hardware import Hardware
from paceline.plan.measured_collectives import with_collectives
from paceline.plan.models import meta_model_and_inputs
from paceline.plan.subject import Kernels, Subject, of_module, transformer
from paceline.plan.what_if import with_network

if TYPE_CHECKING:
    from paceline.train.config import TrainConfig

SAMPLES = 512
"""Of a step where nothing says how many: half a million to four million tokens for models of 1,024 to 8,192 of context,
as Brown et al. 2020 and Touvron et al. 2023 used."""


@dataclass(frozen=True)
class Request:
    """What is planned.

    Attributes:
        case: Model, machines, devices.
        samples: Of a step on one device.
        precisions: What may be computed in.
        config: The run's configuration, for models that `paceline train` trains.
        network: How many times the bandwidth between hosts is asked about.
        usual: Samples of a step by the preset, where its step is planned.
        own: How the user's configuration makes a step, with the batch that is planned, where one is asked about.
        notes: What is not as one would think of what was looked up.
    """

    case: Case
    samples: int
    precisions: tuple[str, ...]
    config: TrainConfig | None
    network: float = 1.0
    usual: int = 0
    own: Setting | None = None
    notes: tuple[str, ...] = ()

    @property
    def _traced(self) -> tuple[str, ...]:
        """What is told of the model's trace, by the smallest micro-batch that is planned."""
        subject, precision = self.case.subject, self.precisions[0]
        least, samples = subject.least(precision), self.samples if self.own is None else self.own.samples
        told = subject.work(min(least, samples), precision).warnings
        if (many := subject.work(samples, precision)).source == "rough":
            told = tuple(dict.fromkeys((*told, *many.warnings)))
        if least == 1 or samples == 1:
            return told
        reason = subject.work(1, precision).warnings[0].partition(". ")[0]
        return (*told, f"micro-batches have {least} samples or more: with one, {reason}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be found out, or is not as one would think."""
        found = (*self._traced, *self.notes)
        if self.config is not None and self.config.tf32 and "float32" in self.precisions:
            found = (*found, "tf32 is no part of forecasts: in float32 matrices are taken to multiply without it")
        if self.network != 1 and self.case.devices <= self.case.hardware.devices_per_host:
            found = (*found, f"--network {self.network:g} changes nothing: {self.case.devices} devices are on one host")
        if not self.usual or self.usual == self.batch:
            return found
        return (
            *found,
            f"the preset's step has {self.usual:,} samples, which {self.case.devices:,} devices cannot share equally: "
            f"{self.batch:,} are planned. --batch-tokens chooses another number",
        )

    @property
    def batch(self) -> int:
        """Samples of a step over all devices."""
        return self.samples * self.case.devices

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step over all devices."""
        return self.batch * self.case.subject.context


def request(options: PlanArguments, devices: int) -> Request:
    """Looks up what the arguments name.

    Raises:
        UserError: They name what there is not, or sizes that do not go together.
    """
    # What is misspelt is told first: a machine's name before a model is traced, a model's before a machine is measured.
    named = None if options.hardware is None else profiles.hardware(options.hardware)
    profile = read_profile(options.collectives) if options.collectives else None
    config = _config(options)
    subject, longest = _subject(options, config, _kernels(named))
    usual = 0
    if options.batch_tokens:
        samples = quantities.samples(options.batch_tokens, subject.context, devices)
    elif options.config and config is not None:
        samples = quantities.share(config.batch, devices, f"{options.config}: batch {config.batch}")
    else:
        usual = config.batch if config is not None else 0
        samples = max(1, (usual or SAMPLES) // devices)
    hardware = with_network(named or _here(devices), options.network)
    precisions, fails = _precisions(options, hardware, subject, config)
    longer = f"the model is made for samples of {longest:,} tokens, and {subject.context:,} are planned"
    notes = (*fails, *([longer] if 0 < longest < subject.context else []))
    if profile is not None:
        hardware = with_collectives(hardware, profile, devices, options.collectives)
    return Request(
        Case(subject, hardware, devices, options.slow_rank),
        samples,
        precisions,
        config,
        options.network,
        usual,
        _own(options, config, samples * devices, devices, hardware),
        notes,
    )


def _own(
    options: PlanArguments, config: TrainConfig | None, batch: int, devices: int, hardware: Hardware
) -> Setting | None:
    if not options.config or config is None or config.plan:
        return None
    from paceline.plan.run_file import setting_of

    setting = setting_of(replace(config, batch=batch), devices)
    if setting.strategy.precision != "auto":
        return setting
    # As a run finds it: see `comm.devices.strategy_on`.
    low = _kernels(hardware) == "cuda" and "bfloat16" in hardware.device.ceiling
    return replace(setting, strategy=replace(setting.strategy, precision="bfloat16" if low else "float32"))


def _kernels(named: Hardware | None) -> Kernels:
    is_cpu = not torch.cuda.is_available() if named is None else named.is_cpu
    return "cpu" if is_cpu else "cuda"


def _here(devices: int) -> Hardware:
    # Measuring runs ranks, of which plans know nothing.
    from paceline.calibrate import gpu, machine

    report = partial(show, warning=True)
    on_gpus = torch.cuda.is_available()
    return gpu.here(report=report) if on_gpus else machine.here(machine.measurable(devices), report=report)


def _config(options: PlanArguments) -> TrainConfig | None:
    """The configuration of a run, where the model is one that `paceline train` trains."""
    if options.config:
        from paceline.train.command_line import parse_train_arguments

        return parse_train_arguments([options.config])
    if options.model in PRESETS:
        from paceline.train.defaults import defaults

        return defaults(options.model)
    return None


def _subject(options: PlanArguments, config: TrainConfig | None, kernels: Kernels) -> tuple[Subject, int]:
    """What is planned, and the tokens of a sample that it is made for; 0 where that is not known."""
    if config is not None:
        shape = config.model.shape(config.data.vocabulary) if options.config else PRESETS[options.model]
        made = transformer(options.config or options.model, _fitting(shape, options), options.context, kernels)
        return made, shape.context
    model, inputs = meta_model_and_inputs(options.model)
    context = _context(options, model) if inputs is None else options.context
    found = of_module(options.model, model, inputs, context, kernels)
    if options.context and (tokens := found.work(1, "bfloat16").tokens) != options.context:
        kind = f"{tokens:,} tokens long" if tokens > 1 else "no sequence of tokens"
        raise UserError(
            f"--context {options.context}: a sample of what {options.model} is called with is {kind}; leave it out, or "
            "change the example that the model is built with"
        )
    return found, _longest(model) if inputs is None else 0


def _context(options: PlanArguments, model: nn.Module) -> int:
    """Tokens of a sample: those that are asked for, else the longest of a transformers' model; 0 where unknown."""
    for name, table in model.named_modules():
        kind = name.rpartition(".")[2]
        positions = kind == "wpe" or ("position" in kind and "relative" not in kind)
        if positions and isinstance(table, nn.Embedding) and table.num_embeddings < options.context:
            raise _too_long(options, table.num_embeddings)
    return options.context or _longest(model)


def _longest(model: nn.Module) -> int:
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else 0


def _fitting(shape: ModelConfig, options: PlanArguments) -> ModelConfig:
    if options.context <= shape.context:
        return shape
    if shape.position == "learned":
        raise _too_long(options, shape.context)
    return replace(shape, context=options.context)


def _too_long(options: PlanArguments, positions: int) -> UserError:
    return UserError(
        f"--context {options.context}: {options.config or options.model} has learned positions for {positions:,} "
        "tokens; choose at most as many"
    )


WORTH_A_LOOK = 4.0
"""Times as fast as float32 that a low precision's matmuls may be for float32 to be looked at too."""


def _precisions(
    options: PlanArguments, hardware: Hardware, subject: Subject, config: TrainConfig | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What may be computed in, and what is to be said of that."""
    known = hardware.device.ceiling
    asked: str = options.precision
    if asked == "auto" and options.config and config is not None:
        asked = config.strategy.precision
    if asked != "auto":
        if asked not in known:
            raise UserError(
                f"--precision {asked}: {hardware.device.name} multiplies matrices in {', '.join(known)}; choose one of "
                "them"
            )
        return (asked,), ()
    low = next((dtype for dtype in ("bfloat16", "float16") if dtype in known), None)
    if low is None:
        return ("float32",), ()
    # float32 leaves a model as it is, which for one that has its parameters in another dtype is something else.
    is_choice = "float32" in known and subject.shapes.dtypes == ("float32",)
    some = subject.work(subject.least(low), low)
    if is_choice and some.source == "rough" and subject.work(subject.least("float32"), "float32").source != "rough":
        # Such as Fourier transforms, which torch has in no low precision.
        reason = some.warnings[0].partition(". ")[0]
        return ("float32",), (f"float32 is planned, as in {low} {reason}",)
    close = is_choice and known[low] < WORTH_A_LOOK * known["float32"]
    return ((low, "float32") if close else (low,)), ()
