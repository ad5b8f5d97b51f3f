"""The page of a run that goes on: for browsers of this host alone, made anew as the run writes."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.report.watch_page import LivePage, PageServer
from paceline.report.watched import Watched
from tests.report.browser import Browser
from tests.report.events import figures, lines
from tests.report.test_watched import end, going_on
from tests.train.processes import program


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(0, LivePage(Watched(tmp_path / "run")).get) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def ask(port: int, host: str | None = None, path: str = "/") -> tuple[int, str | None, str]:
    """Status, after how many seconds to ask again, and the page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status != 200 or answer.getheader("Cache-Control") == "no-store"
    return answer.status, answer.getheader("Refresh"), text


def test_the_page_follows_the_run(server: PageServer, tmp_path: Path) -> None:
    status, again, page = ask(server.server_port)
    assert (status, again) == (200, "1") and "Waiting for the run to begin" in page
    run = going_on(tmp_path / "run")
    _, again, page = ask(server.server_port)
    assert int(again or 0) >= 10 and 'data-figure="steps" data-value="10.0"' in page and "reloads itself" in page
    # Nothing new: it is not made again.
    assert ask(server.server_port)[2] == page
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines([figures(20, 1e9)]))
    end(run)
    _, again, page = ask(server.server_port)
    assert again is None and 'data-figure="steps" data-value="110.0"' in page and "The run has ended." in page


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("localhost:{}", "/", 200),
        ("evil.example:{}", "/", 403),
        ("127.0.0.1", "/", 403),
        ("", "/", 403),
        ("127.0.0.1:{}", "/config.yaml", 404),
        ("127.0.0.1:{}", "/../run/config.yaml", 404),
    ],
)
def test_it_is_for_this_host_and_serves_the_page_alone(server: PageServer, host: str, path: str, status: int) -> None:
    assert ask(server.server_port, host.format(server.server_port), path)[0] == status
    assert server.server_address[0] == "127.0.0.1"


def test_a_browser_shows_it_under_its_policy(server: PageServer, tmp_path: Path, page: Browser) -> None:
    run = going_on(tmp_path / "run")
    end(run)
    page.window.get(server.address)
    page.settle()
    assert page.text("h1") == "run"
    assert page.wait_for("document.querySelectorAll('.chart canvas').length") > 0
    # Browsers ask for an icon by themselves, which there is none of.
    assert [told for told in page.complaints() if "favicon" not in told] == []


def test_a_port_that_is_in_use_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        assert main(["watch", str(tmp_path), "--web", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be had: Address already in use" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--web", "--port", "70000"]) == 2
    assert "from 0 to 65535" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "7000"]) == 2
    assert "add --web" in capsys.readouterr().err


@pytest.mark.full
def test_ctrl_c_ends_it_and_frees_the_port(tmp_path: Path) -> None:
    run = going_on(tmp_path / "run")
    with program([sys.executable, "-m", "paceline", "watch", str(run), "--web"], tmp_path) as serving:
        assert serving.process.stdout is not None
        (port,) = re.findall(r"^http://127.0.0.1:(\d+)/:", serving.process.stdout.readline())
        assert ask(int(port))[0] == 200
        os.kill(serving.process.pid, signal.SIGINT)
        status, _, errors = serving.finish()
        assert status == 130 and "Traceback" not in errors
        assert not serving.alive()
    with socket.socket() as free, pytest.raises(ConnectionRefusedError):
        free.connect(("127.0.0.1", int(port)))
