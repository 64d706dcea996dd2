"""Train on several devices: torchrun --nproc-per-node N -m chiar.train PRESET --data … --out …"""

import typer

from chiar.console import guarded
from chiar.training.cli import train

if __name__ == "__main__":
    guarded(lambda: typer.run(train))
