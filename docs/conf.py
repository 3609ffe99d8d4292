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

from sphinx.pycode import ModuleAnalyzer

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
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]+)">\s*</picture>'
)
# a page's own list of its sections, which the site shows beside the page
_SECTIONS = re.compile(r"(?:^- \[[^\]]+\]\(#[^)\s]+\)\n){3,}", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")

project = "sparsewire"
author = "The sparsewire maintainers"
copyright = author
version = release = metadata.version("sparsewire")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["README.md"]  # the list of pages, for those who read them on a code host
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

default_role = "py:obj"  # `TopK` in a docstring becomes a link if it names something public
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Options for both", "params_style"),
    ("Options for gradients", "params_style"),
    ("Options for updates", "params_style"),
]
python_use_unqualified_type_names = True
toc_object_entries = False  # every name has a heading of its own
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "sparsewire"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    # one signature for `attach`, not one for each kind of exchange: its docstring explains both
    source = ModuleAnalyzer.for_module("sparsewire.adapters.attach")
    source.analyze()
    source.overloads.clear()


def _read(app: Any, page: str, source: list[str]) -> None:
    """Replace a page's text by that of its file, with the links that the site needs."""
    origin = ROOT / ELSEWHERE[page] if page in ELSEWHERE else DOCS / f"{page}.md"
    text = _SECTIONS.sub("", origin.read_text())
    text = _PICTURE.sub(lambda found: _picture(found, origin.parent, DOCS / page), text)
    source[0] = _LINK.sub(lambda link: _link(link, origin.parent, DOCS / page), text)


def _picture(found: re.Match[str], folder: Path, page: Path) -> str:
    """Return a picture for `page` that follows the reader's choice of a light or a dark page."""
    dark, light, label = found.groups()
    images = "\n".join(
        f"```{{image}} {os.path.relpath(folder / path, page.parent)}\n"
        f":alt: {label}\n:class: only-{kind}\n```\n"
        for kind, path in (("light", light), ("dark", dark))
    )
    # measured pictures have small letters: on a phone they scroll instead of shrinking
    return f"````{{container}} wide\n{images}````" if light.endswith(".png") else images


def _link(link: re.Match[str], folder: Path, page: Path) -> str:
    """Return a link as `page` needs it, from a file in `folder`.

    A link to a file that is not part of the site becomes its text alone.
    """
    mark, text, target, anchor = link.groups()
    if ":" in target:
        return link[0]
    path = Path(os.path.normpath(folder / target))
    pages = {ROOT / file: f"{page}.md" for page, file in ELSEWHERE.items()}
    if path in pages:
        target = os.path.relpath(DOCS / pages[path], page.parent)
        return f"[{text}]({target}{anchor or ''})"
    if mark or (path.suffix == ".md" and path.is_relative_to(DOCS)):
        return f"{mark}[{text}]({os.path.relpath(path, page.parent)}{anchor or ''})"
    return f"{text}" if text.startswith("`") else f"{text} (`{path.relative_to(ROOT)}`)"
