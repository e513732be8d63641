"""Install packages with methods or suites of their own into a folder on the module path, as pip would."""

METHOD = """
from procap.methods.coop import CoOp

class Theirs(CoOp):
    'Their own method.'
"""


def install(folder, modules, points, *, version="1.0"):
    """Write `modules` (file name without suffix and text) and the package `theirs` that registers `points`."""
    folder.mkdir(exist_ok=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    for old in folder.glob("theirs-*.dist-info"):
        (old / "METADATA").unlink()
        (old / "entry_points.txt").unlink()
        old.rmdir()
    info = folder / f"theirs-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: theirs\nVersion: {version}\n")
    lines = ["[procap.methods]", *(f"{name} = {path}" for name, path in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
