"""Write docs/which-pytorch.md and its translation from the facts.

python docs/write_which_pytorch.py
"""

from __future__ import annotations

from pathlib import Path

from snugtune.environment.tables import page

for language, name in (("en", "which-pytorch.md"), ("zh", "which-pytorch.zh.md")):
    Path(__file__).with_name(name).write_text(page(language), encoding="utf-8", newline="\n")
