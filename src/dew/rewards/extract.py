"""Find the final answer in a text. Standard library only; linear time in the length of the text.

A marked answer is taken as a whole: `<answer>`, `\\boxed`, `####`, "the answer is", `[ ]` at the end, or a text that is
only a formula. Anything else is prose, whose last expression is the answer (math-verify finds it, see latex.py).
"""

import re
from itertools import accumulate
from typing import NamedTuple
from unicodedata import normalize

MAX_LENGTH = 4_000  # characters of an answer; the longest gold answer in the named data sets has 200
_CUT = re.compile(r"\A(?:.{,2000}?\n|.{,2000}?\. |.{,2000}? )", re.DOTALL)
"""Where the end of a long text may begin: at a line, sentence or word, so that no formula is split."""
MAX_BOXES = 20  # consecutive boxes that form one answer
MAX_DEPTH = 40  # nested brackets

_SPACES: dict[int, str | None] = {code: " " for code in (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)}
_SPACES |= dict.fromkeys((0xAD, *range(0x200B, 0x2010), 0x2060, 0xFEFF)) | {0x2212: "-"}
"""Unicode spaces and minus, and zero-width characters, which are removed. The parsers' grammars have none of them."""
_RAISED, _LOWERED, _FRACTION = map(re.compile, ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", "[₀₁₂₃₄₅₆₇₈₉]+", r"(\d ?)?([¼½¾⅐-⅞])"))
_THIN = re.compile(r"(?<![\d.\\])\d{1,3}(?:\\,\d{3})+(?!\d)")
_NEGATIVE = re.compile(r"(?i)\b(?:negative|minus) (?=\d)")
_DOLLAR = re.compile(r"(?<!\\)\$")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BETWEEN_BOXES = re.compile(r"\\text|\\quad|\\qquad|\\[,;! ]|\b(?:and|or)\b|[\s,;.:${}&]")
_LABEL = re.compile(r"\A\\(?:text(?:bf|rm)?|mathrm)\s*\{[^{}]*(?::|=|\bis|\bare)\s*\}(?=.)", re.DOTALL)
"""`\\text{Answer: }` before the answer, inside its box."""
_ANSWER_IS = re.compile(r"(?im)\banswer\b\W{0,4}(?:(?:is|are)\b[ \t]*:?|:|=)[ \t*]*|^A:[ \t]*")
_FINAL_ANSWER_IS = re.compile(r"(?i)\bfinal answer\b\W{0,4}(?:is\b[ \t]*:?|:)[ \t*]*")
_SENTENCE_ENDS = re.compile(
    r"\n|(?<!\\)[.!?](?:\s|\**$)|。|\bI hope\b|,\s+(?:as|which|since|because|so|not|but|when|if|thus|rounded)\b"
)
_DISPLAY = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]", re.DOTALL)
NO_UNIT = (
    r"(?:plus|minus|squared|cubed|factorial|hundred|and\s+a\s+half|at\s+(?:least|most)"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths|or\s+(?:more|less|fewer|greater|higher))\b"
)
"""Words after a number that change it."""
_UNDECIDED = re.compile(
    r"(?i)\b(?:could|may|might|either|maybe|perhaps|possibly)\b[^.\n]*\d\W{0,3}(?:,|\bor\b)\W{0,3}(?:or\b\W{0,3})?\d[^.\n]*\W*\Z"
    r"|(?:\b(?:not|negative|minus|(?:less|more|greater) than|twice|half of)\W{1,3}|不是\W{0,3})"
    rf"(?:\d[\d.,/]*\b|[\w\\{{}}^_/+-]+\$)[^\d\n]{{0,40}}\Z|\d\W{{1,3}}{NO_UNIT}[^\d\n]{{0,40}}\Z"
)
"""A text that ends with several candidates ("5, 6 or 7") or with "not 7", "less than 7" or "7 squared"."""
_LAST_BRACKET = re.compile(r"(?<![\w\\\[\]])\[\s*([^\[\],]{1,100})\s*\]\W*\Z")
"""`[90]` at the end, but no interval or list."""
_COMMAND = re.compile(r"\\[a-zA-Z]+|\\.")
_MATH_WORD = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|pi|infinity|inf|min|max|gcd|lcm|mod|and|or|theta|alpha"
    r"|beta|[pb]?matrix|text|cases|array"
)
_SHORT_ANSWER = re.compile(
    r"[^\w\s]{0,2}-?\d[\d.,/ ]*(?:%|°|[^\W\d_][\w./^²³ ]{0,40})?|[\w-]+|\\text\{[^{}]*\}|\([A-J]\)(?:\s[\w ]{0,60})?"
)
"""A number with its unit, one word, or a choice with its text."""
_POWER = r"(?:\^|\*\*(?!\d+\*\*))[\s{(+-]*"  # not a number in bold
_TOO_LARGE = re.compile(
    rf"{_POWER}\d{{6,}}|\d{{5,}}[\s)}}]*!|!\s*!\s*!|\d\s*{_POWER}\d+[\s)}}]*{_POWER}\d|\d{{1000,}}"
    rf"|[eE][+-]?\d{{5,}}|_?(?:sum|prod)\b.{{0,40}}\d{{5,}}"
)
"""A six-digit exponent, the factorial of a five-digit number, a tower of powers, a thousand digits, a huge sum."""


class Answer(NamedTuple):
    """An extracted answer, not yet parsed as mathematics."""

    text: str
    marked: bool
    """True: `text` is exactly the answer. False: it is prose with the answer near its end."""


def find_answer(text: str) -> Answer | None:
    """Return the final answer of a text, or None if there is none or its box is not closed."""
    text = in_tag(plain(after_thinking(text)))
    if boxes := list(_BOX.finditer(text)):
        found = _after_answer_is(text[boxes[-1].end() :], _FINAL_ANSWER_IS) or last_boxed(text)
        return Answer(found, marked=True) if found else None
    bracket = _LAST_BRACKET.search(text[-200:])
    if found := _after_hashes(text) or _after_answer_is(text) or (bracket and bracket[1].strip(" $")):
        return Answer(found, marked=True)
    if not (text := text.strip()) or _UNDECIDED.search(text[-200:]):
        return None
    if is_formula(text):
        return Answer(text, marked=True)
    return Answer(_CUT.sub("", text[-MAX_LENGTH:]) if len(text) > MAX_LENGTH else text, marked=False)


def find_gold(answer: str) -> Answer | None:
    """Return a gold answer: the whole text, unless it is a solution with a marked answer."""
    answer = in_tag(plain(answer))
    found = last_boxed(answer, open_end=True) or _after_hashes(answer) or _after_answer_is(answer)
    text = found or answer.strip()
    marked = bool(found) or not _DOLLAR.search(text.strip("$"))
    return Answer(text, marked) if text.strip("$ ") else None


def in_tag(text: str) -> str:
    """Return the content of the last `<answer>`, up to the end if it is not closed, or the whole text without one."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0]


def plain(text: str) -> str:
    """Write 10⁵ as 10^{5}, 2¾ as 2 3/4, `10\\,000` as 10000, "negative 5" as -5, and Unicode spaces in ASCII."""
    text = _NEGATIVE.sub("-", _THIN.sub(lambda number: number[0].replace(r"\,", ""), text))
    text = _RAISED.sub(lambda found: f"^{{{normalize('NFKC', found[0])}}}", text.translate(_SPACES))
    text = _LOWERED.sub(lambda found: f"_{{{normalize('NFKC', found[0])}}}", text)
    form = r"\frac{{{1}}}{{{2}}}", "{} {}/{}"
    return _FRACTION.sub(lambda x: form[bool(x[1])].format(x[1], *normalize("NFKC", x[2]).split("⁄")), text)


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text if there is no such tag."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str, *, open_end: bool = False) -> str | None:
    """Return the content of the last `\\boxed{}` or `\\fbox{}`; consecutive boxes are joined by commas.

    Consecutive boxes have only "and", "or", punctuation and spaces between them. A box without a closing brace was
    truncated and is not an answer, unless `open_end` is set.
    """
    boxes: list[str] = []
    next_start = len(text)
    for match in reversed(list(_BOX.finditer(text))[-MAX_BOXES:]):
        if (box := in_braces(text, match.end(), open_end)) is None:
            break
        content, end = box
        if boxes and (end > next_start or _BETWEEN_BOXES.sub("", text[end:next_start])):
            break
        if content not in boxes:
            boxes.insert(0, content)
        next_start = match.start()
    return _LABEL.sub("", ", ".join(boxes)) if boxes else None


def in_braces(text: str, at: int, open_end: bool = False) -> tuple[str, int] | None:
    """Return (content, end position) of the argument of a command that ends at `at`."""
    at = len(text) - len(text[at:].lstrip())
    if not text.startswith("{", at):
        bare = re.compile(r"[^\s$\\{}]+").match(text, at)
        return (bare[0].rstrip(".,;:"), bare.end()) if bare else None
    depth = 0
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[at + 1 : brace.start()].strip(), brace.end()
    return (text[at + 1 :].strip(), len(text)) if open_end else None


def _after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`, GSM8K's marker."""
    _, marker, rest = text.rpartition("####")
    return _strip_marks(rest.lstrip("#: \t").partition("\n")[0]) or None if marker else None


def _after_answer_is(text: str, phrase: re.Pattern[str] = _ANSWER_IS) -> str | None:
    """Return what follows the last "answer is" or "answer:", if it is a formula, a quantity, a choice or a word."""
    for match in reversed(list(phrase.finditer(text))[-3:]):
        rest = text[match.end() : match.end() + MAX_LENGTH].lstrip()
        display, end = _DISPLAY.match(rest), _SENTENCE_ENDS.search(rest)
        claim = display[0] if display else _strip_marks(rest[: end.start()] if end else rest)
        if claim and (is_formula(claim) or _SHORT_ANSWER.fullmatch(claim)):
            return claim
    return None


def is_formula(text: str) -> bool:
    """Whether the only words are names of functions: `2x + 3`, `\\frac{1}{2}`, `x = 4`."""
    if len(text) > MAX_LENGTH or "\n\n" in text.strip() or not re.search(r"[\w\\∞π√∅]", text):
        return False
    bare = _COMMAND.sub(" ", re.sub(r"\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}", " ", text))
    words = re.findall(r"[^\W\d_]{2,}", bare)
    return all(_MATH_WORD.fullmatch(word) or (word.isascii() and word.isupper()) for word in words)


def _strip_marks(text: str) -> str:
    """Strip surrounding emphasis, quotation marks and punctuation."""
    return text.replace('\\"', '"').strip().strip('*`"“”').strip().rstrip(".,;:!").strip()


def too_complex(text: str) -> bool:
    """Whether a text is too long, too deeply nested or has too large numbers for the parsers. No real answer is."""
    if len(text) > MAX_LENGTH or _TOO_LARGE.search(text):
        return True
    depths = accumulate(1 if bracket in "([{" else -1 for bracket in re.findall(r"[()\[\]{}]", text))
    return max(depths, default=0) > MAX_DEPTH
