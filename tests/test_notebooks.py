"""The notebooks run from top to bottom, in the order a reader takes, and are kept without outputs, in short cells."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
CELL_LINES = 16


def apples() -> ModuleType:
    """The file beside the notebooks."""
    spec = importlib.util.spec_from_file_location("notebooks_apples", ROOT / "notebooks" / "apples.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_kept_without_outputs_and_in_short_cells(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown"
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert cell.source.count("\n") < CELL_LINES, cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_rendered_copy_is_of_this_notebook(path: Path) -> None:
    folder = ROOT / "docs" / "notebooks"
    text = (folder / f"{path.stem}.md").read_text(encoding="utf-8")
    for cell in nbformat.read(path, as_version=4).cells:
        shown = cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        assert shown in text, "make it again: make notebooks"
    assert "![" in text
    assert all(file.stat().st_size < 1_000_000 for file in folder.glob(f"{path.stem}*"))
    assert "/tmp/" not in text


def test_the_lines_have_the_law_that_the_notebooks_say() -> None:
    text = apples()
    lines = text.lines()
    assert len(set(lines)) == len(lines) == 6 * 6 * 4 * 4
    assert pytest.approx(6.3561, abs=1e-4) == text.ENTROPY
    assert not [line for line in lines if text.mistake(line)]
    wrong = {
        "Ann has 2 pens and gets 3 more. Now Ben has 5 pens.": "name",
        "Ann has 2 pens and gets 3 more. Now Ann has 5 hats.": "thing",
        "Ann has 2 pens and gets 3 more. Now Ann has 6 pens.": "sum",
        "Ann has pens and gets 3 more. Now Ann has 6 pens.": "form",
    }
    assert {line: text.mistake(line) for line in wrong} == wrong


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebooks")


# In this order: the second and third take the model that the first has trained.


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "pictures", "pages"),
    [
        pytest.param("01_train_and_sample", 1, 1, marks=pytest.mark.slow),
        ("02_strategies", 1, 3),
        ("03_evaluation", 2, 0),
        pytest.param("04_low_communication", 3, 0, marks=pytest.mark.slow),
    ],
    ids=NAMES,
)
def test_a_notebook_runs_and_is_rendered(workplace: Path, tmp_path: Path, name: str, pictures: int, pages: int) -> None:
    command = [sys.executable, ROOT / "notebooks" / "render.py", name, "--docs", tmp_path, "--work", workplace]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = sorted(path.stem for path in tmp_path.glob("*.html"))
    assert len(shown) == pages
    assert len([path for path in tmp_path.glob("*.png") if path.stem not in shown]) == pictures
    text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert text.count("![output](") == pictures
    assert text.count("[The page, to play with](") == pages


def test_every_notebook_is_run() -> None:
    assert NAMES == ["01_train_and_sample", "02_strategies", "03_evaluation", "04_low_communication"]
