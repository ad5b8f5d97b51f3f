"""Faults brought about on purpose, and checks of what is left of a training after each."""
