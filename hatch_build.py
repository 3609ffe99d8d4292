"""Package metadata that depends on where a release is published: the description and the links.

A package index shows README.md without the files beside it, so relative links would lead nowhere.
With `repository` set in pyproject.toml they lead to the release's tag there; without it a link
becomes its text and a picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r'<picture>.*?<img src="([^"]+)" alt="([^"]+)">\s*</picture>', re.DOTALL)
_RELATIVE = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)(?P<rest>\n*)"
)


def standalone(readme: str, repository: str, tag: str) -> str:
    """Return `readme` without relative links, and with one version of each picture."""

    def replace(link: re.Match[str]) -> str:
        picture, text, path, rest = link.group("picture", "text", "path", "rest")
        if repository:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({repository}/{kind}/{tag}/{path}){rest}"
        return "" if picture else f"{text}{rest}"

    return _RELATIVE.sub(replace, _PICTURE.sub(r"![\2](\1)", readme))


class CustomMetadataHook(MetadataHookInterface):
    """Fills in the fields that pyproject.toml calls dynamic, except the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        tag = f"v{metadata['version']}"
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": standalone(readme, repository, tag),
        }
        metadata["urls"] = {}
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/README.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
            }
