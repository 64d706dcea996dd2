"""One definition of the settings: both commands' options and help come from it."""

from dataclasses import fields

import pytest

from chiar.training.cli import OPTIONS, SETTINGS, Launch, parse
from chiar.training.settings import TrainSettings, train_arguments
from commands import run


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_both_commands_have_the_options_with_the_help_of_the_fields(command):
    code, shown = run(command, "--help")
    words = " ".join(shown.split())
    assert code == 0 and all(field.type.__metadata__[0].endswith(".") for field in SETTINGS.values())
    for field in (*(SETTINGS[name] for name in OPTIONS), *fields(Launch)):
        assert f"--{field.name.replace('_', '-')} " in words and field.type.__metadata__[0] in words


def test_a_printed_command_is_the_run(settings, tmp_path):
    chosen = settings(weights=[1.0], sample="a b", precision="auto")
    words = train_arguments("v3-tiny", {"dropout": 0.5}, chosen, tmp_path)
    assert words[:4] == ["train", "v3-tiny", "--data", chosen.data[0]] and words[-2:] == ["--out", str(tmp_path)]
    given = dict(parse(word) for word in words if "=" in word)
    assert given.pop("dropout") == 0.5
    assert TrainSettings.from_dict({"precision": "auto", **given, "data": chosen.data}) == chosen
