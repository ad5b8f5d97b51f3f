"""Proves schedules: no deadlock, no race, nothing read before it is there, no gradient lost. Pure."""

from paceline.core.check.checker import all_ranks, check
from paceline.core.check.report import Fault, Lifetime, Report, ScheduleError, lifetimes

__all__ = ["Fault", "Lifetime", "Report", "ScheduleError", "all_ranks", "check", "lifetimes"]
