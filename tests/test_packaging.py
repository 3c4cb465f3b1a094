"""The package's shape: links resolve, imports point down and are lazy, the wheel holds every file and only `mdlm/`."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mdlm
from mdlm import cli

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"mdlm": "mdlm", "samplers": "mdlm.samplers", "eval": "mdlm.eval", "training": "mdlm.training"}
LEVEL = {"mdlm": 0, "samplers": 1, "eval": 2, "training": 3}


def _sources() -> list[tuple[str, Path]]:
    return [(folder, path) for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def _imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Modules imported by a file; with `top_level_only`, those imported when the file is imported."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if top_level_only and (lazy or typing_only):
            skipped.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _folder_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "mdlm":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL and parts[1] != "mdlm" else "mdlm"


@pytest.mark.parametrize("name", ["samplers", "training", "eval"])
def test_the_links_inside_mdlm_resolve_to_the_top_level_folders(name: str) -> None:
    link = ROOT / "mdlm" / name
    assert link.is_symlink()
    assert link.resolve() == (ROOT / name).resolve()


def test_nobody_imports_a_folder_by_its_bare_name() -> None:
    for path in [p for _, p in _sources()] + sorted((ROOT / "tests").glob("*.py")):
        bare = {m for m in _imports(path, top_level_only=False) if m.split(".")[0] in ("samplers", "training", "eval")}
        assert not bare, f"{path.name} imports {bare}: the bare name loads a second copy of the module"


def test_imports_point_down_only() -> None:
    for folder, path in _sources():
        for module in _imports(path, top_level_only=True):
            target = _folder_of(module)
            if target is not None:
                assert LEVEL[target] <= LEVEL[folder], f"{folder}/{path.name} imports {module}, which lies above it"


def test_optional_and_framework_packages_stay_where_they_belong() -> None:
    owner = {"accelerate": "training", "lm_eval": "eval", "matplotlib": "eval"}
    for folder, path in _sources():
        names = {m.split(".")[0] for m in _imports(path, top_level_only=False)}
        assert "flash_attn" not in names, f"{path.name}: flash-attn is reached through transformers only"
        for package, home in owner.items():
            assert package not in names or folder == home, f"{folder}/{path.name} imports {package}"


def test_every_source_file_has_a_docstring_and_stays_short() -> None:
    for folder, path in _sources():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{folder}/{path.name} does not say which question it answers"
        assert text.count("\n") <= 450, f"{folder}/{path.name} is long: look for its second question"


def test_the_readme_names_every_source_file() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [f"{folder}/{path.name}" for folder, path in _sources() if f"`{path.name}`" not in readme]
    assert not [name for name in missing if not name.endswith("__init__.py")]


def test_the_wheel_holds_every_file_and_only_mdlm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("mdlm_torch-*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert {n.split("/")[0] for n in names} == {"mdlm"}
    expected = {f"{FOLDERS[folder].replace('.', '/')}/{path.name}" for folder, path in _sources()}
    expected |= {f"mdlm/training/recipes/{p.name}" for p in (ROOT / "training" / "recipes").glob("*.yaml")}
    expected |= {f"mdlm/eval/harness_presets/{p.name}" for p in (ROOT / "eval" / "harness_presets").glob("*.[py]*")}
    expected |= {"mdlm/py.typed", "mdlm/samplers/show.html", "mdlm/training/recipes/__init__.py"}
    models = ROOT / "mdlm" / "builtin_models"
    expected |= {str(p.relative_to(ROOT)) for p in models.rglob("*") if p.is_file()}
    assert names == expected


def test_unknown_attribute_names_what_there_is() -> None:
    with pytest.raises(AttributeError, match="it offers"):
        _ = mdlm.generat  # type: ignore[attr-defined]


def test_help_imports_no_torch() -> None:
    code = "import sys; from mdlm.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "mdlm --help loads torch: it would take seconds"
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_a_misspelt_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
