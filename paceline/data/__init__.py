"""Text on disk to batches of tokens: the same for any number of ranks."""

from paceline.data.config import DataConfig
from paceline.data.corpus import Corpus, Facts, SplitFacts, TokenFile, open_corpus
from paceline.data.loader import Loader, MicroBatch, StepBatch, validation_batches
from paceline.data.preparation import prepare
from paceline.data.tokenizer import Tokenizer

__all__ = [
    "Corpus",
    "DataConfig",
    "Facts",
    "Loader",
    "MicroBatch",
    "SplitFacts",
    "StepBatch",
    "TokenFile",
    "Tokenizer",
    "open_corpus",
    "prepare",
    "validation_batches",
]
