"""Text on disk to batches of tokens: the same for any number of ranks.

What needs torch, the loader, is in `paceline.data.loader`: the launcher reads configurations without it.
"""

from paceline.data.config import DataConfig
from paceline.data.corpus import Corpus, Facts, SplitFacts, TokenFile, open_corpus
from paceline.data.preparation import prepare, prepared
from paceline.data.tokenizer import Tokenizer

__all__ = [
    "Corpus",
    "DataConfig",
    "Facts",
    "SplitFacts",
    "TokenFile",
    "Tokenizer",
    "open_corpus",
    "prepare",
    "prepared",
]
