"""Numbers in sentences and tables of the evidence pages follow from committed files."""

from pathlib import Path

import pytest
from scripts import page_numbers as script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", script.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_numbers_of_the_pages(page):
    text = page.read_text()
    assert not list(script.problems(page, text)), "run scripts/page_numbers.py --write"
    assert script.study.with_tables(text, script.tables()) == text, "run scripts/page_numbers.py --write"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It gains 0.10 ± 0.02. <!-- = 0.1, 0.024 -->", []),
        ("It gains 0.11, or −12%.\n<!-- = 0.1, -0.12 -->", [("0.11", "0.10")]),
        ("It loses 0.100. <!-- = -0.1 -->", [("0.100", "-0.100")]),
        ("- It gains 0.10.", [("- It gains 0.10.", "1 numbers, 0 sources: ['0.10']")]),
        ("7 runs <!-- check: 3 + 3 == 7 -->", [("3 + 3 == 7", "false")]),
        ("`0.1`, torch 2.11, 0.5B, β = 0.1, 95% and 16 seeds\n\n    0.1\n\n| 0.1 |\n", []),
    ],
)
def test_what_is_wrong(text, wrong):
    assert [(written, right) for _, written, right in script.problems(ROOT, text)] == wrong


def test_only_commented_blocks_of_guides_are_checked():
    found = list(script.problems(script.GUIDES[0], "At most 0.5.\n\nIt gains 0.5. <!-- = 0.4 -->\n"))
    assert [(written, right) for _, written, right in found] == [("0.5", "0.4")]


def test_seeds_needed():
    """Cohen's d = 0.5, power 0.8, two-sided 0.05: 34 pairs in the usual tables."""
    like = script.paired({0: 1.0, 1: -1.0}, {0: 0.0, 1: 0.0}, arm="a", baseline="b", score="s")  # spread √2
    assert script.seeds_needed(0.5 * 2**0.5, like) == 34


def test_a_cell_of_a_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "| a |\n|---|\n| 1 |\n\n| | s | MB |\n|---|---|---|\n| x, y | 1.5 (1.2 to 1.9) | 1,024 |\n| x | −2 | |\n"
    )
    assert [script.cell(page, "x, y", "s", 2, n=n) for n in range(3)] == [1.5, 1.2, 1.9]
    assert script.cell(page, "x, y", "MB", 2) == 1024 and script.cell(page, "x", "s", 2) == -2
