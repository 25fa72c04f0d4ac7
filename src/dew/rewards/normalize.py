"""Compare numbers, words, choices and quantities without a parser, and prepare LaTeX for the parser in latex.py.

Standard library only; linear time.
"""

import re
from decimal import Decimal
from fractions import Fraction

from dew.rewards.extract import NO_UNIT, in_braces, is_formula

DECIMALS = 6  # decimals to which a rounded answer must agree: 0.333333 equals 1/3, 0.33 does not
CHOICES = "ABCDEFGHIJ"

_SPACE = r"(?:\\[,;:! ]| )"
_GROUP = rf"(?:\{{?,\}}?(?:\\[,;:! ])*|{_SPACE}+)"
_DIGITS = rf"(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)|\d{{1,60}})"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_DIGITS})(?P<decimals>\.\d{{0,60}})?|(?P<only>\.\d{{1,60}}))")
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<mixed>\d{{1,9}})(?=\s|\\))?\s*"
    rf"(?:\\[dtc]?frac\s*\{{\s*(?P<a>-?{_DIGITS})\s*\}}\s*\{{\s*(?P<b>{_DIGITS})\s*\}}"
    rf"|\\[dtc]?frac\s*(?P<c>\d)\s*(?P<d>\d)(?!\d)|(?P<e>{_DIGITS})\s*/\s*(?P<f>{_DIGITS}))"
)
_RECURRING = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<whole>{_DIGITS})?\.(?P<once>\d{{0,60}})\\(?:overline|bar|dot)\s*\{{?(?P<again>\d{{1,60}})\}}?"
)
_AROUND = re.compile(r"\A(?:\\\(|\\\[|\\?\$|[€£¥]|\s)+|(?<![€£¥.$\s])(?:\\\)|\\\]|\\?\$|[€£¥.]|\s)+\Z")
_MARKUP = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|boxed)(?![a-zA-Z])|[{}$*`]|\\[ ,;!]")
_WORD = re.compile(r"[^\W\d_]{3,}")
_ALONE = rf"(?<![A-Za-z0-9_'’])([{CHOICES}])(?![A-Za-z0-9_'’])"
_SEVERAL = re.compile(rf"{_ALONE}(?:\W{{0,3}}(?:[,;/&]|\band\b|\bor\b)\W{{0,3}}(?:(?:and|or)\b\W{{0,3}})?{_ALONE})+")
_NOT = re.compile(
    r"(?:\b(?:not|neither|nor|except)|n['’]t)\W+(?:(?:be|an?|the|option|choice|answer)\W+){0,3}\Z", re.IGNORECASE
)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORD_OF = {"hundred": 100, "one hundred": 100} | {word: i for i, word in enumerate(_ONES.split())}
_WORD_OF |= {
    f"{ten} {one}".removesuffix(" zero"): 10 * n + i
    for n, ten in enumerate(_TENS.split(), 2) for i, one in enumerate(_ONES.split()[:10])
}  # fmt: skip
_GROUPED = re.compile(r"[-+]?(?:\d{1,3}(?:\.\d{3}){2,}|\d{1,2}(?:,\d\d)+,\d{3})")
"""1.234.567 and 12,34,567."""
_TIME = re.compile(r"(\d{1,2})(?::(\d\d)|(?=\s*[ap]\.?\s?m))\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_NAMED = re.compile(
    r"(?:answer|option|choice|choos\w*|select\w*|pick\w*|it['’]?s|it is)\b[^.\n]{0,30}\Z", re.IGNORECASE
)
_CORRECT = re.compile(r"\W{0,3}\s*is\s+(?:correct|the\s+(?:(?:correct|right|best)\s+)?(?:answer|option|choice))\b")
_BASE = re.compile(r"\(?(\d\w*?)\)?_(\d{1,2}|[a-z]{3,})", re.ASCII)
_AT_START = re.compile(rf"\W{{0,3}}([{CHOICES}])(?:[.,:;)]|\s*$|[^\x00-\x7f])")


def read_number(text: str) -> tuple[Fraction, int] | None:
    """Return (value, number of decimals written), or None if the text is not one plain number.

    Understands signs, thousands separators, decimals, fractions and mixed numbers: `-1,000.50`, `\\frac{3}{4}`,
    `1 1/2`, `0.\\overline{3}`.
    """
    if len(text) > 200:
        return None
    text = _AROUND.sub("", text)
    if match := _NUMBER.fullmatch(text):
        whole, decimals = re.sub(r"\D", "", match["whole"] or "0"), match["decimals"] or match["only"] or ""
        value = Fraction(whole + decimals if len(decimals) > 1 else whole)
    elif match := _RECURRING.fullmatch(text):  # 2.1666... = (216 - 21) / 90
        whole, decimals, once, again = re.sub(r"\D", "", match["whole"] or "0"), "", match["once"], match["again"]
        value = Fraction(int(whole + once + again) - int(whole + once), (10 ** len(again) - 1) * 10 ** len(once))
    elif match := _FRACTION.fullmatch(text):
        parts = match["a"] or match["c"] or match["e"], match["b"] or match["d"] or match["f"]
        over, under = (int(re.sub(r"[^\d-]", "", part)) for part in parts)
        if under == 0 or (match["mixed"] and over < 0):
            return None
        value, decimals = int(match["mixed"] or 0) + Fraction(over, under), ""
    else:
        return None
    return (-value if match["sign"] == "-" else value), max(0, len(decimals) - 1)


def read_other_number(text: str) -> tuple[Fraction, int] | None:
    """Read a number that only an answer may have: words up to a hundred, or other separators (1.234.567, 12,34,567)."""
    if _GROUPED.fullmatch(text := _AROUND.sub("", text)):
        return Fraction(re.sub(r"[.,]", "", text)), 0
    value = _WORD_OF.get(" ".join(re.findall(r"[^\W_]+", _MARKUP.sub(" ", text[:60]).lower())))
    return None if value is None else (Fraction(value), 0)


def same_time(a: str, b: str) -> bool | None:
    """Whether two times are equal, such as 15:30 and 3:30 p.m.; None if one has neither a.m. nor 24 hours."""
    times = [_TIME.fullmatch(_MARKUP.sub(" ", text).strip()) for text in (a, b)]
    found = [(int(t[1]) % 12, t[2] or "00", t[3].lower() == "p" if t[3] else int(t[1]) >= 12) for t in times if t]
    return found[0] == found[1] if all(t and (t[3] or not 0 < int(t[1]) < 13) for t in times) else None


def same_number(a: tuple[Fraction, int], b: tuple[Fraction, int]) -> bool:
    """Whether two numbers are equal, or equal to six decimals if either was written with that many."""
    if a[0] == b[0]:
        return True
    if max(a[1], b[1]) < DECIMALS:
        return False
    apart, size = abs(a[0] - b[0]), max(abs(a[0]), abs(b[0]))
    return round(a[0], DECIMALS) == round(b[0], DECIMALS) and apart <= size / 1000


def write_number(value: Fraction) -> str:
    """Write equal numbers the same way: `1000`, `0.5`, `1/3`."""
    if value.denominator > 1 and 10**12 % value.denominator == 0:
        return f"{Decimal(value.numerator) / value.denominator:f}"
    return str(value)


def words(text: str) -> str | None:
    """Return the lower-case words without articles and punctuation, or None if the text is mathematics."""
    plain = _MARKUP.sub(" ", text)
    if re.search(r"[\\^_=<>+]|\d\s*[*/]\s*\d|(?<![^\W\d])\s*-\s*\d", plain) or not _WORD.search(plain):
        return None
    found = [w for w in re.findall(r"[^\W_]+", plain.lower()) if w not in ("a", "an", "the")]
    return " ".join("solution" if w == "solutions" else w for w in found) or None


def gold_choice(gold: str) -> str | None:
    """Return C for a gold answer `C`, `(C)`, `\\text{(C)}` or `(C) Cecile`, or None if it is not a choice."""
    plain = _MARKUP.sub(" ", gold).strip()
    found = re.fullmatch(rf"\(([{CHOICES}])\)(?:\s.*)?|([{CHOICES}])[.):]?", plain, re.DOTALL)
    return (found[1] or found[2]) if found else None


def final_choice(text: str, *, marked: bool = False) -> str | None:
    """Return the choice that a text makes: the first after its last "answer", else one at its start, else the last one.

    A letter after "not", "neither" or "nor", or in a list of several, is not a choice. Unless the text is a marked
    answer, it must also be named as a choice (`_is_named`), unlike the point C, the pronoun I or the article A.
    """
    text = _MARKUP.sub(" ", text)
    text = text.upper() if marked and len(re.findall(r"\w", text)) == 1 else text  # (a) is A
    lists = [m.span() for m in _SEVERAL.finditer(text) if len(set(re.findall(_ALONE, m[0]))) > 1]
    start = _AT_START.match(text)
    chosen = [
        m for m in re.finditer(_ALONE, text)
        if not _NOT.search(text[max(0, m.start() - 30) : m.start()]) and not any(a <= m.start() < b for a, b in lists)
        and (marked or (start and start.start(1) == m.start()) or _is_named(text, m.start()))
    ]  # fmt: skip
    at = text.lower().rfind("answer")
    after = [m for m in chosen if at >= 0 and at <= m.start() < at + 200]
    if after or not chosen:
        return after[0][1] if after else None
    return (chosen[0] if start and start.start(1) == chosen[0].start() else chosen[-1])[1]


def _is_named(text: str, at: int) -> bool:
    """Whether the letter at this position is called a choice, is in parentheses, or is alone in the last line."""
    before, rest = text[max(0, at - 60) : at], text[at + 1 : at + 60]
    if text[at] in "AI" and re.match(r"\s+(?!is\b)[a-z]", rest):
        return False
    alone = re.search(r"(?:\n|\A)\W*\Z", before) and re.fullmatch(r"\W*", rest)
    return bool(alone or (before.endswith("(") and rest[:1] == ")") or _NAMED.search(before) or _CORRECT.match(rest))


def same_base(a: str, b: str) -> bool | None:
    """Whether two numerals with a base, such as `10_{2}` and `10_3`, are the same; None if one has no base."""
    numerals = [_BASE.fullmatch(_MARKUP.sub("", _AROUND.sub("", text)).replace(" ", "")) for text in (a, b)]
    x, y = ((n[1], str(_WORD_OF.get(n[2], n[2]))) if n else None for n in numerals)
    return x == y if x and y else None


# ── quantities, and LaTeX for the parser ────────────────────────────────────────────────────────────────────
UNITS = (
    r"(?:[mcdknK]m|ft|yd|mi|in|[mkK]g|gm|lb|oz|[mcdk][lL]|min|sec|hr|ms|mph|[ck]?m/s|km/?h|kmph|rpm|[kM]Wh?|[kMG]?Hz"
    r"|k?Pa|eV|cc|sq|cu|rad|deg|mol|pt|yr|men|day|(?:kilo|centi|milli|deci)?(?:met(?:er|re)|lit(?:er|re)|gram)|feet|foot|inch|yard|mile"
    r"|degree|radian|unit|square|cubic|cent|dollar|pound|ounce|gallon|acre|hectare|hour|minute|second|week|month|year"
    r"|point|cup|bag|box|egg|car|ton|rupee|student|people|digit|integer|way|time|old|per)(?:e?s)?(?![a-zA-Z])"
)
"""Words that are always units, unlike a single letter, `ab` or `xyz`, which may be variables."""
_UNIT_LETTER = "[mgshtdlLNJWVAKCFT]"
_UNIT = re.compile(
    r"(?:\\?\$|[€£¥~≈\s]|\\approx|Rs\.?(?=\W)|(?:USD|EUR|GBP|INR|about|approximately)\b)*"
    r"(?P<number>[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?|[-+]?\d{0,9}\s*\\[dt]?frac(?:\{\d+\}\{\d+\}|\d\d))\s*"
    r"(?P<percent>\\?%|percent(?:age)?\b|pct\b)?"
    rf"(?:\\(?:text|mathrm|mbox|textbf)\s*\{{(?![\s~]*(?!{_UNIT_LETTER})[a-zA-Z]\s*\}})[^{{}}]*\}}"
    rf"|{UNITS}|(?<=\s)(?:of(?:\s+the|\s+an?)?(?=\s)|(?!{NO_UNIT})[^\W\d_]{{4,}}+)|[^\x00-\x7f\W\d_]{{2,}}+|[一-鿿]|(?:USD|EUR|GBP|INR)\b"
    r"|\\[ ,;]|[°€£¥¢²³]|[\s./^{}~]|\^\{?[23]\}?|\\circ)*+"
)
"""A number followed only by words, currency signs and their powers. Possessive quantifiers: no backtracking."""
_BOLD = re.compile(r"(?<![\w)])\*\*([^*]+)\*\*(?!\w)")
_DECORATION = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|bm|boldsymbol|displaystyle|large|Large|LARGE|huge|Huge|bf)(?![a-zA-Z])"
    r"|\\[bB]igg?[lr]?(?![a-zA-Z])|(?<=\\\\)\[[\d.]+(?:pt|em|ex|[cm]m)\]|\\text\s*\{\s*\\\$\s*\}"
    r"|\^\s*\{?\s*\\circ\s*\}?\s*[CF]\Z|(?:\\pmod\s*(?:\{[^{}]*\}|\d+)|\(\s*\\?mod\s*\d+\s*\))\s*\Z"
    r"|\\(?:black)?square(?![a-zA-Z])|\\checkmark|\A.*\\equiv(?=.*mod)|(?<=:\d\d)\s*[aApP]\.?\s?[mM]\.?\Z"
)
"""Colour, size, the space between the rows of a matrix, `\\text{\\$}`, `°C`, ∎, the modulus in `9 \\pmod{11}`, p.m."""
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*(?:\d|\{\d\})\s*)?[({]?\s*)"
    r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))"
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_NEXT = re.compile(r",\s+(?:and\s+)?|,(?!\d{3}(?!\d))|\s+and\s+")
"""The separator between quantities of a list, but not between thousands."""
_SYMBOL = r"[^\W\d_]|\\(?:pi|theta|alpha|beta)(?![a-zA-Z])|\\[dtc]?frac\s*(?:\d\s*\d|\{[^{}]*\}\s*\{[^{}]*\})"
_ARGUMENT = re.compile(rf"(\^|\\mathbb|\\[dtc]?frac\s*(?:\d|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})?)\s*({_SYMBOL})")
"""`\\frac\\pi4`, which math-verify would split into `\\frac{\\}{p}i4`, and `\\frac{1}x`."""
_FACTOR = re.compile(r"(\\[dtc]?frac\s*\d\s*\d(?=\d))")
"""`\\frac11` before a 2, which is 1/12 to math-verify."""
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\})(?:\\!\s?)?\d{3})+(?![\d,])")
_LETTER = re.compile(r"\\(?:mathrm|text|operatorname|mathit|rm)\s*\{\s*([a-zA-Z])\s*\}")
_LETTER_UNIT = re.compile(
    rf"(?<=[\d)}}i])(?:\\[ ,;:]|\s)*+\\(?:mathrm|text)\s*\{{\s*{_UNIT_LETTER}\s*\}}(?:\^\s*\{{?[23]\}}?)?\s*\Z"
)
"""`\\text{ m}^2` after a number, a bracket or π."""
_MINUS_POWER = re.compile(r"\^\s*(-\s*(?:\d+|[a-zA-Z]))")
_INNER = r"\([^()]*+\)"
for _ in range(8):  # brackets within brackets
    _INNER = rf"\((?:[^()]|{_INNER})*+\)"
_ROOT = re.compile(
    rf"(?:([√∛∜])|\\?(?<![A-Za-z])sqrt(\[\w\])?)\s*((?:(?:[√∛∜]|\\sqrt)\s*)*(?:\d+(?:\.\d+)?|{_INNER}|{_SYMBOL}))"
)
"""√12, √√16, and `\\sqrt12` and `\\sqrt\\frac23`, which math-verify reads as √1 · 2 and 2/3."""
_DEGREE = {"√": "", "∛": "[3]", "∜": "[4]"}
_NAMES = re.compile(
    r"(?<![\\A-Za-z])(sqrt|pi|(?:arc)?(?:sin|cos|tan|cot)|csc|log|ln|theta|alpha|beta|infty)(?![A-Za-z])"
)
_GAP = r"(?:\\q?quad|\\[ ,;]|\s)*"
_OR, _AND = (
    re.compile(
        rf"{_GAP}(?:\\(?:text|mbox)\s*\{{\s*{word}\s*\}}|(?<![a-z\\]){word}(?![a-z])|\\(?:{signs})(?![a-zA-Z])){_GAP}"
    )
    for word, signs in (("[oO]r", "lor|vee"), ("[aA]nd", "land|wedge"))
)
_POINT = re.compile(r"\A[A-Z]\s*(?=(?:\\left\s*)?\([^()]*,[^()]*\)\Z)")
"""The name of a point before its coordinates."""
_SETS = dict.fromkeys(("no solution", "no real solution", "empty set"), r"\emptyset")
_SETS |= dict.fromkeys(("all real numbers", "all reals", "real numbers"), r"\mathbb{R}")
_SCALES = {"thousand": 3, "million": 6, "billion": 9}
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z](?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|[:|])(.*)\\\}", re.DOTALL)
_UNION = re.compile(r"(?<=[\])}])\s*U\s*(?=\\?[\[({])")
_SIGNS = str.maketrans(
    {"–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "∗": r"\cdot ", "π": r"\pi ", "√": r"\sqrt ",
     "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
     "∅": r"\emptyset ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "θ": r"\theta ", "％": r"\%",
     "±": r"\pm ", "，": ",", "（": "(", "）": ")", "⁄": "/", "~": " ", "∨": r"\lor ", "∧": r"\land "}
)  # fmt: skip
_SYNONYMS = {r"\degree": r"^\circ ", r"\varnothing": r"\emptyset", r"\langle": "(", r"\rangle": ")",
             r"\left\{": r"\{", r"\right\}": r"\}", r"\lbrace": r"\{", r"\rbrace": r"\}", "{:}": ":",
             "^o": r"^\circ ", "^{o}": r"^\circ "}  # fmt: skip


def same_list(answer: str, gold: str) -> bool:
    """Whether lists have equal numbers in the same order: `5 apples, 3 pears` equals `5, 3`, but not `3, 5`."""
    a, b = _quantities(answer), _quantities(gold)
    return len(a) == len(b) > 1 and all(map(same_number, a, b))


def same_percent(answer: str, gold: str) -> bool:
    """Whether 12.5% equals 12.5, which math-verify accepts only for integers. Below 1, it does not: 0.5% for 0.5."""
    a, b = (_UNIT.fullmatch(text.strip()) for text in (answer, gold))
    if not a or not b or bool(a["percent"]) == bool(b["percent"]):
        return False
    x, y = read_number(a["number"]), read_number(b["number"])
    return x is not None and y is not None and same_number(x, y) and abs(x[0]) > 1 and x[1] > 0


def _quantities(text: str) -> list[tuple[Fraction, int]]:
    """Return the numbers in a list of numbers with or without units, or an empty list if it is not one."""
    units = [_UNIT.fullmatch(part) for part in _NEXT.split(_TEXT.sub(r"\1", text))]
    numbers = [read_number(unit["number"]) for unit in units if unit and not unit["percent"]]
    found = [number for number in numbers if number]
    return found if len(found) == len(units) else []


def unwrap(text: str) -> str:
    """Remove command and braces around a formula: `\\mathbf{6-5i}`, `\\text{p - q}`, `{(3,4]}`. Words keep theirs,
    unless there is a number among them: `3 \\text{ hours 20 minutes}` is not 3."""
    text = _TEXT.sub(lambda words: words[1] if re.search(rf"(?<![\w^])(?:\d|{NO_UNIT})", words[1]) else words[0], text)
    text = _DECORATION.sub("", text).strip()
    command = re.match(r"(?:\\(?:math(?:bf|rm|it)|text(?:bf|rm|it)?|mbox))?(?=\s*\{)", text)
    inner, end = (command and in_braces(text, command.end())) or ("", 0)
    whole = end == len(text) and not re.search(r"[A-Z]{2}|\\choose|\\over", inner)
    return inner if whole and is_formula(inner) else text


def alternatives(text: str) -> list[str]:
    """Return other readings of a marked answer: a number with a unit, a decimal comma, thousands, powers of ten."""
    found = []
    text = re.sub(r"\A\\text\s*\{([^{}]*)\}\Z", r"\1", text.strip())
    left, equals, right = text.rpartition("=")
    if (unit := _UNIT.fullmatch(right)) and unit["number"] != right.strip():
        number = clean(left) + equals + unit["number"]
        found.append(number + (r"\%" if unit["percent"] else ""))
        if scale := re.match(r"\W*(?:text\{\s*)?(thousand|million|billion)", right[unit.end("number") :]):
            found.append(rf"{number} \cdot 10^{_SCALES[scale[1]]}")
    if named := _SETS.get(words(text) or ""):
        found.append(named)
    if re.fullmatch(r"-?\d+(?:[. ]\d{3})*,\d+", text) and not re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        found.append(re.sub(r"[. ]", "", text).replace(",", "."))
    if power := re.fullmatch(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})", text):
        found.append(rf"{power[1]} \cdot 10^{{{int(power[2])}}}")
    if _THOUSANDS.search(text) and not re.search(r"[(\[]|\\\{", text):  # x = 1,200 is not 1 and 200
        found.append(clean(_THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)))
    return found


def clean(text: str) -> str:
    """Convert a marked answer to LaTeX for math-verify, without delimiters and decoration or Unicode signs."""
    text = _DECORATION.sub("", _BOLD.sub(r"\1", _convert_roots(text).translate(_SIGNS))).strip()
    for command, same in _SYNONYMS.items():
        text = text.replace(command, same)
    text = _ARGUMENT.sub(r"\1{\2}", _ARGUMENT.sub(r"\1{\2}", text))  # both arguments of a fraction
    text = _DEGREES.sub(r"\1{\2 \\pi / 180}", _FACTOR.sub(r"\1\\cdot ", text))
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
            inner = text[len(left) : -len(right)]
            text = inner if left not in inner else text
    text = _POINT.sub("", text.strip(" \n\t*`").removeprefix("=").rstrip(".,;:").rstrip("\\").strip())
    text = _MINUS_POWER.sub(r"^{\1}", _LETTER_UNIT.sub("", text))
    # math-verify would remove \mathrm{e} from 1 - 1/\mathrm{e} as a unit, leaving 1.
    text = _NAMES.sub(r"\\\1", _LETTER.sub(r"\1", text))
    if builder := _SET_BUILDER.fullmatch(text):
        text = builder[1]
    text = _AND.sub(r" \\land ", _OR.sub(r" \\lor ", _UNION.sub(r"\\cup ", text)))
    return text.replace("**", "^").replace("*", r"\cdot ")


def _convert_roots(text: str) -> str:
    """Convert `√2`, `\\sqrt12` and `sqrt(a(b+c))` to `\\sqrt{...}`."""
    return _ROOT.sub(lambda root: rf"\sqrt{_DEGREE.get(root[1], root[2] or '')}{{{_convert_roots(root[3])}}}", text)


def spelling(text: str) -> str | None:
    """Spell answers that are equal without a parser the same way. Majority voting counts these strings."""
    text = _BOLD.sub(r"\1", text).strip().strip("$*` ")
    number = read_number(text if re.search("[,;]", text) else text.rpartition("=")[2])
    written = write_number(number[0]) if number else re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\s|\\[,;! ]", "", text))
    return written[:500] or None
