"""Write the pages of docs/gallery again with today's report page, from the data that they contain.

    python scripts/gallery.py

A page whose runs are at hand can be made anew: dew report RUNS --out docs/gallery/NAME.html.
"""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from dew.report.write import page

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"


def content_of(text: str) -> dict[str, Any]:
    """What a page shows: the first blob has all but the groups' answers, the others a group each."""
    data = re.search(r'<script type="text/plain" id="data">\n(.*?)</script>', text, re.DOTALL)
    assert data, "not a page of dew report"
    content, *groups = (json.loads(gzip.decompress(base64.b64decode(blob))) for blob in data[1].split())
    for run in content["runs"]:
        run["groups"], groups = groups[: len(run["groups"])], groups[len(run["groups"]) :]
    return dict(content)


if __name__ == "__main__":
    for path in sorted(GALLERY.glob("*.html")):
        path.write_text(page(content_of(path.read_text())))
