from __future__ import annotations

from paceline.verify.differences import Difference, Recorder, Report, merge_reports


def test_a_rank_keeps_the_largest_and_the_first_that_is_too_large() -> None:
    recorder = Recorder(rank=1, tolerance=1e-3)
    recorder.record("weights", 1e-4, "small")
    recorder.record("updated", 0.5, "late")
    recorder.record("gradient", 0.1, "first", unit="u", bucket="b", op="all_reduce")
    recorder.record("gradient", 0.2, "second")
    recorder.step = 1
    recorder.record("weights", 0.9, "next")
    report = recorder.report()
    assert report.largest == {"weights": 0.9, "updated": 0.5, "gradient": 0.2}
    assert report.first == Difference("gradient", 0, 0, 1, 0.1, 3, "first", "u", "b", "all_reduce")


def test_over_ranks_the_cause_comes_before_what_follows_from_it() -> None:
    """A wrong gradient of one rank is wrong on all ranks once it is reduced."""
    cause = Difference("local", step=2, micro_batch=0, rank=3, size=0.1, sequence=90)
    effect = Difference("gradient", step=2, micro_batch=0, rank=0, size=0.1, sequence=10)
    earlier = Difference("norm", step=1, micro_batch=2, rank=0, size=0.1, sequence=95)
    found = merge_reports([Report({"gradient": 0.1}, effect), Report({"local": 0.2}), Report({"gradient": 0.3}, cause)])
    assert found == Report({"local": 0.2, "gradient": 0.3}, cause)
    assert merge_reports([Report({}, cause), Report({}, earlier)]).first == earlier
    assert merge_reports([Report(), Report()]) == Report()
