"""Numbers, words and letters of choices, compared without a parser. Standard library only; linear time."""

import re
from decimal import Decimal
from fractions import Fraction

DECIMALS = 6  # decimals to which a rounded answer must agree: 0.333333 is 1/3, 0.33 is not
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
_AROUND = re.compile(r"\A(?:\\\(|\\\[|\\?\$|[€£¥]|\s)+|(?:\\\)|\\\]|\\?\$|[€£¥.]|\s)+\Z")
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
_TIME = re.compile(r"(\d{1,2}):(\d\d)\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_NAMED = re.compile(
    r"(?:answer|option|choice|choos\w*|select\w*|pick\w*|it['’]?s|it is)\b[^.\n]{0,30}\Z", re.IGNORECASE
)
_CORRECT = re.compile(r"\W{0,3}\s*is\s+(?:correct|the\s+(?:(?:correct|right|best)\s+)?(?:answer|option|choice))\b")
_BASE = re.compile(r"\(?(\d\w*?)\)?_(\d{1,2}|[a-z]{3,})", re.ASCII)
_AT_START = re.compile(rf"\W{{0,3}}([{CHOICES}])(?:[.,:;)]|\s*$|[^\x00-\x7f])")


def read_number(text: str) -> tuple[Fraction, int] | None:
    """(value, how many decimals were written), or None if the text is not one plain number.

    Understands signs, thousands separators, decimals, fractions and mixed numbers: `-1,000.50`, `\\frac{3}{4}`,
    `1 1/2`, `0.\\overline{3}`.
    """
    if len(text) > 200:
        return None
    text = _AROUND.sub("", text.replace("−", "-"))
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
    """A number as only an answer has it: in words up to a hundred, or with other separators (1.234.567, 12,34,567)."""
    if _GROUPED.fullmatch(text := _AROUND.sub("", text)):
        return Fraction(re.sub(r"[.,]", "", text)), 0
    value = _WORD_OF.get(" ".join(re.findall(r"[^\W_]+", _MARKUP.sub(" ", text[:60]).lower())))
    return None if value is None else (Fraction(value), 0)


def same_time(a: str, b: str) -> bool:
    """15:30 and 3:30 p.m."""
    times = [_TIME.fullmatch(_MARKUP.sub(" ", text).strip()) for text in (a, b)]
    found = [(int(t[1]) % 12, t[2], t[3].lower() == "p" if t[3] else int(t[1]) >= 12) for t in times if t]
    stated = [t[3] or not 0 < int(t[1]) < 13 for t in times if t]
    return len(found) == 2 and found[0] == found[1] and all(stated)


def same_number(a: tuple[Fraction, int], b: tuple[Fraction, int]) -> bool:
    """Exactly equal, or equal to six decimals if either was written with that many."""
    if a[0] == b[0]:
        return True
    if max(a[1], b[1]) < DECIMALS:
        return False
    apart, size = abs(a[0] - b[0]), max(abs(a[0]), abs(b[0]))
    return round(a[0], DECIMALS) == round(b[0], DECIMALS) and apart <= size / 1000


def write_number(value: Fraction) -> str:
    """One spelling per number: `1000`, `0.5`, `1/3`."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**12 % value.denominator == 0:
        return f"{Decimal(value.numerator) / value.denominator:f}"
    return str(value)


def words(text: str) -> str | None:
    """Lower-case words without articles and punctuation, or None if the text is mathematics."""
    plain = _MARKUP.sub(" ", text)
    if re.search(r"[\\^_=<>+]|\d\s*[-*/]\s*\d", plain) or not _WORD.search(plain):
        return None
    found = [w for w in re.findall(r"[^\W_]+", plain.lower()) if w not in ("a", "an", "the")]
    return " ".join("solution" if w == "solutions" else w for w in found) or None


def gold_choice(gold: str) -> str | None:
    """C for a gold answer `C`, `(C)`, `\\text{(C)}` or `(C) Cecile`; None if it is not a choice."""
    plain = _MARKUP.sub(" ", gold).strip()
    found = re.fullmatch(rf"\(([{CHOICES}])\)(?:\s.*)?|([{CHOICES}])[.):]?", plain, re.DOTALL)
    return (found[1] or found[2]) if found else None


def final_choice(text: str, *, marked: bool = False) -> str | None:
    """The choice that a text makes: the first after its last "answer", else one at its start, else the last one.

    Not a choice: a letter after "not", "neither" or "nor", a list of several and, unless the text is a marked answer,
    a letter that nothing calls a choice, such as the point C, the pronoun I or the article A.
    """
    text = _MARKUP.sub(" ", text)
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
    """Whether the letter at this place is called a choice, stands in parentheses or alone in the last line."""
    before, rest = text[max(0, at - 60) : at], text[at + 1 : at + 60]
    if text[at] in "AI" and re.match(r"\s+(?!is\b)[a-z]", rest):
        return False
    alone = re.search(r"(?:\n|\A)\W*\Z", before) and re.fullmatch(r"\W*", rest)
    return bool(alone or (before.endswith("(") and rest[:1] == ")") or _NAMED.search(before) or _CORRECT.match(rest))


def same_base(a: str, b: str) -> bool | None:
    """Whether two numerals with a base, `10_{2}` and `10_3`, are the same; None if one of them has no base."""
    numerals = [_BASE.fullmatch(_MARKUP.sub("", _AROUND.sub("", text)).replace(" ", "")) for text in (a, b)]
    x, y = ((n[1], str(_WORD_OF.get(n[2], n[2]))) if n else None for n in numerals)
    return x == y if x and y else None
