"""What general-purpose compressors need for the held-out text: the figures a language model should beat."""

from __future__ import annotations

import lzma
import threading
import zlib
from typing import NamedTuple, Protocol

CHUNK = 64 << 10
SMALLEST_DICTIONARY = 4096  # bytes; xz accepts no smaller one


class Baselines(NamedTuple):
    """Compressed sizes of a text.

    Attributes:
        bytes: length of the text.
        gzip_bits_per_byte: bits `gzip -9` needs for each byte of it.
        xz_bits_per_byte: bits `xz -9e` needs for each byte of it.
    """

    bytes: int
    gzip_bits_per_byte: float
    xz_bits_per_byte: float


class BaselineThread(threading.Thread):
    """Measures in the background, while the text is tokenised; both compressors run outside the interpreter's lock."""

    def __init__(self, text: bytes) -> None:
        """Prepare to measure `text`, which must not be empty; call `start` next."""
        super().__init__(name="baselines", daemon=True)
        self._text = text
        self._cancelled = threading.Event()
        self._result: Baselines | None = None

    def run(self) -> None:
        """Compress the text both ways."""
        text = self._text
        gzip_size = self._compressed_size(zlib.compressobj(9, wbits=31))
        # A dictionary longer than the text changes nothing but the memory that is reserved.
        dictionary = max(len(text), SMALLEST_DICTIONARY)
        preset = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary}
        xz_size = self._compressed_size(lzma.LZMACompressor(filters=[preset]))
        self._result = Baselines(len(text), 8 * gzip_size / len(text), 8 * xz_size / len(text))

    def cancel(self) -> None:
        """Stop within one chunk and wait for it."""
        self._cancelled.set()
        self.join()

    def result(self) -> Baselines:
        """Wait for the figures."""
        self.join()
        if self._result is None:
            raise RuntimeError("the compressors did not finish")
        return self._result

    def _compressed_size(self, compressor: _Compressor) -> int:
        size = 0
        for start in range(0, len(self._text), CHUNK):
            if self._cancelled.is_set():
                return 0
            size += len(compressor.compress(self._text[start : start + CHUNK]))
        return size + len(compressor.flush())


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...
