"""regard look --serve: the page until Ctrl-C, and what is said meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
from regard_command import main
sys.exit(main({!r}))
"""


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_the_page_is_served_until_it_is_interrupted(tmp_path: Path) -> None:
    arguments = ["look", "-t", "to be or not to be", "--serve", "--ablate", "-o", str(tmp_path / "a.html")]
    command = [sys.executable, "-c", COMMAND.format(arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    said = ""
    while not said.startswith("serving"):
        said = running.stdout.readline()
        assert said, running.stderr and running.stderr.read()
        if said.startswith("byte model"):
            first = said + running.stdout.readline()
    assert ", q and k 73.7 kB " in first.replace("\n", " ")
    url = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/[\w-]{43}/)  on this machine only, with .*\n", said)
    assert url is not None
    with urlopen(url[1], timeout=10) as answer:
        page = answer.read().decode()
    assert "loss without a head" in page and "fetch(" in page
    assert "fetch(" not in (tmp_path / "a.html").read_text(encoding="utf-8")
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate(timeout=20)
    assert (running.returncode, rest, errors) == (0, "\nregard look: no longer served\n", "")
