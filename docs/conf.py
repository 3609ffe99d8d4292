"""The site: `make docs` builds it into out/docs, with warnings as errors.

Pages that live elsewhere in the repository, such as CONTRIBUTING.md, are read from there, and links
between pages work on a code host and on the site alike.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
ELSEWHERE = {
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "papers-aji2017": "papers/aji2017/README.md",
    "papers-eghlidi2020": "papers/eghlidi2020/README.md",
    "papers-accuracy": "papers/accuracy/README.md",
    "examples": "examples/README.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")

project = "sparsewire"
author = "The sparsewire maintainers"
copyright = author
version = release = metadata.version("sparsewire")

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["README.md"]  # the list of pages, for those who read them on a code host
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

html_theme = "furo"
html_title = "sparsewire"
html_theme_options = {"navigation_with_keys": True}


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)


def _read(app: Any, page: str, source: list[str]) -> None:
    """Replace a page's text by that of its file, with the links that the site needs."""
    origin = ROOT / ELSEWHERE[page] if page in ELSEWHERE else DOCS / f"{page}.md"
    source[0] = _LINK.sub(lambda link: _link(link, origin.parent), origin.read_text())


def _link(link: re.Match[str], folder: Path) -> str:
    """A link as the site needs it; to a file that is not part of the site, its text alone."""
    mark, text, target, anchor = link.groups()
    if ":" in target:
        return link[0]
    path = Path(os.path.normpath(folder / target))
    pages = {ROOT / file: f"{page}.md" for page, file in ELSEWHERE.items()}
    if path in pages:
        return f"[{text}]({pages[path]}{anchor or ''})"
    if mark or (path.suffix == ".md" and path.parent == DOCS):
        return f"{mark}[{text}]({os.path.relpath(path, DOCS)}{anchor or ''})"
    return f"{text}" if text.startswith("`") else f"{text} (`{path.relative_to(ROOT)}`)"
