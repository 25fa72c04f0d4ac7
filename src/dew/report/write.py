"""Write report.html, a self-contained page that makes no network requests, and report.json.

Answers are untrusted text. The page contains them as gzipped JSON in base64 and displays them as text nodes only. Its
content security policy allows only its own script and style, by hash, and forbids every request, so nothing else could
run or send data even if text became markup.
"""

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from dew.files import write_atomically
from dew.run.records import Json

PAGE = Path(__file__).parent / "page"
VENDOR = PAGE / "vendor" / "uPlot-1.6.32"
SCRIPTS = (
    "dom", "unpack", "state", "credit", "colour", "words", "save", "figure", "overview", "series", "chart", "curves",
    "answers", "columns", "derivation", "compare", "pointer", "tokens", "picker", "groups", "spread", "main",
)  # fmt: skip
"""Files of page/js, in order of use."""


def write_report(content: Json, out: Path) -> Path:
    """Write the content as a .json file next to `out`, then the page to `out`."""
    write_atomically(out.with_suffix(".json"), _dumps(content))
    write_atomically(out, page(content).encode("utf-8", errors="replace"))
    return out


def page(content: Json, live: str = "") -> str:
    """Return the page as HTML. `live`: the stamp of the runs if a local server (`dew view`) updates the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined)
    script = _script()
    style = "\n".join(file.read_text("utf-8") for file in (VENDOR / "uPlot.min.css", PAGE / "page.css"))
    return environment.get_template("page.html.j2").render(
        title=content["title"],
        policy=f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; "
        + ("connect-src 'self'; " if live else "")
        + "base-uri 'none'; form-action 'none'",
        live=live,
        style=style,
        script=script,
        blobs=blobs(content),
    )


def blobs(content: Json) -> list[str]:
    """Return one blob with everything but the groups' answers, then one per group, so that the page opens quickly."""
    groups = [group for run in content["runs"] for group in run["groups"]]
    prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(group["prompt"] for group in groups))}
    # The table of groups omits complete lines that start every prompt, such as a system prompt.
    first, last = min(prompts, default=""), max(prompts, default="")  # what these two share, all of them share
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    start = first.rfind("\n", 0, same) + 1 if first != last else 0

    def heading(group: Json) -> Json:
        """Return the entry in the table of groups. Groups with equal `same` have the same prompt."""
        prompt = group["prompt"]
        place = {"step": group["step"], "group": group["group"], "same": prompts[prompt]}
        return {**place, "prompt": prompt[start : start + 160], **group["summary"]}

    runs = [{**run, "groups": list(map(heading, run["groups"]))} for run in content["runs"]]
    return [_pack({**content, "runs": runs}), *map(_pack, groups)]


def _dumps(x: Any) -> bytes:
    # ASCII: lone surrogates stay escaped, and JSON.parse in the browser restores them.
    return json.dumps(x, separators=(",", ":"), allow_nan=False, default=str).encode("ascii")


def _pack(x: Any) -> str:
    return base64.b64encode(gzip.compress(_dumps(x), compresslevel=6, mtime=0)).decode("ascii")


def _script() -> str:
    """Return uPlot with its licence, then the page's own files in a function scope."""
    licence = (VENDOR / "LICENSE").read_text("utf-8")
    plots = (VENDOR / "uPlot.iife.min.js").read_text("utf-8")
    ours = "\n".join((PAGE / "js" / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    return f"/* uPlot 1.6.32\n{licence}\n*/\n{plots}\n(() => {{\n'use strict';\n{ours}\n}})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
