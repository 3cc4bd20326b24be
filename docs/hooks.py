"""Hooks of mkdocs: README.md becomes the first page, and links to files outside the site become plain text."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent


def on_files(files, config):
    """Adds README.md as index.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Replaces links to other files of the repository by their text: the site does not know where they are hosted."""

    def link(match):
        text, target = match.groups()
        is_page = "://" in target or target.startswith("#") or files.get_file_from_path(target.partition("#")[0])
        return match[0] if is_page else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, markdown)
