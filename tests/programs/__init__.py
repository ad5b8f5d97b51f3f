"""Training programs drawn at random, each run in one process and by ranks: `python -m tests.programs --count 100`."""
