"""Agreement of `math_verdict` with the labels of other projects' test suites.

    python benchmarks/verifier.py ../shared/data/verifier_cases.jsonl [--write benchmarks/results/verifier.md]

A case has gold, pred, expected, kind, source, and `math_verify_0_9_0`: the result of plain math-verify (with that
project's settings, if it has any). Nothing is tuned per case: every case gets one call of `math_verdict(pred, gold)`,
as in training. Cases marked `policy` (the label is that project's choice, such as rejecting an unreduced fraction) or
`label_suspect` are counted in a separate table.
"""

import argparse
import json
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from dew.rewards.extract import find_answer, last_boxed
from dew.rewards.format import think_answer_format, think_format
from dew.rewards.math import math_verdicts, usable_rows, versions
from dew.rewards.normalize import final_choice

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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", type=Path)
    arguments.add_argument("--write", type=Path)
    given = arguments.parse_args()
    cases = [json.loads(line) for line in given.cases.read_text(encoding="utf-8").splitlines()]
    asked = [case for case in cases if case["kind"] == "verify"]
    fair = [case for case in asked if not case.get("policy") and not case.get("label_suspect")]
    chosen_labels = [case for case in asked if case.get("policy") or case.get("label_suspect")]
    table, apart = agreement(fair)
    policy, apart_by_policy = agreement(chosen_labels)
    found = ", ".join(f"{name} {v}" for name, v in versions().items())
    text = "\n".join(
        [
            "# Verdicts against labels",
            "",
            f"`python benchmarks/verifier.py {given.cases.name} --write FILE`, {date.today()}, {found}.",
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
        ]
    )
    print(text)
    if given.write:
        given.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
