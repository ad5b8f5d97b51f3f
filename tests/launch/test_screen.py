from __future__ import annotations

import pytest

from paceline.launch.screen import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("def f():\n\treturn 'ä€'\n", "def f():\n\treturn 'ä€'\n"),
        ("\x1b[2J\x07\r", "\\x1b[2J\\x07\\r"),
        ("\x9b31m \u202e", "\\x9b31m \\u202e"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown
