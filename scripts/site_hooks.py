"""Adds to the docs site the pages that docs/ links to outside of itself, points the links at them, and ranks guides
first in its search."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "src/dew/tasks/data/tiny/README.md",
           "src/dew/tasks/data/tiny6/README.md"]  # fmt: skip


SEARCH = {  # how the search ranks a page: answers to newcomers, then guides, then measurements, history and reference
    r"(choose|gtpo|howto|troubleshooting)\.md": {"boost": 4},
    r"benchmark|api|log\.|study|real-models|corrections|CHANGELOG|CONTRIBUTING|SECURITY": {"boost": 0.1},
    r"src/": {"exclude": True},
}


def on_files(files: Files, config: Any) -> Files:
    found = [ROOT.glob(pattern) for pattern in ("benchmarks/results/*.md", "benchmarks/*.*", "examples/**/*.py")]
    for path in [*map(ROOT.joinpath, OUTSIDE), *sorted(path for paths in found for path in paths)]:
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """docs/ is the root of the site: ../benchmarks/x.md becomes benchmarks/x.md, docs/trl.md becomes trl.md."""
    uri, pages = page.file.src_uri, {"README.md": "index.md"}
    page.meta["search"] = next((rank for pattern, rank in SEARCH.items() if re.match(pattern, uri)), {})
    if (ROOT / "docs" / uri).exists():
        return re.sub(r"\]\(\.\./", "](", markdown)
    up = "../" * uri.count("/")

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match.group(1).partition("#")
        if ":" in match.group(1) or not target:
            return match.group(0)
        absolute = (ROOT / uri).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        site = pages.get(absolute, absolute.removeprefix("docs/"))
        return f"]({up}{site}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)
