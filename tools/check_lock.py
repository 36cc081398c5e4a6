"""Does requirements.lock still answer what the pyproject.toml files ask for?

    python tools/check_lock.py            exit 0, or one line on stderr and exit 2
    python tools/check_lock.py --stamp    write the digest of pyproject.toml's requirements into the lock

The lock's first lines hold a sha256 of everything in the root pyproject.toml that a resolve depends on. Standard
library only: `make setup` runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "# requirements-sha256: "
HEADER = "# Made by `make lock` from pyproject.toml; do not edit. Installed by `make setup`.\n"


def requirements_digest(pyproject: dict[str, Any]) -> str:
    """sha256 hex over the parts of a root pyproject.toml that decide what a resolve gives."""
    project = pyproject["project"]
    uv = pyproject.get("tool", {}).get("uv", {})
    relevant = {
        "requires-python": project.get("requires-python"),
        "dependencies": sorted(project.get("dependencies", [])),
        "groups": {name: sorted(map(str, items)) for name, items in pyproject.get("dependency-groups", {}).items()},
        "uv": {key: uv.get(key) for key in ("prerelease", "environments")},
        "overrides": sorted(uv.get("override-dependencies", [])),
        "constraints": sorted(uv.get("constraint-dependencies", [])),
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def locked_names(lock: str) -> set[str]:
    """The normalised names of everything the lock pins."""
    return {normal(m) for m in re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==", lock, re.MULTILINE)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def problem(root: Path) -> str | None:
    """What is wrong with `root`'s lock, in one line, or None."""
    with (root / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    lock_path = root / "requirements.lock"
    if not lock_path.is_file():
        return "requirements.lock is missing: run `make lock`"
    lock = lock_path.read_text(encoding="utf-8")
    stamped = re.search(rf"^{re.escape(MARK)}([0-9a-f]{{64}})$", lock, re.MULTILINE)
    if stamped is None or stamped.group(1) != requirements_digest(pyproject):
        return "requirements.lock does not match the requirements in pyproject.toml: run `make lock`"
    names = locked_names(lock)
    for member in sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("services/*/pyproject.toml")]):
        with member.open("rb") as file:
            wanted = tomllib.load(file)["project"].get("dependencies", [])
        for requirement in wanted:
            name = normal(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
            if name not in names and not name.startswith("draftloop-"):
                where = member.relative_to(root)
                return f"{where} asks for {name}, which requirements.lock lacks: add it to pyproject.toml, `make lock`"
    return None


def stamp(root: Path) -> None:
    """Put the header and the digest on top of a lock that uv has just written."""
    with (root / "pyproject.toml").open("rb") as file:
        digest = requirements_digest(tomllib.load(file))
    path = root / "requirements.lock"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    body = "".join(line for line in lines if line != HEADER and not line.startswith(MARK))
    path.write_text(f"{HEADER}{MARK}{digest}\n{body}", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments == ["--stamp"]:
        stamp(ROOT)
        return 0
    message = problem(ROOT)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
