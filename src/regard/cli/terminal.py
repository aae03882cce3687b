"""What a command prints: as wide as the terminal, and in colour where the terminal takes it."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping

PIPED = 80  # columns, where the width is not known

# What of a text has which style of rich.
REPORT = {
    r"\A.*": "bold",
    r"[▁▂▃▄▅▆▇█]": "cyan",
    r"[░▒▓]": "yellow",
    r"\b(encoder |decoder )?(cross )?L\d+H\d+\b": "bold magenta",
    r"(?m)^    rule:(.*\n(?=    ))*.*$": "dim",
}
DOCTOR = {
    r"(?m)^\S+( \S+)*(?=  )": "bold",
    r"(not installed|not built): [^\n]*": "yellow",
    r"regard serves this model": "bold green",
    r"do not use regard here[^\n]*": "bold red",
}


def width() -> int:
    """Columns of the terminal, or PIPED where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED


def show(text: str, styles: Mapping[str, str]) -> None:
    """Prints a text; what each pattern fits has its style, where the output is a terminal that takes colours.

    Plain are pipes, files, TERM=dumb, NO_COLOR (https://no-color.org), and Python without the package rich; FORCE_COLOR
    is heard in a pipe too.
    """
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(text)
        return
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    if console.color_system is None or console.no_color:
        print(text)
        return
    shown = Text(text)
    for pattern, style in styles.items():
        shown.highlight_regex(re.compile(pattern), style)
    console.print(shown)


def hanging(rows: str) -> str:
    """Lines of a name, two spaces or more, and a text, wrapped to a terminal under the text; as they are in a pipe."""
    if not sys.stdout.isatty():
        return rows
    found: list[str] = []
    for line in rows.splitlines():
        name = re.match(r"\S+( \S+)* {2,}", line)
        indent = " " * (name.end() if name is not None else 0)
        found += textwrap.wrap(line, max(width(), len(indent) + 20), subsequent_indent=indent) or [""]
    return "\n".join(found)
