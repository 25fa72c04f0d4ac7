"""Speed of the report: `dew report` on large runs, opening the page, and every kind of interaction.

    PYTHONPATH=src:tests/support python benchmarks/report.py [--repeats 5] [--write FILE]

Needs Playwright and Chromium, as the browser tests do. The runs are synthetic (tests/support/make_run.py). "CPU" is the
time that the page's main thread worked (script, style, layout, painting), which other programs on the machine do not
change much, the smallest of all repeats; "wall" is the time from the event to the frame that shows its result, the
median, the smallest and the largest; "complete" the median until everything is drawn and all tokens are found, where
the page does that in parts.
Close other programs: on a busy machine all are larger.
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from dew.report import build
from dew.run.folder import RunFolder
from make_run import make_group, make_run, make_study

DRAWN = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
COMPLETE = "while (document.querySelector('[aria-busy=true]')) await new Promise(requestAnimationFrame);"
ACT = f"""async (code) => {{
  const start = performance.now();
  let is = eval(code);
  for (let k = 0; typeof is === 'function' && !is() && k < 600; k++) await new Promise(requestAnimationFrame);
  {DRAWN}
  const shown = performance.now() - start;
  {COMPLETE}
  return [shown, performance.now() - start];
}}"""
"""Run the code, wait until the function it may return is true and two frames are drawn, then until nothing is left to
do; how long both took."""


def click(selector: str) -> str:
    return f"document.querySelector(`{selector}`).dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"


def choose(label: str, value: str) -> str:
    """Change a <select> by its label."""
    return f"""{{
      const found = [...document.querySelectorAll('section:not([hidden]) label.choice')];
      const box = found.find((label) => label.textContent.startsWith(`{label}`)).querySelector('select');
      box.value = `{value}`;
      box.dispatchEvent(new Event('change'));
    }}"""


def key(name: str) -> str:
    return f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{name}', bubbles: true}}))"


def point(selector: str, place: int) -> str:
    return f"""{{
      const token = document.querySelectorAll(`{selector}`)[{place}];
      const {{x, y}} = token.getBoundingClientRect();
      token.dispatchEvent(new MouseEvent('mousemove', {{clientX: x + 3, clientY: y + 3, bubbles: true}}));
    }}"""


def slide(name: str, value: float) -> str:
    box = f"document.querySelector('[data-setting={name}]')"
    return f"{box}.value = {value}; {box}.dispatchEvent(new Event('input'))"


def find(query: str) -> str:
    form = "document.querySelector('#view-credit .find')"
    return f"{form}.elements.find.value = '{query}'; {form}.requestSubmit()"


def other_group(code: str) -> str:
    return f"const old = dew.view.group; {code}; () => dew.view.group !== old"


TABS = [(f"view: {name}", click(f"#tab-{name}")) for name in ("curves", "groups", "credit", "overview")]
TOKENS = "() => document.querySelector('#tokens[open] tbody tr')"
RUN = [
    *TABS,
    *[(f"{label}, again", code) for label, code in TABS],
    ("view: groups, again", click("#tab-groups")),
    ("next group", other_group(key("j"))),
    ("next group", other_group(key("j"))),
    ("colour by entropy", key("4")),
    ("colour by advantage", key("2")),
    ("colour relative to GRPO", choose("Colour", "relative")),
    ("wrong answers only", choose("Show", "wrong")),
    ("all answers", choose("Show", "all")),
    ("longest answers first", choose("Sort", "length")),
    ("point at a token", point(".answer .t", 30)),
    ("select a token", click(".answer .t")),
    ("move the selection", key("ArrowRight")),
    ("columns", click("[data-mode=columns]")),
    ("next group, columns", other_group(key("j"))),
    ("compare two rules", click("[data-mode=methods]")),
    ("compare dew with GRPO", choose("Credit with", "dew")),
    ("compare dew with forking tokens", choose("minus", "forking_tokens")),
    ("move the slider of α₂", slide("alpha2", 0.8)),
    ("answers", click("[data-mode=text]")),
    ("sort the table", click("[data-by=spread]")),
    ("sort the table", click("[data-by=step]")),
    ("filter the table", choose("With", "mixed")),
    ("next flipped token", key("f")),
    ("dark theme", key("t")),
    ("view: credit, again", click("#tab-credit")),
    ("tokens of a bar, at once (unpacks all groups)", click(".bar-right") + f"; {TOKENS}"),
    ("close the list of tokens", click("#tokens .close")),
    ("tokens of a bar", click(".bar-right") + f"; {TOKENS}"),
    ("close the list of tokens", click("#tokens .close")),
    ("tokens of a word", click(".word") + f"; {TOKENS}"),
    ("close the list of tokens", click("#tokens .close")),
    ("tokens of a query", find("H<0.01 & wrong & |A|>2 & step>200") + f"; {TOKENS}"),
    ("close the list of tokens", click("#tokens .close")),
    ("tokens of a query: half of all", find("correct") + f"; {TOKENS}"),
]
CHART = ".chart .u-over"
LONG = [(label, code.replace("step>200", "step>1")) for label, code in RUN]
ONE_GROUP = [(label, code) for label, code in LONG if "next group" not in label]
STUDY = [
    *TABS[:1],
    ("view: credit", TABS[2][1]),
    ("view: overview", TABS[3][1]),
    ("view: curves, again", TABS[0][1]),
    ("point at a curve", point(CHART, 0)),
    ("hide an arm", click(".chip")),
    ("show it again", click(".chip")),
    ("smoothing", "{const s = document.querySelector('#smooth'); s.value = 0.8; s.dispatchEvent(new Event('input'))}"),
    ("seeds: each run", choose("Seeds", "each")),
    ("point at one of 132 curves", point(CHART, 0)),
    ("hide a run", click(".chip")),
    ("seeds: mean", choose("Seeds", "mean")),
]
TASKS = [
    ("another task", choose("Task", "synthetic-1")),
    ("view: curves", TABS[0][1]),
    ("another task, curves", choose("Task", "synthetic")),
]


def wide_run(folder: Path) -> Path:
    """500 steps of which 50 are recorded with 200 groups each; every file has the same groups."""
    make_run(folder, groups=4)
    rng = np.random.default_rng(0)
    groups = [make_group(rng, 500, g, 16, 0.5) for g in range(200)]
    run = RunFolder(folder)
    for path in run.record_files():
        path.unlink()
    run.write_records(500, groups)
    [whole] = run.record_files()
    for step in range(10, 500, 10):
        shutil.copy(whole, whole.with_name(whole.name.replace("500", f"{step:03d}")))
    return folder


def long_run(folder: Path, size: int, mean: int, steps: int) -> Path:
    """Every 20 steps, 4 groups of `size` long answers, of which one is cut off at 16,384 tokens."""
    make_run(folder, steps=steps, groups=0)
    rng = np.random.default_rng(0)
    for step in [1, *range(20, steps + 1, 20)]:
        lengths = rng.lognormal(np.log(mean), 0.5, (4, size)).clip(max=8192).astype(int)
        lengths[:, 0] = 16384
        groups = [make_group(rng, step, g, size, 0.5, lengths=row) for g, row in enumerate(lengths.tolist())]
        RunFolder(folder).write_records(step, groups)
    return folder


class Tab:
    """A page and the CPU seconds of its main thread."""

    def __init__(self, browser: Any) -> None:
        self.tab = browser.new_page(viewport={"width": 1440, "height": 900})
        self.tool = self.tab.context.new_cdp_session(self.tab)
        self.tool.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu(self) -> float:
        metrics = self.tool.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))

    def open(self, page: Path, address: str) -> tuple[float, float, float]:
        before, start = self.cpu(), time.perf_counter()
        self.tab.goto(f"{page.as_uri()}{address}")
        self.tab.wait_for_selector("html[data-ready]")
        self.tab.evaluate(f"(async () => {{ {DRAWN} }})()")
        wall = time.perf_counter() - start
        self.tab.evaluate(f"(async () => {{ {COMPLETE} }})()")
        return self.cpu() - before, wall, time.perf_counter() - start

    def act(self, code: str) -> tuple[float, float, float]:
        self.tab.evaluate(ACT, "0")  # anything still to be drawn
        before = self.cpu()
        wall, complete = self.tab.evaluate(ACT, code)
        return self.cpu() - before, wall / 1000, complete / 1000


def table(title: str, head: str, found: dict[str, list[tuple[float, float, float]]]) -> list[str]:
    rows = []
    for label, times in found.items():
        cpu, wall, complete = ([1000 * seconds for seconds in column] for column in zip(*times, strict=True))
        median = f"{statistics.median(wall):.0f} ({min(wall):.0f} to {max(wall):.0f})"
        rows.append(f"| {label} | {min(cpu):.0f} | {median} | {statistics.median(complete):.0f} |")
    return [f"## {title}", "", f"| {head} | CPU, ms | wall, ms | complete, ms |", "|---|---|---|---|", *rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    parser.add_argument("--only", help="one of the pages")
    args = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    pages = {  # title: how it is made, its interactions
        "run of 500 steps, 200 groups of 16 answers": (make_run, RUN),
        "run of 500 steps, 50 of them recorded with 200 groups each": (wide_run, RUN),
        "run of 200 steps, 44 groups of 8 long answers": (lambda to: long_run(to, 8, 3000, 200), LONG),
        "run of 20 steps, 8 groups of 64 long answers": (lambda to: long_run(to, 64, 6000, 20), ONE_GROUP),
        "study of 132 runs in 12 arms": (make_study, STUDY),
        "study of 132 runs in 22 arms on 2 tasks": (lambda to: make_study(to, arms=11, seeds=6, tasks=2), TASKS),
    }
    if args.only:
        pages = {title: value for title, value in pages.items() if args.only in title}
    lines, builds = [], ["| | `dew report`, CPU, s | page, MB |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for k, (title, (make, actions)) in enumerate(pages.items()):
            run = make(Path(folder) / str(k))
            start = time.process_time()
            page = build([run])
            builds.append(f"| {title} | {time.process_time() - start:.1f} | {page.stat().st_size / 1e6:.1f} |")
            found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
            for _ in range(args.repeats):
                for name in ("overview", "curves", "groups", "credit"):
                    tab = Tab(browser)
                    found[f"open: {name}"].append(tab.open(page, f"#{name}"))
                    tab.tab.close()
                tab = Tab(browser)
                tab.open(page, "")
                for label, code in actions:
                    found[label].append(tab.act(code))
                tab.tab.close()
            lines += table(title.capitalize(), "interaction", found)
        version = browser.version
        browser.close()
    text = "\n".join([
        "# The report's page",
        "",
        f"`python benchmarks/report.py --repeats {args.repeats}`, {date.today()}, {os.cpu_count()} virtual cores of "
        f"{platform.machine()}, load average {os.getloadavg()[0]:.0f}, headless Chromium {version}. "
        "CPU is the time of the page's main thread until everything is drawn, the smallest of all repeats; wall is the "
        "median (smallest to largest), and ends two frames after the page has changed; complete is later where the "
        "page fills cards, draws charts or finds tokens in parts.",
        "",
        *builds,
        "",
        *lines,
    ])  # fmt: skip
    print(text)
    if args.write:
        args.write.write_text(text)


if __name__ == "__main__":
    main()
