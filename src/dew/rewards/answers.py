"""Where in a completion the answer stands. Standard library only, and time linear in the text.

An answer that is marked as such is taken whole: `<answer>`, `\\boxed`, `####`, "the answer is", `[ ]` at the
end, or a completion that is nothing but a formula. Everything else is prose, in which the last thing that
looks like mathematics is taken to be the answer (that search is math-verify's, see reading.py).
"""

import re
from dataclasses import dataclass

LONGEST = 4_000
"""Characters of an answer that are read. No data set here has a gold answer of more than 200."""
LONGEST_ROW = 20
"""Boxes in a row that are read as one answer."""
DEEPEST = 40
"""Brackets within brackets that are read."""


@dataclass(frozen=True)
class Answer:
    """What was found, before it is read as mathematics."""

    text: str
    marked: bool
    """True: `text` is the answer and nothing else. False: it is prose with the answer somewhere near its end."""


def find_answer(completion: str) -> Answer | None:
    """The answer of a completion, or None if there is none or its box was never closed."""
    text = after_thinking(completion)
    if (tagged := _last_tag(text)) is not None:
        text = tagged
    if boxes := list(_BOX.finditer(text)):
        if final := _after_answer_is(text[boxes[-1].end() :], _FINAL_ANSWER_IS):
            return Answer(final, marked=True)
        boxed = last_boxed(text)
        return Answer(boxed, marked=True) if boxed else None
    for find in (_after_hashes, _after_answer_is, _bracket_at_the_end):
        if found := find(text):
            return Answer(found, marked=True)
    text = text.strip().removeprefix("=").strip()
    if not text:
        return None
    return Answer(text, marked=True) if is_formula(text) else Answer(_tail(text), marked=False)


def find_gold(answer: str) -> Answer | None:
    """A gold answer is an answer by itself, unless it is a solution that marks its answer."""
    found = last_boxed(answer, open_end=True) or _after_hashes(answer) or _after_answer_is(answer)
    if found:
        return Answer(found, marked=True)
    whole = answer.strip()
    if not _DOLLAR.search(whole.strip("$")):
        return Answer(whole, marked=True) if whole.strip("$ ") else None
    return Answer(whole, marked=False)


# Marks

_DOLLAR = re.compile(r"(?<!\\)\$")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BETWEEN = re.compile(r"\\text|\\quad|\\qquad|\\[,;! ]|\b(?:and|or)\b|[\s,;.:${}&]")


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text if there is no such tag."""
    return text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text


def last_boxed(text: str, *, open_end: bool = False) -> str | None:
    """The content of the last `\\boxed{}` or `\\fbox{}`; of several in a row, joined by commas.

    In a row means: nothing but "and", "or", punctuation and spaces between them. A box that is never closed was
    cut off, and what is in it is not the answer; `open_end` reads it all the same.
    """
    boxes: list[str] = []
    row_starts = len(text)
    for match in reversed(list(_BOX.finditer(text))[-LONGEST_ROW:]):
        if (box := _box_at(text, match.end(), open_end=open_end)) is None:
            if boxes:
                break
            return None
        content, end = box
        if boxes and (end > row_starts or _BETWEEN.sub("", text[end:row_starts])):
            break
        if content not in boxes:
            boxes.insert(0, content)
        row_starts = match.start()
    return _LABEL.sub("", ", ".join(boxes)) if boxes else None


_LABEL = re.compile(r"\A\\(?:text(?:bf|rm)?|mathrm)\s*\{[^{}]*(?::|=|\bis|\bare)\s*\}(?=.)", re.DOTALL)
"""`\\text{Answer: }` before the answer, in its box."""


def _box_at(text: str, at: int, *, open_end: bool) -> tuple[str, int] | None:
    """(content, where the box ends), for a box whose command ends at `at`."""
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text) or text[at] != "{":
        bare = re.compile(r"[^\s$\\{}]+").match(text, at)
        return (bare[0].rstrip(".,;:"), bare.end()) if bare else None
    depth = 0
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[at + 1 : brace.start()].strip(), brace.end()
    return (text[at + 1 :].strip(), len(text)) if open_end else None


def _last_tag(text: str) -> str | None:
    """The content of the last `<answer>`; to the end if the tag is not closed."""
    at = text.rfind("<answer>")
    return text[at + len("<answer>") :].split("</answer>", 1)[0] if at >= 0 else None


def _after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K has it."""
    at = text.rfind("####")
    if at < 0:
        return None
    line = text[at + 4 :].lstrip("#: \t").split("\n", 1)[0].strip()
    return _bare(line) or None


_ANSWER_IS = re.compile(r"(?im)\banswer\b\W{0,4}(?:(?:is|are)\b[ \t]*:?|:|=)[ \t*]*|^A:[ \t]*")
_FINAL_ANSWER_IS = re.compile(r"(?i)\bfinal answer\b\W{0,4}(?:is\b[ \t]*:?|:)[ \t*]*")
_SENTENCE_ENDS = re.compile(r"\n|[.!?](?:\s|\**$)|。|\bI hope\b")


def _after_answer_is(text: str, said: re.Pattern[str] = _ANSWER_IS) -> str | None:
    """What follows the last "answer is" or "answer:", if that is a formula, a number with a unit, a choice, a word."""
    matches = list(said.finditer(text))
    for match in reversed(matches[-3:]):
        rest = text[match.end() : match.end() + LONGEST].lstrip()
        end = _SENTENCE_ENDS.search(rest)
        claim = _bare(rest[: end.start()] if end else rest)
        if claim and (is_formula(claim) or _CLAIM.fullmatch(claim)):
            return claim
    return None


_LAST_BRACKET = re.compile(r"(?<![\w\\\[\]])\[\s*([^\[\],]{1,100})\s*\]\W*\Z")


def _bracket_at_the_end(text: str) -> str | None:
    """`[90]` where the text ends with it: one value, so neither an interval nor a list."""
    found = _LAST_BRACKET.search(text[-200:])
    return found[1].strip(" $") if found else None


# What text looks like

_COMMAND = re.compile(r"\\[a-zA-Z]+|\\.")
_MATH_WORD = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|pi|infinity|inf|min|max|gcd|lcm|mod|and|or|theta|alpha"
    r"|beta|[pb]?matrix|text|cases|array"
)
_CLAIM = re.compile(
    r"[^\w\s]{0,2}-?\d[\d.,/ ]*(?:%|°|[^\W\d_][\w./^²³ ]{0,40})?|\w+|\\text\{[^{}]*\}|\([A-J]\)(?:\s[\w ]{0,60})?"
)
"""A number with its unit, one word, or a choice with what it stands for."""


def is_formula(text: str) -> bool:
    """True if there are no words in it besides the names of functions: `2x + 3`, `\\frac{1}{2}`, `x = 4`."""
    if len(text) > LONGEST or "\n\n" in text.strip() or not re.search(r"[\w\\∞π√∅]", text):
        return False
    words = re.findall(r"[^\W\d_]{2,}", _COMMAND.sub(" ", re.sub(r"\\(?:text|mathrm|textbf)\{[^{}]*\}", " ", text)))
    return all(_MATH_WORD.fullmatch(word) or (word.isascii() and word.isupper()) for word in words)


def _bare(text: str) -> str:
    """Without the emphasis, quotation marks and punctuation around it."""
    return text.strip().strip('*`"“”').strip().rstrip(".,;:!").strip()


def _tail(text: str) -> str:
    """The end of a long text, cut between lines or sentences so that no formula is cut in two."""
    if len(text) <= LONGEST:
        return text
    tail = text[-LONGEST:]
    for cut in ("\n", ". ", " "):
        if 0 <= (at := tail.find(cut)) < LONGEST // 2:
            return tail[at + len(cut) :]
    return tail


def too_much(text: str) -> bool:
    """True for what no one writes as an answer and every parser chokes on: endless, bottomless, astronomic."""
    if len(text) > LONGEST or _ASTRONOMIC.search(text):
        return True
    depth = deepest = 0
    for mark in re.findall(r"[(\[{]|[)\]}]", text):
        depth += 1 if mark in "([{" else -1
        deepest = max(deepest, depth)
    return deepest > DEEPEST


_POWER = r"(?:\^|\*\*)[\s{(+-]*"
_ASTRONOMIC = re.compile(
    rf"{_POWER}\d{{6,}}|\d{{5,}}[\s)}}]*!|!\s*!\s*!|\d\s*{_POWER}\d+[\s)}}]*{_POWER}\d|\d{{1000,}}"
    rf"|[eE][+-]?\d{{5,}}|_?(?:sum|prod)\b.{{0,40}}\d{{5,}}"
)
"""A power with a six-digit exponent, the factorial of a five-digit number, a tower of powers, a thousand digits."""
