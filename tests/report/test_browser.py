"""The page in a headless Chromium, driven by Playwright. No network needed.

Needs `apt-get install chromium` (or CHROMIUM=/path/to/one) and `pip install playwright`; skipped without them.
"""

import csv
import io
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dew import Rollouts, get_algorithm
from dew.report import build, build_from_records
from dew.report.serve import make_server
from dew.run.folder import RunFolder, lock
from dew.run.records import AnswerRecord, GroupRecord, write_records
from make_run import make_run, make_study

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the report's page")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium, or set CHROMIUM")

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
FITS = "document.documentElement.scrollWidth <= window.innerWidth"
HUE, DEPTH = "e.className.match(/(plus|less|amount)-/)?.[1]", "Number(e.className.match(/-(\\d+)/)[1])"
GROUND = "getComputedStyle(document.body).backgroundColor"
playwright.expect.set_options(timeout=30_000)  # as long as Playwright waits for an element; else 5 s


class Page:
    """A page in a tab, and what it must not do: console errors, exceptions, requests other than its own."""

    def __init__(self, tab: Any, page: Path | str, address: str, viewport: Any = DESKTOP, theme: str = "light") -> None:
        url = page.as_uri() if isinstance(page, Path) else page
        self.tab = tab
        self.noise: list[str] = []
        self.heard = {
            "console": lambda m: self.noise.append(m.text) if m.type == "error" else None,
            "pageerror": lambda e: self.noise.append(str(e)),
            "request": lambda r: None if r.url.startswith(url) else self.noise.append(r.url),
        }
        for event, hear in self.heard.items():
            tab.on(event, hear)
        tab.set_viewport_size(viewport)
        tab.emulate_media(media="screen", color_scheme=theme)
        tab.goto(f"{url}{address}")
        tab.wait_for_selector("html[data-ready]")
        if "group" in address:
            tab.wait_for_selector(".group-title")
        self.settle()

    def leave(self) -> Any:
        """Return the tab, empty."""
        for event, hear in self.heard.items():
            self.tab.remove_listener(event, hear)
        self.tab.mouse.move(0, 0)
        self.tab.goto("about:blank")
        return self.tab

    def settle(self) -> None:
        """Wait two frames, until scrolling, drawing and layout are done, and for what is drawn or found later."""
        self.tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
        self.tab.wait_for_selector("[aria-busy=true]", state="detached")

    def wait_for_group(self, step: int, group: int) -> None:
        # Not wait_for_function: it may evaluate a string, which the page's content security policy forbids.
        playwright.expect(self.tab.locator(".group-title h2")).to_have_text(f"Step {step}, group {group}")
        playwright.expect(self.tab.locator(".answer:empty")).to_have_count(0)  # some are filled when the page is idle

    def texts(self, selector: str) -> list[str]:
        """What is drawn: an answer that is out of sight has no such text."""
        return self.tab.locator(selector).all_inner_texts()

    def count(self, selector: str) -> int:
        return self.tab.locator(selector).count()

    def each(self, selector: str, code: str) -> list[Any]:
        """A JavaScript expression of each element e."""
        return self.tab.locator(selector).evaluate_all(f"(es) => es.map((e) => {code})")

    def table(self, selector: str) -> dict[str, float]:
        """A table of signals as numbers."""
        rows = (text.split("\t") for text in self.texts(f"{selector} tr"))
        return {name.strip(): number(value) for name, *_, value in rows}

    def unfold(self, selector: str, name: str) -> None:
        """Open a <details>, and wait until the address remembers it: what is redrawn before would be closed again."""
        self.tab.click(f"{selector} summary")
        self.wait_for_address(f"{name}=yes")

    def open(self, view: str) -> None:
        """Follow the link of a tab; the page draws its view after the click, when the address has changed."""
        self.tab.click(f"#tab-{view}")
        self.tab.wait_for_selector(f"#view-{view}:not([hidden])")
        self.settle()

    def wait_for_address(self, pattern: str) -> None:
        """The browser tells of a new address after it has changed."""
        self.tab.wait_for_url(re.compile(pattern))

    def choose(self, label: str, value: str) -> None:
        self.tab.select_option(f"section:not([hidden]) label:has-text('{label}') select", value)
        self.settle()

    def chosen(self, label: str) -> str:
        return self.tab.input_value(f"section:not([hidden]) label:has-text('{label}') select")

    def saved(self, selector: str) -> bytes:
        """What a button downloads; clicked by script, so that it may be out of sight."""
        with self.tab.expect_download() as started:
            self.tab.locator(selector).first.evaluate("(button) => button.click()")
        return Path(started.value.path()).read_bytes()

    def saved_rows(self, selector: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.saved(f"{selector} button:text-is('CSV')").decode())))


def number(text: str) -> float:
    return float(text.replace("−", "-"))


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_context()
        browser.close()


@pytest.fixture(scope="module")
def tabs() -> list[Any]:
    """Tabs without a page: to open one more takes Chromium three times as long as to show a page in it."""
    return []


@pytest.fixture
def opened(window: Any, tabs: list[Any]) -> Iterator[Any]:
    pages: list[Page] = []

    def opener(page: Path | str, address: str = "", **options: Any) -> Page:
        pages.append(Page(tabs.pop() if tabs else window.new_page(), page, address, **options))
        return pages[-1]

    yield opener
    tabs += [page.leave() for page in pages]
    assert [page.noise for page in pages] == [[] for _ in pages]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build([make_run(tmp_path_factory.mktemp("runs") / "one", steps=120, groups=12, size=6)])


@pytest.fixture(scope="module")
def groups(report: Path) -> list[GroupRecord]:
    return list(RunFolder(report.parent).records())


@pytest.fixture(scope="module")
def mixed(groups: list[GroupRecord]) -> GroupRecord:
    """A recorded group with several correct and several wrong answers."""
    return next(g for g in groups if 2 <= sum(a.correct for a in g.answers) <= len(g.answers) - 2)


@pytest.fixture
def page(report: Path, mixed: GroupRecord, opened: Any) -> Page:
    return opened(report, at(mixed))


def at(group: GroupRecord) -> str:
    return f"#step={group.step}&group={group.group}"


# ── credit: what the page computes and shows ────────────────────────────────────────────────────────────────
LENGTHS = (5, 3, 7, 1, 4)
CHOICES: dict[str, list[Any]] = {
    "compare": ["column", "row", "matrix", "turn"],
    "average": ["arithmetic", "geometric"],
    "pool": ["group", "joint", "sign", "outcome"],
    "spread": ["both", "correct", "wrong"],
    "entropy_clip": [None, [0.2, 1.5]],
}
SETTINGS = [
    dict(zip(CHOICES, c, strict=True)) | {"alpha1": 0.9, "alpha2": 0.5} for c in itertools.product(*CHOICES.values())
]


@pytest.mark.parametrize(
    ("correct", "every"), [((True, False, True, False, False), 1), ((True,) * 5, 7)], ids=["mixed", "one outcome"]
)
def test_page_computes_the_credit_of_dew(report: Path, opened: Any, correct: tuple[bool, ...], every: int) -> None:
    """A ragged group in which some tokens do not train, one entropy is below the floor, and answers have charges."""
    entropy = torch.rand(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3 * 3
    mask = torch.tensor([[t < n for t in range(7)] for n in LENGTHS])
    mask[2, 3] = False
    entropy[0, 1] = 0.0
    reward, extra = torch.tensor([correct, (0.0, -0.3, -0.1, 0.0, 0.2)], dtype=torch.float64)
    answers = [
        {"correct": correct[i], "reward": float(reward[i]), "extra": float(extra[i]), "tokens": ["x"] * n}
        | {"live": mask[i, :n].tolist(), "entropy": entropy[i, :n].tolist()}
        for i, n in enumerate(LENGTHS)
    ]
    code = "([group, all]) => all.map((s) => ['GRPO', 'GRPO-S', 'GTPO'].map((m) => dew.advantages(group, m, s)))"
    found = opened(report).tab.evaluate(code, [{"answers": answers}, SETTINGS[::every]])
    rollouts = Rollouts(reward=reward[None], mask=mask[None], entropy=entropy[None], extra=extra[None])
    for settings, tables in zip(SETTINGS[::every], found, strict=True):
        shared = {name: settings[name] for name in ("average", "pool", "spread", "entropy_clip")}
        grpo_s = get_algorithm("grpo_s", beta1=settings["alpha1"], beta2=settings["alpha2"], **shared)
        algorithms = (get_algorithm("grpo"), grpo_s, get_algorithm("gtpo", **settings))
        for algorithm, table in zip(algorithms, tables, strict=True):
            expected = algorithm.advantages(rollouts)[0]
            for i, n in enumerate(LENGTHS):
                assert [v is None for v in table[i]] == (~mask[i, :n]).tolist()
                live = [v for v in table[i] if v is not None]
                assert live == pytest.approx(expected[i, :n][mask[i, :n]].tolist(), rel=1e-5, abs=1e-6), settings


def test_pointing_at_a_token_shows_its_numbers(page: Page, mixed: GroupRecord) -> None:
    for i, t in ((0, 0), (1, 12), (3, 30)):
        token = page.tab.locator(f'.answer[data-i="{i}"] .t[data-t="{t}"]')
        token.scroll_into_view_if_needed()
        token.hover()
        answer = mixed.answers[i]
        credit, even = (answer.advantage or [])[t], (answer.grpo or [])[t]
        expected = {"GRPO": even, "× weight": credit / even, "= credit": credit}
        assert page.table(".panel .product") == pytest.approx(expected, rel=1e-3)
        lists = (answer.entropy, answer.logp, answer.ratio)
        expected = {name: (x or [])[t] for name, x in zip(("Entropy", "Log-probability", "Ratio"), lists, strict=True)}
        assert page.table(".panel .signals") == pytest.approx(expected, rel=1e-3)
        change = credit / even - 1
        words = "just as" if abs(change) < 0.005 else f"{abs(change):.0%} {'more' if change > 0 else 'less'} than"
        verb = "Credited" if answer.correct else "Blamed"
        assert page.tab.inner_text(".panel .in-words").startswith(f"{verb} {words} under GRPO")


def test_derivation_matches_the_recorded_advantage(page: Page, mixed: GroupRecord) -> None:
    for i, answer in enumerate(mixed.answers[:3]):
        page.tab.locator(f'.answer[data-i="{i}"] .t[data-t="9"]').click()
        if i == 0:
            page.unfold(".panel", "steps")
        steps = page.texts(".panel .steps li")
        side = [a for a in mixed.answers if a.correct == answer.correct and len(a.tokens) > 9]
        x = [(a.entropy or [])[9] ** (1 if a.correct else -1) for a in side]
        assert f"{len(side)} {'correct' if answer.correct else 'wrong'} answer" in "".join(steps)
        mean = next(s for s in steps if s.startswith("Mean of")).rsplit("= ", 1)[1]
        assert float(mean) == pytest.approx(sum(x) / len(x), rel=1e-3)
        assert number(steps[-1].rsplit("= ", 1)[1]) == pytest.approx((answer.advantage or [])[9], rel=2e-3)
        assert page.texts(".panel .agrees")[0].startswith("✓ The run trained on")
    for key, i, t in (("ArrowRight", 2, 10), ("ArrowUp", 1, 10), ("ArrowLeft", 1, 9), ("ArrowDown", 2, 9)):
        page.tab.keyboard.press(key)
        assert page.each(".pinned", "[e.closest('[data-i]').dataset.i, e.dataset.t]") == [[str(i), str(t)]]
    page.tab.keyboard.press("Escape")
    assert page.count(".pinned") == 0


def test_colours_show_sign_and_size(page: Page, mixed: GroupRecord) -> None:
    """Blue for credit, orange for blame; by default relative to GRPO; another signal, other colours."""
    for i, answer in enumerate(mixed.answers):
        assert set(page.each(f'.answer[data-i="{i}"] .t', HUE)) == {"plus" if answer.correct else "less"}
        header = page.tab.locator(f'.answer[data-i="{i}"] .outcome').text_content()
        assert header == ("✓ correct" if answer.correct else "✗ wrong")  # not by colour alone
    right = next(i for i, a in enumerate(mixed.answers) if a.correct)
    tokens = f'.answer[data-i="{right}"] .t'
    credit = mixed.answers[right].advantage or []
    assert page.tab.evaluate("dew.makeScale('relative', [0.5, 3]).of(1.5)") == ["plus", 56]  # halfway from 0 to 3
    hue, depth = page.tab.evaluate("dew.makeScale('difference', [1e-5, -1]).of(1e-5)")
    assert hue == "plus" and depth < 13  # rounding is not a large difference
    page.tab.keyboard.press("2")  # advantage
    page.settle()
    depth = page.each(tokens, DEPTH)
    full = min(credit[t] for t in range(len(credit)) if depth[t] == 100)
    assert depth == pytest.approx([min(100, 12 + 88 * v / full) for v in credit], abs=1)
    page.tab.keyboard.press("4")  # entropy
    page.settle()
    values, depth = mixed.answers[right].entropy or [], page.each(tokens, DEPTH)
    assert [depth[t] for t in sorted(range(len(values)), key=lambda t: values[t])] == sorted(depth)


def test_uniform_credit_is_coloured_by_entropy(compared: Path, opened: Any) -> None:
    """The runs of GRPO; those of GTPO by their credit relative to it."""
    for number, (algorithm, signal) in enumerate([("grpo", "entropy"), ("gtpo", "relative")]):
        page = opened(compared, f"#groups&with=mixed&in={2 * number + 1}")
        assert algorithm in page.tab.inner_text(".group-title .facets") and page.chosen("Colour") == signal
        assert ("the same credit" in page.tab.inner_text(".legend")) == (algorithm == "grpo")


def test_answers_filtered_sorted_and_by_position(page: Page, mixed: GroupRecord) -> None:
    page.unfold(".more-controls", "more")
    page.choose("Show", "wrong")
    assert set(page.tab.locator(".answer .outcome").all_text_contents()) == {"✗ wrong"}
    page.choose("Show", "all")
    page.choose("Sort", "length")
    lengths = [len(mixed.answers[i].tokens) for i in page.each(".answer", "Number(e.dataset.i)")]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == len(mixed.answers)
    page.tab.click("[data-mode=columns]")
    shown = page.each(".grid tbody tr", "Number(e.dataset.i)")
    assert [mixed.answers[i].correct for i in shown] == sorted((a.correct for a in mixed.answers), reverse=True)
    assert page.texts('.grid td.t[data-t="3"]') == [mixed.answers[i].tokens[3].replace(" ", "·") for i in shown]
    alive, mean = page.tab.locator(".grid .side").first.locator("td").nth(3).inner_text().split(" · ")
    H = [(a.entropy or [])[3] for a in mixed.answers if a.correct]
    assert int(alive) == len(H) and float(mean) == pytest.approx(sum(H) / len(H), rel=1e-2)


def test_two_rules_are_compared_on_one_group(page: Page, mixed: GroupRecord) -> None:
    """Coloured by the difference of their credit, which a slider recomputes; as dew computes it."""
    page.tab.click("[data-mode=methods]")
    page.choose("Credit with", "dew")
    longest = max(len(a.tokens) for a in mixed.answers)
    lists = [[*(a.entropy or []), *[0.0] * (longest - len(a.tokens))] for a in mixed.answers]
    rollouts = Rollouts(
        reward=torch.tensor([[a.reward for a in mixed.answers]], dtype=torch.float64),
        mask=torch.tensor([[[t < len(a.tokens) for t in range(longest)] for a in mixed.answers]]),
        entropy=torch.tensor([lists], dtype=torch.float64),
    )
    plain = get_algorithm("grpo").advantages(rollouts)[0]
    for alpha2 in (0.5, 1.5, 0.0):
        if alpha2 != 0.5:
            page.tab.fill('[data-setting="alpha2"]', str(alpha2))
        page.settle()
        expected = get_algorithm("dew", alpha2=alpha2).advantages(rollouts)[0] - plain
        for i, answer in enumerate(mixed.answers[:3]):
            shown = page.tab.evaluate("(i) => dew.view.group.answers[i].difference", i)
            assert shown == pytest.approx(expected[i, : len(answer.tokens)].tolist(), rel=1e-3, abs=1e-3)
            hues = page.each(f'.answer[data-i="{i}"] .t', HUE)
            signs = [hue for hue, v in zip(hues, shown, strict=True) if abs(v) > 1e-3]
            assert signs == ["plus" if v > 0 else "less" for v in shown if abs(v) > 1e-3]
    page.tab.locator('.answer[data-i="1"] .t[data-t="4"]').click()
    table = page.table(".panel .place + .signals")
    assert table["difference"] == pytest.approx(table["dew"] - table["grpo"], abs=2e-3)
    page.choose("minus", "run")
    page.wait_for_address("rule=dew&than=run")
    page.choose("Credit with", "gtpo")  # the run's own rule, with its settings
    assert max(map(abs, page.tab.evaluate("dew.view.group.answers[0].difference"))) < 2e-3
    page.choose("Credit with", "maxrl")  # rules that the page has no formula for
    page.choose("minus", "dr_grpo")
    one, other = (get_algorithm(name).advantages(rollouts)[0] for name in ("maxrl", "dr_grpo"))
    shown = page.tab.evaluate("dew.view.group.answers[0].difference")
    assert shown == pytest.approx((one - other)[0, : len(mixed.answers[0].tokens)].tolist(), abs=0.02)


def test_tokens_are_found_by_a_query(report: Path, groups: list[GroupRecord], opened: Any) -> None:
    """Count, list and links; a bin of the histogram narrows the query; Back closes the list."""
    page = opened(report, "#credit")
    tokens = [(g, i, t) for g in groups for i, a in enumerate(g.answers) for t in range(len(a.tokens))]

    def fits(group: GroupRecord, i: int, t: int) -> bool:
        a = group.answers[i]
        size = float(f"{abs((a.advantage or [])[t]):.4g}")  # as the page has it
        return (a.entropy or [])[t] < 0.1 and not a.correct and size > 1 and group.step > 40

    found = [token for token in tokens if fits(*token)]
    page.tab.fill("#view-credit [name=find]", "H<0.1 & wrong & |A|>1 & step>40")
    page.tab.keyboard.press("Enter")
    page.settle()
    held = len({(g.step, g.group) for g, _, _ in found})
    assert page.texts("#tokens [role=status]") == [f"{len(found)} tokens in {held} groups"] and found
    assert page.texts(".token-table mark")[0] == found[0][0].answers[found[0][1]].tokens[found[0][2]].replace(" ", "·")
    page.tab.locator("#tokens .bin").last.click(force=True)
    page.settle()
    values = [(g.answers[i].advantage or [])[t] for g, i, t in found]
    edge = max(values) - (max(values) - min(values)) / 40
    inside = sum(v >= edge for v in values)
    assert int(page.texts("#tokens [role=status]")[0].split()[0]) == pytest.approx(inside, abs=1)
    page.tab.fill("#tokens [name=find]", "H<0.1 & nonsense")
    page.tab.keyboard.press("Enter")
    playwright.expect(page.tab.locator("#tokens [role=status]")).to_contain_text("“nonsense” is not understood.")
    page.tab.go_back()
    playwright.expect(page.tab.locator("#tokens")).to_be_hidden()
    page.wait_for_address("^((?!find).)*$")
    again = opened(report, "#credit&find=H%3C0.1%20%26%20position%3D3")
    again.settle()
    third = sum(len(a.tokens) > 2 and (a.entropy or [])[2] < 0.1 for g in groups for a in g.answers)
    assert again.texts("#tokens [role=status]")[0].startswith(f"{third} tokens")


def test_next_flipped_token_and_the_clickable_strip(odd: Path, opened: Any) -> None:
    page = opened(odd, "#step=2&group=0")
    for place in ("1.2", "2.2", "3.2", "4.1", "1.2"):  # from a group without any to the one that has four
        page.tab.keyboard.press("f")
        page.wait_for_group(1, 1)
        i, t = place.split(".")
        playwright.expect(page.tab.locator(".panel .place")).to_contain_text(f"token {t} of answer #{i} ")
        page.tab.wait_for_selector(".pinned")
        page.wait_for_address(f"token={place}$")
    strip = page.tab.locator('.answer[data-i="0"] .strip')
    width = strip.bounding_box()["width"]
    strip.click(position={"x": width * 0.9, "y": 2})
    assert page.each(".pinned", "e.textContent") == ["<|im_end|>"]


# ── address, keyboard and curves ──────────────────────────────────────────────────────────────────────────────
def test_groups_and_views_open_by_address_key_and_tab(report: Path, groups: list[GroupRecord], opened: Any) -> None:
    page = opened(report, at(groups[5]))
    for key, n in (("", 5), ("j", 6), ("k", 5), ("k", 4)):
        if key:
            page.tab.keyboard.press(key)
        page.wait_for_group(groups[n].step, groups[n].group)
        page.wait_for_address(f"{at(groups[n])}$")
    assert page.count('tr[aria-current="true"] .group-link') == 1
    words = groups[8].answers[2].text[-12:-2]
    page.tab.keyboard.press("/")
    page.tab.keyboard.type(words)
    hits = sum(any(words.lower() in a.text.lower() for a in g.answers) or words in g.prompt for g in groups)
    playwright.expect(page.tab.locator(".group-link")).to_have_count(hits)
    for name in ("credit", "curves", "overview"):
        page.open(name)
        page.wait_for_address(f"#{name}")
        assert page.count("main > section:not([hidden])") == 1
    text = page.tab.inner_text("#view-overview")
    score = RunFolder(report.parent).scores()[1]["scores"]["pass@1"]
    shown = f"{score['value']:.1%} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"
    assert all(part in text for part in ("synthetic-gtpo-seed0", shown, "Remedy: Raise max_"))
    page.tab.keyboard.press("ArrowRight")
    page.tab.wait_for_selector("#view-curves:not([hidden])")


def test_address_restores_the_view_the_filter_and_the_token(odd: Path, opened: Any) -> None:
    page = opened(odd, "#groups")
    page.choose("With", "mixed")
    page.tab.click("[data-mode=columns]")
    page.choose("Colour", "entropy")
    page.tab.locator('tr[data-i="3"] .t[data-t="1"]').click()
    page.wait_for_address(r"token=4\.2")
    again = opened(odd, page.tab.url[page.tab.url.index("#") :])
    again.tab.wait_for_selector('tr[data-i="3"] .t[data-t="1"].pinned')
    assert again.chosen("With") == "mixed" and again.count("[data-mode=columns][aria-pressed=true]") == 1
    assert again.chosen("Colour") == "entropy"
    assert again.tab.inner_text(".panel") == page.tab.inner_text(".panel")


def test_seeds_as_mean_and_band_or_as_lines(report: Path, tmp_path: Path, opened: Any) -> None:
    other = make_run(tmp_path / "b", steps=90, groups=4, size=4, seed=3)
    page = opened(build([report.parent, other], tmp_path), "#curves")
    first = "#view-curves .chart >> nth=0 >>"
    assert page.chosen("Seeds") == "mean" and page.count(".chip") == 0  # a single arm
    assert page.texts(f"{first} .plot-line")[0].strip().startswith("gtpo · accuracy")
    band = page.saved("#view-curves .chart button:text-is('PNG')")
    page.choose("Seeds", "each")
    assert page.saved("#view-curves .chart button:text-is('PNG')") != band
    names = [text.split(" · ")[0].strip() for text in page.texts(f"{first} .plot-line")]
    assert names == ["synthetic-gtpo-seed0"] * 2 + ["synthetic-gtpo-seed3"] * 2
    page.settle()  # all charts are drawn, as they move together
    page.tab.locator(f"{first} .u-over").hover(position={"x": 150, "y": 60})
    page.settle()
    step = page.texts(f"{first} .plot-lines > .quiet")
    logged = next(m for m in RunFolder(report.parent).metrics() if f"step {m['step']}" == step[0])
    assert float(page.texts(f"{first} .plot-line b")[0]) == pytest.approx(logged["accuracy"], rel=1e-3)
    assert page.texts("#view-curves .chart >> nth=3 >> .plot-lines > .quiet")[:1] == step  # charts move together
    page.tab.click(".chip:has-text('seed3')")
    page.wait_for_address("hide=1$")
    assert page.count(f"{first} .plot-line") == 2


# ── hostile text ────────────────────────────────────────────────────────────────────────────────────────────
ATTACKS = [
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "<!-- ",
    "{{ constructor.constructor('window.hacked=1')() }}",
    "${window.hacked=1}",
    "javascript:window.hacked=1",
]
ODD = ["\x00", "\u202eevil\u202c", "\ud800", "👩‍👩‍👧", "é\u0301" * 30, "\u2028", "", "\n\n", "\t"]


def test_hostile_text_is_shown_and_not_executed(tmp_path: Path, opened: Any) -> None:
    bad = ATTACKS[1]
    signals: Any = {"entropy": [0.5] * 16, "advantage": [1.0] * 16, "extracted": bad, "verdict": bad}
    answers = [AnswerRecord([*ATTACKS, *ODD], correct, float(correct), **signals) for correct in (True, False)]
    run = RunFolder(tmp_path)
    run.write_run({"name": bad, "model": bad, "algorithm": {"name": bad, "settings": {bad: bad}}, "status": bad})
    run.append_metrics({"step": 1, "reward": 0.5, bad: 1.0})
    run.append_alarm({"step": 1, "alarm": bad, "message": bad, "remedy": bad})
    run.write_scores([{"when": "after", "task": bad, "n_problems": 3, "k": 1, "scores": {bad: {"value": 0.5}}}])
    (tmp_path / "config.yaml").write_text(bad)
    write_records(tmp_path, 1, [GroupRecord(1, 0, bad, answers, bad, bad, {bad: bad})])
    page = opened(build([tmp_path]))
    for name in ("curves", "credit", "groups"):
        page.open(name)
    for mode in ("columns", "methods", "text"):
        page.tab.click(f"[data-mode={mode}]")
        page.tab.locator(".group .t").nth(1).click()
    assert page.tab.evaluate("window.hacked") is None
    assert page.count("main img, main script, main iframe") == 0
    shown = page.texts('.answer[data-i="0"] .t')
    assert shown[:10] == [*ATTACKS, "⟨U+0000⟩", "⟨U+202E⟩evil⟨U+202C⟩", "⟨U+D800⟩"]
    assert shown[10] == ODD[3] and shown[12:14] == ["⟨U+2028⟩", "∅"]
    assert bad in page.tab.inner_text(".prompt") and bad in page.tab.inner_text(".panel")


@pytest.mark.parametrize("element", ["'script'), {text: 'window.hacked=1'}", "'img'), {src: 'https://example.org/x'}"])
def test_content_security_policy_blocks_what_is_injected(report: Path, window: Any, element: str) -> None:
    page = Page(window.new_page(), report, "")
    with page.tab.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.tab.evaluate(f"document.body.append(Object.assign(document.createElement({element}))")
    assert page.tab.evaluate("window.hacked") is None
    page.tab.close()


# ── themes, phone, print, accessibility ─────────────────────────────────────────────────────────────────────
def test_key_switches_between_light_and_dark(report: Path, opened: Any) -> None:
    page = opened(report, "#groups")
    pixel = "document.querySelector('.strip').getContext('2d').getImageData(0, 0, 1, 1).data.join()"
    before = page.tab.evaluate(GROUND), page.tab.evaluate(pixel)
    page.tab.keyboard.press("t")
    assert page.tab.evaluate(GROUND) != before[0] and page.tab.evaluate(pixel) != before[1]


def test_phone_scrolls_vertically_only_and_print_has_no_controls(report: Path, opened: Any) -> None:
    page = opened(report, viewport=PHONE)
    for view in ("overview", "curves", "credit", "groups"):
        page.open(view)
        assert page.tab.evaluate(FITS), view
    page.tab.eval_on_selector("#live", "live => { live.hidden = false; live.textContent = 'live · 10:56:00 PM'; }")
    assert page.tab.eval_on_selector("#tabs", "tabs => tabs.scrollWidth === tabs.clientWidth")  # all tabs are in view
    page.tab.locator(".answer .t").nth(3).click()
    page.settle()
    panel, token = (page.tab.locator(name).bounding_box() for name in (".panel", ".pinned"))
    assert panel["y"] + panel["height"] == PHONE["height"] and token["y"] + token["height"] <= panel["y"]
    page.tab.click(".panel .close")
    assert not page.tab.locator(".panel").is_visible()
    page.tab.emulate_media(media="print", color_scheme="dark")
    assert page.tab.evaluate(GROUND) == "rgb(255, 255, 255)"
    visible = [page.tab.locator(name).first.is_visible() for name in (".answer", ".picker", "header.top")]
    assert visible == [True, False, False]


@pytest.mark.parametrize("width", [960, 1200, 1201])
def test_a_group_is_in_view_at_any_width(report: Path, opened: Any, width: int) -> None:
    page = opened(report, "#groups", viewport={"width": width, "height": 900})
    assert page.tab.locator(".group-title").first.bounding_box()["y"] < 900


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"viewport": PHONE}, {"theme": "dark"}], ids=["desktop", "phone", "dark"])
def test_axe_finds_nothing_serious(compared: Path, opened: Any, options: dict[str, Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python for accessibility")
    page = opened(compared, **options)
    page.tab.evaluate(next(Path(axe.__file__).parent.glob("**/axe.min.js")).read_text())
    groups = [f"#groups&mode={mode}" for mode in ("text", "columns", "methods", "same")]
    for address in ("#overview", "#curves", *groups, "#credit", "#credit&find=H%3C1"):
        page.tab.evaluate("(hash) => { location.hash = hash; }", address)
        page.tab.wait_for_timeout(150)
        found = page.tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
        assert not serious, [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in serious]


# ── runs with little in them, arms and studies ──────────────────────────────────────────────────────────────
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        '{"answers": [{"tokens": ["a", "b"], "reward": 1}, {"tokens": ["c"], "reward": 0}]}',
        '{"answers": []}',
        '{"answers": [{"tokens": [], "reward": 0}]}',
        '{"answers": [{"tokens": ["a"], "live": [false], "entropy": [0.5], "advantage": [null], "reward": 1}]}',
        '{"algorithm": "grpo", "answers": [{"tokens": ["a"], "advantage": [1], "reward": 1}, {"tokens": ["b"]}]}',
        '{"algorithm": "grpo_s", "answers": [{"tokens": ["a"], "entropy": [1], "reward": 1}, {"tokens": []}]}',
    ],
)
def test_minimal_records(tmp_path: Path, opened: Any, line: str) -> None:
    (tmp_path / "records.jsonl").write_text(line)
    page = opened(build_from_records(tmp_path / "records.jsonl"))
    for name in ("credit", "groups"):
        page.open(name)
    for mode in page.each("[data-mode]", "e.dataset.mode"):
        page.tab.click(f"[data-mode={mode}]")
        if page.count(".group .t"):
            page.tab.locator(".group .t").first.click()
            assert page.tab.locator(".panel").text_content().startswith("✕How the credit was computed")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms with two seeds each, the same prompts in both arms."""
    folder = tmp_path_factory.mktemp("arms")
    for algorithm, seed in itertools.product(("grpo", "gtpo"), (0, 1)):
        make_run(folder / f"{algorithm}-{seed}", steps=40, groups=4, size=4, seed=seed, algorithm=algorithm)
    return build([folder])


def test_results_show_every_arm_on_one_axis(compared: Path, opened: Any) -> None:
    page = opened(compared)
    row = '.row[data-metric="entropy"]'
    assert page.each(f"{row} [data-arm]", "e.dataset.arm") == ["grpo", "gtpo"]
    for algorithm, shown in zip(("grpo", "gtpo"), page.each(f"{row} .row-values b", "e.textContent"), strict=True):
        metrics = [RunFolder(compared.parent / f"{algorithm}-{seed}").metrics()[-4:] for seed in (0, 1)]
        assert float(shown) == pytest.approx(sum(m["entropy"] for of in metrics for m in of) / 8, rel=1e-3)
    assert "too few seeds (2 of at least 5)" in page.each(f"{row} .row-difference", "e.textContent")[1]
    page.tab.click(f"{row} h3 a")
    page.tab.wait_for_selector("#view-curves .wanted")
    assert "entropy" in page.tab.locator(".wanted").inner_text().lower()


def test_study_of_two_tasks(tmp_path: Path, opened: Any) -> None:
    """One task at a time; a mark for every arm; pointing at its entry shows its lines and numbers."""
    folder = make_study(tmp_path / "study", arms=12, seeds=5, generations=6, tasks=2)
    RunFolder(folder / "synthetic" / "synthetic_9-lr0.0001-seed4").write_run({"seed": 99})  # not in the baseline
    content = json.loads((report := build([folder])).with_suffix(".json").read_text())
    arms, rows = content["tasks"][0]["arms"], content["tasks"][0]["rows"]
    area = next(row["after"] for row in rows if row["name"] == "area")
    means = [sum(area[r] for r in arm["runs"]) / 5 for arm in arms]
    page = opened(report)
    assert page.count('.charts.wide [data-metric="area"] .forest') == 11  # all but the baseline
    shown = page.tab.inner_text('.row[data-metric="area"] [data-arm="synthetic(2)"] .row-difference b')
    assert number(shown) == pytest.approx(100 * (means[2] - means[0]), abs=0.05)  # in points
    assert page.count("table:has(.cell) tbody tr") == 11  # a rule at two rates has one row
    assert page.count(".cell svg") == 22
    page.open("curves")
    look = "e.style.getPropertyValue('--mark') + e.style.getPropertyValue('--shape')"
    marks = page.each(".chip .dot", look)
    assert "polygon" in marks[7] and "polygon" not in marks[3]  # as their colours are alike to some
    assert len(set(marks)) == 12 and page.chosen("Seeds") == "mean" and page.chosen("Show") == "differences"
    page.tab.hover(".chip:has-text('synthetic(9)')")
    page.tab.fill("#smooth", "0.9")  # the charts are drawn again, with the same numbers
    page.settle()
    last, base = ([content["runs"][r]["metrics"]["entropy"][-1] for r in arms[k]["runs"][:4]] for k in (9, 0))
    chart = page.tab.locator("[data-metrics=entropy]")
    shown = number(chart.locator(".plot-line b").inner_text())
    assert shown == pytest.approx(sum(last) / 4 - sum(base) / 4, rel=1e-2)  # from the baseline
    log = "#view-curves .chart >> nth=0 >> button:text-is('log')"
    assert not page.tab.is_visible(log)  # differences have both signs
    page.choose("Show", "values")
    assert page.tab.is_visible(log)
    page.choose("Show", "differences")
    assert page.tab.title().endswith("· dew") and page.count("#tab-groups:visible") == 0
    page.choose("Seeds", "each")
    assert page.count(".chip") == 12  # 60 runs, but one entry per arm
    page.tab.click(".chip >> nth=1")
    page.wait_for_address("hide=5.6.7.8.9$")
    assert "54 lines" in page.tab.inner_text("#view-curves .chart >> nth=0")
    page.choose("Task", "synthetic-1")
    page.wait_for_address("task=synthetic-1")
    assert page.each(".chip .dot", look) == marks
    assert page.texts(".chip")[1].startswith("synthetic(1) @ 0.0002")
    assert opened(report, "#overview&task=synthetic-1").chosen("Task") == "synthetic-1"


# ── the table of groups, and what it opens ──────────────────────────────────────────────────────────────────
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups: uniform credit; flipped tokens, repeated answers and chat markup; the same prompt again."""

    def right(*advantage: float) -> AnswerRecord:
        entropy = [0.5, 0.001, 0.9]
        return AnswerRecord(["so", " four", "<|im_end|>"], True, 1.0, entropy=entropy, advantage=advantage)

    def wrong(*advantage: float) -> AnswerRecord:
        return AnswerRecord([" maybe", " five"], False, 0.0, entropy=[0.7, 0.002], advantage=advantage)

    folder = tmp_path_factory.mktemp("odd") / "run"
    RunFolder(folder).write_run({"name": "odd", "algorithm": {"name": "gtpo", "settings": {}}})
    flipped = [right(1.0, -0.5, 2.0)] * 3 + [wrong(0.3, -1.0)]
    plain = GroupRecord(1, 0, "plain", [right(1.0, 1.0, 1.0), wrong(-1.0, -1.0)])
    write_records(folder, 1, [plain, GroupRecord(1, 1, CHAT, flipped, algorithm="gtpo")])
    write_records(folder, 2, [GroupRecord(2, 0, CHAT, [right(1.0, 0.9, 1.1), wrong(-1.0, -1.2)])])
    return build([folder])


def test_flipped_tokens_are_found_marked_and_counted(odd: Path, opened: Any) -> None:
    """Three answers with one token each, and one with one: four flipped tokens in one of three groups."""
    page = opened(odd)
    assert "1 of 3 recorded groups have credit of the wrong sign" in page.tab.inner_text(".finding.amber")
    page.tab.click(".finding.amber a")
    page.wait_for_group(1, 1)
    page.wait_for_address("with=flipped")
    assert page.count(".group-link") == 1
    assert page.each(".answer .t.flip", "e.textContent") == [" four", " maybe"]
    assert "4 flipped tokens" in page.tab.inner_text(".group-title .facets")
    page = opened(odd, "#groups")
    page.wait_for_group(1, 1)  # the largest spread of credit
    for shown in (["2 · 0", "1 · 1", "1 · 0"], ["1 · 0", "1 · 1", "2 · 0"]):
        page.tab.click('[data-by="step"]')
        assert page.texts(".group-link") == shown
    page.wait_for_address("by=-step")
    assert page.tab.get_attribute("th:has([data-by=step])", "aria-sort") == "ascending"


def test_a_wrong_answer_beside_its_nearest_correct_one(page: Page, mixed: GroupRecord) -> None:
    wrong = next(i for i, a in enumerate(mixed.answers) if not a.correct)
    answer = mixed.answers[wrong]
    starts = {
        j: next(t for t, (x, y) in enumerate(zip(answer.tokens, a.tokens, strict=False)) if x != y)
        for j, a in enumerate(mixed.answers)
        if a.correct
    }
    j, at = max(starts.items(), key=lambda item: item[1])
    size = [abs(x) for x in answer.advantage or []]
    before, here, after = (f"{sum(x) / sum(size):.0%}" for x in (size[:at], size[at : at + 1], size[at + 1 :]))
    box = page.tab.locator(f'.answer[data-i="{wrong}"] .diverges')
    text = (
        f"Leaves correct answer #{j + 1} at token {at + 1}: {before} of the blame before, {here} at it, {after} after"
    )
    assert box.locator("summary").inner_text() == text
    box.locator("summary").click()
    both = box.locator(".beside .tokens")
    playwright.expect(both).to_have_count(2)  # drawn once it is open
    shown = both.evaluate_all("(es) => es.map((e) => e.querySelector('.t').textContent)")
    assert shown == [answer.tokens[at], mixed.answers[j].tokens[at]]


@pytest.mark.parametrize("status", ["killed", "running"])
def test_a_run_that_ended_or_still_trains_on_a_phone(tmp_path: Path, opened: Any, status: str) -> None:
    run, now, name = RunFolder(tmp_path / "tc"), time.time(), "long_" * 20
    run.write_run({"name": name, "status": "running", "steps": 60})
    for step in range(1, 13):
        run.append_metrics({"step": step, "time": now + 10 * (step - 12), "accuracy": 0.05 * step})
    run.append_alarm({"step": 3, "alarm": "truncated", "message": "Too long.", "remedy": "Raise it."})
    (run.path / ".lock").touch()
    with lock(run.path) if status == "running" else nullcontext():
        page = opened(build([run.path]), viewport=PHONE)
    first, about = page.texts(".finding")[0], page.tab.inner_text(".report-title")
    if status == "running":
        assert "running · 12/60 · 8 min left · last step at" in about and page.tab.title() == f"12/60 ▲1 {name} · dew"
        assert "Too long (step 3)." in first
    else:
        assert "Killed" in first and "killed" in about and page.tab.title() == f"{name} · dew"
    assert page.tab.evaluate(FITS)


def test_repeated_answers_and_prompts_markup_and_hits(odd: Path, opened: Any) -> None:
    page = opened(odd, "#step=1&group=1")
    assert page.count(".answer") == 2 and page.texts(".times") == ["× 3"]
    assert page.count(".t.markup") == 1
    prompt = page.tab.inner_text(".prompt")
    assert prompt.startswith("system (9 characters)") and "What is 2+2?" in prompt and "<|im_start|>" not in prompt
    assert CHAT.strip() in page.tab.locator(".prompt .raw").text_content()
    page.tab.click("[data-mode=columns]")
    assert page.texts(".grid thead th.sure") == ["2"]
    page.tab.click("[data-mode=same]")
    page.tab.wait_for_selector(".same-column")
    assert page.texts(".same-column h3") == ["step 1, group 1", "step 2, group 0"]
    assert opened(odd, "#step=1&group=0").count("[data-mode=same]") == 0
    page = opened(odd, "#step=1&group=1&q=o%20fo")
    page.tab.wait_for_selector(".t.hit")
    assert page.each(".answer[data-i='0'] .t.hit", "e.textContent") == ["so", " four"]


def test_downloads(report: Path, odd: Path, tmp_path: Path, opened: Any) -> None:
    logged = [m["accuracy"] for m in RunFolder(report.parent).metrics()]
    shown = [float(row["accuracy"]) for row in opened(report, "#curves").saved_rows("#view-curves .chart")]
    assert shown == pytest.approx(logged, rel=1e-5)
    assert opened(report, "#credit").saved("#view-credit button:text-is('PNG')").startswith(b"\x89PNG")
    rows = opened(odd, "#step=1&group=1").saved_rows("#group-controls")
    assert [row["token"] for row in rows if row["flipped"] == "true"] == [" four"] * 3 + [" maybe"]
    evil = AnswerRecord(["=1+1", '"quoted",'], True, 1.0, advantage=[1.0, 1.0])
    write_records(tmp_path, 1, [GroupRecord(1, 0, "p", [evil])])
    rows = opened(build([tmp_path]), "#groups").saved_rows("#group-controls")
    assert [row["token"] for row in rows] == ["'=1+1", '"quoted",']  # no cell starts a formula


def test_view_follows_a_run_from_its_start(tmp_path: Path, opened: Any) -> None:
    RunFolder(tmp_path).write_run({"name": "just started", "status": "running"})
    server, address = make_server([tmp_path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tab = opened(address).tab
        assert tab.locator("#tabs a:visible").count() == 1  # there is nothing else to see yet
        RunFolder(tmp_path).append_metrics({"step": 1, "accuracy": 0.5})
        tab.click("#tab-curves", timeout=20_000)
        tab.wait_for_selector("#view-curves canvas")
        assert tab.inner_text(".live").startswith("live")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_large_runs_and_long_answers(tmp_path: Path, opened: Any) -> None:
    """201 groups and an answer of 18,000 tokens: rows, tokens and columns are added as they are asked for."""
    long = AnswerRecord([f"w{k} " for k in range(18_000)], True, 1.0, entropy=[0.1] * 18_000)
    blob = AnswerRecord(["x" * 100_000], False, 0.0, entropy=[0.1])
    write_records(tmp_path, 1, [GroupRecord(1, 0, "long", [long, blob], algorithm="gtpo")])
    write_records(tmp_path, 2, [GroupRecord(2, g, "?", [AnswerRecord(["a"], True, 1.0)]) for g in range(200)])
    page = opened(build([tmp_path]), "#step=1&group=0")
    page.tab.click(".more-tokens")
    assert page.count('.answer[data-i="0"] .t') == 4000 and page.tab.evaluate(FITS)
    assert len(page.tab.locator('.answer[data-i="1"] .t').text_content()) == 100_000
    page.tab.click("[data-mode=columns]")
    page.tab.click("text=later ›")
    assert page.tab.input_value(".columns input") == "20"  # as many as fit
    page.tab.fill(".columns input", "17990")
    page.tab.press(".columns input", "Enter")
    page.tab.wait_for_selector('.columns [data-t="17999"]')
    page = opened(tmp_path / "report.html", "#step=1&group=0&token=1.9000")
    page.tab.click("[data-mode=columns]")
    assert page.count('.columns .pinned[data-t="8999"]') == 1
    for _ in range(6):
        page.tab.evaluate("{ const table = document.querySelector('.group-list'); table.scrollTop = 1e9; }")
        page.settle()
    assert page.texts(".group-link") == ["1 · 0", *(f"2 · {g}" for g in range(200))]
