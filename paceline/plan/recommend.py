"""Which setting to take and why, or what would have to change for one to fit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.command_line import quantities as said
from paceline.core.strategy import Strategy
from paceline.plan import profiles, quantities
from paceline.plan.case import Case
from paceline.plan.choice import ALIKE
from paceline.plan.estimate import Estimate
from paceline.plan.search import Found, fits
from paceline.plan.subject import Subject
from paceline.plan.text import count

_WHAT = {
    0: "every rank holds all and gathers nothing",
    1: "optimizer states are shared out, and parameters are gathered once a step",
    2: "optimizer states and gradients are shared out, and parameters are gathered once a step",
    3: "parameters, too, are shared out, and gathered as they are needed",
}
_AGAIN = {"unit": "blocks", "keep_attention": "all of the blocks but attention"}


def name(found: Found, estimate: Estimate) -> str:
    """A strategy's: "zero 2", with the precision where several are compared."""
    several = len({each.setting.strategy.precision for each in found.best}) > 1
    return estimate.name + (f" {estimate.setting.strategy.precision}" if several else "")


def in_words(estimate: Estimate, called: str = "") -> str:
    """A setting: "zero 2, 8 micro-batches of 1 sample, nothing recomputed", or what its strategy is called."""
    setting = estimate.setting
    parts = [called or estimate.name]
    parts.append(f"{count(setting.micro_batches, 'micro-batch', 'es')} of {count(setting.samples, 'sample')}")
    parts.append(recomputed(setting.strategy))
    if setting.strategy.accumulation != "auto":
        parts.append(f"accumulation {setting.strategy.accumulation}")
    if setting.strategy.bucket_mb != Strategy.bucket_mb:
        parts.append(f"buckets of {setting.strategy.bucket_mb:g} MiB")
    if setting.strategy.prefetch != Strategy.prefetch:
        parts.append(f"{setting.strategy.prefetch} units gathered ahead")
    return ", ".join(parts)


def recomputed(strategy: Strategy) -> str:
    """What is computed again."""
    if strategy.recompute == "none":
        return "nothing recomputed"
    every = f" in every {strategy.recompute_every}nd block" if strategy.recompute_every == 2 else ""
    return f"{_AGAIN[strategy.recompute]} recomputed{every}"


def reason(found: Found) -> str:
    """Why the recommended setting, in a sentence."""
    best = found.recommended
    if best is None:
        return ""
    stage = best.setting.strategy.stage
    others = [each for each in found.best if each is not best]
    fitting = [each for each in others if each.fits]
    is_fastest = all(best.seconds <= each.seconds for each in fitting)
    told = f"the fastest of the {len(fitting) + 1} strategies that fit" if fitting else "the only strategy that fits"
    if not is_fastest:
        told = f"within {said.share(ALIKE)} of {told}, and of those the one that shares least"
    parts = [f"{told}: {_WHAT[stage]}"]
    too_large = [each for each in others if not each.fits and each.setting.strategy.stage < stage]
    if too_large:
        nearest = min(too_large, key=lambda each: -each.spare)
        parts.append(f"{name(found, nearest)} would need {quantities.gib(-nearest.spare)} GiB more")
    # Room that is worth a word: at least what shows, and a hundredth of the device.
    room = best.spare + max(2**30 / 10, best.capacity / 100)
    compared = [each for each in fitting if each.seconds > (1 + ALIKE) * best.seconds or each.spare > room]
    if compared:
        parts.append(_next(best, compared[0], name(found, compared[0])))
    return "; ".join(parts)


def _next(best: Estimate, other: Estimate, called: str) -> str:
    slower = other.seconds / best.seconds - 1
    if slower < ALIKE:
        return f"{called} is as fast and leaves {quantities.gib(other.spare)} GiB free"
    again = other.setting.strategy.recompute not in ("none", best.setting.strategy.recompute)
    again = again or other.setting.strategy.recompute_every < best.setting.strategy.recompute_every
    causes = {
        "computing again" if again else "computing longer": other.compute - best.compute,
        "waiting for the network": other.communication - best.communication,
        "updating more on each rank": other.optimizer - best.optimizer,
    }
    cause = max(causes, key=lambda each: causes[each])
    return f"{called} takes {said.share(slower)} longer, {cause}"


def would_fit(case: Case, samples: int, precision: str) -> list[str]:
    """Changes each of which alone would make something fit, in words."""
    return list(_changes(case, samples, precision))


def _changes(case: Case, samples: int, precision: str) -> Iterator[str]:
    def would(changed: Case, share: int) -> bool:
        stage = Strategy(zero=3 if changed.devices > 1 else 0, precision=precision)  # type: ignore[arg-type]
        return fits(changed, stage, share)

    for times in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if would(replace(case, devices=case.devices * times), max(1, samples // times)):
            # Each device needs samples of its own.
            batch = "" if samples % times == 0 else f" and a step of {case.devices * times:,} samples"
            yield f"{case.devices * times:,} devices{batch}"
            break
    larger = [profiles.hardware(each) for each in profiles.names()]
    larger = [each for each in larger if each.device.memory > case.hardware.device.memory]
    for hardware in sorted(larger, key=lambda each: each.device.memory):
        if precision in hardware.device.ceiling and would(replace(case, hardware=hardware), samples):
            yield f"--hardware {hardware.device.name}"
            break
    context = case.subject.context // 2
    while (shorter := _with_context(case.subject, context)) is not None:
        if would(replace(case, subject=shorter), samples):
            yield f"--context {context}"
            break
        context //= 2


def _with_context(subject: Subject, context: int) -> Subject | None:
    if context < 128 or subject.with_context is None:
        return None
    return subject.with_context(context)
