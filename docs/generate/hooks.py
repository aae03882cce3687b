"""What mkdocs calls while it builds the site: the reference, the gallery, notebooks, formulas."""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mkdocs.structure.files import File, Files

from generate import formulas, gallery, notebook, reference


def on_files(files: Files, config: Any) -> Files:
    for page in reference.PAGES:
        files.append(File.generated(config, f"reference/{page.file}.md", content=page.markdown()))
    for file in list(files.documentation_pages()):
        if file.abs_src_path is None or not notebook.is_notebook(text := file.content_string):
            continue
        folder, name = posixpath.split(file.src_uri)
        found = notebook.execute(text, Path(file.abs_src_path))
        content, shown = notebook.to_markdown(found, name.removesuffix(".md"))
        file.content_string = content
        for name, data in shown.items():
            files.append(File.generated(config, posixpath.join(folder, name), content=data))
    content, pictures = gallery.page()
    files.append(File.generated(config, "gallery.md", content=content))
    for name, data in pictures.items():
        files.append(File.generated(config, name, content=data))
    return files


def on_page_content(html: str, **_: Any) -> str:
    return formulas.to_mathml(html)
