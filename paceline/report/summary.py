"""The page's first section: what the run did, in single numbers, and what binds it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.command_line import quantities as said
from paceline.core.memory import memory as planned_memory
from paceline.report.critical_path import What
from paceline.report.html import Html, Section, bar, figures, join, tag
from paceline.report.memory import plan_of
from paceline.report.run import Run
from paceline.report.steps import Step, straggler
from paceline.report.variants import Setting, variant

_BINDS = 0.1
"""Of a step: what a slow rank costs the others from here on is the first thing to say."""
_LEAST_GAIN = 0.01
"""Of a step: less is not worth a sentence."""
_WORDS: dict[What, str] = {
    "computing": "Computing",
    "communicating": "Communication",
    "between ops": "What ranks do between ops (Python, clipping, the operating system)",
}


def summary(run: Run) -> Section:
    """Steps, rate, exposed communication, goodput, memory, the slowest rank; and the verdict."""
    return Section("summary", "Summary", verdict(run), join([figures(key_figures(run)), _where_the_time_went(run)]))


def key_figures(run: Run) -> list[tuple[str, str, str, float | None]]:
    """The single numbers, as `figures` takes them."""
    history, spent, slow = run.history, run.history.goodput, straggler(run.steps)
    rate, mfu, exposed = history.mean("perf/tokens_per_second"), history.mean("perf/mfu"), exposed_share(run)
    flops, peak = history.mean("perf/tflops"), run.peak_bytes
    planned = plan_of(run)
    plan = 0 if planned is None else planned.total
    loss, bits = history.last_figure("train/loss"), history.last_figure("val/bits_per_byte")
    unknown = "not known"
    items: list[tuple[str, str, str, float | None]] = [
        ("steps", "Steps", _steps(run), history.steps),
        ("loss", "Last loss", unknown if loss is None else said.digits(loss), loss),
        ("tokens_per_second", "Tokens/s, all ranks", unknown if rate is None else said.count(rate), rate),
        ("mfu", "MFU", said.share(mfu), mfu)
        if mfu is not None
        else ("tflops", "TFLOP/s (of what peak is not known)", unknown if flops is None else said.digits(flops), flops),
        ("exposed", "Exposed communication", unknown if exposed is None else said.share(exposed), exposed),
        (
            "goodput",
            "Goodput",
            unknown if spent is None else said.share(spent.share),
            None if spent is None else spent.share,
        ),
        ("peak_bytes", "Peak memory of a rank", unknown if peak is None else said.size(peak), peak),
        ("planned_bytes", "Planned for buffers of it", *((said.size(plan), plan) if plan else (unknown, None))),
        (
            "slowest_rank",
            "Slowest rank",
            "none stands out" if slow is None else f"rank {slow.rank}",
            None if slow is None else slow.rank,
        ),
    ]
    if run.forecast is not None:
        items[-1:-1] = run.forecast.figures()
    if bits is not None:
        items.insert(2, ("bits_per_byte", "Bits per byte, held-out text", said.digits(bits), bits))
    return [item for item in items if item[2] != unknown] if run.is_own_loop else items


def exposed_share(run: Run) -> float | None:
    """Share of the time in which ranks stood still for communication: of all steps, else of those with events."""
    measured = run.history.mean("comm/exposed_fraction")
    if measured is None and run.steps:
        spans = [(times.exposed, times.seconds) for step in run.steps for times in step.ranks]
        whole = sum(seconds for _, seconds in spans)
        measured = sum(exposed for exposed, _ in spans) / whole if whole > 0 else None
    return measured


def path_shares(steps: Sequence[Step]) -> dict[What, float]:
    """What the critical paths of steps consist of, as shares of their length."""
    spent: dict[What, float] = dict.fromkeys(_WORDS, 0.0)
    for step in steps:
        for segment in step.path:
            spent[segment.what] += segment.seconds
    whole = sum(spent.values())
    return {what: part / whole for what, part in spent.items()} if whole > 0 else {}


def verdict(run: Run) -> str:
    """A sentence: what the steps' length comes from."""
    shares, slow = path_shares(run.steps), straggler(run.steps)
    if not shares:
        return "Without events of a step it cannot be said what binds this run."
    length = statistics.median(step.seconds for step in run.steps)
    parts = sorted(shares.items(), key=lambda item: -item[1])
    rest = " and ".join(f"{what} {said.share(part)}" for what, part in parts[1:])
    about = f"of the critical path of {said.count(len(run.steps), 'recorded step')}"
    hope = _hope(run, 0.0 if slow is None else slow.of_step)
    if slow is not None and slow.of_step >= _BINDS:
        return (
            f"Rank {slow.rank} binds this run: each other rank stands still {said.seconds(slow.cost)} a step for it, "
            f"{said.share(slow.of_step)} of {said.seconds(length)}, since it takes longer {_in(slow.cause)}. "
            f"{_WORDS[parts[0][0]]} is {said.share(parts[0][1])} {about}, {rest}.{hope}"
        )
    first, part = parts[0]
    return (
        f"{_WORDS[first]} binds this run: it is {said.share(part)} {about} "
        f"({said.seconds(length)} in the middle), {rest}.{hope}"
    )


def _hope(run: Run, waits: float) -> str:
    """What is expected to help most: of what steps lose, and of settings."""
    return _loss(run, waits) + _setting(run)


def _setting(run: Run) -> str:
    """Which other stage or bucket size would shorten a step most, if one would."""
    if run.what_if is None:
        return ""
    own = run.what_if.own
    now = run.what_if.predict(own).seconds
    mine = [each for each in run.single_changes if each.setting.devices == own.devices and each.times == 1]
    best = min(mine, key=lambda each: each.step.seconds, default=None)
    if best is None or (gain := 1 - best.step.seconds / now) < _LEAST_GAIN:
        return " No other stage or bucket size is expected to shorten a step by 1 %."
    flag = (
        f"--strategy.zero {best.setting.stage}"
        if best.setting.stage != own.stage
        else f"--strategy.bucket-mb {best.setting.bucket_mb:g}"
    )
    return (
        f" Of settings, {best.words} ({flag}) is expected to help most: by simulation a step would take "
        f"{said.share(gain)} less time{_memory_for(run, best.setting)}."
    )


def _memory_for(run: Run, setting: Setting) -> str:
    """What else a setting takes, where that is more."""
    plan = plan_of(run)
    if run.program is None or plan is None:
        return ""
    more = planned_memory(variant(run.program, setting, 0), run.program.micro_batches).total - plan.total
    return f", for {said.size(more)} more of a rank's memory" if more > 0 else ""


def _loss(run: Run, waits: float) -> str:
    """What costs most; `waits` is the share of a step that ranks stand still for a slow one."""
    changes = [] if run.prediction is None else run.prediction.changes(waits)
    if not changes or changes[0].gain < _LEAST_GAIN:
        return ""
    return (
        f" It would help most if {changes[0].what}: a step would take at most {said.share(changes[0].gain)} less time."
        if not waits or changes[0].gain != waits
        else f" It would help most if {changes[0].what}: a step would take about {said.share(waits)} less time."
    )


def _in(cause: str) -> str:
    return "computing" if cause == "computing" else f"with {cause}"


def _steps(run: Run) -> str:
    planned = run.config.steps if run.config is not None else 0
    done = said.count(run.history.steps)
    return f"{done} of {planned:,}" if planned > run.history.steps else done


def _where_the_time_went(run: Run) -> Html:
    spent = run.history.goodput
    if spent is None:
        return Html("")
    parts = [
        ("useful", "steps that count", spent.useful),
        ("repeated", "steps done again after a restart", spent.repeated),
        ("validating", "validating", spent.validating),
        ("interrupted", "interrupted", spent.interrupted),
        ("other", "starting, saving and the rest", spent.other),
    ]
    shown = [part for part in parts if part[2] > 0]
    told = ", ".join(f"{words} {said.seconds(seconds)}" for _, words, seconds in shown)
    caption = f"Of {said.seconds(spent.seconds)}: {told}."
    drawn = bar([(f"time-{name}", seconds / spent.seconds) for name, _, seconds in shown], caption)
    keys = [tag("li", tag("span", class_=f"key time-{name}"), words) for name, words, _ in shown]
    return tag("figure", drawn, tag("figcaption", caption), tag("ul", *keys, class_="keys"))
