"""Look every locked version up in a database of known vulnerabilities: `make audit-dependencies`.

pip-audit asks the index for what is known of each version. It passes over what it cannot look up and then says that it
found nothing; here that is a failure. Exit code 0: all looked up and nothing known; 1: something is known; 2: the
database was not reached, or does not know all the packages.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print what is known, or that nothing could be looked up, and end with the exit code of that."""
    files = sorted((ROOT / "requirements").glob("*.txt"))
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    command += ["--format", "json", *(word for file in files for word in ("--requirement", str(file)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text, code = conclusion(done.stdout, (done.stderr.strip().splitlines() or ["no message"])[-1])
    print(text)
    raise SystemExit(code)


def conclusion(output: str, last_line: str) -> tuple[str, int]:
    """The report from pip-audit's JSON, and the exit code; `last_line` is what it said instead where there is none."""
    try:
        packages: Sequence[Mapping[str, Any]] = json.loads(output)["dependencies"]
    except ValueError:
        return f"Nothing was checked: the database of vulnerabilities was not reached ({last_line[:300]})", 2
    skipped = sorted({package["name"] for package in packages if "skip_reason" in package})
    if packages and all("skip_reason" in package for package in packages):
        return f"Nothing was checked: the database of vulnerabilities has no answer to any of {len(skipped)} names", 2
    vulnerabilities = sorted({line for package in packages for line in known_lines(package)})
    lines = [
        *vulnerabilities,
        f"{len({package['name'] for package in packages})} packages, {len(vulnerabilities)} known vulnerabilities",
    ]
    if skipped:
        lines.append(f"Not checked, since the database has no answer: {', '.join(skipped)}")
    return "\n".join(lines), 1 if vulnerabilities else 2 if skipped else 0


def known_lines(package: Mapping[str, Any]) -> list[str]:
    """A line for each vulnerability that is known of a package: its name there, and the versions without it."""
    return [
        f"{package['name']} {package['version']}: {entry['id']}, mended in {', '.join(entry['fix_versions']) or 'none'}"
        for entry in package.get("vulns", ())
    ]


if __name__ == "__main__":
    main()
