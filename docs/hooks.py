"""For mkdocs: README.md is the first page, and links to files that are not pages become their text."""

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
    """Leaves out links to the rest of the repository: this site does not know where that is hosted."""

    def link(match):
        text, target = match.groups()
        is_page = "://" in target or target.startswith("#") or files.get_file_from_path(target.partition("#")[0])
        return match[0] if is_page else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, markdown)
