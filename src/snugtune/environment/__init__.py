"""What is installed here, whether it works together on the cards, and what to install. Imports no torch.

`reading` looks at this machine and `texts` at recorded output; both give `stated.Stated`. `findings.decide`
judges it, as a pure function; `situation` and `surroundings` answer what the rules in facts/rules.toml ask.
"""

from __future__ import annotations

from snugtune.environment.install import InstallLine, install_line, shell_line
from snugtune.environment.noted import installed, snapshot

__all__ = ["InstallLine", "install_line", "installed", "shell_line", "snapshot"]
