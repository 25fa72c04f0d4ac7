"""Parse answers as LaTeX and compare them with math-verify. Runs only in the sandboxed workers of process.py.

math-verify's own time limits are off, because they need the main thread. sympy's `parse_expr` runs text as Python code,
so it is replaced by the LaTeX parser for arithmetic in prose and by `_parse_atom` for numbers.
"""

import logging
import re
import socket
from functools import lru_cache, partial
from itertools import product
from typing import Any

import math_verify.parser as mv_parser
import sympy
from latex2sympy2_extended import latex2sympy, math_normalization, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.logic import And
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from dew.rewards import normalize
from dew.rewards.extract import find_gold, too_complex
from dew.rewards.verifiers import Status
from dew.rewards.worker import fork_workers

LATEX, PROSE = LatexExtractionConfig(), ExprExtractionConfig()
_latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))
"""math-verify's default converts symbols to lower case: R - r becomes 0."""
_convert_neighbours = _Latex2Sympy.convert_postfix_list

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
_LONE_UNIT = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s+[mgshLNJWV](?:\^\{?[23]\}?|[²³])?")
"""`16 m`, only in answers: in a gold answer the letter may be a variable."""
math_normalization.units_regex = re.compile(rf"(\d|\}}|\)|\s)\s*{normalize.UNITS}(?:\^\{{?[23]\}}?)?\s*$")
"""Replaces math-verify's pattern, which removes `t` from 6-2t and `ab` from 2ab."""
math_normalization.unit_superscript_regex = re.compile(r"(\\(?:text|mbox)\{[^{}]*\})(\^\{?\d\}?|\{\^\d\})?$")
"""Replaces math-verify's pattern, which removes `\\text{ cm}, 3\\text{ cm}` as one unit: "5 cm, 3 cm" became 5."""

_MIXED = re.compile(r"(?<![\d/^_.])(?<!\d,(?=\d{3}))(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?![\d/])")
_PRIME = re.compile(r"(?<=[A-Za-z)}])(?:['′]+|\^\s*\{?(?:\s*\\prime)+)")
_PM, _MP = re.compile(r"\\pm(?![a-z])"), re.compile(r"\\mp(?![a-z])")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:e|t|eq|eqslant)|neq?)(?![a-z])|\\in(?![a-z]).*\\lor", re.DOTALL)
_SPACE_AROUND_CJK = re.compile(r"(?<=[぀-ヿ一-鿿，。：（）])(?=[-\d(\\])|(?<=[\d)}])(?=[぀-ヿ一-鿿。，：（）])")
"""Chinese and Japanese have no spaces around numbers, but math-verify needs them to find numbers."""


def serve(channel: socket.socket) -> None:
    """Entry point of the process that forks the workers (see math.py)."""
    logging.disable(logging.CRITICAL)
    fork_workers(channel, handle, [dict(zip(("answer", "marked", "gold"), case, strict=True)) for case in WARM_UP])


def handle(request: dict[str, Any]) -> tuple[Status, str | None]:
    """Return a worker's reply to one request."""
    try:
        return compare(request["answer"], request["marked"], request["gold"])
    except BaseException:  # including a parser's SystemExit
        return "unparsable", None


def _neighbours(self: Any, parts: list[Any], i: int = 0) -> Any:
    """Convert formulas without a sign between them: 2½ is a sum and 2(3) a product, but 2 3 is no number. To
    latex2sympy, each is a sum, and 2½π is π."""
    this, following = (part.getText() for part in parts[i : i + 2]) if i + 1 < len(parts) else ("", "")
    if _DIGITS.fullmatch(this) and following[:1].isdigit():
        raise ValueError("two numbers without a sign between them")
    mixed = this.isdigit() and following.startswith(r"\frac")
    first = _convert_neighbours(self, parts[i : i + 2]) if mixed else self.convert_postfix(parts[i])
    if (end := i + 1 + mixed) == len(parts):
        return first
    rest = _neighbours(self, parts, end)
    if isinstance(first, list):  # d/dx
        return sympy.Derivative(rest, *first)
    matrices = any(isinstance(x, sympy.MatrixBase) for x in (first, rest))
    return self.mat_mul_flat(first, rest) if matrices else self.mul_flat(first, rest)


def _from_latex(text: str, **settings: Any) -> Any:
    """Parse LaTeX. A ratio such as 1:2:3, which is 1/6 to latex2sympy, becomes a tuple that differs from a list."""
    ratio = text.rpartition("=")[2]
    if ratio.count(":") < 2 or "," in ratio:
        return _latex2sympy(text, **settings)
    return sympy.Tuple(sympy.Symbol(":"), *_latex2sympy(f"({ratio.replace(':', ',')})", **settings))


@lru_cache(maxsize=64)
def _parse_arithmetic(text: str) -> Any:
    """Parse arithmetic in prose, such as `3 * (4 + 5)`, with the LaTeX parser."""
    if too_complex(text):
        raise ValueError("too complex for an answer")
    return _from_latex(normalize.clean(text))


def _parse_atom(text: str, *_: Any, **__: Any) -> Any:
    """Parse `12`, `.5`, `1e3`, `3/2` or `yotta` with the same result as sympy, but without running code."""
    text = text.strip()
    if digits := _DIGITS.fullmatch(text):
        whole = not any((digits["decimals"], digits["only"], digits["power"]))
        return sympy.Integer(int(text)) if whole else sympy.Float(text)
    if re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        return sympy.Rational(text)
    if re.fullmatch(r"[A-Za-z]+", text):
        return sympy.Symbol(text)
    raise sympy.SympifyError(text)


_Latex2Sympy.convert_postfix_list = _neighbours
mv_parser.latex2sympy = _from_latex
mv_parser.parse_expr_cached = _parse_arithmetic
sympy_parser.parse_expr = _parse_atom  # called by sympify, to which latex2sympy passes every number


def compare(answer: str, marked: bool, gold: str) -> tuple[Status, str | None]:
    """Return (status, extracted answer). If not `marked`, `answer` is prose that contains the answer."""
    wanted, found = _parse_gold(gold), _parse_answer(answer, marked)
    extracted = normalize.spelling(answer if marked else next((r for r in found if isinstance(r, str)), ""))
    if marked and (unit := _LONE_UNIT.fullmatch(answer.strip())):
        found = found + _parse_answer(unit[1], True)
    # math-verify also returns the text that it parsed, but text is compared in normalize.py.
    wanted, found = ([r for r in parsed if not isinstance(r, str)] for parsed in (wanted, found))
    if not wanted or not found:
        return "unparsable", extracted
    texts = answer, target.text if (target := find_gold(gold)) else ""
    primes = [len(re.findall(r"['′]|prime", "".join(_PRIME.findall(x.rpartition("=")[2])))) for x in texts]
    if marked and primes[0] != primes[1]:  # to the parser, f''(x) is f(x)
        return "wrong", extracted
    if any(isinstance(r, sympy.Union) for r in wanted):
        sets = [r for r in found if isinstance(r, sympy.FiniteSet)]  # a list of intervals
        found += [sympy.Union(*r.args) for r in sets if all(isinstance(part, sympy.Interval) for part in r.args)]
    same = _same(wanted, found)
    if not same and any(_is_complex(r) for r in (*wanted, *found)):
        same = _same(*([_complex(r) for r in parsed] for parsed in (wanted, found)))
    same = (same and _precise(answer, wanted) and _precise(texts[1], found)) or (
        marked and (normalize.same_list(*texts) or normalize.same_percent(*texts))
    )
    return ("correct" if same else "wrong"), extracted


def _same(wanted: list[Any], found: list[Any]) -> bool:
    pairs = [(a, b) for a, b in product(wanted, found) if not _set_and_tuple(a, b) and not _set_and_tuple(b, a)]
    return any(verify(a, b, timeout_seconds=None, allow_set_relation_comp=True) and _same_size(a, b) for a, b in pairs)


def _same_size(*pair: Any) -> bool:
    """Whether numbers agree in their first digits: to math-verify, 1/2^{60} - 1/2^{61} is so small that it is 0."""
    if not all(isinstance(x, sympy.Expr) and x.is_number and not x.has(sympy.Float) for x in pair):
        return True
    a, b = (sympy.N(x.doit()) for x in pair)
    return bool(abs(a) > 1e-9 or abs(a) < 1e-99 or abs(a - b) < abs(a) / 1000)


def _set_and_tuple(a: Any, b: Any) -> bool:
    """Whether a is a set and b a tuple or interval: math-verify accepts `(1, 2)` for `x \\in \\{1, 2\\}`."""
    a, b = (getattr(value, "rhs", value) for value in (a, b))
    return isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.Tuple | sympy.Interval)


def _is_complex(value: Any) -> bool:
    """Whether i is its only symbol, and therefore the imaginary unit."""
    return {str(symbol) for symbol in getattr(value, "free_symbols", ())} == {"i"}


def _complex(value: Any) -> Any:
    """Expand a complex number: i(2-i) becomes 1+2i."""
    return sympy.expand(value.subs(dict.fromkeys(value.free_symbols, sympy.I))) if _is_complex(value) else value


def _precise(text: str, others: list[Any]) -> bool:
    """Return False if `text` is a decimal that equals one of the others only because math-verify rounds."""
    number = normalize.read_number(text)
    if not number or not number[1] or not all(isinstance(r, sympy.Expr) and r.is_number for r in others):
        return True
    value = sympy.Rational(number[0].numerator, number[0].denominator)
    allowed = abs(value) / 1000 if number[1] >= normalize.DECIMALS else sympy.Rational(1, 10**20)
    return any(abs(sympy.N((percent * r - value).doit(), 30)) <= allowed for r in others for percent in (1, 100))


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> list[Any]:
    """Parse a gold answer, once for all answers of a group."""
    target = find_gold(gold)
    return _parse_answer(target.text, target.marked) if target else []


def _parse_answer(text: str, marked: bool) -> list[Any]:
    """Return every interpretation of an answer: sympy expressions, and the text that they were parsed from."""
    if too_complex(text):
        return []
    text = _MIXED.sub(lambda x: f"{int(x[1]) * int(x[3]) + int(x[2])}/{x[3]}", text)  # to the parser, 2 1/2 is 3/2
    if not marked:
        parsed = parse(_SPACE_AROUND_CJK.sub(" ", text.replace(r"\$", "")), [LATEX, PROSE], parsing_timeout=None)
        return [meaning for value in parsed for meaning in _meanings(value, text)]
    found, text = [], normalize.unwrap(text)
    for form in dict.fromkeys((normalize.clean(text), *normalize.alternatives(text))):
        parsed = _solution_set(form) or _parse_latex(form)
        found += [meaning for value in parsed for meaning in _meanings(_canonical(value), form)]
    return found


def _parse_latex(text: str) -> list[Any]:
    parts = re.split(r",?\s*\\l(?:or|and)", text)
    # p=5, q=2 and p=7, q=2: two solutions, not four values
    text = (";" if all("=" in part and "," in part for part in parts) else ",").join(parts)
    try:  # as a whole: math-verify's `parse` also takes a fraction out of what is no formula
        return [mv_parser.parse_latex_cached(normalize_latex(text, LATEX.normalization_config))]
    except Exception:  # of no common class; it cannot read the percentage of a fraction, or ± in one
        if text.endswith(r"\%"):
            return [mv_parser.convert_to_pct(value) for value in _parse_latex(text.removesuffix(r"\%"))]
        both = [_PM.sub(above, _MP.sub(below, text)) for above, below in ("+-", "-+")]
        return _parse_latex(", ".join(both)) if text not in both else []


def _solution_set(text: str) -> list[sympy.Set]:
    """Parse `x < -1 or x > 2` as a union of intervals. Empty if `text` is not a list of inequalities in one variable.

    A comma means "and", or "or" if nothing satisfies both sides.
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
    """Parse a list of relations. `x \\in S`, an equation to math-verify, becomes a relation that sympy can solve."""
    (value,) = _parse_latex(text)
    values = value.args if isinstance(value, sympy.FiniteSet) else [value]
    return [sympy.Contains(v.lhs, v.rhs) if isinstance(getattr(v, "rhs", None), sympy.Set) else v for v in values]


def _meanings(value: Any, text: str) -> list[Any]:
    """Return the meanings of a value: a list without brackets is a set and a tuple, a column vector also a tuple."""
    if isinstance(value, sympy.FiniteSet) and r"\{" not in text:
        return [value, sympy.Tuple(*getattr(value, "_unsorted_args", value.args))]
    return [value, sympy.Tuple(*value)] if isinstance(value, sympy.MatrixBase) and value.cols == 1 else [value]


def _canonical(value: Any) -> Any:
    """Return a canonical form: 0.1 + 0.2 becomes 3/10 (a sum of floats is not 0.3), −50% becomes (−50)% (math-verify
    then accepts −50), 5 = 6 becomes false, 6 = x becomes x = 6, and a > b > c becomes c < b < a."""
    if isinstance(value, sympy.FiniteSet) and any(_canonical(x) is sympy.false for x in value.args):
        value = sympy.false  # 5 = 6, 7
    relations = value._unsorted_args if isinstance(value, And) else [value]
    if all(isinstance(r, sympy.Eq) for r in relations):
        sides = [relations[0].lhs, *(r.rhs for r in relations)]
        if all(isinstance(side, sympy.Expr) and side.is_number for side in sides):
            return value if all(_close(r.lhs, r.rhs) for r in relations) else sympy.false
        return value.reversed if isinstance(value, sympy.Eq) and sides[0].is_number and sides[1].is_Symbol else value
    if isinstance(value, And) and all(isinstance(r, sympy.Gt | sympy.Ge) for r in relations):
        return And(*(r.reversed for r in reversed(relations)))
    if not isinstance(value, sympy.Add | sympy.Mul) or not value.is_number:
        if isinstance(value, sympy.Expr):  # sympy does not simplify ∛(x²) to x^{2/3}, because x may be complex
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
    """Whether an equation of numbers holds; with decimals, within 1%."""
    if not left.has(sympy.Float) and not right.has(sympy.Float):
        return _same([left], [right])
    return bool(abs(sympy.N((left - right).doit())) <= abs(sympy.N(right.doit())) / 100)
