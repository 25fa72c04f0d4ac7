"""Agreement of `math_verdict` with the labels of other projects' test suites.

    python benchmarks/verifier.py ../shared/data/verifier_cases.jsonl --golds ../shared/data/math500/test.jsonl.gz
        [--write benchmarks/results/verifier.md]

A case has gold, pred, expected, kind, source, and `math_verify_0_9_0`: the result of plain math-verify (with that
project's settings, if it has any). Nothing is tuned per case: every case gets one call of `math_verdict(pred, gold)`,
as in training. Cases marked `policy` (the label is that project's choice, such as rejecting an unreduced fraction) or
`label_suspect` are counted in a separate table. `--golds` also checks other spellings and near misses of gold answers.
"""

import argparse
import gzip
import json
import re
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from dew.engines.recorder import versions
from dew.rewards.extract import find_answer, last_boxed
from dew.rewards.math import math_verdicts, usable_rows
from dew.rewards.normalize import final_choice
from dew.rewards.verifiers import think_answer_format, think_format

Case = dict[str, Any]
PATIENT = 60.0
"""A generous time limit, because this does not measure speed."""


def agreement(cases: list[Case]) -> tuple[list[str], list[str]]:
    """(the table by source, the disagreements)."""
    verdicts = math_verdicts([c["pred"] for c in cases], [c["gold"] for c in cases], timeout=PATIENT)
    table: dict[str, Counter[str]] = defaultdict(Counter)
    apart = []
    for case, verdict in zip(cases, verdicts, strict=True):
        for source in (case["source"]["repo"], "**all**"):
            plain = case.get("math_verify_0_9_0")
            table[source] += Counter(
                n=1, ours=verdict.correct == bool(case["expected"]), plain=bool(plain) == bool(case["expected"])
            )
        if verdict.correct != bool(case["expected"]):
            settings = f", asked with {case['config']}" if case.get("config") else ""
            apart.append(
                f"- {case['id']}: label {case['expected']}, here {verdict.status}{settings}: "
                f"gold `{case['gold'][-70:]}`, answer `{str(case['pred'])[-70:]}`".replace("\n", " ")
            )
    lines = ["| source | cases | dew | plain math-verify 0.9.0 |", "|---|---|---|---|"]
    order = sorted(table, key=lambda source: (source == "**all**", -table[source]["n"]))
    lines += [f"| {source} | {t['n']} | {t['ours']} | {t['plain']} |" for source in order for t in [table[source]]]
    return lines, apart


def spellings(gold: str) -> list[str]:
    """Completions with the same answer, written differently."""
    boxed = [gold, f" {gold} .", rf"\displaystyle {gold}", rf"\mathbf{{{gold}}}", f"{{{gold}}}"]
    boxed += [rf"\text{{The answer is }} {gold}", re.sub(r"\\d?frac", r"\\tfrac", gold), gold.replace(r"\pi", "π")]
    boxed += [
        re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", gold),
        gold.replace("^\\circ", " degrees"),
        gold.replace("^\\circ", ""),
    ]
    if "=" not in gold and r"\in" not in gold and r"\text{" not in gold and "_" not in gold:
        boxed += [f"x = {gold}"]
    if re.fullmatch(r"-?\d+(\.\d+)?", gold):
        boxed += [
            gold + unit for unit in (r" \text{ cm}^2", " units", r"\,\mathrm{m}", " apples", r"\text{ m}^{3}", " km/h")
        ]
        boxed += [
            f"{float(gold):,.2f}",
            f"x = {float(gold):,.2f}",
            rf"\$ {gold}",
            rf"{gold}\text{{ (approx.)}}",
            rf"\approx {gold}",
        ]
    if elements := elements_of(gold):
        boxed += [f"({', '.join(elements)})", rf"\langle {', '.join(elements)} \rangle", ", ".join(elements)]
        boxed += [r"\begin{bmatrix}" + r"\\".join(elements) + r"\end{bmatrix}"]
    if re.fullmatch(r"-?\d+(?:, ?-?\d)+", gold):
        values = re.split(", ?", gold)
        boxed += [", ".join(values[::-1]), rf"\{{{gold}\}}", r" \text{ or } ".join(f"x = {value}" for value in values)]
    if r"\cup" in gold:
        ways = [re.sub(r"\((.*), ?(.*)\)", r"\1 < x < \2", way.strip()) for way in gold.split(r"\cup")]
        ways = [way.replace(r"-\infty < ", "").replace(r" < \infty", "") for way in ways]
        boxed += [word.join(ways) for word in (r" \text{ or } ", " or ", r" \lor ", ", ")] + [
            gold.replace(r"\cup", "U")
        ]
    return [rf"\boxed{{{text}}}" for text in dict.fromkeys(boxed)] + [
        f"<answer>{gold}</answer>",
        rf"Answer: \({gold}\)",
    ]


def near_misses(gold: str) -> list[str]:
    """Completions with a wrong answer that looks like the gold answer."""
    if gold.startswith(r"\text{"):
        word = gold[6:-1].strip("()")
        return [rf"\boxed{{{text}}}" for text in (rf"\text{{not {word}}}", word[1:] + word[0], "5") if text != word]
    digits = [m for m in re.finditer(r"(?<![\d.])\d+", gold) if not re.search(r"(inches|cm)\}\^$", gold[: m.start()])]
    texts = [gold[: m.start()] + str(int(m[0]) + 1) + gold[m.end() :] for m in digits]
    for sign, other in (("+", "-"), ("-", "+"), ("(", "["), (")", "]"), ("[", "("), ("]", ")"), (r"\cup", r"\cap")):
        if sign in "+-" or "," in gold:
            texts += [gold[: m.start()] + other + gold[m.end() :] for m in re.finditer(re.escape(sign), gold)]
    texts = [text for text in texts if not re.search(r"\[-?\\infty|\\infty ?\]|\+\\infty", text)]  # slips of notation
    if elements := elements_of(gold):
        texts += [f"({', '.join(elements[::-1])})", rf"\{{{', '.join(elements)}\}}", f"({', '.join(elements[:-1])})"]
    if gold != "0" and re.fullmatch(r"-?\d+(\.\d+)?|-?\\d?frac\{\d+\}\{\d+\}", gold):
        texts += [
            f"{gold}x",
            rf"{gold}\pi",
            f"{gold}i",
            f"{gold}, 7777",
            f"7777={gold}",
            f"x<{gold}",
            f"({gold},1)",
            f"{gold}+1",
        ]
    return [rf"\boxed{{{text}}}" for text in dict.fromkeys(texts) if text != gold]


def elements_of(gold: str) -> list[str]:
    """The elements of a point or a column vector."""
    column = re.fullmatch(r"\\begin\{pmatrix\}([^&]*)\\end\{pmatrix\}", gold)
    point = re.fullmatch(r"(?:\\left)?\(([^()]*,[^()]*?)(?:\\right)?\)", gold)
    found = column[1].split(r"\\") if column else point[1].split(",") if point and "infty" not in gold else []
    return [element.strip() for element in found]


def generated(golds: list[str]) -> tuple[list[str], list[str]]:
    """(a table, the wrong verdicts) for other spellings and near misses of gold answers."""
    lines, wrong = ["| generated answers | number | wrong verdicts |", "|---|---|---|"], []
    for name, make, right in (("other spellings", spellings, True), ("near misses", near_misses, False)):
        cases = [(text, gold) for gold in dict.fromkeys(golds) for text in make(gold)]
        verdicts = math_verdicts([text for text, _ in cases], [gold for _, gold in cases], timeout=PATIENT)
        apart = [(v.status, *case) for case, v in zip(cases, verdicts, strict=True) if v.correct != right]
        lines.append(f"| {name} | {len(cases)} | {len(apart)} |")
        wrong += [f"- {status}: gold `{gold}`, answer `{text}`" for status, text, gold in apart]
    return lines, wrong


def others(cases: list[Case]) -> list[str]:
    """Cases that test something other than a verdict."""

    def number(text: str) -> Any:
        return math_verdicts([text], ["0"], timeout=PATIENT)[0].extracted

    def hashes(text: str) -> str | None:
        found = find_answer(text)
        return found.text.replace(",", "") if found else None

    asked = {
        "string_match": lambda c: math_verdicts([c["pred"]], [c["gold"]], timeout=PATIENT)[0].correct,
        "extract_boxed": lambda c: last_boxed(c["pred"]),
        "extract_gsm8k": lambda c: hashes(c["pred"]),
        "extract_int": lambda c: number(c["pred"]),
        "extract_letter": lambda c: final_choice(c["pred"]),
        "format_think": lambda c: bool(think_format([c["pred"]])[0]),
        "format_think_answer": lambda c: bool(think_answer_format([c["pred"]])[0]),
        "latex_parse": lambda c: bool(usable_rows([{"answer": c["pred"]}], timeout=PATIENT)[0]),
        "latex_bad": lambda c: bool(usable_rows([{"answer": c["pred"]}], timeout=PATIENT)[0]),
    }
    lines = ["| kind | cases | as labelled |", "|---|---|---|"]
    for kind, ask in asked.items():
        mine = [case for case in cases if case["kind"] == kind]
        right = sum(ask(case) in (case["expected"], str(case["expected"])) for case in mine)
        lines.append(f"| {kind} | {len(mine)} | {right} |")
    return lines


def golds_section(path: Path | None) -> list[str]:
    if not path:
        return []
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        table, wrong = generated([json.loads(row)["answer"] for row in rows])
    title = f"Other spellings and near misses of the gold answers of {path.parent.name}, generated by this script:"
    return ["", title, "", *table, "", *wrong]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", type=Path)
    arguments.add_argument("--golds", type=Path, help="rows with an answer, .jsonl.gz")
    arguments.add_argument("--write", type=Path)
    given = arguments.parse_args()
    cases = [json.loads(line) for line in given.cases.read_text(encoding="utf-8").splitlines()]
    asked = [case for case in cases if case["kind"] == "verify"]
    fair = [case for case in asked if not case.get("policy") and not case.get("label_suspect")]
    chosen_labels = [case for case in asked if case.get("policy") or case.get("label_suspect")]
    table, apart = agreement(fair)
    policy, apart_by_policy = agreement(chosen_labels)
    found = ", ".join(f"{name} {v}" for name, v in versions("math-verify", "latex2sympy2_extended", "sympy").items())
    text = "\n".join(
        [
            "# Verdicts against labels",
            "",
            f"`python benchmarks/verifier.py {given.cases.name} --golds ROWS --write FILE`, {date.today()}, {found}.",
            "",
            *table,
            "",
            "Disagreements:",
            "",
            *apart,
            "",
            "Labels that are a project's choice, or doubtful:",
            "",
            *policy,
            "",
            *apart_by_policy,
            "",
            "Other cases:",
            "",
            *others(cases),
            "",
            "latex_parse: the formula is equal to itself; latex_bad: it is not, and is reported as a bad gold answer.",
            *golds_section(given.golds),
        ]
    )
    print(text)
    if given.write:
        given.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
