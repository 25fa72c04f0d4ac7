"""Parses answers as LaTeX and compares them with math-verify. Runs only in the sandboxed workers of process.py.

math-verify's own time limits are off: they need the main thread. sympy's `parse_expr` runs text as Python and is
replaced: by the LaTeX parser for arithmetic in prose, by `_parse_atom` for the digits of numbers.
"""

import logging
import re
import socket
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

import math_verify.parser as mv_parser
import sympy
from latex2sympy2_extended import latex2sympy, math_normalization
from latex2sympy2_extended.logic import And
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from dew.rewards.extract import find_gold, in_braces, is_formula, too_complex
from dew.rewards.normalize import DECIMALS, read_number, same_number, words, write_number
from dew.rewards.verifiers import Status
from dew.rewards.worker import fork_workers

LATEX, PROSE = LatexExtractionConfig(), ExprExtractionConfig()

WARM_UP = (
    (r"\frac{1}{2} + x", True, r"x + \sqrt{4}/4"),
    (r"(3, \frac{\pi}{2})", True, r"[0, 1)"),
    (r"\{1, 2\}", True, "2, 1"),
    ("so $x = 3$ and 1/2 are both", False, "3"),
    ("y = 2x + 3", True, "2x - y + 3 = 0"),
    (r"\sin^2 x + \cos^2 x", True, "1"),
    ("x < -1 or x > 2", True, r"(-\infty, -1) \cup (2, \infty)"),
)
"""Comparisons that fill the caches of the parser and of sympy before workers are forked."""
_DIGITS = re.compile(r"[+-]?(?:[0-9]+(?P<decimals>\.[0-9]*)?|\.(?P<only>[0-9]+))(?P<power>[eE][+-]?[0-9]{1,4})?")
_UNITS = (
    r"(?:[mcdkn]m|ft|yd|mi|in|[mk]g|gm|lb|oz|[mcdk][lL]|min|sec|hr|ms|mph|[ck]?m/s|km/?h|kmph|rpm|[kM]Wh?|[kMG]?Hz"
    r"|k?Pa|eV|cc|sq|cu|rad|deg|mol|pt|yr|men|day|(?:kilo|centi|milli|deci)?(?:met(?:er|re)|lit(?:er|re)|gram)|feet|foot|inch|yard|mile"
    r"|degree|radian|unit|square|cubic|cent|dollar|pound|ounce|gallon|acre|hectare|hour|minute|second|week|month|year"
    r"|point|rupee|student|people|digit|integer|way|time|old|per)(?:e?s)?(?![a-zA-Z])"
)
"""Words that are units wherever they stand; a single letter, `ab` or `xyz` may be variables."""
_UNIT_LETTER = "[mgshtdlLNJWVAKCFT]"
_UNIT = re.compile(
    r"(?:\\?\$|[€£¥~≈\s]|\\approx|Rs\.?(?=\W)|(?:USD|EUR|GBP|INR|about|approximately)\b)*"
    r"(?P<number>[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?|[-+]?\d{0,9}\s*\\[dt]?frac(?:\{\d+\}\{\d+\}|\d\d))\s*"
    r"(?P<percent>\\?%|percent(?:age)?\b|pct\b)?"
    rf"(?:\\(?:text|mathrm|mbox|textbf)\s*\{{(?![\s~]*(?!{_UNIT_LETTER})[a-zA-Z]\s*\}})[^{{}}]*\}}"
    rf"|{_UNITS}|(?<=\s)[^\W\d_]{{4,}}+|[^\x00-\x7f\W\d_]{{2,}}+|(?:USD|EUR|GBP|INR)\b"
    r"|\\[ ,;]|[°€£¥²³]|[\s./^{}~]|\^\{?[23]\}?|\\circ)*+"
)
"""A number followed only by words, currency signs and their powers. Possessive quantifiers: no backtracking."""
_LONE_UNIT = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s+[mgshLNJWV](?:\^\{?[23]\}?|[²³])?")
"""`16 m`: only an answer may be read so, because in a gold answer the letter may be a variable."""
math_normalization.units_regex = re.compile(rf"(\d|\}}|\)|\s)\s*{_UNITS}(?:\^\{{?[23]\}}?)?\s*$")
"""math-verify's own removes `t` from 6-2t and `ab` from 2ab."""
math_normalization.unit_superscript_regex = re.compile(r"(\\(?:text|mbox)\{[^{}]*\})(\^\{?\d\}?|\{\^\d\})?$")
"""math-verify's own removes `\\text{ cm}, 3\\text{ cm}` as one unit, so that 5 and 3 were 5."""

_BOLD = re.compile(r"(?<![\w)])\*\*([^*]+)\*\*(?!\w)")
_DECORATION = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|bm|boldsymbol|displaystyle|large|Large|LARGE|huge|Huge|bf)(?![a-zA-Z])"
    r"|\\[bB]igg?[lr]?(?![a-zA-Z])|(?<=\\\\)\[[\d.]+(?:pt|em|ex|[cm]m)\]|\\text\s*\{\s*\\\$\s*\}"
    r"|\^\s*\{?\s*\\circ\s*\}?\s*[CF]\Z|(?:\\pmod\s*(?:\{[^{}]*\}|\d+)|\(\s*\\?mod\s*\d+\s*\))\s*\Z"
    r"|\A.*\\equiv(?=.*mod)|(?<=:\d\d)\s*[aApP]\.?\s?[mM]\.?\Z"
)
"""Colour, size, the space between the rows of a matrix, `\\text{\\$}`, `°C`, the modulus in `9 \\pmod{11}`, p.m."""
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*(?:\d|\{\d\})\s*)?[({]?\s*)"
    r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))"
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_NEXT = re.compile(r",\s+(?:and\s+)?|,(?!\d{3}(?!\d))|\s+and\s+")
"""Between the quantities of a list; not between thousands."""
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\})(?:\\!\s?)?\d{3})+(?![\d,])")
_MIXED = re.compile(r"(?<![\d/^_.,])(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?![\d/])")
_LETTER = re.compile(r"\\(?:mathrm|text|operatorname|mathit|rm)\s*\{\s*([a-zA-Z])\s*\}")
_LETTER_UNIT = re.compile(
    rf"(?<=[\d)}}i])(?:\\[ ,;:]|\s)*+\\(?:mathrm|text)\s*\{{\s*{_UNIT_LETTER}\s*\}}(?:\^\s*\{{?[23]\}}?)?\s*\Z"
)
"""`\\text{ m}^2` after a number, a bracket or π."""
_MINUS_POWER = re.compile(r"\^\s*(-\s*(?:\d+|[a-zA-Z]))")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[a-zA-Z]|\([^()]*\))")
_DEGREE = {"√": "", "∛": "[3]", "∜": "[4]"}
_NAMES = re.compile(
    r"(?<![\\A-Za-z])(sqrt|pi|(?:arc)?(?:sin|cos|tan|cot)|csc|log|ln|theta|alpha|beta|infty)(?![A-Za-z])"
)
_GAP = r"(?:\\q?quad|\\[ ,;]|\s)*"
_OR, _AND = (
    re.compile(
        rf"{_GAP}(?:\\(?:text|mbox)\s*\{{\s*{word}\s*\}}|(?<![a-z\\]){word}(?![a-z])|\\(?:{signs})(?![a-zA-Z])){_GAP}"
    )
    for word, signs in (("or", "lor|vee"), ("and", "land|wedge"))
)
_PRIME = re.compile(r"(?<=[A-Za-z)}])(?:['′]+|\^\s*\{?(?:\s*\\prime)+)")
_POINT = re.compile(r"\A[A-Z]\s*(?=(?:\\left\s*)?\([^()]*,[^()]*\)\Z)")
"""The name of a point before its coordinates."""
_NOTHING = ("no solution", "no real solution", "empty set")
_HALF_DAY = re.compile(r"\b([ap])\.?\s?m\b")
_SCALES = {"thousand": 3, "million": 6, "billion": 9}
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:e|t|eq|eqslant)|neq?)(?![a-z])|\\in(?![a-z]).*\\lor", re.DOTALL)
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z](?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|[:|])(.*)\\\}", re.DOTALL)
_UNION = re.compile(r"(?<=[\])}])\s*U\s*(?=\\?[\[({])")
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "∗": r"\cdot ", "π": r"\pi ", "√": r"\sqrt ",
     "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
     "∅": r"\emptyset ", "°": r"^\circ ", "θ": r"\theta ", "％": r"\%",
     "±": r"\pm ", "，": ",", "（": "(", "）": ")", "⁄": "/", "~": " ", "∨": r"\lor ", "∧": r"\land "}
)  # fmt: skip
_SYNONYMS = {r"\degree": r"^\circ ", r"\varnothing": r"\emptyset", r"\langle": "(", r"\rangle": ")",
             r"\left\{": r"\{", r"\right\}": r"\}", r"\lbrace": r"\{", r"\rbrace": r"\}", "{:}": ":"}  # fmt: skip
_SPACE_AROUND_CJK = re.compile(r"(?<=[぀-ヿ一-鿿，。：（）])(?=[-\d(\\])|(?<=[\d)}])(?=[぀-ヿ一-鿿。，：（）])")
"""Chinese and Japanese put no spaces around numbers, but math-verify's search for numbers needs them."""


def serve(channel: socket.socket) -> None:
    """Entry point of the process that forks the workers (see math.py)."""
    logging.disable(logging.CRITICAL)
    fork_workers(channel, handle, [dict(zip(("answer", "marked", "gold"), case, strict=True)) for case in WARM_UP])


def handle(request: dict[str, Any]) -> tuple[Status, str | None]:
    """A worker's reply to one request."""
    try:
        return compare(request["answer"], request["marked"], request["gold"])
    except BaseException:  # including a parser's SystemExit
        return "unparsable", None


@lru_cache(maxsize=64)
def _parse_arithmetic(text: str) -> Any:
    """Arithmetic in prose, `3 * (4 + 5)`, by the LaTeX parser."""
    if too_complex(text):
        raise ValueError("too complex for an answer")
    text = text.strip().rstrip(".").replace("**", "^").replace("*", r"\cdot ")
    return latex2sympy(text.replace("×", r"\times ").replace("÷", r"\div "))


def _parse_atom(text: str, *_: Any, **__: Any) -> Any:
    """`12`, `.5`, `1e3`, `3/2` and `yotta`, with the same result as in sympy but without evaluating code."""
    text = text.strip()
    if digits := _DIGITS.fullmatch(text):
        whole = not any((digits["decimals"], digits["only"], digits["power"]))
        return sympy.Integer(int(text)) if whole else sympy.Float(text)
    if re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        return sympy.Rational(text)
    if re.fullmatch(r"[A-Za-z]+", text):
        return sympy.Symbol(text)
    raise sympy.SympifyError(text)


mv_parser.parse_expr_cached = _parse_arithmetic
sympy_parser.parse_expr = _parse_atom  # called by sympify, to which latex2sympy passes every number


def compare(answer: str, marked: bool, gold: str) -> tuple[Status, str | None]:
    """(status, extracted answer). An unmarked `answer` is prose that contains the answer."""
    wanted, found = _parse_gold(gold), _parse_answer(answer, marked)
    extracted = _normalize(answer if marked else next((r for r in found if isinstance(r, str)), ""))
    if marked and (unit := _LONE_UNIT.fullmatch(answer.strip())):
        found = found + _parse_answer(unit[1], True)
    # math-verify also returns the text it parsed. Text is compared in normalize.py, which knows what a word is.
    wanted, found = ([r for r in parsed if not isinstance(r, str)] for parsed in (wanted, found))
    if not wanted or not found:
        return "unparsable", extracted
    texts = answer, target.text if (target := find_gold(gold)) else ""
    half_days = [set(_HALF_DAY.findall(text.lower())) for text in texts]
    if marked and all(half_days) and half_days[0] != half_days[1]:  # 3:30 a.m. and 3:30 p.m.
        return "wrong", extracted
    primes = [len(re.findall(r"['′]|prime", "".join(_PRIME.findall(x.rpartition("=")[2])))) for x in texts]
    if marked and primes[0] != primes[1]:  # to the parser, f''(x) is f(x)
        return "wrong", extracted
    if any(isinstance(r, sympy.Union) for r in wanted):
        sets = [r for r in found if isinstance(r, sympy.FiniteSet)]  # a list of intervals
        found += [sympy.Union(*r.args) for r in sets if all(isinstance(part, sympy.Interval) for part in r.args)]
    same = _same(wanted, found)
    if not same and any(_is_complex(r) for r in (*wanted, *found)):
        same = _same(*([_complex(r) for r in parsed] for parsed in (wanted, found)))
    same = (same and _precise(answer, wanted) and _precise(gold, found)) or (
        marked and (_same_list(answer, gold) or _same_percent(answer, gold))
    )
    return ("correct" if same else "wrong"), extracted


def _same(wanted: list[Any], found: list[Any]) -> bool:
    pairs = [(a, b) for a, b in product(wanted, found) if not _set_and_tuple(a, b) and not _set_and_tuple(b, a)]
    return any(verify(a, b, timeout_seconds=None, allow_set_relation_comp=True) for a, b in pairs)


def _set_and_tuple(a: Any, b: Any) -> bool:
    """math-verify compares `x \\in \\{1, 2\\}` with `(1, 2)`, which it parses as an interval."""
    a, b = (getattr(value, "rhs", value) for value in (a, b))
    return isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.Tuple | sympy.Interval)


def _same_list(answer: str, gold: str) -> bool:
    """`5 apples, 3 pears` and `5, 3`. The order counts: as a set, 3 apples and 5 pears would be the same."""
    a, b = _quantities(answer), _quantities(gold)
    return len(a) == len(b) > 1 and all(map(same_number, a, b))


def _same_percent(answer: str, gold: str) -> bool:
    """12.5% and 12.5, as math-verify does with whole numbers. Below 1 it is a mistake: 0.5% for 0.5."""
    a, b = (_UNIT.fullmatch(text.strip()) for text in (answer, gold))
    if not a or not b or bool(a["percent"]) == bool(b["percent"]):
        return False
    x, y = read_number(a["number"]), read_number(b["number"])
    return x is not None and y is not None and same_number(x, y) and abs(x[0]) > 1 and x[1] > 0


def _quantities(text: str) -> list[tuple[Fraction, int]]:
    """The numbers in a list of numbers with or without units; empty if it is not one."""
    units = [_UNIT.fullmatch(part) for part in _NEXT.split(_TEXT.sub(r"\1", text))]
    numbers = [read_number(unit["number"]) for unit in units if unit and not unit["percent"]]
    found = [number for number in numbers if number]
    return found if len(found) == len(units) else []


def _is_complex(value: Any) -> bool:
    """Whether i is its only symbol, and so the imaginary unit."""
    return {str(symbol) for symbol in getattr(value, "free_symbols", ())} == {"i"}


def _complex(value: Any) -> Any:
    """i(2-i) as 1+2i."""
    return sympy.expand(value.subs(dict.fromkeys(value.free_symbols, sympy.I))) if _is_complex(value) else value


def _precise(text: str, others: list[Any]) -> bool:
    """False if `text` is a decimal that only math-verify's rounding makes equal to one of the others."""
    number = read_number(text)
    if not number or not number[1] or not all(isinstance(r, sympy.Expr) and r.is_number for r in others):
        return True
    value = sympy.Rational(number[0].numerator, number[0].denominator)
    allowed = abs(value) / 1000 if number[1] >= DECIMALS else sympy.Rational(1, 10**20)
    return any(abs(sympy.N((percent * r - value).doit(), 30)) <= allowed for r in others for percent in (1, 100))


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> list[Any]:
    """A gold answer, parsed once for a group of answers."""
    target = find_gold(gold)
    return _parse_answer(target.text, target.marked) if target else []


def _parse_answer(text: str, marked: bool) -> list[Any]:
    """Every interpretation of an answer: sympy expressions, and the text that they were parsed from."""
    if too_complex(text):
        return []
    if not marked:
        parsed = parse(_SPACE_AROUND_CJK.sub(" ", text), [LATEX, PROSE], parsing_timeout=None)
        return [meaning for value in parsed for meaning in _meanings(value, text)]
    found, text = [], _MIXED.sub(r"\1\\frac{\2}{\3}", _unwrap(text))  # to the parser, 2 1/2 is 3/2
    for form in dict.fromkeys((clean(text), *_alternatives(text))):
        parsed = _solution_set(form) or _parse_latex(form)
        found += [meaning for value in parsed for meaning in _meanings(_canonical(value), form)]
    return found


def _parse_latex(text: str) -> list[Any]:
    parts = re.split(r",?\s*\\l(?:or|and)", text)
    # p=5, q=2 and p=7, q=2: two solutions, not four values
    text = (";" if all("=" in part and "," in part for part in parts) else ",").join(parts)
    return list(parse(rf"\boxed{{{text}}}", [LATEX], parsing_timeout=None))


def _solution_set(text: str) -> list[sympy.Set]:
    """`x < -1 or x > 2` as a union of intervals; empty if `text` is not a list of inequalities for one variable.

    A comma means "and", but "or" where nothing satisfies both.
    """
    if not _INEQUALITY.search(text) or not re.search(r",|\\lor|\\land", text):
        return []
    try:
        ways = [[_relations(part) for part in way.split(r"\land")] for way in re.split(r",?\s*\\lor", text)]
        for comma in (sympy.And, sympy.Or):
            found = sympy.Or(*(sympy.And(*(comma(*part) for part in way)) for way in ways)).as_set()
            if not found.is_empty or "," not in text:
                return [found]
    except (TypeError, ValueError, NotImplementedError, AttributeError):  # not relations, or of several variables
        pass
    return []


def _relations(text: str) -> list[Any]:
    """The relations of a list; `x \\in S`, which math-verify parses as an equation, as one that sympy can solve."""
    value, *_ = (value for value in _parse_latex(text) if not isinstance(value, str))
    values = value.args if isinstance(value, sympy.FiniteSet) else [value]
    return [sympy.Contains(v.lhs, v.rhs) if isinstance(getattr(v, "rhs", None), sympy.Set) else v for v in values]


def _meanings(value: Any, text: str) -> list[Any]:
    """A list without brackets is a set and a tuple, a column vector also a tuple."""
    if isinstance(value, sympy.FiniteSet) and r"\{" not in text:
        return [value, sympy.Tuple(*getattr(value, "_unsorted_args", value.args))]
    return [value, sympy.Tuple(*value)] if isinstance(value, sympy.MatrixBase) and value.cols == 1 else [value]


def _canonical(value: Any) -> Any:
    """0.1 + 0.2 as 3/10, since a sum of floats is not 0.3; −50% as (−50)%, which math-verify compares with −50.

    5 = 6 is false, 6 = x is x = 6, and a > b > c is c < b < a.
    """
    relations = value._unsorted_args if isinstance(value, And) else [value]
    if all(isinstance(r, sympy.Eq) for r in relations):
        sides = [relations[0].lhs, *(r.rhs for r in relations)]
        if all(isinstance(side, sympy.Expr) and side.is_number for side in sides):
            return value if all(_close(r.lhs, r.rhs) for r in relations) else sympy.false
        return value.reversed if isinstance(value, sympy.Eq) and sides[0].is_number and sides[1].is_Symbol else value
    if isinstance(value, And) and all(isinstance(r, sympy.Gt | sympy.Ge) for r in relations):
        return And(*(r.reversed for r in reversed(relations)))
    if not isinstance(value, sympy.Add | sympy.Mul) or not value.is_number:
        if isinstance(value, sympy.Expr):  # a cube root of x² is x^{2/3} to everyone but sympy, where x may be complex
            value = value.replace(_is_odd_root, lambda x: x.base.base ** (x.base.exp * x.exp))
        return value
    if value.has(sympy.UnevaluatedExpr):  # a percentage
        sign, *rest = value.args
        return sympy.Mul(-rest[0], rest[1], evaluate=False) if sign == -1 and len(rest) == 2 else value
    decimals = {x: sympy.Rational(str(x)) for x in value.atoms(sympy.Float)}
    return value.xreplace(decimals).doit() if decimals else value


def _is_odd_root(x: Any) -> bool:
    return bool(x.is_Pow and x.base.is_Pow and x.base.exp.is_Integer and x.exp.is_Rational and x.exp.q % 2 == 1)


def _close(left: Any, right: Any) -> bool:
    """Whether an equation of numbers holds; a decimal may be rounded to 1%."""
    if not left.has(sympy.Float) and not right.has(sympy.Float):
        return _same([left], [right])
    return bool(abs(sympy.N((left - right).doit())) <= abs(sympy.N(right.doit())) / 100)


def _unwrap(text: str) -> str:
    """`\\mathbf{6-5i}`, `\\text{p - q}` and `{(3,4]}` without the command and the braces; words stay in theirs."""
    text = text.strip()
    command = re.match(r"(?:\\(?:math(?:bf|rm|it)|text(?:bf|rm|it)?|mbox))?(?=\s*\{)", text)
    inner, end = (command and in_braces(text, command.end())) or ("", 0)
    whole = end == len(text) and not re.search(r"[A-Z]{2}|\\choose|\\over", inner)
    return inner if whole and is_formula(inner) else text


def _alternatives(text: str) -> list[str]:
    """Other interpretations of a marked answer: a number with a unit, a decimal comma, thousands, powers of ten."""
    found = []
    text = re.sub(r"\A\\text\s*\{([^{}]*)\}\Z", r"\1", text.strip())
    left, equals, right = text.rpartition("=")
    if (unit := _UNIT.fullmatch(right)) and unit["number"] != right.strip():
        number = clean(left) + equals + unit["number"]
        found.append(number + (r"\%" if unit["percent"] else ""))
        if scale := re.match(r"\W*(?:text\{\s*)?(thousand|million|billion)", right[unit.end("number") :]):
            found.append(rf"{number} \cdot 10^{_SCALES[scale[1]]}")
    if words(text) in _NOTHING:
        found.append(r"\emptyset")
    if re.fullmatch(r"-?\d+,\d+", text) and not re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        found.append(text.replace(",", "."))
    if power := re.fullmatch(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})", text):
        found.append(rf"{power[1]} \cdot 10^{{{int(power[2])}}}")
    if _THOUSANDS.search(text) and not re.search(r"[(\[]|\\\{", text):  # x = 1,200 is not 1 and 200
        found.append(clean(_THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)))
    return found


def clean(text: str) -> str:
    """A marked answer as LaTeX for math-verify: without delimiters and decoration, Unicode signs as commands."""
    text = _ROOT.sub(lambda root: rf"\sqrt{_DEGREE[root[1]]}{{{root[2]}}}", text)
    text = _DECORATION.sub("", _BOLD.sub(r"\1", text.translate(_SIGNS))).strip()
    for command, same in _SYNONYMS.items():
        text = text.replace(command, same)
    text = _DEGREES.sub(r"\1{\2 \\pi / 180}", text)
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
            inner = text[len(left) : -len(right)]
            text = inner if left not in inner else text
    text = _POINT.sub("", text.strip(" \n\t*`").rstrip(".,;:").rstrip("\\").strip())
    text = _MINUS_POWER.sub(r"^{\1}", _LETTER_UNIT.sub("", text))
    # math-verify would remove \mathrm{e} from 1 - 1/\mathrm{e} as a unit, leaving 1.
    text = _NAMES.sub(r"\\\1", _convert_roots(_LETTER.sub(r"\1", text)))
    if builder := _SET_BUILDER.fullmatch(text):
        text = builder[1]
    text = _AND.sub(r" \\land ", _OR.sub(r" \\lor ", _UNION.sub(r"\\cup ", text)))
    return text.replace("**", "^").replace("*", r"\cdot ")


def _convert_roots(text: str) -> str:
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


def _normalize(text: str) -> str | None:
    """One spelling for equal answers where no parser is needed; majority voting counts these strings."""
    text = _BOLD.sub(r"\1", text).strip().strip("$*` ")
    number = read_number(text if re.search("[,;]", text) else text.rpartition("=")[2])
    spelling = write_number(number[0]) if number else re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\s|\\[,;! ]", "", text))
    return spelling[:500] or None
