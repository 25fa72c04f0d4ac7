"""The page in a headless Chromium, driven by Playwright. No network needed.

Needs `apt-get install chromium` (or CHROMIUM=/path/to/one) and `pip install playwright`; skipped without them.
"""

import colorsys
import csv
import io
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dew import Rollouts, get_algorithm
from dew.report import build, build_from_records
from dew.report.serve import make_server
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord, write_records
from make_run import make_run, make_study

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the report's page")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium, or set CHROMIUM")

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def tabs() -> Iterator[Any]:
    """The tabs of one browser window, shared by all tests: a window for each page takes three times as long."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        window, made = browser.new_context(), []

        def tab(k: int) -> Any:
            while len(made) <= k:
                made.append(window.new_page())
            return made[k]

        yield tab
        browser.close()


class Page:
    """A page in a tab, and what it must not do: console errors, exceptions, requests other than its own."""

    def __init__(
        self, tab: Any, page: Path | str, address: str = "", viewport: Any = DESKTOP, color_scheme: str = "light"
    ) -> None:
        url = page.as_uri() if isinstance(page, Path) else page
        self.tab = tab
        self.noise: list[str] = []
        self.listeners = {
            "console": lambda m: self.noise.append(m.text) if m.type == "error" else None,
            "pageerror": lambda e: self.noise.append(str(e)),
            "request": lambda r: None if r.url.startswith(url) else self.noise.append(r.url),
        }
        tab.bring_to_front()  # frames of a tab in the background are drawn slowly
        tab.set_viewport_size(viewport)
        tab.emulate_media(media="screen", color_scheme=color_scheme)
        for event, listener in self.listeners.items():
            tab.on(event, listener)
        tab.goto(f"{url}{address}")
        tab.wait_for_selector("html[data-ready]")

    def close(self) -> None:
        self.settle()
        for event, listener in self.listeners.items():
            self.tab.remove_listener(event, listener)
        self.tab.goto("about:blank")

    def settle(self) -> None:
        """Wait two frames, until scrolling, drawing and layout are done, and for what is drawn or found later."""
        self.tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
        self.tab.wait_for_selector("[aria-busy=true]", state="detached")

    def wait_for_group(self, title: str) -> None:
        # Not wait_for_function: it may evaluate a string, which the page's content security policy forbids.
        playwright.expect(self.tab.locator(".group-title h2")).to_have_text(title)

    def texts(self, selector: str) -> list[str]:
        """What is drawn: an answer that is out of sight has no such text."""
        return self.tab.locator(selector).all_inner_texts()

    def table(self, selector: str) -> dict[str, float]:
        """A table of signals as numbers."""
        rows = [text.split("\t") for text in self.texts(f"{selector} tr")]
        return {name.strip(): float(value.replace("−", "-")) for name, value in rows}


@pytest.fixture
def opened(tabs: Any) -> Iterator[Any]:
    pages: list[Page] = []

    def opener(page: Path | str, address: str = "", **options: Any) -> Page:
        pages.append(Page(tabs(len(pages)), page, address, **options))
        return pages[-1]

    yield opener
    for page in pages:
        page.close()
    assert [page.noise for page in pages] == [[] for _ in pages]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one", steps=120, groups=12, size=6)


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return build([run])


@pytest.fixture(scope="module")
def mixed(run: Path) -> GroupRecord:
    """A recorded group with several correct and several wrong answers."""
    return next(g for g in RunFolder(run).records() if 2 <= sum(a.correct for a in g.answers) <= len(g.answers) - 2)


def at(group: GroupRecord) -> str:
    return f"#step={group.step}&group={group.group}"


# ── the credit that the page computes is dew.credit's ───────────────────────────────────────────────────────

LENGTHS = (5, 3, 7, 1, 4)
CORRECT = (True, False, True, False, False)
SETTINGS = [
    dict(zip(("compare", "average", "pool", "spread", "entropy_clip"), chosen, strict=True))
    | {"alpha1": 0.9, "alpha2": 0.5}
    for chosen in itertools.product(
        ["column", "row", "matrix", "turn"],
        ["arithmetic", "geometric"],
        ["group", "joint", "sign", "outcome"],
        ["both", "correct", "wrong"],
        [None, [0.2, 1.5]],
    )
]


def ragged(seed: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One group, as data of the page and as padded tensors. Some tokens do not train."""
    rng = torch.Generator().manual_seed(seed)
    entropy = torch.rand(len(LENGTHS), max(LENGTHS), generator=rng, dtype=torch.float64) ** 3 * 3
    mask = torch.tensor([[t < n for t in range(max(LENGTHS))] for n in LENGTHS])
    mask[2, 3] = False
    entropy[0, 1] = 0.0  # below the floor
    extra = torch.tensor([0.0, -0.3, -0.1, 0.0, 0.2], dtype=torch.float64)
    answers = [
        {
            "correct": CORRECT[i],
            "reward": float(CORRECT[i]),
            "extra": float(extra[i]),
            "tokens": ["x"] * n,
            "live": mask[i, :n].tolist(),
            "entropy": entropy[i, :n].tolist(),
        }
        for i, n in enumerate(LENGTHS)
    ]
    return {"answers": answers}, entropy, mask, extra, torch.tensor(CORRECT)


def test_page_computes_the_credit_of_dew(report: Path, opened: Any) -> None:
    group, entropy, mask, extra, correct = ragged(0)
    code = "([group, all]) => all.map((s) => ['GRPO', 'GRPO-S', 'GTPO'].map((m) => dew.advantages(group, m, s)))"
    found = opened(report).tab.evaluate(code, [group, SETTINGS])
    rollouts = Rollouts(reward=correct.double()[None], mask=mask[None], entropy=entropy[None], extra=extra[None])
    for settings, (grpo, grpo_s, gtpo) in zip(SETTINGS, found, strict=True):
        shared = {name: settings[name] for name in ("average", "pool", "spread", "entropy_clip")}
        one, two = settings["alpha1"], settings["alpha2"]
        algorithms = {
            "GTPO": get_algorithm("gtpo", alpha1=one, alpha2=two, compare=settings["compare"], **shared),
            "GRPO-S": get_algorithm("grpo_s", beta1=one, beta2=two, **shared),
            "GRPO": get_algorithm("grpo"),
        }
        expected = {name: algorithm.advantages(rollouts)[0] for name, algorithm in algorithms.items()}
        for name, table in {"GTPO": gtpo, "GRPO-S": grpo_s, "GRPO": grpo}.items():
            for i, n in enumerate(LENGTHS):
                assert [v is None for v in table[i]] == (~mask[i, :n]).tolist()
                live = [v for v in table[i] if v is not None]
                assert live == pytest.approx(expected[name][i, :n][mask[i, :n]].tolist(), rel=1e-5, abs=1e-6), settings


def test_group_of_one_outcome_gets_zero(report: Path, opened: Any) -> None:
    group, *_ = ragged(1)
    for one in group["answers"]:
        one["correct"] = True
    code = "(group) => ['GRPO-S', 'GTPO'].map((m) => dew.advantages(group, m, dew.settingsOf(group)).flat())"
    for values in opened(report).tab.evaluate(code, group):
        assert {v for v in values if v is not None} == {0}


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_hovering_shows_the_recorded_numbers(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")
    for i, t in ((0, 0), (1, 12), (3, 30)):
        token = page.tab.locator(f'.answer[data-i="{i}"] .t[data-t="{t}"]')
        token.scroll_into_view_if_needed()
        page.settle()  # scrolling puts the tip away
        token.hover()
        answer = mixed.answers[i]
        lists = (answer.advantage, answer.shaped, answer.entropy, answer.logp, answer.ratio, answer.grpo)
        names = ("Advantage", "Shaped reward r̃", "Entropy", "Log-probability", "Ratio", "GRPO")
        expected = {name: values[t] for name, values in zip(names, lists, strict=True) if values}
        assert page.table(".tip") == pytest.approx(expected, rel=1e-3)
        assert page.table(".panel .signals") == pytest.approx(expected, rel=1e-3)


def test_tip_shows_the_numbers_of_the_next_group(report: Path, run: Path, opened: Any) -> None:
    groups = list(RunFolder(run).records())
    page = opened(report, at(groups[0]))
    token = page.tab.locator('.answer[data-i="0"] .t[data-t="0"]')
    token.hover(position={"x": 3, "y": 3})
    page.tab.keyboard.press("j")
    title = f"Step {groups[1].step}, group {groups[1].group}"
    page.wait_for_group(title)
    token.hover(position={"x": 5, "y": 5})
    page.tab.wait_for_selector(".tip:not([hidden])")
    entropy = groups[1].answers[0].entropy
    assert entropy and page.table(".tip")["Entropy"] == pytest.approx(entropy[0], rel=1e-3)


def test_derivation_matches_the_recorded_advantage(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")
    for i, answer in enumerate(mixed.answers[:3]):
        page.tab.locator(f'.answer[data-i="{i}"] .t[data-t="9"]').click()
        steps = page.texts(".panel .steps li")
        assert answer.entropy and answer.advantage
        side = [a for a in mixed.answers if a.correct == answer.correct and len(a.tokens) > 9]
        x = [(a.entropy or [])[9] ** (1 if a.correct else -1) for a in side]
        assert f"{len(side)} {'correct' if answer.correct else 'wrong'} answer" in "".join(steps)
        mean = next(s for s in steps if s.startswith("Mean of")).rsplit("= ", 1)[1]
        assert float(mean) == pytest.approx(sum(x) / len(x), rel=1e-3)
        last = steps[-1].rsplit("= ", 1)[1].replace("−", "-")
        assert float(last) == pytest.approx(answer.advantage[9], rel=2e-3)
        assert page.texts(".panel .agrees")[0].startswith("✓ The run trained on")


def test_switching_signals_recolours_tokens(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")

    def colours(i: int) -> list[str]:
        code = "(ts) => ts.map((t) => getComputedStyle(t).backgroundColor)"
        return page.tab.locator(f'.answer[data-i="{i}"] .t').evaluate_all(code)

    right = next(i for i, a in enumerate(mixed.answers) if a.correct)
    credit = colours(right)
    page.tab.click('button[data-signal="entropy"]')
    entropy = colours(right)
    assert len(credit) == len(mixed.answers[right].tokens) and credit != entropy
    depth = page.tab.locator(f'.answer[data-i="{right}"] .t').evaluate_all(
        "(ts) => ts.map((t) => parseFloat(t.style.getPropertyValue('--deep')))"
    )
    values = mixed.answers[right].entropy or []
    order = sorted(range(len(values)), key=lambda t: values[t])
    assert [depth[t] for t in order] == sorted(depth)  # the more entropy, the deeper
    page.tab.keyboard.press("1")
    assert colours(right) == credit


def test_credit_is_blue_in_correct_answers_and_orange_in_wrong_ones(
    report: Path, mixed: GroupRecord, opened: Any
) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")
    for i, answer in enumerate(mixed.answers):
        hues = page.tab.locator(f'.answer[data-i="{i}"] .t').evaluate_all("(ts) => ts.map((t) => t.dataset.hue)")
        assert set(hues) == {"plus" if answer.correct else "less"}
        header = page.tab.locator(f'.answer[data-i="{i}"] .outcome').text_content()
        assert header == ("✓ correct" if answer.correct else "✗ wrong")  # not by colour alone


def test_filter_and_sort(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")
    page.tab.select_option("#group-controls label:has-text('Show') select", "wrong")
    assert set(page.tab.locator(".answer .outcome").all_text_contents()) == {"✗ wrong"}
    page.tab.select_option("#group-controls label:has-text('Show') select", "all")
    page.tab.select_option("#group-controls label:has-text('Sort') select", "longest")
    shown = page.tab.locator(".answer").evaluate_all("(as) => as.map((a) => Number(a.dataset.i))")
    lengths = [len(mixed.answers[i].tokens) for i in shown]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == len(mixed.answers)


def test_columns_show_the_same_position_of_every_answer(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.click("[data-mode=columns]")
    rows = page.tab.locator(".grid tbody tr")
    shown = rows.evaluate_all("(rs) => rs.map((r) => Number(r.dataset.i))")
    assert [mixed.answers[i].correct for i in shown] == sorted((a.correct for a in mixed.answers), reverse=True)
    column = page.tab.locator('.grid td.t[data-t="3"]').all_inner_texts()
    assert column == [mixed.answers[i].tokens[3].replace(" ", "·") for i in shown]
    right, wrong = (page.tab.locator(".grid .side").nth(k).locator("td").nth(3).inner_text() for k in (0, 1))
    H = [(a.entropy or [])[3] for a in mixed.answers if a.correct]
    assert right.startswith(f"{len(H)} · ") and wrong.startswith(f"{len(mixed.answers) - len(H)} · ")
    assert float(right.split(" · ")[1]) == pytest.approx(sum(H) / len(H), rel=1e-2)


@pytest.mark.slow
def test_three_methods_side_by_side(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.click("[data-mode=methods]")
    assert page.texts(".method-name strong") == ["GRPO", "GRPO-S", "GTPO"] * 2

    def depths(method: str) -> set[str]:
        code = "(ts) => ts.map((t) => t.style.getPropertyValue('--deep'))"
        return set(page.tab.locator(f'.compared.right [data-method="{method}"] .t').evaluate_all(code))

    assert len(depths("GRPO")) == 1 and len(depths("GRPO-S")) == 1 and len(depths("GTPO")) > 5
    before = page.texts(".compared.right .method-name .quiet")
    page.tab.fill('[data-setting="alpha2"]', "0")
    page.tab.keyboard.press("Tab")
    assert len(depths("GTPO")) == 1  # without its weight, GTPO is flat too
    assert page.texts(".compared.right .method-name .quiet") != before
    page.tab.click("text=Settings of the run")
    assert page.texts(".compared.right .method-name .quiet") == before


# ── moving about ────────────────────────────────────────────────────────────────────────────────────────────


def test_address_keyboard_and_search(report: Path, run: Path, opened: Any) -> None:
    groups = list(RunFolder(run).records())
    page = opened(report, at(groups[5]))
    heading = page.tab.locator(".group-title h2")
    for key, n in (("", 5), ("j", 6), ("k", 5), ("k", 4)):
        if key:
            page.tab.keyboard.press(key)
        expected = f"Step {groups[n].step}, group {groups[n].group}"
        page.wait_for_group(expected)
        assert page.tab.url.endswith(at(groups[n]))
    assert page.tab.locator('tr[aria-current="true"] .group-link').count() == 1
    words = groups[8].answers[2].text[-12:-2]
    page.tab.keyboard.press("/")
    page.tab.keyboard.type(words)
    hits = sum(any(words.lower() in a.text.lower() for a in g.answers) or words in g.prompt for g in groups)
    playwright.expect(page.tab.locator(".group-link")).to_have_count(hits)
    page.tab.locator(".group-link").first.click()
    assert heading.is_visible()


def test_arrow_keys_move_between_tokens(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")
    page.tab.locator('.answer[data-i="1"] .t[data-t="4"]').click()
    for key, i, t in (("ArrowRight", 1, 5), ("ArrowDown", 2, 5), ("ArrowLeft", 2, 4), ("ArrowUp", 1, 4)):
        page.tab.keyboard.press(key)
        assert page.tab.locator(f'.answer[data-i="{i}"] .t.pinned').get_attribute("data-t") == str(t)
    page.tab.keyboard.press("Escape")
    assert page.tab.locator(".pinned").count() == 0
    page.tab.keyboard.press("p")
    assert page.tab.locator('.answer[data-i="0"] .t[data-t="0"].pinned').count() == 1


def test_views_open_by_tab_and_address(report: Path, opened: Any) -> None:
    page = opened(report)
    for name in ("curves", "groups", "credit", "overview"):
        page.tab.click(f"#tab-{name}")
        page.tab.wait_for_selector(f"#view-{name}:not([hidden])")
        assert page.tab.locator("main > section:not([hidden])").count() == 1
        if name != "groups":  # there the address names the open group
            assert page.tab.url.endswith(f"#{name}")
    assert opened(report, "#credit").tab.locator("#view-credit").is_visible()


def test_overview_shows_scores_alarms_and_settings(report: Path, opened: Any) -> None:
    text = opened(report).tab.inner_text("#view-overview")
    for part in ("synthetic-gtpo-seed0", "71.0 % [66.0, 76.0]", "Remedy: Raise max_completion_length", "gtpo"):
        assert part in text


# ── curves ──────────────────────────────────────────────────────────────────────────────────────────────────


def has_colour(page: Page, chart: int, name: str) -> bool:
    """Whether a chart's canvas has pixels of a run's colour."""
    code = """([chart, name]) => {
      const canvas = document.querySelectorAll('.chart canvas')[chart];
      const wanted = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      const [r, g, b] = [1, 3, 5].map((k) => parseInt(wanted.slice(k, k + 2), 16));
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      for (let k = 0; k < data.length; k += 4) {
        const off = Math.abs(data[k] - r) + Math.abs(data[k + 1] - g) + Math.abs(data[k + 2] - b);
        if (data[k + 3] > 200 && off < 24) found++;
      }
      return found > 20;
    }"""
    return bool(page.tab.evaluate(code, [chart, name]))


@pytest.fixture(scope="module")
def two(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    return build([run, make_run(folder / "b", steps=90, groups=4, size=4, seed=3)], folder)


def test_two_runs_overlay_in_two_colours(two: Path, opened: Any) -> None:
    page = opened(two, "#curves&seeds=each")
    page.tab.wait_for_selector(".chart canvas")
    assert has_colour(page, 0, "--run-0") and has_colour(page, 0, "--run-1")
    names = [f"synthetic-gtpo-seed{seed}" for seed in (0, 3)]
    lines = page.texts(".chart >> nth=0 >> .plot-line")
    assert [line.split(" · ")[0].strip() for line in lines] == [names[0]] * 2 + [names[1]] * 2
    page.tab.click(f".chip:has-text('{names[1]}')")
    lines = page.texts(".chart >> nth=0 >> .plot-line")
    assert len(lines) == 2 and not any(names[1] in line for line in lines) and page.tab.url.endswith("hide=1")
    assert not has_colour(page, 0, "--run-1")


def test_seeds_as_mean_and_band(two: Path, opened: Any) -> None:
    """Runs that differ only in their seed are averaged; the last common step is 90."""
    page = opened(two, "#curves")
    assert page.tab.input_value("label:has-text('Seeds') select") == "mean"
    assert len(page.texts(".chip")) == 0  # a single arm
    lines = page.texts(".chart >> nth=0 >> .plot-line")
    assert len(lines) == 2 and lines[0].strip().startswith("gtpo · accuracy")


def test_hovering_a_curve_shows_the_logged_number(report: Path, run: Path, opened: Any) -> None:
    page = opened(report, "#curves")
    page.tab.locator(".chart >> nth=0 >> .u-over").hover(position={"x": 150, "y": 60})
    page.settle()
    step = int(page.texts(".chart >> nth=0 >> .plot-lines > .quiet")[0].removeprefix("step "))
    logged = next(m for m in RunFolder(run).metrics() if m["step"] == step)
    shown = float(page.texts(".chart >> nth=0 >> .plot-line b")[0])
    assert shown == pytest.approx(logged["accuracy"], rel=1e-3)
    assert page.texts(".chart >> nth=3 >> .plot-lines > .quiet") == [f"step {step}"]  # charts move together


@pytest.mark.slow
def test_zoom_and_log_scale(report: Path, opened: Any) -> None:
    page = opened(report, "#curves")
    box = page.tab.locator(".chart >> nth=0 >> .u-over").bounding_box()
    before = page.tab.locator(".chart canvas").first.screenshot()
    page.tab.mouse.move(box["x"] + 60, box["y"] + 50)
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + 160, box["y"] + 50, steps=4)
    page.tab.mouse.up()
    page.settle()
    zoomed = page.tab.locator(".chart canvas").first.screenshot()
    assert zoomed != before
    page.tab.click(".chart >> nth=0 >> button")
    page.settle()
    assert page.tab.locator(".chart canvas").first.screenshot() != zoomed


@pytest.mark.slow
def test_charts_are_drawn_a_few_at_a_time(report: Path, opened: Any) -> None:
    """With a clock that runs fast, one before the page is painted; those out of sight when they are needed."""
    page = opened(report, "#curves")
    page.settle()
    drawn = page.tab.locator(".chart canvas").count()
    new = "document.querySelectorAll('.chart canvas:not([data-old])').length"
    at_once = page.tab.evaluate(
        f"""() => {{
          let clock = 0;
          performance.now = () => (clock += 1000);
          for (const canvas of document.querySelectorAll('.chart canvas')) canvas.dataset.old = '';
          const box = document.querySelector('#smooth');
          box.value = 0.8;
          box.dispatchEvent(new Event('input'));
          return {new};
        }}"""
    )
    assert at_once == 1 < drawn
    page.settle()
    assert page.tab.evaluate(new) == drawn
    charts = page.tab.locator(".charts:not(.more *) > .chart")
    last = charts.last
    assert last.locator("canvas").count() == 0
    with page.tab.expect_download() as started:
        last.evaluate("(chart) => chart.querySelector('.buttons button:last-child').click()")
    assert Path(started.value.path()).read_bytes().startswith(b"\x89PNG") and last.locator("canvas").count() == 1
    page.tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.tab.locator(".charts:not(.more *) > .chart canvas").count() == charts.count() > drawn


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
    answers = [
        AnswerRecord(
            [*ATTACKS, *ODD], c, float(c), extracted=bad, verdict=bad, entropy=[0.5] * 16, advantage=[1.0] * 16
        )
        for c in (True, False)
    ]
    run = RunFolder(tmp_path)
    run.write_run({"name": bad, "model": bad, "algorithm": {"name": bad, "settings": {bad: bad}}, "status": bad})
    run.append_metrics({"step": 1, "reward": 0.5, bad: 1.0})
    run.append_alarm({"step": 1, "alarm": bad, "message": bad, "remedy": bad})
    run.write_scores([{"when": "after", "task": bad, "n_problems": 3, "k": 1, "scores": {bad: {"value": 0.5}}}])
    (tmp_path / "config.yaml").write_text(bad)
    write_records(tmp_path, 1, [GroupRecord(1, 0, bad, answers, bad, bad, {bad: bad})])
    page = opened(build([tmp_path]))
    for name in ("curves", "credit", "groups"):
        page.tab.click(f"#tab-{name}")
    for mode in ("columns", "methods", "text"):
        page.tab.click(f"[data-mode={mode}]")
        page.tab.locator(".group .t").nth(1).click()
    assert page.tab.evaluate("window.hacked") is None
    assert page.tab.locator("main img, main script, main iframe").count() == 0
    shown = page.tab.locator('.answer[data-i="0"] .t').all_inner_texts()
    assert shown[:7] == ATTACKS
    assert shown[7:10] == ["⟨U+0000⟩", "⟨U+202E⟩evil⟨U+202C⟩", "⟨U+D800⟩"]
    assert shown[10] == ODD[3] and shown[12] == "⟨U+2028⟩" and shown[13] == "∅"
    assert bad in page.tab.inner_text(".prompt") and bad in page.tab.inner_text(".panel")


def test_content_security_policy_blocks_injected_scripts(report: Path, tabs: Any) -> None:
    page = Page(tabs(0), report)
    page.tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked=1'}))"
    )
    page.tab.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    for _ in range(100):  # complaints arrive when they arrive
        complaints = [line for line in page.noise if "Content Security Policy" in line]
        if len(complaints) == 2:
            break
        page.tab.wait_for_timeout(50)
    assert len(complaints) == 2 and page.tab.evaluate("window.hacked") is None
    page.close()


@pytest.mark.slow
def test_answer_of_a_hundred_kilobytes(tmp_path: Path, opened: Any) -> None:
    words = [f"w{k} " for k in range(18_000)]
    long = AnswerRecord(words, True, 1.0, entropy=[0.1] * 18_000, advantage=[1.0] * 18_000)
    blob = AnswerRecord(["x" * 100_000], False, 0.0, entropy=[0.1], advantage=[-1.0])
    write_records(tmp_path, 1, [GroupRecord(1, 0, "long", [long, blob], algorithm="gtpo")])
    page = opened(build([tmp_path]), "#groups")
    page.tab.wait_for_selector(".answer")
    assert page.tab.locator('.answer[data-i="0"] .t').count() == 2000
    page.tab.click(".more-tokens")
    assert page.tab.locator('.answer[data-i="0"] .t').count() == 4000
    assert len(page.tab.locator('.answer[data-i="1"] .t').text_content()) == 100_000
    assert page.tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.tab.click("[data-mode=columns]")
    page.tab.click("text=later ›")
    assert "positions 33 to 64 of 18,000" in page.tab.inner_text(".columns")


# ── who looks, and on what ──────────────────────────────────────────────────────────────────────────────────


def luminance(colour: str) -> float:
    rgb = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(params=["light", "dark"])
def colour(request: pytest.FixtureRequest, report: Path, opened: Any) -> Any:
    """A colour of the style sheet by its name, in the light or the dark theme."""
    page = opened(report, color_scheme=request.param)
    code = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    return lambda name: page.tab.evaluate(code, f"--{name}")


def test_text_contrast_on_every_colour(colour: Any) -> None:
    """WCAG AA: contrast of at least 4.5, also on the deepest colours of the heat map."""
    pairs = [("ink", ground) for ground in ("paper", "card", "hover", "plus", "less", "amount", "alarm-paper")]
    pairs += [(text, ground) for text in ("quiet", "right", "wrong") for ground in ("paper", "card")]
    pairs += [("accent-ink", "accent"), ("alarm", "alarm-paper")]
    for text, ground in pairs:
        high, low = sorted((luminance(colour(text)), luminance(colour(ground))), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_light_and_dark_by_system_and_by_key(report: Path, opened: Any) -> None:
    page = opened(report, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.tab.evaluate(ground)
    page.tab.keyboard.press("t")
    light = page.tab.evaluate(ground)
    assert dark != light == opened(report, color_scheme="light").tab.evaluate(ground)


@pytest.mark.slow
def test_canvases_follow_the_theme(report: Path, opened: Any) -> None:
    page = opened(report, "#groups")
    page.tab.wait_for_selector(".strip")
    pixel = "document.querySelector('.strip').getContext('2d').getImageData(0, 0, 1, 1).data.join()"
    answers = page.tab.locator(".answer").all_text_contents()
    light = page.tab.evaluate(pixel)
    page.tab.keyboard.press("t")
    assert page.tab.evaluate(pixel) != light and page.tab.locator(".answer").all_text_contents() == answers
    page.tab.click("#tab-curves")
    page.settle()
    assert has_colour(page, 0, "--run-0")
    page.tab.keyboard.press("t")
    page.settle()
    assert has_colour(page, 0, "--run-0")


def test_phone_layout_scrolls_vertically_only(report: Path, opened: Any) -> None:
    page = opened(report, viewport=PHONE)
    for view in ("overview", "curves", "credit", "groups"):
        page.tab.click(f"#tab-{view}")
        page.settle()
        if view == "groups":
            page.tab.wait_for_selector(".answer")
        assert page.tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), view
    page.tab.locator(".answer .t").nth(3).click()
    page.settle()
    panel = page.tab.locator(".panel").bounding_box()
    token = page.tab.locator(".pinned").bounding_box()
    assert panel["y"] + panel["height"] == PHONE["height"] and token["y"] + token["height"] <= panel["y"]


def test_print_shows_answers_without_controls(report: Path, opened: Any) -> None:
    page = opened(report, "#groups", color_scheme="dark")
    page.tab.wait_for_selector(".answer")
    page.tab.emulate_media(media="print", color_scheme="dark")
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.tab.evaluate("getComputedStyle(document.querySelector('.answer')).color") == "rgb(17, 17, 17)"
    assert page.tab.locator(".answer").first.is_visible() and not page.tab.locator(".picker").is_visible()
    assert not page.tab.locator("header.top").is_visible()


# ── runs of others, and runs with little in them ────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        '{"answers": [{"tokens": ["a", "b"], "reward": 1}, {"tokens": ["c"], "reward": 0}]}',
        '{"answers": []}',
        '{"answers": [{"tokens": [], "reward": 0}]}',
        '{"answers": [{"tokens": ["a"], "live": [false], "entropy": [0.5], "advantage": [null], "reward": 1}]}',
        '{"algorithm": "grpo", "answers": [{"tokens": ["a"], "advantage": [1], "reward": 1}, {"tokens": ["b"]}]}',
        '{"algorithm": "grpo_s", "settings": {"beta1": 1, "beta2": 0.1}, "answers": '
        '[{"tokens": ["a"], "entropy": [0.5], "reward": 1}, {"tokens": ["b"], "entropy": [0.1], "reward": 0}]}',
    ],
)
def test_minimal_records(tmp_path: Path, opened: Any, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line)
    page = opened(build_from_records(path))
    for name in ("curves", "credit", "groups"):
        page.tab.click(f"#tab-{name}")
    page.tab.wait_for_selector(".group-title")
    for mode in ("columns", "methods", "text"):
        page.tab.click(f"[data-mode={mode}]")
        if page.tab.locator(".group .t").count():
            page.tab.locator(".group .t").first.click()
            assert page.tab.locator(".panel").text_content().startswith("✕How the credit was computed")


def test_run_that_has_just_started(tmp_path: Path, opened: Any) -> None:
    RunFolder(tmp_path).write_run({"name": "just started", "status": "running"})
    page = opened(build([tmp_path]))
    for name in ("curves", "groups", "credit", "overview"):
        page.tab.click(f"#tab-{name}")
        assert page.tab.inner_text(f"#view-{name}").strip()


# ── findings, arms and studies ──────────────────────────────────────────────────────────────────────────────


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
    assert page.tab.locator(f"{row} .row-line").evaluate_all("(ls) => ls.map((l) => l.dataset.arm)") == ["grpo", "gtpo"]
    after = []
    for algorithm in ("grpo", "gtpo"):
        values = [
            [m["entropy"] for m in RunFolder(compared.parent / f"{algorithm}-{seed}").metrics()][-4:] for seed in (0, 1)
        ]
        after.append(sum(map(sum, values)) / 8)  # the last tenth of 40 steps, over two seeds
    assert [float(text) for text in page.texts(f"{row} .row-values b")] == pytest.approx(after, rel=1e-3)
    assert "too few seeds (2 of at least 5)" in page.texts(f"{row} .row-difference")[1]
    table = page.tab.inner_text("section:has(> h2:text-is('Settings that differ'))")
    assert "algorithm" in table and "steps" not in table  # only what differs
    page.tab.click(f"{row} h3 a")
    page.tab.wait_for_selector("#view-curves .wanted")
    assert "entropy" in page.tab.locator(".wanted").inner_text().lower()


def test_runs_have_other_hues_than_credit(colour: Any) -> None:
    def hls(name: str) -> tuple[float, float, float]:
        return colorsys.rgb_to_hls(*(int(colour(name)[k : k + 2], 16) / 255 for k in (1, 3, 5)))

    taken = [hls(name)[0] for name in ("plus", "less", "right", "wrong")]
    for r in range(8):
        hue, _, saturation = hls(f"run-{r}")
        away = min(min(abs(hue - other), 1 - abs(hue - other)) for other in taken)
        assert saturation < 0.12 or away > 18 / 360, r


def test_study_opens_with_bands_and_a_forest_plot(tmp_path: Path, opened: Any) -> None:
    study = make_study(tmp_path / "study", arms=3, seeds=6, generations=20)
    page = opened(build([study]))
    assert "Verdict of a made-up study" in page.tab.inner_text(".findings")
    assert "single runs, ± their standard deviation" in page.tab.inner_text("#view-overview")
    assert page.tab.locator('.row[data-metric="area"] .forest').count() == 2  # both arms against the baseline
    runs = json.loads((study / "study.json").read_text())["runs"]
    area = {(run["arm"], run["seed"]): run["scores"]["area"] for run in runs}
    gaps = [area["synthetic(2)", seed] - area["baseline", seed] for seed in range(6)]
    shown = page.tab.inner_text('.row[data-metric="area"] [data-arm="synthetic(2)"] .row-difference b')
    assert float(shown.replace("−", "-")) == pytest.approx(sum(gaps) / 6, rel=5e-3)  # three digits are shown
    page.tab.click("#tab-curves")
    assert [text.split(" ×")[0] for text in page.texts(".chip")] == ["baseline", "synthetic(1)", "synthetic(2)"]
    assert page.tab.input_value("label:has-text('Seeds') select") == "mean"
    page.tab.select_option("label:has-text('Seeds') select", "each")
    assert len(page.texts(".chip")) == 3  # 18 runs, but one entry per arm
    page.tab.click(".chip >> nth=1")
    assert page.tab.url.endswith("hide=6.7.8.9.10.11")
    assert "12 lines" in page.tab.inner_text(".chart >> nth=0")
    page.tab.click("#tab-groups")
    assert "no groups" in page.tab.inner_text("#view-groups")


@pytest.mark.slow
def test_every_arm_of_a_large_study_has_its_own_mark(tmp_path: Path, opened: Any) -> None:
    """A colour and a shape; pointing at its entry shows its lines and numbers in every chart."""
    page = opened(build([make_study(tmp_path / "study", arms=17, seeds=2, generations=20)]), "#curves")
    page.settle()
    looks = "(dots) => dots.map(({ style }) => style.getPropertyValue('--mark') + style.getPropertyValue('--shape'))"
    assert len(set(page.tab.locator(".chip .dot").evaluate_all(looks))) == 17
    assert "17 lines" in page.tab.inner_text(".chart >> nth=0")
    runs = json.loads((tmp_path / "study" / "study.json").read_text())["runs"]
    last = [run["curves"]["entropy"][-1] for run in runs if run["arm"] == "synthetic(9)"]
    page.tab.hover(".chip:has-text('synthetic(9)')")
    chart = page.tab.locator("[data-metrics=entropy]")
    assert float(chart.locator(".plot-line b").inner_text()) == pytest.approx(sum(last) / 2, rel=1e-3)
    assert chart.locator(".plot-line polygon").count() == 1  # the second arm of its colour
    assert page.texts(".chart >> nth=0 >> .plot-line")[0].strip().startswith("synthetic(9)")
    page.tab.hover("#tab-curves")
    assert "17 lines" in page.tab.inner_text(".chart >> nth=0")
    page.tab.locator(".chip").nth(1).focus()
    page.tab.keyboard.press("Tab")
    assert page.texts(".chart >> nth=0 >> .plot-line")[0].strip().startswith("synthetic(2)")


@pytest.mark.slow
def test_study_of_two_tasks_shows_one_at_a_time(tmp_path: Path, opened: Any) -> None:
    report = build([make_study(tmp_path / "study", arms=3, seeds=6, generations=20, tasks=2)])
    page = opened(report)
    assert page.tab.inner_text("h1") == "baseline · synthetic(1) · synthetic(2) on 2 tasks"
    dots = "document.querySelectorAll('.row[data-metric=area] .dot')"
    colours = f"[...{dots}].map((dot) => dot.style.getPropertyValue('--mark'))"
    first = page.tab.evaluate(colours)
    assert len(set(first)) == 3
    assert "synthetic(2) is ahead of baseline in area" in page.tab.inner_text(".findings")

    page.tab.select_option("#view-overview .task select", "synthetic-1")
    assert page.tab.url.endswith("#overview&task=synthetic-1")
    shown = page.tab.inner_text(".findings")
    assert "synthetic-1: synthetic(2) @ 0.0002 is behind baseline @ 0.0001 in area" in shown
    assert "synthetic:" not in shown
    assert page.tab.locator('.row[data-metric="area"] .forest').count() == 2
    assert page.tab.evaluate(colours) == first
    page.tab.click("#tab-curves")
    assert page.tab.input_value("#view-curves .task select") == "synthetic-1"
    labels = ["baseline @ 0.0001", "synthetic(1) @ 0.0002", "synthetic(2) @ 0.0002"]
    assert [text.split(" ×")[0] for text in page.texts(".chip")] == labels

    shared = opened(report, "#curves&task=synthetic-1")
    assert [text.split(" ×")[0] for text in shared.texts(".chip")] == labels
    shared.tab.select_option("#view-curves .task select", "synthetic")
    assert [text.split(" ×")[0] for text in shared.texts(".chip")] == ["baseline", "synthetic(1)", "synthetic(2)"]
    assert opened(report, "#overview&task=unknown").tab.input_value("#view-overview .task select") == "synthetic"


# ── the table of groups, and what it opens ──────────────────────────────────────────────────────────────────

CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups: uniform credit; flipped tokens, repeated answers and chat markup; the same prompt again."""

    def right(advantage: list[float], entropy: list[float] | None = None) -> AnswerRecord:
        entropy = entropy or [0.5, 0.001, 0.9]
        return AnswerRecord(["so", " four", "<|im_end|>"], True, 1.0, entropy=entropy, advantage=advantage)

    def wrong(advantage: list[float]) -> AnswerRecord:
        return AnswerRecord([" maybe", " five"], False, 0.0, entropy=[0.7, 0.002], advantage=advantage)

    folder = tmp_path_factory.mktemp("odd") / "run"
    RunFolder(folder).write_run({"name": "odd", "algorithm": {"name": "gtpo", "settings": {}}})
    plain = [right([1.0] * 3), wrong([-1.0] * 2)]
    flipped = [right([1.0, -0.5, 2.0])] * 3 + [wrong([0.3, -1.0])]
    again = [right([1.0, 0.9, 1.1]), wrong([-1.0, -1.2])]
    groups = [GroupRecord(1, 0, "plain", plain), GroupRecord(1, 1, CHAT, flipped, algorithm="gtpo")]
    write_records(folder, 1, groups)
    write_records(folder, 2, [GroupRecord(2, 0, CHAT, again)])
    return build([folder])


def test_flipped_tokens_are_found_marked_and_counted(odd: Path, opened: Any) -> None:
    """Three answers with one token each, and one with one: four flipped tokens in one of three groups."""
    page = opened(odd)
    assert "1 of 3 recorded groups have credit of the wrong sign" in page.tab.inner_text(".findings")
    assert "4 tokens" in page.tab.inner_text(".finding.bad")
    page.tab.click(".finding.bad a")
    page.tab.wait_for_selector(".answer")
    assert page.tab.inner_text(".group-title h2") == "Step 1, group 1"
    assert page.tab.locator(".group-link").count() == 1 and "with=flipped" in page.tab.url
    flips = page.tab.locator(".answer .t.flip").evaluate_all("(ts) => ts.map((t) => t.textContent)")
    assert flips == [" four", " maybe"]
    assert "4 flipped tokens" in page.tab.inner_text(".group-title .facets")


def test_groups_open_at_the_most_telling_and_sort(odd: Path, opened: Any) -> None:
    page = opened(odd, "#groups")
    page.tab.wait_for_selector(".answer")
    assert page.tab.inner_text(".group-title h2") == "Step 1, group 1"  # the largest spread of credit
    page.tab.click('[data-by="step"]')
    assert page.texts(".group-link") == ["2 · 0", "1 · 1", "1 · 0"]
    page.tab.click('[data-by="step"]')
    assert page.texts(".group-link") == ["1 · 0", "1 · 1", "2 · 0"]
    assert page.tab.get_attribute("th:has([data-by=step])", "aria-sort") == "ascending" and "by=-step" in page.tab.url
    page.tab.locator("tr:has-text('2 · 0') td").last.click()
    page.wait_for_group("Step 2, group 0")


def test_identical_answers_and_markup_are_folded(odd: Path, opened: Any) -> None:
    page = opened(odd, "#step=1&group=1")
    page.tab.wait_for_selector(".answer")
    assert page.tab.locator(".answer").count() == 2 and page.texts(".times") == ["× 3"]
    page.tab.select_option("label:has-text('Identical answers') select", "no")
    assert page.tab.locator(".answer").count() == 4
    prompt = page.tab.inner_text(".prompt")
    assert prompt.splitlines()[0].startswith("system (9 characters)") and "What is 2+2?" in prompt
    assert "<|im_start|>" not in prompt and CHAT.strip() in page.tab.locator(".prompt .raw").text_content()
    assert page.tab.locator(".t.markup").count() == 3


@pytest.mark.slow
def test_same_prompt_side_by_side(odd: Path, opened: Any) -> None:
    page = opened(odd, "#step=1&group=1")
    page.tab.click("[data-mode=same]")
    page.tab.wait_for_selector(".same-column")
    assert page.texts(".same-column h3") == ["step 1, group 1", "step 2, group 0"]
    assert opened(odd, "#step=1&group=0").tab.locator("[data-mode=same]").count() == 0


def test_sure_columns_are_hatched(odd: Path, opened: Any) -> None:
    page = opened(odd, "#step=1&group=1&mode=columns")
    page.tab.wait_for_selector(".grid")
    assert page.texts(".grid thead th.sure") == ["2"]
    image = page.tab.locator(".grid td.sure").first.evaluate("(td) => getComputedStyle(td).backgroundImage")
    assert image.startswith("repeating-linear-gradient")


@pytest.mark.slow
def test_search_is_highlighted(odd: Path, opened: Any) -> None:
    page = opened(odd, "#step=1&group=1&q=o%20fo")
    page.tab.wait_for_selector(".t.hit")
    assert page.tab.locator(".answer[data-i='0'] .t.hit").evaluate_all("(ts) => ts.map((t) => t.textContent)") == [
        "so",
        " four",
    ]
    page.tab.fill("#search", "2+2")
    page.tab.wait_for_selector(".prompt mark")
    assert page.texts(".prompt mark") == ["2+2"] and page.tab.url.endswith("q=2%2B2")


def test_colour_is_proportional_unless_contrast_is_asked(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed))
    page.tab.wait_for_selector(".answer")
    i = next(i for i, a in enumerate(mixed.answers) if a.correct)
    read = "(ts) => ts.map((t) => parseFloat(t.style.getPropertyValue('--deep')))"
    depth = page.tab.locator(f'.answer[data-i="{i}"] .t').evaluate_all(read)
    credit = mixed.answers[i].advantage or []
    inside = [t for t in range(len(credit)) if depth[t] < 100]
    ratios = [(depth[t] - 12) / credit[t] for t in inside]
    assert max(ratios) == pytest.approx(min(ratios), rel=0.01)
    page.tab.select_option("label:has-text('Colour') select", "contrast")
    assert page.tab.locator(f'.answer[data-i="{i}"] .t').evaluate_all(read) != depth


# ── credit over training ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_every_mark_opens_its_tokens(report: Path, run: Path, opened: Any) -> None:
    page = opened(report, "#credit")
    answers = [a for g in RunFolder(run).records() for a in g.answers if any(any(b.advantage or ()) for b in g.answers)]
    right = sum(len(a.tokens) for a in answers if a.correct)
    page.tab.locator(".bar-right").first.click()
    page.settle()
    assert page.texts("#tokens p.quiet")[0].startswith(f"{-(-right // 10):,} tokens")  # the first tenth
    lowest = sorted(H for a in answers if a.correct for H in a.entropy or ())[: -(-right // 10)]
    for _ in range(3):  # further rows are added by scrolling
        shown = [float(text.replace("−", "-")) for text in page.texts(".token-table td:nth-child(4)")]
        assert shown == pytest.approx(lowest[: len(shown)], rel=1e-2)
        page.tab.evaluate("{ const box = document.getElementById('tokens'); box.scrollTop = box.scrollHeight; }")
        page.settle()
    assert len(shown) > 2 * page.tab.viewport_size["height"] / 30
    page.tab.click("#tokens .close")
    word = page.texts(".words.right tbody th")[0]
    uses = page.texts(".words.right tbody td")[0]
    page.tab.locator(".words.right .word").first.click()
    page.settle()
    assert page.texts("#tokens p.quiet")[0].startswith(f"{uses} token"), word
    page.tab.locator(".token-table a").first.click()
    page.tab.wait_for_selector(".pinned")
    assert page.tab.locator("#tokens").is_hidden() and "token=" in page.tab.url
    pinned = page.tab.locator(".pinned").first.text_content().strip()
    assert word.strip("·").startswith(pinned)


def test_credit_over_training_has_a_column_per_recorded_step(report: Path, run: Path, opened: Any) -> None:
    page = opened(report, "#credit")
    steps = sorted({g.step for g in RunFolder(run).records()})
    page.tab.locator("figure:has-text('Near-zero entropy')").scroll_into_view_if_needed()
    page.settle()
    assert page.tab.locator(".bar-flipped").count() == len(steps)
    bar = page.tab.locator(".bar-sure").first
    bar.hover()
    sure = [a for g in RunFolder(run).records() if g.step == steps[0] for a in g.answers]
    H = [x for a in sure for x in a.entropy or ()]
    share = f"step {steps[0]}: {100 * sum(x < 0.01 for x in H) / len(H):.2f} %"
    assert bar.get_attribute("aria-label") == share == bar.locator("title").text_content()


# ── address, downloads, keyboard ────────────────────────────────────────────────────────────────────────────


def test_address_restores_the_view_the_filter_and_the_token(odd: Path, opened: Any) -> None:
    page = opened(odd, "#groups")
    page.tab.select_option("label:has-text('With') select", "mixed")
    page.tab.click("[data-mode=columns]")
    page.tab.keyboard.press("2")
    page.tab.locator('tr[data-i="3"] .t[data-t="1"]').click()
    page.settle()
    again = opened(odd, page.tab.url[page.tab.url.index("#") :])
    again.tab.wait_for_selector('tr[data-i="3"] .t[data-t="1"].pinned')
    assert again.tab.input_value("label:has-text('With') select") == "mixed"
    assert again.tab.locator("[data-mode=columns][aria-pressed=true]").count() == 1
    assert again.tab.locator("#group-controls [data-signal=entropy][aria-pressed=true]").count() == 1
    assert again.tab.inner_text(".panel") == page.tab.inner_text(".panel")


def saved(page: Page, selector: str) -> bytes:
    with page.tab.expect_download() as started:
        page.tab.locator(selector).first.click()
    return Path(started.value.path()).read_bytes()


def test_downloads(report: Path, run: Path, odd: Path, opened: Any) -> None:
    page = opened(report, "#curves")
    rows = list(csv.DictReader(io.StringIO(saved(page, ".chart button:text-is('CSV')").decode())))
    logged = [m["accuracy"] for m in RunFolder(run).metrics()]
    assert [float(row["accuracy"]) for row in rows] == pytest.approx(logged, rel=1e-5)
    assert saved(page, ".chart button:text-is('PNG')").startswith(b"\x89PNG")
    page = opened(report, "#credit")
    assert saved(page, "#view-credit button:text-is('PNG')").startswith(b"\x89PNG")
    page = opened(odd, "#step=1&group=1")
    page.tab.wait_for_selector(".answer")
    rows = list(csv.DictReader(io.StringIO(saved(page, "#group-controls button:text-is('CSV')").decode())))
    assert [row["token"] for row in rows if row["flipped"] == "true"] == [" four"] * 3 + [" maybe"]


def test_cells_cannot_start_a_formula(tmp_path: Path, opened: Any) -> None:
    evil = AnswerRecord(["=1+1", '"quoted",'], True, 1.0, advantage=[1.0, 1.0])
    write_records(tmp_path, 1, [GroupRecord(1, 0, "p", [evil])])
    page = opened(build([tmp_path]), "#groups")
    page.tab.wait_for_selector(".answer")
    rows = list(csv.DictReader(io.StringIO(saved(page, "#group-controls button:text-is('CSV')").decode())))
    assert [row["token"] for row in rows] == ["'=1+1", '"quoted",']


@pytest.mark.slow
def test_few_tab_stops_before_the_answers(report: Path, opened: Any) -> None:
    page = opened(report, "#groups")
    page.tab.wait_for_selector(".answer")
    page.tab.focus("#tab-groups")
    stops = 0
    while not page.tab.evaluate("document.activeElement.matches('[data-mode]')"):
        page.tab.keyboard.press("Tab")
        stops += 1
        assert stops < 25
    page.tab.click("#tab-credit")
    page.tab.focus(".chart .opens[tabindex='0']")
    page.tab.keyboard.press("ArrowRight")
    page.tab.keyboard.press("Enter")
    assert page.tab.locator("#tokens").is_visible()


@pytest.mark.slow
def test_narrow_window_shows_the_panel_of_a_clicked_token(report: Path, mixed: GroupRecord, opened: Any) -> None:
    page = opened(report, at(mixed), viewport={"width": 900, "height": 800})
    page.tab.wait_for_selector(".answer")
    page.tab.locator(".answer .t").nth(2).scroll_into_view_if_needed()
    page.settle()  # scrolling puts the tip away
    page.tab.locator(".answer .t").nth(2).hover()
    assert page.tab.locator(".tip").is_visible()
    page.tab.locator(".answer .t").nth(2).click()
    assert page.tab.locator(".panel").is_visible()
    page.tab.click(".panel .close")
    assert not page.tab.locator(".panel").is_visible()


@pytest.mark.slow
def test_smoothing_works_on_few_points(tmp_path: Path, opened: Any) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 9):
        run.append_metrics({"step": step, "reward": float(step % 2)})
    page = opened(build([tmp_path]), "#curves&smooth=0")
    rough = page.tab.locator(".chart canvas").first.screenshot()
    page = opened(build([tmp_path]), "#curves&smooth=1")
    assert page.tab.locator(".chart canvas").first.screenshot() != rough


def test_charts_do_not_repeat_a_metric(tmp_path: Path, opened: Any) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 5):
        run.append_metrics(
            {"step": step, "accuracy": step / 8, "reward": step / 8, "reward/task": step / 8, "loss": 0.1}
        )
    page = opened(build([tmp_path]), "#curves")
    assert page.texts(".chart strong") == ["Reward", "Loss"]


# ── accessibility ───────────────────────────────────────────────────────────────────────────────────────────


SLOW_AXE = [pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"viewport": PHONE}, {"color_scheme": "dark"})]


@pytest.mark.parametrize("options", SLOW_AXE, ids=["desktop", "phone", "dark"])
def test_axe_finds_nothing_serious(compared: Path, opened: Any, options: dict[str, Any]) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python", reason="pip install axe-playwright-python to check accessibility"
    )
    script = next(Path(axe.__file__).parent.glob("**/axe.min.js")).read_text()
    page = opened(compared, **options)
    page.tab.evaluate(script)
    for address in ("#overview", "#curves", "#groups", "#groups&mode=columns", "#groups&mode=same", "#credit"):
        page.tab.evaluate("(hash) => { location.hash = hash; }", address)
        page.tab.wait_for_timeout(150)
        found = page.tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
        assert not serious, [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in serious]


# ── dew view ────────────────────────────────────────────────────────────────────────────────────────────────


def test_learned_credit_is_reproduced_and_shown_below_the_tokens(tmp_path: Path, opened: Any) -> None:
    algorithm = get_algorithm("dapo", token_weight="learned")
    reward, value = torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.4, 0.6, 0.5, 0.9], [0.5, 0.6, 0.2, 0.3]]])
    mask = torch.tensor([[[True] * 4, [True, True, False, True]]])
    A = algorithm.advantages(Rollouts(mask=mask, reward=reward, value=value))[0].tolist()
    answers = [
        AnswerRecord(list("abcd"), r > 0, r, live=m, value=v, advantage=a)
        for r, m, v, a in zip(reward[0].tolist(), mask[0].tolist(), value[0].tolist(), A, strict=True)
    ]
    write_records(tmp_path, 1, [GroupRecord(1, 0, "?", answers, algorithm="dapo", settings=asdict(algorithm))])
    page = opened(build_from_records(next((tmp_path / "records").iterdir())), "#groups")
    chances = ["predicted chance of success: 0.4 to 0.9", "predicted chance of success: 0.5 to 0.3"]
    assert page.texts(".chance") == chances
    for i, t in ((0, 0), (0, 1), (0, 3), (1, 1), (1, 3)):
        page.tab.click(f'.answer[data-i="{i}"] .t[data-t="{t}"]')
        page.tab.wait_for_selector(".panel .agrees, .panel .differs")
        assert page.texts(".panel .agrees"), (i, t, page.texts(".panel .differs"))


def test_view_follows_a_run_that_is_written(tmp_path: Path, opened: Any) -> None:
    folder = make_run(tmp_path / "run", steps=5, groups=4, size=3)
    server, address = make_server([folder])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tab = opened(address, "#curves").tab
        assert tab.evaluate("dew.report.runs[0].metrics.step.length") == 5
        RunFolder(folder).append_metrics({"step": 6, "accuracy": 0.5})
        tab.wait_for_function("() => dew.report.runs[0].metrics.step.length === 6", timeout=20_000)
        assert tab.locator("#view-curves").is_visible() and tab.inner_text(".live").startswith("live")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_run_of_five_hundred_steps(tmp_path: Path, opened: Any) -> None:
    """500 steps, 200 groups of 16: all groups are there, the keys visit one after the other, the table holds all."""
    run = make_run(tmp_path / "run")
    groups = list(RunFolder(run).records())
    page = opened(build([run]), "#groups&fold=no")
    page.tab.wait_for_selector(".answer")
    assert page.tab.evaluate("dew.view.all.length") == len(groups) == 200
    first = page.tab.evaluate("dew.view.n")
    for n in range(first + 1, first + 41):
        group = groups[n % len(groups)]
        page.tab.keyboard.press("j")
        title = f"Step {group.step}, group {group.group}"
        page.wait_for_group(title)
        assert page.tab.locator(".answer").count() == len(group.answers) == 16
        assert page.tab.locator(".answer .t").count() == group.size
    for end in ("0", "table.scrollHeight") * 5:  # rows are added by scrolling
        page.tab.evaluate(f"() => {{ const table = document.querySelector('.group-list'); table.scrollTop = {end}; }}")
        page.settle()
    assert page.texts(".group-link") == [f"{group.step} · {group.group}" for group in groups]
