from __future__ import annotations

import random

WORDS = "the wind turns and a line of riders turns with it one by one taking its pull at the front"


def prose(words: int, seed: int) -> str:
    """Paragraphs of random words, the same for the same seed."""
    chooser = random.Random(seed)
    vocabulary = WORDS.split()
    return "".join(chooser.choice(vocabulary) + chooser.choice([" ", " ", " ", "\n", "\n\n"]) for _ in range(words))
