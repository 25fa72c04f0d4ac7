"""Answers that are words or the letter of a choice. Standard library only, and time linear in the text."""

import re

CHOICES = "ABCDEFGHIJ"

_DRESS = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|boxed)(?![a-zA-Z])|[{}$*`]|\\[ ,;!]")
_WORD = re.compile(r"[^\W\d_]{3,}")


def words(text: str) -> str | None:
    """Lower-case words without articles and punctuation, or None if this is mathematics rather than words."""
    plain = _DRESS.sub(" ", text)
    if re.search(r"[\\^_=<>+]|\d\s*[-*/]\s*\d", plain) or not _WORD.search(plain):
        return None
    return " ".join(w for w in re.findall(r"[^\W_]+", plain.lower()) if w not in ("a", "an", "the")) or None


def gold_choice(gold: str) -> str | None:
    """C for a gold answer `C`, `(C)`, `\\text{(C)}` or `(C) Cecile`; None if the gold answer is not a choice."""
    plain = _DRESS.sub(" ", gold).strip()
    found = re.fullmatch(rf"\(([{CHOICES}])\)(?:\s.*)?|([{CHOICES}])[.):]?", plain, re.DOTALL)
    return (found[1] or found[2]) if found else None


_ALONE = rf"(?<![A-Za-z0-9_'’])([{CHOICES}])(?![A-Za-z0-9_'’])"
_AT_START = re.compile(rf"\W{{0,3}}([{CHOICES}])(?:[.,:;)]|\s*$|[^\x00-\x7f])")


def chosen(text: str) -> str | None:
    """The choice that a text settles on: the first after its last "answer", at its very start, or the last one."""
    text = _DRESS.sub(" ", text)
    at = text.lower().rfind("answer")
    if at >= 0 and (found := re.search(_ALONE, text[at + len("answer") : at + 200])):
        return found[1]
    if found := _AT_START.match(text):
        return found[1]
    every = re.findall(_ALONE, text)
    return every[-1] if every else None
