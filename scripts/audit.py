"""Known vulnerabilities and licences of the pinned dependencies, according to PyPI and the installed packages.

    python scripts/audit.py [LOCK]     print the table of benchmarks/results/security.md; only contacts pypi.org

PyPI lists vulnerabilities only of a project's latest version. Other pins are listed as `unknown`; check those with
`pip-audit -r locks/core.txt`, if its service is reachable.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

LOCK = Path(__file__).parents[1] / "locks" / "core.txt"


def pins(lock: Path) -> list[tuple[str, str]]:
    lines = (line.split("#")[0].split(";")[0].strip() for line in lock.read_text().splitlines())
    return [(name, version) for line in lines if "==" in line for name, _, version in [line.partition("==")]]


def vulnerabilities(pin: tuple[str, str]) -> str:
    name, version = pin
    try:
        with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as reply:
            page = json.load(reply)
    except (OSError, ValueError) as error:
        return f"unknown ({error})"
    if any(file.get("yanked") for file in page["releases"].get(version, [])):
        return "yanked"
    if page["info"]["version"] != version:
        return f"unknown (latest is {page['info']['version']})"
    return ", ".join(found["id"] for found in page["vulnerabilities"]) or "none known"


def licence(name: str) -> str:
    """As the installed package declares it: SPDX expression, else classifiers, else free text."""
    try:
        declared = metadata(name)
    except PackageNotFoundError:
        return "not installed"
    classified = [
        line.split(" :: ")[-1] for line in declared.get_all("Classifier", []) if line.startswith("License :: ")
    ]
    spdx, words = declared.get("License-Expression"), (declared.get("License") or "").strip().splitlines()
    named = words[0] if words and len(words[0]) < 60 else ""
    return spdx or ", ".join(c for c in classified if c != "OSI Approved") or named or "not declared"


def main(lock: Path) -> None:
    found = pins(lock)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(vulnerabilities, found))
    clear = sum(answer == "none known" for answer in answers)
    print(f"{len(found)} pins, {clear} without known vulnerabilities:\n")
    print("| package | version | vulnerabilities | licence |\n|---|---|---|---|")
    for (name, version), answer in zip(found, answers, strict=True):
        print(f"| {name} | {version} | {answer} | {licence(name)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOCK)
