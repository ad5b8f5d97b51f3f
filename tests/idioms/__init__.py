"""Training idioms, each written once for one process, DDP and paceline: see `side`."""
