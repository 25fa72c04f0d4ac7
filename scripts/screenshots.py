"""Make the screenshots of docs/report.md from synthetic runs and those of docs/real-models.md from real ones, in a
headless Chromium.

    PYTHONPATH=src:tests/support python scripts/screenshots.py [FOLDER]        # default: docs/images

Needs Playwright and Chromium, as the browser tests do. Nothing in the pictures report-*.png was measured.
FOLDER/screenshots.sha256 has the digest of the sources that they show; a test compares it.
"""

import csv
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from dew.report import build, build_from_records
from dew.run.folder import RunFolder
from make_run import make_run, make_study

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
SHOTS = {  # name: page, address, size, theme
    "report-overview": ("runs", "#overview", DESKTOP, "light"),
    "report-study": ("study", "#overview", DESKTOP, "light"),
    "report-curves": ("study", "#curves", DESKTOP, "light"),
    "report-groups": ("runs", "#groups&token=1.5", DESKTOP, "light"),
    "report-columns-dark": ("runs", "#groups&mode=columns", DESKTOP, "dark"),
    "report-compare": ("runs", "#groups&mode=methods&rule=dew&than=forking_tokens&token=2.20", DESKTOP, "light"),
    "report-tokens": ("runs", "#credit&find=H%3C0.01 %26 wrong %26 |A|>1 %26 step>100", DESKTOP, "light"),
    "report-credit-dark": ("runs", "#credit", DESKTOP, "dark"),
    "report-phone": ("runs", "#groups", PHONE, "light"),
    "gsm8k-0.5b-curves": ("gsm8k", "#curves&smooth=0.5", DESKTOP, "light"),
    "gsm8k-group": ("group", "#groups&mode=methods&rule=gtpo&token=2.20", DESKTOP, "light"),
}
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def gsm8k_runs(folder: Path) -> Path:
    """The four runs of docs/real-models.md, from the metrics that are kept of them."""
    with (RESULTS / "gsm8k-0.5b" / "curves.csv").open() as file:
        for line in csv.DictReader(file):
            name = line.pop("algorithm")
            run = RunFolder(folder / name)
            if line["step"] == "1":
                run.write_run({"name": name, "algorithm": {"name": name, "settings": {}}, "status": "done"})
            run.append_metrics({"step": int(line.pop("step")), **{k: float(v) for k, v in line.items() if v}})
    return folder


def digest() -> str:
    """Of the report's sources and of the runs that are shown."""
    root = Path(__file__).parents[1]
    files = sorted((root / "src" / "dew" / "report").rglob("*.*"))
    files = [path for path in files if path.is_file() and path.suffix != ".pyc" and "benchmark" not in path.name]
    files += [root / "tests" / "support" / "make_run.py", root / "scripts" / "screenshots.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def main(out: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        runs = Path(folder) / "runs"
        for algorithm in ("grpo", "gtpo"):
            for seed in range(5):
                name = f"{algorithm}-seed{seed}"
                make_run(runs / name, steps=200, groups=24, size=8, seed=seed, name=name, algorithm=algorithm)
        group = RESULTS / "readme-group" / "records" / "step-00000001.jsonl.gz"
        pages = {
            "runs": build([runs]),
            "study": build([make_study(Path(folder) / "study", arms=6, tasks=2)]),
            "gsm8k": build([gsm8k_runs(Path(folder) / "gsm8k")]),
            "group": build_from_records(group, Path(folder) / "group.html"),
        }
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (page, address, size, theme) in SHOTS.items():
            tab = browser.new_page(viewport=size, color_scheme=theme)
            tab.goto(f"{pages[page].as_uri()}{address}")
            tab.wait_for_selector("html[data-ready]")
            if "groups" in address:
                tab.wait_for_selector(".group-title")
            tab.wait_for_timeout(500)
            tab.get_by_text("Searching …").wait_for(state="hidden")
            tab.screenshot(path=out / f"{name}.png")
            tab.close()
        browser.close()
    (out / "screenshots.sha256").write_text(f"{digest()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
