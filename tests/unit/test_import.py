"""What an import costs: nothing heavy comes with the package."""

from __future__ import annotations

import subprocess
import sys


def test_import_is_light() -> None:
    code = (
        "import sys; import paceline\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert paceline.__version__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there() -> None:
    import paceline

    assert all(getattr(paceline, name) for name in paceline.__all__)
