"""Studies by name. Each is a small file of its own; to add one, declare STUDY there and name the file here."""

from importlib import import_module
from pathlib import Path

from chiar.errors import InputError, unknown_name
from chiar.studies.declaration import Study, check

DECLARED = ("tiny", "routers40m", "routers40m_steps", "routers40m_even", "routers40m_long")


def find(name: str) -> Study:
    """A declared study, or the one of a TOML file."""
    if name.endswith(".toml"):
        from chiar.studies.toml_file import read_study

        return read_study(Path(name))
    if name not in DECLARED:
        if Path(name).exists():
            raise InputError(f"{name} is neither a declared study nor a .toml file.")
        raise unknown_name("study", name, DECLARED)
    return check(import_module(f"chiar.studies.declared.{name}").STUDY)
