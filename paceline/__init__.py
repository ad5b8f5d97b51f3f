"""paceline: data-parallel training for PyTorch."""
