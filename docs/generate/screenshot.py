"""Takes the picture that README shows, of a page that `regard look TEXT --model minilm --head L0H1 -o page.html` wrote.

    python docs/generate/screenshot.py page.html docs/page.png ball

marks the first "ball" of the text and writes the picture. Needs chromium and the test extra.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page: str, picture: str, word: str) -> None:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1160, "height": 900}, device_scale_factor=1.25)
        opened.goto(Path(page).resolve().as_uri())
        opened.get_by_text(word, exact=True).first.click()
        opened.mouse.move(0, 0)
        opened.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
