"""Answers read as mathematics and compared, with math-verify. Runs in the workers of pool.py, under a limit.

math-verify's own time limits are off: they need the main thread. sympy's `parse_expr`, which runs text as Python, is
replaced everywhere: for sums in prose by the LaTeX parser, for the digits of numbers by their own reading.
"""

import re
from functools import lru_cache
from typing import Any

import math_verify.parser as mv_parser
import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from dew.rewards.answers import find_gold, too_much
from dew.rewards.plain import read_number, write_number
from dew.rewards.verdict import Status

LATEX, PROSE = LatexExtractionConfig(), ExprExtractionConfig()


@lru_cache(maxsize=64)
def _arithmetic(text: str) -> Any:
    """A sum in prose, `3 * (4 + 5)`, by the LaTeX parser."""
    if too_much(text):
        raise ValueError("too large to be an answer")
    text = text.strip().rstrip(".").replace("**", "^").replace("*", r"\cdot ")
    return latex2sympy(text.replace("×", r"\times ").replace("÷", r"\div "))


_DIGITS = re.compile(r"[+-]?(?:[0-9]+(?P<decimals>\.[0-9]*)?|\.(?P<only>[0-9]+))(?P<power>[eE][+-]?[0-9]{1,4})?")


def _inert(text: str, *_: Any, **__: Any) -> Any:
    """`12`, `.5`, `1e3`, `3/2` and `yotta` as sympy reads them, but not by running them; nothing else is read."""
    text = text.strip()
    if digits := _DIGITS.fullmatch(text):
        whole = not any((digits["decimals"], digits["only"], digits["power"]))
        return sympy.Integer(int(text)) if whole else sympy.Float(text)
    if re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        return sympy.Rational(text)
    if re.fullmatch(r"[A-Za-z]+", text):
        return sympy.Symbol(text)
    raise sympy.SympifyError(text)


mv_parser.parse_expr_cached = _arithmetic
sympy_parser.parse_expr = _inert  # what sympify calls: latex2sympy hands it every number that it meets


def judge(answer: str, marked: bool, gold: str) -> tuple[Status, str | None]:
    """(status, what was read). `answer` is an answer if it is marked as one, else prose that holds one."""
    wanted, found = _wanted(gold), _readings(answer, marked)
    extracted = _spelling(answer if marked else next((r for r in found if isinstance(r, str)), ""))
    # Comparing the strings that math-verify falls back to is left to text.py, which knows what a word is.
    wanted, found = ([r for r in readings if not isinstance(r, str)] for readings in (wanted, found))
    if not wanted or not found:
        return "unparsable", extracted
    same = verify(wanted, found, timeout_seconds=None, allow_set_relation_comp=True)
    return ("correct" if same else "wrong"), extracted


@lru_cache(maxsize=256)
def _wanted(gold: str) -> list[Any]:
    """The readings of a gold answer; a group of answers shares one."""
    target = find_gold(gold)
    return _readings(target.text, target.marked) if target else []


def _readings(text: str, marked: bool) -> list[Any]:
    """Every way to understand it: sympy expressions, and the string that they were read from."""
    if too_much(text):
        return []
    if not marked:
        return parse(_spaced(text), [LATEX, PROSE], parsing_timeout=None)
    readings = []
    for form in dict.fromkeys((clean(text), *_alternatives(text))):
        readings += parse(rf"\boxed{{{form}}}", [LATEX], parsing_timeout=None)
    return readings


def _alternatives(text: str) -> list[str]:
    """What a marked answer may mean besides what it says: a number with its unit, a decimal comma."""
    found = []
    text = re.sub(r"\A\\text\s*\{([^{}]*)\}\Z", r"\1", text.strip())
    if unit := _UNIT.fullmatch(text):
        found.append(unit["number"] + (r"\%" if unit["percent"] else ""))
    if re.fullmatch(r"-?\d+,\d+", text) and not re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        found.append(text.replace(",", "."))
    if power := re.fullmatch(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})", text):
        found.append(rf"{power[1]} \cdot 10^{{{int(power[2])}}}")
    return found


_UNIT = re.compile(
    r"(?:\\?\$|[€£¥~≈\s]|Rs\.?(?=\W)|(?:USD|EUR|GBP|INR)\b)*"
    r"(?P<number>[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\\[dt]?frac\{\d+\}\{\d+\})\s*"
    r"(?P<percent>\\?%|percent(?:age)?\b|pct\b)?"
    r"(?:\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|[^\W\d_]{2,}+|\\[ ,;]|[°€£¥²³]|[\s./^{}~]|\^\{?[23]\}?|\\circ)*+"
)
"""A number and then nothing but words, signs of currency and their powers. Possessive: no way back, no blow-up."""

_BOLD = re.compile(r"(?<![\w)])\*\*([^*]+)\*\*(?!\w)")
_DECORATION = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|bm|boldsymbol|displaystyle|large|Large|LARGE|huge|Huge)(?![a-zA-Z])"
)
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*(?:\d|\{\d\})\s*)?[({]?\s*)"
    r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))"
)
_LISTED = re.compile(r"(?<=\d)\s*\\text\s*\{[^{}]*\b(?:and|or)\s*\}\s*(?=[-\d$])")
_LETTER = re.compile(r"\\(?:mathrm|text|operatorname|mathit|rm)\s*\{\s*([a-zA-Z])\s*\}")
_NAMES = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|log|ln|theta|alpha|beta|infty)(?![A-Za-z])")
_AND = re.compile(
    r"(?:\\q?quad|\\ |\s)*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-z\\])(?:and|or)(?![a-z]))(?:\\q?quad|\\ |\s)*"
)
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "∗": r"\cdot ", "π": r"\pi ", "√": r"\sqrt ",
     "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
     "∅": r"\emptyset ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "θ": r"\theta ", "％": r"\%",
     "±": r"\pm ", "，": ",", "（": "(", "）": ")", "⁄": "/", " ": " ", "~": " "}
)  # fmt: skip


def clean(text: str) -> str:
    """A marked answer as LaTeX that math-verify reads: no delimiters, no decoration, signs spelt out."""
    text = _DECORATION.sub("", _BOLD.sub(r"\1", text.translate(_SIGNS))).strip()
    text = _LISTED.sub(", ", _DEGREES.sub(r"\1{\2 \\pi / 180}", text))  # 5 apples and 3 oranges: two values
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
            inner = text[len(left) : -len(right)]
            text = inner if left not in inner else text
    text = text.strip(" \n\t*`").rstrip(".,;:").rstrip("\\").strip()
    # As a unit, e would be cut off from 1 - 1/\mathrm{e}, and what remains is 1.
    text = _NAMES.sub(r"\\\1", _roots(_LETTER.sub(r"\1", text)))
    if "=" in text and "," in text:  # p=5, q=2 and p=7, q=2: two solutions, not four values
        text = _AND.sub(" ; ", text)
    return text.replace("**", "^").replace("*", r"\cdot ")


def _roots(text: str) -> str:
    """`sqrt(a(b+c))` as `\\sqrt{a(b+c)}`."""
    for match in reversed(list(re.finditer(r"\\?(?<![A-Za-z])sqrt\s*\(", text))):
        depth = 0
        for mark in re.compile(r"[()]").finditer(text, match.end() - 1):
            depth += 1 if mark[0] == "(" else -1
            if depth == 0:
                inside = text[match.end() : mark.start()]
                text = rf"{text[: match.start()]}\sqrt{{{inside}}}{text[mark.end() :]}"
                break
    return text


_EAST = re.compile(r"(?<=[぀-ヿ一-鿿，。：（）])(?=[-\d(\\])|(?<=[\d)}])(?=[぀-ヿ一-鿿。，：（）])")


def _spaced(text: str) -> str:
    """Chinese and Japanese set numbers without spaces; the search for numbers needs them."""
    return _EAST.sub(" ", text)


def _spelling(text: str) -> str | None:
    """One spelling for equal answers, as far as that goes without a parser: they vote by it."""
    text = _BOLD.sub(r"\1", text).strip().strip("$*` ")
    number = read_number(text if re.search("[,;]", text) else text.rpartition("=")[2])
    spelt = write_number(number[0]) if number else re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\s|\\[,;! ]", "", text))
    return spelt[:500] or None
