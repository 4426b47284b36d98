"""Build wheel and sdist, install the wheel into an environment of its own, and use it from outside the checkout.

Run by `make test-wheel`. The wheel is built from the sdist, so that an sdist which lacks a file fails as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def main() -> None:
    """Build, check, install and use."""
    with tempfile.TemporaryDirectory(prefix="varprop-wheel-") as folder:
        work = Path(folder)
        builder = Environment(work / "builder")
        builder.install("build", "twine", "hatchling")
        builder.python("-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(ROOT))
        files = sorted(map(str, (work / "dist").iterdir()))
        print(*files, sep="\n", flush=True)
        builder.python("-m", "twine", "check", "--strict", *files)
        (wheel,) = (file for file in files if file.endswith(".whl"))
        user = Environment(work / "user")
        user.install(wheel)
        user.python(str(ROOT / "tests/smoke_wheel.py"), "core")
        user.install(f"{wheel}[lab]")
        user.python(str(ROOT / "tests/smoke_wheel.py"), "lab")


class Environment:
    """A virtual environment with nothing in it but pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder

    def install(self, *requirements: str) -> None:
        """Install packages in the versions that varprop is tested with."""
        quiet = ("-qq", "--disable-pip-version-check")
        self.python("-m", "pip", *quiet, "install", "-c", str(CONSTRAINTS), *requirements)

    def python(self, *arguments: str) -> None:
        """Run its Python outside the checkout; nothing of the caller's Python reaches it."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        outside["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{outside['PATH']}"
        done = subprocess.run([self.folder / "bin/python", *arguments], cwd=self.folder, env=outside)
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} failed with status {done.returncode}.")


if __name__ == "__main__":
    main()
