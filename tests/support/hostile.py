"""Strings that parsers choke on, drawn without end: towers, nests, avalanches, broken LaTeX, noise."""

import re
from collections.abc import Callable
from random import Random


def listed(text: str) -> list[str]:
    """The entries of a table, one or several a line, apart by two spaces or more."""
    return re.split(r"\s{2,}", text.strip())


GOLDS = listed(r"""
    42  x^2+1=0  \frac{1}{2}  \{1,2,3\}  [0,1)  x > 3  \sqrt{2}+\pi  y=2x+3  2^{100}  (1,2),(3,4)  1-\frac{1}{e}  C
    \begin{pmatrix}1&2\\3&4\end{pmatrix}  \text{Evelyn}
""")
WORDS = listed(r"""
    answer  the answer is  so  boxed  ####  and  or  =  $  $$  \boxed{  }  {  (  )  [  ]  \frac  \sqrt  ^  _  1  x  ,  ;
    %  !  \sum_{k=1}^{n}  \int_0^1  \lim_{x\to0}  9999999999  \left(  \right)  \begin{matrix}  \end{matrix}  &  \\
    \text{  e  i  <think>  </think>  <answer>  \pm  \cup  \infty  \le  0.  /  -
""")
WORDS += ["\n", "\x00", "\ud800", "🙂"]


def tower(r: Random) -> str:
    base = r.choice(["10", "9", "x", "2.5", "(1+x)", r"\pi"])
    return "^{".join([base] * r.randint(2, 60)) + "}" * 60


OPENINGS = [
    ("(", ")"), ("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{1+", "}"), ("[", "]"), ("|", "|"), (r"\left(", r"\right)"),
    (r"\sin(", ")"), (r"\boxed{", "}"), ("f(", ")"), ("-", ""),
]  # fmt: skip


def nest(r: Random) -> str:
    opening, closing = r.choice(OPENINGS)
    depth = r.choice([5, 20, 39, 100, 1000, 20_000])
    return opening * depth + r.choice(["1", "x", "x^2", ""]) + closing * r.choice([depth, depth - 1, 0])


AVALANCHES = listed(r"""
    N!  N!!  ((N!)!)!  \binom{N}{N}  7^N  (x+1)^N  (x+y+z)^{N}  \sum_{k=1}^{N} \frac{1}{k}  \prod_{k=1}^{N} k  1eN
    \sin(10^{N})  \int_0^{N} x^x \sin(x^{N}) dx  x^{N} + 3x^{17} - x + 1 = 0  \gcd(N!, N^N)  N \mod 7^{N}  \log_{2}(N!)
    \lim_{x\to 0} \frac{\sin x - x^{N}}{x}  \sqrt[N]{N}  N^{N^{N}}  DIGITS  0.DIGITS
""")


def avalanche(r: Random) -> str:
    n = r.choice([99, 9_999, 99_999, 10**6, 10**9, 10**30])
    return r.choice(AVALANCHES).replace("DIGITS", "3" * min(n, 90_000)).replace("N", str(n))


def algebra(r: Random) -> str:
    k = r.randint(2, 40)
    terms = [rf"{r.randint(-99, 99)}{r.choice('xyzabc')}^{{{r.randint(0, 30)}}}" for _ in range(k)]
    wrap = r.choice([r"\sqrt{%s}", r"\sin(%s)", "(%s)^{7}", r"\frac{1}{%s}", "%s = 0", "%s > 0", r"|%s|", r"e^{%s}"])
    return r.choice(["+", "", r" \cdot "]).join(
        wrap % t if r.random() < 0.4 and "=" not in wrap else t for t in terms
    ) + r.choice(["", "=0", r"\le 1", " < x < 5"])


def matrix(r: Random) -> str:
    n = r.choice([2, 5, 12, 40])
    cell = r.choice(["1", "x", r"\frac{1}{2}", r"\sin x"])
    rows = r"\\".join("&".join([cell] * n) for _ in range(n))
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}" + r.choice(
        ["", "^{-1}", "^{99}", rf"\cdot \det\begin{{pmatrix}}{rows}\end{{pmatrix}}"]
    )


def soup(r: Random) -> str:
    return r.choice(["", " "]).join(r.choices(WORDS, k=r.choice([3, 10, 40, 200, 2_000])))


def prose(r: Random) -> str:
    pieces = ["we get $x = 3$ and ", "the answer is ", "1,000 apples ", r"\boxed{7} ", "so $", "= ", "answer: $$"]
    return "".join(r.choices(pieces, k=r.choice([20, 300, 3_000])))


def characters(r: Random) -> str:
    return "".join(chr(r.randrange(1, 0x2FFF)) for _ in range(r.choice([10, 100, 5_000])))


def repeated(r: Random) -> str:
    return r.choice(
        [" ", "$", "answer ", r"\boxed{", r"\boxed{1},", "1 ", "1,", "(", "x+", r"\frac", "\n", "#### ", r"\text{a} "]
    ) * r.choice([100, 3_000, 50_000])


MAKERS: list[Callable[[Random], str]] = [tower, nest, avalanche, algebra, matrix, soup, prose, characters, repeated]
MARKS = [r"\boxed{%s}", "The answer is %s.", "$%s$", "#### %s", "%s", "<answer>%s</answer>", "<think>%s</think> %s"]


def hostile(n: int, seed: int = 0) -> list[tuple[str, str]]:
    """n of (answer, gold)."""
    r = Random(seed)
    corpus = []
    for _ in range(n):
        maker, mark = r.choice(MAKERS), r.choice(MARKS)
        text = maker(r)
        corpus.append((mark.replace("%s", text), r.choice(GOLDS) if r.random() < 0.95 else maker(r)[:500]))
    return corpus
