"""Text to corpus: found in the cache where it was prepared before, else read, split and tokenised."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from paceline.core.errors import UserError
from paceline.data.baselines import BaselineThread
from paceline.data.cache import Cache, Record, explain_failed_writes
from paceline.data.config import DataConfig
from paceline.data.corpus import (
    FACTS,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    Corpus,
    Facts,
    SplitFacts,
    open_corpus,
    seal_corpus,
)
from paceline.data.progress_bar import Report, progress, size_text
from paceline.data.scan import Reader, Scan
from paceline.data.sources import Sources, find
from paceline.data.tokenise import token_dtype, tokenise
from paceline.data.tokenizer import Tokenizer, read_definition, train
from paceline.data.unreadable import describe_unreadable, refuse_unreadable, scan_readable

SHOWN_IGNORED = 4  # kinds of ignored files named to people; the facts hold all
FORMAT = 2  # part of every key: raise it when the content of an entry changes


def prepare(config: DataConfig, *, report: Report | None = None, threads: int | None = None) -> Corpus:
    """The corpus of `config`, tokenised at most once.

    Processes that ask for the same text at the same time wait for the first one. Files that were
    touched but hold the same text are read again, yet not tokenised again.

    Args:
        config: which text and how.
        report: receives lines for people; None for silence.
        threads: how many tokenise at once, None for one a core. Does not change the result.

    Raises:
        UserError: the text is missing, too little, or in part not text where `config` refuses that; the tokenizer
            cannot be read; the cache cannot be written.
    """
    sources, settings, cache, mark = _asked(config)
    known = _recorded(cache, mark)
    if known is None:
        estimate = sum(file.size for file in sources.files)
        with (
            explain_failed_writes(cache.folder, lambda: estimate),
            cache.lock(mark, report),
        ):
            known = _recorded(cache, mark) or _build(config, sources, settings, cache, mark, report, threads)
    corpus, unreadable = _found(config, sources, known)
    if report is not None:
        for line in describe(corpus):
            report(line)
        if unreadable:
            report(describe_unreadable(unreadable))
    return corpus


def prepared(config: DataConfig) -> Corpus | None:
    """The corpus of `config` if it lies in the cache, without waiting for anybody who makes it.

    Raises:
        UserError: the text is missing, or in part not text where `config` refuses that; the tokenizer cannot be read.
    """
    sources, _, cache, mark = _asked(config)
    known = _recorded(cache, mark)
    return None if known is None else _found(config, sources, known)[0]


def describe(corpus: Corpus) -> list[str]:
    """Lines that tell a person what a corpus holds."""
    facts = corpus.facts
    sides = facts.train, facts.validation
    most = sorted(facts.ignored.items(), key=lambda item: -item[1])
    shown = [f"{count:,} {what}" for what, count in most[:SHOWN_IGNORED]] + ["…"] * (len(most) > SHOWN_IGNORED)
    return [
        f"text: {facts.source}: {facts.files:,} files, {sum(side.documents for side in sides):,} documents, "
        f"{size_text(sum(side.bytes for side in sides))}" + (f"; passed over: {', '.join(shown)}" if shown else ""),
        f"tokens: {facts.train.tokens:,} to train on, {facts.validation.tokens:,} held out "
        f"({facts.validation.documents:,} documents, {size_text(facts.validation.bytes)}), "
        f"vocabulary {facts.vocabulary:,}, in {corpus.folder}",
        f"held-out text: gzip -9 needs {facts.gzip_bits_per_byte:.3f} bits per byte, "
        f"xz -9e {facts.xz_bits_per_byte:.3f}"
        + (
            f" (measured on its first {size_text(facts.baseline_bytes)})"
            if facts.baseline_bytes < facts.validation.bytes
            else ""
        ),
    ]


Known = tuple[Corpus, dict[str, str]]
"""A corpus, and the files that were passed over for it."""


def _asked(config: DataConfig) -> tuple[Sources, tuple[str, ...], Cache, str]:
    """Where the text is, all else that an entry depends on, the cache, and the mark of both in it."""
    sources, settings = find(config.path), _settings(config)
    return sources, settings, Cache(config.cache_folder), _digest(sources.fingerprint(), config.text_field, *settings)


def _found(config: DataConfig, sources: Sources, known: Known) -> Known:
    """The corpus as it is of these files, and all that could not be read."""
    corpus, not_text = known
    unreadable = {**sources.unreadable, **not_text}
    refuse_unreadable(config, unreadable)
    files = len(sources.files) - len(not_text)
    return replace(
        corpus, facts=replace(corpus.facts, source=sources.name, files=files, ignored=sources.ignored)
    ), unreadable


def _recorded(cache: Cache, mark: str) -> Known | None:
    record = cache.recorded(mark)
    if record is None or (corpus := open_corpus(cache.entry(record.key))) is None:
        return None
    return corpus, record.unreadable


def _build(
    config: DataConfig,
    sources: Sources,
    settings: tuple[str, ...],
    cache: Cache,
    mark: str,
    report: Report | None,
    threads: int | None,
) -> Known:
    """Read the text; tokenise it unless its content is known. For the holder of the mark's lock."""
    found, reader, unreadable = scan_readable(config, sources, report)
    refuse_unreadable(config, {**sources.unreadable, **unreadable})
    key = _digest(found.content, *settings)
    with cache.lock(key, report):  # the same text may have two marks
        corpus = open_corpus(cache.entry(key), report)
        if corpus is None:
            with cache.writing(key) as folder:
                _write(config, sources, found, reader, folder, report, threads)
            corpus = open_corpus(cache.entry(key))
    if corpus is None:
        raise UserError(f"{cache.entry(key)} was changed while it was being written. Start again")
    cache.record(mark, Record(key, unreadable))
    return corpus, unreadable


def _write(
    config: DataConfig,
    sources: Sources,
    found: Scan,
    reader: Reader,
    folder: Path,
    report: Report | None,
    threads: int | None,
) -> None:
    """Fill `folder` with an entry."""
    baselines = BaselineThread(found.held_out)
    baselines.start()
    try:
        if config.tokenizer:
            definition = read_definition(config.tokenizer)
        else:
            if report is not None:
                report(f"training a tokenizer on {size_text(sum(map(len, found.sample)))} of the text")
            definition = train((text.decode() for text in found.sample), config.vocabulary)
        tokenizer = Tokenizer(definition, config.tokenizer or "the new tokenizer")
        itemsize = token_dtype(tokenizer.vocabulary).itemsize
        # No text gives more tokens than it has bytes; one token in two bytes is already unusual.
        with explain_failed_writes(folder.parent, lambda: sum(found.sizes) * itemsize // 2):
            (folder / TOKENIZER).write_text(definition, encoding="utf-8")
            with (folder / TRAIN).open("wb") as first, (folder / VALIDATION).open("wb") as second:
                with progress("tokenising", sum(found.sizes), report) as advance:
                    content = tokenise(reader(), tokenizer, found.threshold, (first, second), threads, advance)
                tokens = [file.tell() // itemsize for file in (first, second)]
        if content != found.content:
            raise UserError(f"{sources.name} changed while it was being read. Start again when it is at rest")
        measured = baselines.result()
    except BaseException:
        baselines.cancel()
        raise
    facts = Facts(
        source=sources.name,
        files=len(sources.files),
        ignored=sources.ignored,
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text,
        tokenizer_bytes=(folder / TOKENIZER).stat().st_size,
        train=SplitFacts(found.documents[0], found.sizes[0], tokens[0]),
        validation=SplitFacts(found.documents[1], found.sizes[1], tokens[1]),
        baseline_bytes=measured.bytes,
        gzip_bits_per_byte=measured.gzip_bits_per_byte,
        xz_bits_per_byte=measured.xz_bits_per_byte,
    )
    (folder / FACTS).write_text(facts.to_json(), encoding="utf-8")
    seal_corpus(folder)


def _settings(config: DataConfig) -> tuple[str, ...]:
    """Everything but the text that an entry depends on."""
    if config.tokenizer:
        tokenizer = "given " + _digest(read_definition(config.tokenizer))
    else:
        tokenizer = f"trained {config.vocabulary}"
    return str(FORMAT), repr(config.validation), tokenizer


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
