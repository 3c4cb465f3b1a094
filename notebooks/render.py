"""Run the notebooks and write what came out as Markdown with pictures: `python notebooks/render.py` (`make notebooks`).

Each becomes `docs/notebooks/NAME.md` beside its pictures; a page that is shown in a notebook is kept as an HTML file,
with a screenshot where a Chromium is installed. The tests run the notebooks with this, too.
"""

import argparse
import base64
import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "notebooks"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def prepare(folder):
    """What the notebooks need beside them, copied into the folder they run in."""
    for name in ("apples.py", "apples.yaml"):
        shutil.copy(HERE / name, folder / name)


def execute(path, folder):
    """The notebook with its outputs, run in `folder`. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=1200,
        startup_timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook


def as_markdown(notebook, name, folder):
    """Its text; pictures and pages are written into `folder`."""
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        streams = [output for output in cell.outputs if output.output_type == "stream"]
        printed = "".join(output.text for output in streams if output.name == "stdout")
        if printed.strip():
            parts.append(f"```text\n{ANSI.sub('', printed).rstrip()}\n```")
        for place, output in enumerate(cell.outputs):
            parts += shown(output.get("data", {}), f"{name}_{number}_{place}", folder)
    return "\n\n".join(parts) + "\n"


def shown(data, stem, folder):
    """Markdown of one output."""
    if "image/png" in data:
        (folder / f"{stem}.png").write_bytes(base64.b64decode(data["image/png"]))
        return [f"![output]({stem}.png)"]
    page = re.search(r'<iframe srcdoc="([^"]*)"', data.get("text/html", ""))
    if page is not None:
        (folder / f"{stem}.html").write_text(html.unescape(page[1]), encoding="utf-8")
        link = f"[The page, to play with]({stem}.html) (download it and open it in a browser)"
        return [f"![the page]({stem}.png)", link] if screenshot(folder / f"{stem}.html") else [link]
    return [f"```text\n{ANSI.sub('', data['text/plain'])}\n```"] if "text/plain" in data else []


def screenshot(page):
    """A picture beside the page; False where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return False
    picture = page.with_suffix(".png")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,560"]
    subprocess.run([browser, *options, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
    return picture.is_file()


def render(names, docs, work):
    """Run these notebooks (all if there are none named) in the folder `work` and write them into `docs`."""
    docs.mkdir(parents=True, exist_ok=True)
    prepare(work)
    for path in sorted(HERE.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = execute(path, work)
        for old in docs.glob(f"{path.stem}*"):
            old.unlink()
        text = as_markdown(notebook, path.stem, docs)
        (docs / f"{path.stem}.md").write_text(text.replace(str(work), "."), encoding="utf-8")
        print(docs / f"{path.stem}.md", flush=True)


def main():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run the notebooks and write them as Markdown with pictures.")
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb; default: all")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where to write")
    parser.add_argument("--work", type=Path, help="where to run and leave what they make; default: a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        render(given.names, given.docs, given.work or Path(folder))


if __name__ == "__main__":
    main()
