"""The documentation: links and anchors lead somewhere, every page can be reached, samples are valid."""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import gallery
import gtpo_pictures
import pytest
import readme_picture
import screenshots
import typer

from dew.algorithms import list_algorithms
from dew.cli.app import COMMANDS, app
from dew.report.write import page as report_page
from dew.run.alarms import RULES
from dew.run.config import OWN_KEYS

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "dew"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def name(path):
    return path.relative_to(ROOT).as_posix()


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), f"{target} does not exist"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}: no such heading"


def test_every_page_is_in_the_site_and_in_the_readme():
    site, readme = (ROOT / "mkdocs.yml").read_text(), (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in site, f"mkdocs.yml does not list {page.name}"
        if page.name != "index.md" and not page.name.startswith("api"):  # the site's own
            assert f"(docs/{page.name}" in readme, f"README.md does not link to {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_samples_are_valid(page):
    """Python parses; every `dew` command and option exists."""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if language == "python":
            ast.parse(block)
        elif language in ("console", "bash"):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                command = re.match(r"\$? ?dew (.*)", line.split("#")[0].strip())
                if command:
                    check_command(command.group(1).split())


def every_command():
    for module in COMMANDS:
        __import__(f"dew.cli.{module}")
    return typer.main.get_command(app).commands


def check_command(words):
    known = every_command()
    if words[0].startswith("-"):
        return
    assert words[0] in known, f"there is no command dew {words[0]}"
    command = known[words[0]]
    if command.context_settings.get("ignore_unknown_options"):
        return  # any setting of the run may be given as an option
    options = {o for p in command.params for o in p.opts} | {"--help"}
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"dew {words[0]} has no option {word}"


def in_table(page, heading):
    """The names in code in the first column of the tables under a heading."""
    text = without_code((ROOT / page).read_text()).partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"^\| (`[^|]*)\|", text, re.M) for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("README.md", "## Algorithms", list_algorithms()),
        ("docs/trl.md", "## Choose an algorithm", list_algorithms()),
        ("docs/trl.md", "## Run a TRL YAML file", set(OWN_KEYS) - {"env"}),  # which TRL has too
        ("docs/metrics.md", "## Alarms", [rule.name for rule in RULES]),
    ],
)
def test_tables_list_every_name(page, heading, names):
    assert in_table(page, heading) == set(names)


def test_every_command_is_in_the_readme():
    words = {name.split()[1].rstrip("`") for name in in_table("README.md", "## Commands")}
    assert words - {"--version"} == set(every_command())


def test_metrics_that_are_described_exist():
    files = [path for folder in ("engines", "algorithms", "rewards") for path in (SRC / folder).rglob("*.py")]
    source = "".join(path.read_text() for path in (SRC / "losses.py", *files))
    written = [re.escape(x) for x in set(re.findall(r'"(\w+(?:/[\w{}]+)?)"', source))]
    exists = re.compile("|".join(re.sub(r"\\{\w+\\}", r"\\w+", x) for x in written))
    for heading in ("Rewards", "Entropy", "Credit", "Groups", "The update", "Lengths", "Time"):
        for metric in in_table("docs/metrics.md", f"## {heading}") - {"reward/<part>"}:
            assert exists.fullmatch(metric), f"nothing in src/dew writes {metric}"


def test_every_alarm_is_in_troubleshooting():
    assert {rule.name for rule in RULES} <= anchors(ROOT / "docs" / "troubleshooting.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    mkdocs, folder = ROOT / ".venv-docs" / "bin" / "mkdocs", tmp_path_factory.mktemp("site")
    if not mkdocs.exists():
        pytest.skip("make docs installs MkDocs into .venv-docs")
    done = subprocess.run([mkdocs, "build", "-d", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # strict: a warning is an error
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r'(?:<script[^>]* src|<link[^>]*stylesheet[^>]* href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"


QUESTIONS = {
    "which algorithm": "choose.html",
    "does it help": "results.html#does-it-help",
    "group size": "howto.html#choose-the-group-size",
    "several gpus": "howto.html#train-on-several-gpus",
    "reward model": "howto.html#use-a-reward-model",
    "chat template": "howto.html#use-my-models-chat-template",
    "resume": "howto.html#resume-a-run",
    "lora": "howto.html#train-with-lora-or-qlora",
    "out of memory": "troubleshooting.html#out-of-memory",
    "accuracy does not rise": "troubleshooting.html#accuracy-does-not-rise",
}


@pytest.mark.slow
def test_the_search_answers_newcomers_questions_first(site):
    """The site's own search, in a folder opened as file://: the first page that it lists, or its first section."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    with playwright.sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        for question, answer in QUESTIONS.items():
            page.goto((site / "index.html").as_uri())
            page.locator("input[name=query]").click()
            page.locator("input[name=query]").press_sequentially(question)
            first = page.locator(".md-search-result__item").first
            playwright.expect(first.locator(f'a[href*="{answer.partition("#")[0]}"]').first).to_be_attached()
            found = first.locator("a").evaluate_all("(links) => links.map((a) => a.href)")
            links = [re.sub(r"\?[^#]*", "", link) for link in found]
            assert any(link.endswith(f"/{answer}") for link in links[:2]), f"{question}: {links[:2]}"


def test_drawn_pictures_are_those_of_the_credit_functions():
    drawn = {"credit": readme_picture.picture(), **gtpo_pictures.pictures()}
    assert {name: (ROOT / "docs" / "images" / f"{name}.svg").read_text() for name in drawn} == drawn


def test_screenshots_show_the_page_as_it_is():
    stored = (ROOT / "docs" / "images" / "screenshots.sha256").read_text()
    assert screenshots.digest() == stored.strip(), "the report has changed: run scripts/screenshots.py"


def test_the_gallery_has_the_page_as_it_is():
    def shell(text):  # another zlib compresses the data differently
        return re.sub(r'id="data">.*?</script>', "", text, flags=re.DOTALL)

    for path in gallery.GALLERY.glob("*.html"):
        stored = path.read_text()
        current = report_page(gallery.content_of(stored))
        assert shell(current) == shell(stored), "the report has changed: run scripts/gallery.py"
