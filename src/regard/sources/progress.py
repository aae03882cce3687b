"""Progress of a pass over a source: a bar of tqdm or rich, or a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

# Told how many keys are done, and of how many; None where a source does not know.
Told = Callable[[int, "int | None"], None]
Progress = Literal["tqdm", "rich"] | Told | None


@contextmanager
def progress_bar(progress: Progress, total: int | None) -> Generator[Callable[[int], None], None, None]:
    """A function that is called with the number of keys done. ImportError where the package of the bar is missing."""
    if progress is None:
        yield lambda done: None
    elif callable(progress):
        yield lambda done: progress(done, total)
    elif progress == "tqdm":
        with _needs("tqdm"):
            from tqdm import tqdm
        with tqdm(total=total, unit=" keys", unit_scale=True) as bar:

            def tell(done: int) -> None:
                bar.update(done - bar.n)

            yield tell
    elif progress == "rich":
        with _needs("rich"):
            from rich.progress import Progress as Bars
        with Bars() as bars:
            task = bars.add_task("keys", total=total)
            yield lambda done: bars.update(task, completed=done)
    else:
        raise ValueError(f"progress is {progress!r}; expected 'tqdm', 'rich', a function of (done, total), or None.")


@contextmanager
def _needs(package: str) -> Generator[None, None, None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f"progress={package!r} needs {package}: pip install 'regard[progress]'.") from error
