"""One visit to a report's page: what it shows, and all that it said and asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


class Visit:
    """A page that was opened without a network and shows its first head."""

    def __init__(self, browser: Any, file: Path, before: str = "", address: str = "", **form: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **form})
        self.context.set_offline(True)
        self.page, self.said, self.asked = self.context.new_page(), list[str](), list[str]()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.add_init_script(before)
        self.page.goto(file.as_uri() + address)
        if form.get("java_script_enabled", True):
            self.page.wait_for_selector("body[data-ready]", timeout=60_000)

    def name(self) -> str:
        """The head that is shown."""
        return self.page.inner_text("#name").split()[0]

    def style(self, where: str, name: str) -> str:
        return self.page.evaluate(f"getComputedStyle(document.querySelector('{where}'))['{name}']")

    def press(self, *keys: str, at: str = "#map") -> None:
        """Presses keys while an element has the focus, one after the other is shown."""
        self.page.locator(at).focus()
        for key in keys:
            self.page.keyboard.press(key)
            self.settle()

    def settle(self) -> None:
        """Until a layer that was opened is shown."""
        self.page.evaluate("new Promise(done => setTimeout(done, 30))")

    def choose(self, number: int) -> None:
        """Clicks on a token of the text."""
        self.page.locator(f"#words [data-n='{number}']").click()
        self.page.mouse.move(2, 2)
        self.settle()

    def listed(self) -> dict[int, float]:
        """The heaviest tokens of the list beside the text, and their shares in percent."""
        lines = self.page.locator("#tops .bar-line")
        numbers, shares = (lines.locator(where).all_inner_texts() for where in ("small", ".share"))
        return {int(n): float(re.sub(r"[^\d.]", "", share)) for n, share in zip(numbers, shares, strict=True)}
