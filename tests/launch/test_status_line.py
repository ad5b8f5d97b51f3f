from __future__ import annotations

from paceline.launch.screen import CLEAR
from tests.launch.terminal import on_terminal

PROGRAM = """
import threading
from paceline.launch.screen import show
from paceline.launch.status_line import StatusLine
drawn = threading.Semaphore(0)
def text(columns):
    drawn.release()
    return f"{columns} " + "x" * 200
with StatusLine(text) as line:
    FIRST
    show("news")
    with line.showing(lambda columns: "other work"):
        pass
    line.draw()
show("the end")
"""
DRAWN = PROGRAM.replace("FIRST", "drawn.acquire(), drawn.acquire()")
NEVER = PROGRAM.replace("FIRST", "pass")


def test_the_last_line_is_drawn_again_and_again_and_gives_way_to_others() -> None:
    status, sent = on_terminal(["-c", DRAWN], columns=60)
    assert status == 0
    line = "57 " + "x" * 54
    assert sent.count(CLEAR + line) >= 3
    assert f"{CLEAR}news\r\n" in sent and f"{CLEAR}other work" in sent
    # A full line would begin the next one, also with ^C behind it.
    assert line + "x" not in sent
    assert sent.endswith(f"{CLEAR}the end\r\n")
    assert sent[: sent.index("the end")].rpartition("\n")[2].endswith(CLEAR)


def test_a_terminal_without_a_cursor_gets_plain_lines() -> None:
    status, sent = on_terminal(["-c", NEVER], term="dumb")
    assert (status, sent) == (0, "news\r\nthe end\r\n")
