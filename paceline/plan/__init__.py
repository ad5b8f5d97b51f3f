"""What a training run costs, before it is run."""
