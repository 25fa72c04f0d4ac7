"""What dew is pinned to: known weaknesses, as far as PyPI tells them, and licences, as the packages tell them.

    python scripts/audit.py [LOCK]     prints the two tables of docs/security.md; asks pypi.org, nobody else

PyPI's project page lists weaknesses of a project's newest version alone. A pin that is not the newest is listed as
`not answered`; `pip-audit -r locks/core.txt` answers for those too where it can reach its service.
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


def asked(pin: tuple[str, str]) -> str:
    """One sentence about a pin."""
    name, version = pin
    try:
        with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as reply:
            page = json.load(reply)
    except (OSError, ValueError) as error:
        return f"not answered ({error})"
    if any(file.get("yanked") for file in page["releases"].get(version, [])):
        return "yanked"
    if page["info"]["version"] != version:
        return f"not answered (newest is {page['info']['version']})"
    return ", ".join(weakness["id"] for weakness in page["vulnerabilities"]) or "none known"


def licence(name: str) -> str:
    """As the installed package declares it: SPDX first, then its classifiers, then its own words."""
    try:
        told = metadata(name)
    except PackageNotFoundError:
        return "not installed"
    classified = [line.split(" :: ")[-1] for line in told.get_all("Classifier", []) if line.startswith("License :: ")]
    spdx, words = told.get("License-Expression"), (told.get("License") or "").strip().splitlines()
    named = words[0] if words and len(words[0]) < 60 else ""
    return spdx or ", ".join(c for c in classified if c != "OSI Approved") or named or "not declared"


def main(lock: Path) -> None:
    found = pins(lock)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(asked, found))
    clear = sum(answer == "none known" for answer in answers)
    print(f"{len(found)} pins, {clear} with no known weakness:\n")
    print("| package | version | weaknesses | licence |\n|---|---|---|---|")
    for (name, version), answer in zip(found, answers, strict=True):
        print(f"| {name} | {version} | {answer} | {licence(name)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOCK)
