"""The rules of the house (ARCHITECTURE.md), read off the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {path.name for path in (ROOT / "services").iterdir() if path.is_dir()}
SOURCES = sorted([*ROOT.glob("packages/*/draftloop/**/*.py"), *ROOT.glob("services/*/draftloop/**/*.py")])
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 60


def _room(path: Path) -> tuple[str, str]:
    """('packages' or 'services', room)."""
    parts = path.relative_to(ROOT).parts
    return parts[0], parts[1]


def _imports(path: Path) -> Iterator[str]:
    """Every module a file imports anywhere in it, lazily in functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _offenders(forbidden: set[str], paths: list[Path]) -> list[str]:
    """'file: module' for every import of a forbidden module or anything below it."""
    return sorted(
        {
            f"{path.relative_to(ROOT)}: {module}"
            for path in paths
            for module in _imports(path)
            if any(module == name or module.startswith(f"{name}.") for name in forbidden)
        }
    )


def test_sources_are_found() -> None:
    assert {_room(path)[1] for path in SOURCES} >= {"core", "drafters", "attention", "capture", "sglang", *SERVICES}


def test_packages_never_import_services() -> None:
    packages = [path for path in SOURCES if _room(path)[0] == "packages"]
    assert _offenders({f"draftloop.{service}" for service in SERVICES}, packages) == []


def test_core_imports_no_other_room() -> None:
    core = [path for path in SOURCES if _room(path) == ("packages", "core")]
    others = {_room(path)[1] for path in SOURCES} - {"core"}
    assert _offenders({f"draftloop.{room}" for room in others}, core) == []


def test_only_the_sglang_room_imports_sglang() -> None:
    assert _offenders({"sglang"}, [path for path in SOURCES if _room(path) != ("packages", "sglang")]) == []


def test_only_services_import_ray() -> None:
    assert _offenders({"ray"}, [path for path in SOURCES if _room(path)[0] == "packages"]) == []


def test_drafters_and_attention_do_not_reach_sglang_through_our_plugin() -> None:
    paths = [path for path in SOURCES if _room(path)[1] in {"drafters", "attention"}]
    assert _offenders({"draftloop.sglang"}, paths) == []


def test_no_pickle() -> None:
    readers = {"pickle", "cloudpickle", "ray.cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert _offenders(readers, SOURCES) == []


def test_no_reader_that_would_unpickle() -> None:
    """torch.load says weights_only=True where it is called; numpy.load never says allow_pickle=True."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe = called in {"torch.load", "torch.jit.load"} and options.get("weights_only") != "True"
            if unsafe or options.get("allow_pickle", "False") != "False":
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
    assert found == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_getattr_with_a_default() -> None:
    """A guessed default hides a renamed field. SGLang's own objects are another matter."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if _room(path) != ("packages", "sglang")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) == 3
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[2], ast.Constant)
    ]
    assert found == []


def test_the_lock_names_no_host_and_no_machine() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in lock
    assert "--index-url" not in lock
    assert str(ROOT) not in lock


def test_the_lock_pins_everything_with_hashes() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [(line, after) for line, after in pairwise(lines) if line[:1].isalnum()]
    assert pins
    assert all("==" in line and after.strip().startswith("--hash=sha256:") for line, after in pins)


def _check_lock(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools/check_lock.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_lock_matches_pyproject() -> None:
    result = _check_lock(ROOT)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["pyproject.toml", "packages/core/pyproject.toml"])
def test_a_new_requirement_makes_the_lock_stale(tmp_path: Path, name: str) -> None:
    for file in ["pyproject.toml", "requirements.lock", "tools/check_lock.py", "packages/core/pyproject.toml"]:
        copy = tmp_path / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / file).read_bytes())
    assert _check_lock(tmp_path).returncode == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(text.replace('"pydantic"', '"pydantic", "left-pad>=1"', 1), encoding="utf-8")
    result = _check_lock(tmp_path)
    assert result.returncode == 2
    assert "make lock" in result.stderr
    assert result.stderr.count("\n") == 1
